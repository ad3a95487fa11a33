"""Where every rank was -> who is to blame; and what the trials by parts narrow it down to."""

from dataclasses import replace

from dsdoctor.comm import groups as isolate
from dsdoctor.comm.collectives import checks as collective_checks
from dsdoctor.comm.collectives.checks import FailedExchange
from dsdoctor.comm.control.messages import RankAnswer, RankOrder
from dsdoctor.comm.control.phases import slowed
from dsdoctor.comm.control.test_state import Responses, time_used_up
from dsdoctor.comm.groups import SWITCHES, Groups, Trial
from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.comm.results import ConnectOutcome, PhaseResult, SkippedStep, Stuck
from tests.comm.made_claims import claims, reaches

INSIDE = ('File "/site/torch/distributed/distributed_c10d.py", line 3 in all_reduce',)


def stuck(rank: int, step: int = 5, **more: object) -> Stuck:
    return Stuck(rank=rank, at=f"exchange {step}", step=step, seconds=8.0, **more)  # type: ignore[arg-type]


def told(
    ranks: tuple[Stuck, ...], silent: dict[int, ConnectOutcome] | None = None, **more: object
) -> list[tuple[str, str]]:
    trouble = FailedExchange(what="the collectives", claims=claims(), stuck=ranks, silent=silent or {}, **more)  # type: ignore[arg-type]
    return [(finding.rule, finding.title) for check in collective_checks.STUCK_CHECKS for finding in check(trouble)]


def test_the_dead_rank_is_named_and_not_those_that_lost_their_connection() -> None:
    others = tuple(stuck(rank, error="Connection closed by peer") for rank in (0, 1, 3))

    assert told((*others, stuck(2, ended="killed by SIGKILL"))) == [
        ("rank-died", "rank 2 (nodeb, pid 102) died in exchange 5 during the collectives: killed by SIGKILL")
    ]
    assert told(others, {2: ConnectOutcome.REFUSED})[0][0] == "rank-died"
    limit = "the out-of-memory killer of its memory cgroup, whose limit is 420 MiB"
    ((_, title),) = told((*others, stuck(2, ended="killed by SIGKILL", cause=limit)))
    assert title.endswith(f"killed by SIGKILL: {limit}")


def test_stopped_silent_and_vanished_are_told_apart() -> None:
    others = tuple(stuck(rank) for rank in (0, 1, 3))

    assert told((*others, stuck(2, process="T"))) == [
        ("rank-stopped", "rank 2 (nodeb, pid 102) not running during the collectives: stopped by a signal")
    ]
    assert told(others, {2: ConnectOutcome.SILENT})[0][0] == "rank-stopped"
    assert told(others[:2], {2: ConnectOutcome.TIMED_OUT, 3: ConnectOutcome.TIMED_OUT}) == [
        (
            "host-vanished",
            "lost contact with nodeb (ranks 2-3) during the collectives: timed out",
        )
    ]


def test_a_rank_whose_first_process_is_stopped_is_told_though_it_exchanged_well() -> None:
    found = collective_checks.supervisor_stopped(
        {0: "rank 0 (nodea, pid 1)", 1: "rank 1 (nodeb, pid 2)"}, {0: "S", 1: "T"}
    )

    assert [finding.title for finding in found] == [
        "rank 1 (nodeb, pid 2): the process that the launcher started is stopped by a signal; the launcher will wait for it"
    ]


def test_rank_0_that_reaches_no_other_host_is_itself_cut_off() -> None:
    made = claims(6)
    silent = dict.fromkeys(range(2, 6), ConnectOutcome.TIMED_OUT)
    trouble = FailedExchange(what="the collectives", claims=made, stuck=(stuck(0), stuck(1)), silent=silent)

    assert [finding.title for finding in collective_checks.host_vanished(trouble)] == [
        "nodea with rank 0 lost contact with all 2 other hosts during the collectives"
    ]


def test_a_rank_that_has_not_begun_what_the_others_wait_in_is_behind() -> None:
    ranks = (stuck(0), stuck(1), stuck(3), stuck(2, step=4, process="D", stack=("File x, line 3 in read",)))

    assert told(ranks) == [
        (
            "rank-behind",
            "rank 2 (nodeb, pid 102) still in exchange 4 (waiting for a device, and cannot be interrupted); "
            "rank 0 is blocked in exchange 5",
        )
    ]


def test_a_cut_link_is_told_by_the_second_mesh() -> None:
    made = claims()
    cut = reaches(made, a_b=ConnectOutcome.TIMED_OUT, b_a=ConnectOutcome.TIMED_OUT)

    assert [rule for rule, _ in told(tuple(stuck(rank) for rank in range(4)), reaches=cut)] == ["mesh-only-master-port"]


