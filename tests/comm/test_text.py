"""A test of communication in a terminal, and its verdict."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.comm.results import ConnectOutcome, Reach, Report, Stuck, ended, verdict
from dsdoctor.comm.text import cells, phase_line, rank_lines, rank_states, report_lines
from dsdoctor.ui.screen import document
from tests.comm.reports import (
    FOUR_HOSTS,
    bad_pair,
    error,
    good_phases,
    healthy_2,
    healthy_4,
    many,
    mesh,
    missing_rank,
    phase,
    report,
    slow_node,
)

EVERY = (healthy_2, healthy_4, missing_rank, slow_node, bad_pair)


def told(found: Report, *, verbose: bool = False) -> str:
    return "\n".join(report_lines(found, verbose=verbose))


# -- the verdict


def test_the_verdict_claims_what_was_tested_and_no_more() -> None:
    phases = good_phases(4, 2)
    said = {"world": 4, "hosts": ("a", "a", "b", "b"), "backend": "nccl"}

    assert verdict(phases, **said) == "✓ 4 of 4 ranks reach each other and get the same results (nccl, 2 hosts)"  # type: ignore[arg-type]
    assert verdict(phases[:4], **said) == "✓ 4 of 4 ranks reach each other over TCP (nccl, 2 hosts)"  # type: ignore[arg-type]
    assert verdict(phases[:2], **said) == "✓ 4 of 4 ranks have met (nccl, 2 hosts)"  # type: ignore[arg-type]
    assert verdict((), **said) == "· nothing was tested"  # type: ignore[arg-type]


def test_the_verdict_names_the_first_error_by_phase_whatever_the_order_they_came_in() -> None:
    late = phase(
        CommPhase.RIGHT, "", error("wrong-data", "rank 1 (a) sends wrong data", fix="x"), state=PhaseState.BROKEN
    )
    early = phase(
        CommPhase.MESH, "", error("path-cut", "rank 0 (a) cannot reach rank 1 (b)", fix="x"), state=PhaseState.BROKEN
    )

    said = verdict((late, early), world=2, hosts=("a", "b"), backend="gloo")

    assert said == "✗ tcp mesh: rank 0 (a) cannot reach rank 1 (b)"
    assert ended((late, early)) is PhaseState.BROKEN


def test_a_phase_that_broke_without_a_finding_speaks_for_itself() -> None:
    broken = phase(CommPhase.RENDEZVOUS, "the control process died", state=PhaseState.BROKEN)

    assert verdict((broken,), world=2, hosts=(), backend="gloo") == "✗ rendezvous: the control process died"


def test_what_is_slow_only_is_no_break() -> None:
    assert slow_node().state is PhaseState.SLOW
    assert slow_node().verdict.startswith(
        "! 4 of 4 ranks reach each other and get the same results (gloo, 4 hosts), but speed: "
    )


# -- the lines


@pytest.mark.parametrize("state", PhaseState)
def test_a_phase_is_one_line_with_a_mark(state: PhaseState) -> None:
    line = phase_line(phase(CommPhase.RENDEZVOUS, "2 of 2 ranks on 1 host, 0.4 s apart", state=state, seconds=1.2))

    mark = {PhaseState.OK: "✓", PhaseState.SLOW: "!", PhaseState.BROKEN: "✗", PhaseState.SKIPPED: "·"}[state]
    rest = ["skipped: 2 of 2"] if state is PhaseState.SKIPPED else ["  2 of 2", "1.2 s"]
    assert line.startswith(f"{mark} rendezvous  ")
    assert [part in line for part in rest] == [True] * len(rest)
    assert len(line) <= 100


def test_a_quick_test_that_went_well_is_told_in_the_guides_words() -> None:
    assert told(healthy_2()).splitlines() == [
        "[nodea-0] is OK",
        "[nodea-1] is OK",
        "",
        "✓ 2 of 2 ranks reach each other and get the same results (gloo, 1 host) in 3.4 s",
    ]


def test_ranks_that_were_not_started_are_not_ok() -> None:
    only_hosts = replace(healthy_2(), ranks=(), phases=(phase(CommPhase.STATIC, "2 hosts answer"),))

    assert "OK" not in told(only_hosts)


def test_pairs_and_speeds_are_tables() -> None:
    shown = told(healthy_4())

    assert "   0 nodea    -  3120  1440  1320" in shown.splitlines()
    assert "  all_reduce  16 MiB  19.2 ms  24.2 ms  0.830   1.25      30 %  3 (nodeb)" in shown.splitlines()
    assert "  all_reduce     8 B  68.4 µs  86.4 µs                          3 (nodeb)" in shown.splitlines()
    assert "limit 4.10 GB/s: loopback (a copy of 64 MiB in memory, timed here)" in shown
    assert "6 more sizes: --verbose" in shown
    assert told(healthy_4(), verbose=True).count("all_reduce ") == 5


def test_a_missing_rank_comes_first_with_its_fix() -> None:
    assert told(missing_rank()).splitlines() == [
        "✗ rendezvous: rank 3 (nodeb) never arrived within 30 s; 3 of 4 are here  [rank-missing]",
        "    ranks 0-2 arrived 0.4 s apart, on nodea and nodeb",
        "    nodeb: the other rank of this host, 2, is here: the host is up and reaches nodea:29500",
        "    Fix: look at what rank 3 wrote before it died",
        "      $ ssh nodeb ps -ef | grep dsdoctor.comm",
        "",
        "   rank  host   pid  interface  state",
        "✗     3  nodeb    -  -          missing",
        "  3 of 4 ranks are ok (-v shows them)",
        "",
        "  next: $ ssh nodeb ps -ef | grep dsdoctor.comm",
    ]


def test_a_slow_node_is_marked_and_its_victims_are_not() -> None:
    shown = told(slow_node()).splitlines()

    assert list(rank_states(slow_node()).values()) == ["ok", "ok", "slow with all others", "ok"]
    assert "   2 nodec   24!   26!    -    26!" in shown


def test_of_a_bad_pair_both_ends_are_named_and_the_direction() -> None:
    shown = told(bad_pair(), verbose=True).splitlines()

    assert "   1 nodeb 2280     -  2470     ✗" in shown
    assert "✗ rank 1 (nodeb) -> rank 3 (noded): timed out after 3.00 s (10.200.0.4)" in shown
    assert list(rank_states(bad_pair()).values()) == [
        "stuck in all_reduce for 12.0 s, stopped",
        "cut off from rank 3",
        "wrong data",
        "cut off from rank 1",
    ]
    assert '    File "a.py", line 1 in f' in shown


def test_a_rank_that_died_is_told_apart_from_one_that_is_stuck() -> None:
    died = Stuck(rank=1, at="all_gather", step=2, seconds=1.0, ended="killed by signal 9")

    assert rank_states(replace(healthy_2(), stuck=(died,)))[1] == "died in all_gather: killed by signal 9"


def test_pairs_within_a_host_are_not_held_against_those_between_hosts() -> None:
    fast = [
        Reach(source=a, target=b, outcome=ConnectOutcome.REACHED, bandwidth=3e11 if a // 2 == b // 2 else 2e10)
        for a in range(4)
        for b in range(4)
        if a != b
    ]
    shown = told(replace(healthy_4(), pairs=(), reaches=tuple(fast)), verbose=True)

    assert "pairs in GB/s" in shown
    assert "   0 nodea   -  300   20   20" in shown
    assert "!" not in shown


@pytest.mark.slow
def test_of_many_ranks_only_the_sick_have_a_line() -> None:
    lost = [Reach(source=a, target=70, outcome=ConnectOutcome.REFUSED) for a in range(70)]
    lost += [Reach(source=70, target=a, outcome=ConnectOutcome.REFUSED) for a in (*range(70), 71)]
    bad_nodes = replace(many(9, bad_nodes=False), pairs=(), reaches=mesh(72, bad=lost), state=PhaseState.BROKEN)

    shown = list(rank_lines(bad_nodes, verbose=False))
    assert shown[1].split() == [
        "✗",
        "70",
        "node08",
        "4170",
        "eth0",
        "10.200.0.71",
        "cut",
        "off",
        "from",
        "all",
        "others",
    ]
    assert shown[2:] == ["  71 of 72 ranks are ok (-v shows them)"]
    assert "✗ node00 -> node08: refused (8 pairs of ranks)" in told(bad_nodes).splitlines()
    assert told(many(9, bad_nodes=False)).splitlines()[:2] == [
        "[node00] ranks 0-7 are OK",
        "[node01] ranks 8-15 are OK",
    ]


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("example", [*EVERY, lambda: many(2, bad_nodes=False)])
def test_what_is_no_sentence_fits_a_hundred_columns(example: Callable[[], Report], *, verbose: bool) -> None:
    found = example()
    titles = [finding.title for finding in found.findings]

    lines = report_lines(found, verbose=verbose)

    assert [line for line in lines if len(line) > 105 and not any(title in line for title in titles)] == []


def test_a_test_that_never_began_says_nothing_of_ranks() -> None:
    broken = phase(
        CommPhase.STATIC, "1 of 2 hosts", error("ssh-refused", "nodeb: refused", fix="x"), state=PhaseState.BROKEN
    )
    found = report(FOUR_HOSTS, (broken,), ranks=(), reaches=())

    assert told(found).splitlines() == [
        "✗ static: nodeb: refused  [ssh-refused]",
        "    Fix: x",
        "",
        "  next: $ python -m dsdoctor explain ssh-refused",
    ]


def test_the_transports_of_nccl_are_counted() -> None:
    found = replace(healthy_2(), transports={"0 -> 1": "P2P/CUMEM", "1 -> 0": "P2P/CUMEM", "1 -> 2": "NET/Socket"})

    assert "      2  P2P/CUMEM, such as 0 -> 1" in told(found).splitlines()
    assert "  1 -> 2  NET/Socket" in told(found, verbose=True).splitlines()


@pytest.mark.parametrize("example", EVERY)
def test_a_report_travels_as_json(example: Callable[[], Report]) -> None:
    found = example()

    assert msgspec.json.decode(msgspec.json.encode(found), type=Report) == found
    shown = msgspec.json.decode(document("comm", found.findings, report=found))
    assert shown["report"]["verdict"] == found.verdict


def test_of_a_single_message_of_the_mesh_no_pair_is_marked() -> None:
    one = replace(slow_node(), pairs=(), phases=healthy_4().phases)

    assert {cell.slow for cell in cells(one).values()} == {False}
    assert "third of the median" not in told(one, verbose=True)