def test_all_alive_all_waiting_and_tcp_well_is_the_librarys_own_transport() -> None:
    found = told(tuple(stuck(rank, stack=INSIDE) for rank in range(4)), reaches=reaches(claims()), backend="nccl")

    assert found == [
        (
            "exchange-hangs",
            "ranks 0-1 (nodea), 2-3 (nodeb) are blocked in exchange 5 (nccl), but plain TCP between them works",
        )
    ]


def test_what_was_not_seen_is_not_claimed_of_a_hang() -> None:
    found = told(tuple(stuck(rank) for rank in range(4)))

    assert found == [
        (
            "exchange-hangs",
            "ranks 0-1 (nodea), 2-3 (nodeb) are blocked in exchange 5 (gloo); their stacks could not be read",
        )
    ]


def test_a_rank_that_stands_in_python_in_the_step_of_the_others_is_behind() -> None:
    ranks = (
        *(stuck(rank, stack=INSIDE) for rank in (0, 1, 3)),
        stuck(2, stack=('File "/job/data.py", line 7 in read',)),
    )

    assert told(ranks) == [
        (
            "rank-behind",
            "rank 2 (nodeb, pid 102) in read (/job/data.py, line 7) (alive), not in the exchange; rank 0 is blocked in exchange 5",
        )
    ]


def test_a_rank_in_torchs_own_data_loader_is_not_inside_of_the_transport() -> None:
    loader = ('File "/site/torch/utils/data/dataloader.py", line 9 in _try_get_data',)
    ranks = (*(stuck(rank, stack=INSIDE) for rank in (0, 1, 3)), stuck(2, stack=loader))

    assert [rule for rule, _ in told(ranks)] == ["rank-behind"]


def test_a_rank_that_raised_is_told_and_not_the_one_that_has_not_come_as_far() -> None:
    ranks = (stuck(0, step=6), stuck(1, error="ValueError: batch 7 is empty"), stuck(2), stuck(3, step=6))

    assert told(ranks) == [
        ("rank-raised", "rank 1 (nodea, pid 101) raised an error in exchange 5: ValueError: batch 7 is empty")
    ]


def test_a_rank_that_left_out_what_the_others_wait_in_is_told_though_it_ran_ahead() -> None:
    left = {1: (SkippedStep(step=5, at="exchange 5", reason="no kernel for it"),)}

    assert told((stuck(0), stuck(1, step=6), stuck(2), stuck(3)), left_out=left) == [
        ("rank-raised", "rank 1 (nodea, pid 101) raised an error in exchange 5: no kernel for it")
    ]
    all_left = dict.fromkeys(range(4), left[1])
    assert [rule for rule, _ in told(tuple(stuck(rank, step=9) for rank in range(4)), left_out=all_left)] == [
        "exchange-hangs"
    ]


def test_what_a_rank_raised_before_another_died_of_it_is_told_first_and_alone() -> None:
    left = {1: (SkippedStep(step=5, at="exchange 5", reason="not supported"),)}

    assert [
        rule for rule, _ in told((stuck(0, step=7, ended="killed by SIGABRT"), stuck(2, step=7)), left_out=left)
    ] == ["rank-raised"]
    later = (stuck(0, step=4, ended="killed by SIGKILL"), stuck(1, error="RuntimeError: what the death did"))
    assert [rule for rule, _ in told(later)] == ["rank-died"]


def test_a_first_error_is_told_before_its_echoes() -> None:
    ranks = (
        stuck(0, error="Connection closed by peer"),
        stuck(1, error="RuntimeError: no such op\nmore"),
        stuck(2),
        stuck(3),
    )

    assert told(ranks) == [
        ("rank-raised", "rank 1 (nodea, pid 101) raised an error in exchange 5: RuntimeError: no such op")
    ]


def test_errors_of_lost_connections_alone_are_told_as_what_they_are() -> None:
    ranks = tuple(stuck(rank, error="DistNetworkError: the socket timed out") for rank in range(4))

    assert told(ranks)[0][0] == "exchange-fails"


def searched(bad: set[int], per_host: int = 2, world: int = 8, backend: str = "gloo", cure: str = "") -> isolate.Search:
    """A search among ranks of which some break every group that they are in; ``cure`` is a variable that helps."""

    def in_groups(what: str, groups: Groups) -> Trial:
        failed = tuple(group for group in groups if bad & {rank for part in group for rank in part})
        return Trial(what=what, groups=groups, failed=failed)

    here = claims(world, per_host=per_host)
    return isolate.isolate(here, backend, lambda switch: switch.variable == cure, in_groups)


def test_what_fails_by_itself_or_with_two_that_are_well_is_left() -> None:
    (finding,) = isolate.narrowed_to(searched({4}))
    (among_ranks,) = isolate.narrowed_to(searched({3}, per_host=5, world=5))

    assert finding.title == "only groups with ranks 4-5 (nodec) fail; groups of the others pass"
    assert among_ranks.title == "only groups with rank 3 (nodea) fail; groups of the others pass"
    assert list(isolate.narrowed_to(searched(set()))) == []


def test_the_first_switch_that_cures_names_the_layer_and_ends_the_search() -> None:
    search = searched({0}, backend="nccl", cure="NCCL_SHM_DISABLE")
    (finding,) = isolate.transport_broken(search)

    assert [switch.variable for switch in search.switches] == ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"]
    assert search.outcome.trials == ()
    assert finding.title.startswith("shared memory between ranks fails on nodea, nodeb")
    assert finding.evidence == ("NCCL_P2P_DISABLE=1: fails",)


def test_every_switch_is_named_once() -> None:
    names = [switch.variable for switch in SWITCHES["nccl"]]

    assert len(names) == len(set(names))


def test_a_deadline_in_the_middle_of_work_is_no_hang() -> None:
    order = RankOrder(number=1, phase=CommPhase.RIGHT, seconds=10.0)
    answers = tuple(RankAnswer(rank=rank, stuck=stuck(rank)) for rank in range(4))
    busy = Responses(order=order, answers=answers, seconds=10.0, still=0.4)

    finding = time_used_up(busy, "the collectives")
    quick = PhaseResult(phase=CommPhase.SPEED, state=PhaseState.OK, seconds=1.0, said="")
    slow = replace(quick, state=PhaseState.SLOW)

    assert slowed(busy, (quick,)) is None
    assert slowed(busy, (quick, slow)) == "the deadline left 10 s for it, too little with what is slow (see above)"
    assert slowed(replace(busy, still=8.0), (slow,)) is None
    assert busy.timed_out_in_progress
    assert not replace(busy, still=8.0).timed_out_in_progress
    assert not replace(busy, seconds=9.0).timed_out_in_progress
    assert not replace(busy, silent={3: ConnectOutcome.SILENT}).timed_out_in_progress
    assert finding.title.startswith("the deadline left 10 s for the collectives, and the ranks were still working")
    measured = time_used_up(replace(busy, order=replace(order, phase=CommPhase.SPEED)), "the measurement of speed")
    assert measured.title.startswith("the measurement of speed was given 10 s of the deadline, and the ranks were")


def test_an_exchange_that_breaks_off_where_packets_are_lost_is_told_with_the_loss() -> None:
    loss = ("node0 -> node2 loses packets: 119 of 857 segments were retransmitted (13.9%)",)
    closed = tuple(stuck(rank, error="Connection closed by peer") for rank in (0, 1))
    waiting = tuple(stuck(rank, stack=INSIDE) for rank in range(4))

    for ranks, rule in ((closed, "exchange-fails"), (waiting, "exchange-hangs")):
        ((found, title),) = told(ranks, lossy=loss)
        assert (found, title.startswith(f"{loss[0]}; then rank")) == (rule, True)
    # nor is a connection that failed once a firewall's doing there
    failed = reaches(claims(), a_b=ConnectOutcome.TIMED_OUT)
    assert [rule for rule, _ in told(waiting, reaches=failed)] != ["exchange-hangs"]
    assert [rule for rule, _ in told(waiting, lossy=loss, reaches=failed)] == ["exchange-hangs"]


def test_ranks_that_still_move_in_their_groups_do_not_hang_though_rank_0_is_done_with_its_own() -> None:
    order = RankOrder(number=1, phase=CommPhase.NODES, seconds=15.0, groups=((0,), (1, 2)))

    def gathered(*ranks: Stuck) -> Responses:
        answers = (RankAnswer(rank=0), *(RankAnswer(rank=rank.rank, stuck=rank) for rank in ranks))
        return Responses(order=order, answers=answers, seconds=15.2, still=14.9)

    closed = stuck(2, error="RuntimeError: [pair.cc:553] Connection closed by peer [10.77.0.1]:40834")
    assert gathered(stuck(1, quiet=1.5), stuck(2, quiet=1.2)).timed_out_in_progress
    # the rank whose time was up first closed its connections
    assert gathered(stuck(1, quiet=1.5), closed).timed_out_in_progress
    assert not gathered(stuck(1, quiet=14.8), stuck(2, quiet=14.9)).timed_out_in_progress
    assert not gathered(stuck(1, quiet=1.5), stuck(2, error="ValueError: x")).timed_out_in_progress
    assert not gathered(stuck(1, quiet=1.5), stuck(2, ended="killed by SIGKILL")).timed_out_in_progress
