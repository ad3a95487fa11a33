"""Who does not come: each cause on each rank of a made run, and that what is not known is not said."""

import socket
import threading
from dataclasses import replace
from itertools import product

import pytest

from dsdoctor.core.finding import Severity
from dsdoctor.hang.activity import Activity, activity_in, remedy_name
from dsdoctor.hang.models import PROCESSES, Frame, Incident, RankView, ThreadStack
from dsdoctor.hang.stacks import grouped_stacks
from dsdoctor.hang.supervisor import HANGS, LATE, WORKS, Judgement
from dsdoctor.hang.verdict import is_working, judge, may_wait_outside
from dsdoctor.rules import book
from dsdoctor.run.hang_report import state_of, with_nccl
from tests.each import each
from tests.hang.made import TORCH, calling, elsewhere, frame, incident, lock, operation, view

LOADER = frame("/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py", 5, "__next__")
SAVING = (*calling("barrier", 77),)


def run(odd: RankView, world: int = 4) -> Incident:
    """All ranks but one wait in collective 56."""
    others = [view(rank, calling("all_reduce"), 56, world=world) for rank in range(world) if rank != odd.rank]
    return incident(*sorted([odd, *others], key=lambda each: each.rank), world=world)


def one(made: Incident) -> tuple[str, Severity, str]:
    """The rule, severity and title of the one finding."""
    findings = judge(made).findings
    assert len(findings) == 1, [finding.title for finding in findings]
    return findings[0].rule, findings[0].severity, findings[0].title


def lying(rank: int, kind: str) -> RankView:
    """One rank with which something is the matter."""
    behind = elsewhere(), 55
    made = {
        "behind": lambda: view(rank, *behind),
        "loader": lambda: view(rank, (*elsewhere("for batch in loader:"), LOADER), 55),
        "gone": lambda: view(rank, *behind, state="", ended="killed by SIGKILL"),
        "zombie": lambda: view(rank, *behind, state="Z", ended="exit status 0"),
        "stopped": lambda: view(rank, *behind, state="T"),
        "disk": lambda: view(rank, *behind, state="D"),
        "interpreter": lambda: view(rank, *behind, silent=30.0),
        "outside": lambda: view(rank, elsewhere(), 56),
        "lock": lambda: view(rank, elsewhere(), 55, lock=lock()),
    }
    return made[kind]()


EXPECTED = {
    "behind": ("hang-rank-behind", "sleeps at train.py:33 in main"),
    "loader": ("hang-rank-behind", "waits for its data loader at train.py:33"),
    "gone": ("hang-rank-gone", "killed by SIGKILL"),
    "zombie": ("hang-rank-gone", "exit status 0"),
    "stopped": ("hang-rank-stopped", "stopped by a signal"),
    "disk": ("hang-disk-sleep", "waiting for a device"),
    "interpreter": ("hang-interpreter-held", "has run no Python for 30 s"),
    "outside": ("hang-rank-outside", "sleeps at train.py:33 in main"),
    "lock": ("hang-stale-lock", "/c/torch_extensions/x/lock"),
}


@each(("kind", "rank"), list(product(EXPECTED, (0, 1, 3))))
def test_each_cause_is_named_with_its_rank(kind: str, rank: int) -> None:
    rule, severity, title = one(run(lying(rank, kind)))

    assert (rule, severity) == (EXPECTED[kind][0], Severity.ERROR)
    assert EXPECTED[kind][1] in title
    assert f"rank {rank}" in title


def test_a_rank_that_works_is_no_error() -> None:
    verdict = judge(run(view(2, elsewhere(), 55, activity="it used 99% of a processor")))

    assert is_working(verdict)
    assert "is still working" in verdict.findings[0].title


@each("held", [lock(holder=4711), lock(doubt="it lies on nfs")], ids=["somebody has it", "on nfs"])
def test_a_lock_that_somebody_may_hold_is_not_called_stale(held: object) -> None:
    rule, _, _ = one(run(view(2, elsewhere(), 55, lock=held)))

    assert rule == "hang-rank-behind"


def test_a_lock_is_not_stale_while_another_rank_compiles() -> None:
    compiles = frame("/v/lib/python3.11/site-packages/torch/utils/cpp_extension.py", 5, "_jit_compile")
    made = incident(
        view(0, (*elsewhere(), compiles), 0, joined=False), view(1, elsewhere(), 0, joined=False, lock=lock()), world=2
    )

    assert [finding.rule for finding in judge(made).findings if finding.rule == "hang-stale-lock"] == []


@each("odd", [0, 2])
def test_the_first_call_that_differs_is_told_with_the_ranks_of_each_kind(odd: int) -> None:
    same = operation(40, "all_reduce", 8, state="done")
    views = [
        view(rank, SAVING if rank == odd else calling("all_reduce"), 41, operations=(same, last))
        for rank in range(4)
        for last in [operation(41, "barrier") if rank == odd else operation(41, "all_gather", 99)]
    ]
    rule, _, title = one(incident(*views))

    assert rule == "hang-other-operation"
    assert f"at position 41: rank {odd}: barrier; ranks" in title
    assert "all_gather of 99" in title
    assert "train.py:77" in title


def test_the_same_call_with_other_sizes_is_told_with_the_sizes() -> None:
    views = [
        view(rank, calling("all_reduce"), 41, operations=(operation(41, "all_reduce", 10 if rank else 1000),))
        for rank in range(4)
    ]
    rule, _, title = one(incident(*views))

    assert (rule, "rank 0: all_reduce of 1000; ranks 1-3: all_reduce of 10" in title) == ("hang-other-sizes", True)


def test_sizes_that_may_differ_are_no_difference() -> None:
    views = [
        view(rank, calling("all_to_all"), 41, operations=(operation(41, "alltoall", rank + 1),)) for rank in range(4)
    ]

    assert one(incident(*views))[0] == "hang-transport"


def test_who_waits_in_another_group_for_a_late_rank_is_not_the_cause() -> None:
    made = incident(
        view(0, calling("all_reduce"), {"0": 9, "tp0": 4}),
        view(1, calling("all_gather"), {"0": 8, "tp0": 4, "tp1": 6}),
        view(2, elsewhere(), {"0": 8, "tp1": 5}),
        world=3,
    )
    rule, _, title = one(made)

    assert (rule, title.startswith("rank 2 ")) == ("hang-rank-behind", True)


def test_ranks_that_wait_for_each_other_in_two_groups_are_told_so() -> None:
    made = incident(
        view(0, calling("all_reduce"), {"0": 0, "1": 11}),
        view(1, SAVING, {"0": 1, "1": 10}),
        view(2, calling("all_reduce"), {"0": 0, "1": 11}),
        world=3,
    )
    rule, _, title = one(made)

    assert rule == "hang-other-operation"
    assert "rank 1 in barrier; ranks 0, 2 in all_reduce" in title


@each("known", [True, False])
def test_of_a_rank_that_tells_nothing_nobody_says_where_it_stands(known: bool) -> None:
    late = view(2, elsewhere(), 56)
    rule, _, title = one(made := run(late if known else replace(late, sample=None)))

    said = judge(made).findings[0].evidence
    assert rule == "hang-rank-outside"
    assert ("rank 2: not in a collective" in said, "has not reached" in title) == (known, known)


def test_when_all_have_come_the_transport_is_named() -> None:
    assert one(incident(*(view(rank, calling("all_reduce"), 56) for rank in range(4))))[0] == "hang-transport"


def test_a_world_that_is_not_seen_whole_is_not_called_complete() -> None:
    rule, severity, title = one(incident(*(view(rank, calling("all_reduce"), 56) for rank in range(3))))

    assert (rule, severity) == ("hang-unclear", Severity.WARNING)
    assert "3 of 4 ranks reported" in title


def test_a_host_that_is_silent_is_named_with_its_ranks() -> None:
    made = incident(*(view(rank, calling("all_reduce"), 56) for rank in range(2)), silent_hosts={"node2": (2, 3)})
    rule, _, title = one(made)

    assert (rule, title.startswith("node2 with ranks 2-3 is unreachable")) == ("hang-host-gone", True)


def test_a_rank_that_has_not_joined_is_told_with_its_line() -> None:
    start = (*elsewhere("dist.init_process_group()", 8), frame(TORCH_START, 3, "init_process_group"))
    made = incident(view(0, start, 0, joined=False), view(1, elsewhere("download()", 5), 0, joined=False), world=2)
    rule, _, title = one(made)

    assert (rule, "rank 1 " in title and "train.py:5" in title) == ("hang-not-started", True)


TORCH_START = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def test_ranks_that_were_never_one_run_are_left_alone() -> None:
    made = incident(view(0, elsewhere(), 0, joined=False), view(1, elsewhere(), 0, joined=False), world=2)

    assert judge(made).findings == ()


def test_a_rank_that_has_ended_while_nobody_waits_is_no_finding() -> None:
    made = incident(view(0, elsewhere(), 56), view(1, elsewhere(), 56, state="", ended="exit status 0"), world=2)

    assert judge(made).findings == ()


def test_ranks_that_all_stand_elsewhere_are_told_with_a_line() -> None:
    rule, severity, title = one(incident(*(view(rank, elsewhere(), 56) for rank in range(4))))

    assert (rule, severity) == ("hang-all-outside", Severity.ERROR)
    assert "sleeps at train.py:33" in title


def test_equal_stacks_are_folded() -> None:
    views = [view(rank, elsewhere() if rank == 2 else calling("all_reduce"), 56) for rank in range(4)]
    heads = [line for line in grouped_stacks(views) if not line.startswith(" ")]

    assert heads == ["rank 2:", "ranks 0-1, 3:"]


def test_of_ranks_that_were_not_heard_of_nobody_says_that_they_wait_for_nothing() -> None:
    rule, severity, title = one(incident(*(view(rank, elsewhere(), 56) for rank in range(3))))

    assert (rule, severity) == ("hang-unclear", Severity.WARNING)
    assert "3 of 4 ranks reported" in title


@each("rank", [0, 3])
@each(
    ("file", "patient"),
    [
        ("/v/lib/python3.11/site-packages/requests/adapters.py", "works"),
        ("/usr/lib/python3.11/subprocess.py", "works"),
        ("/usr/lib/python3.11/threading.py", "hangs"),
    ],
)
def test_what_may_work_where_nobody_sees_it_is_given_time_unless_somebody_said_how_long(
    rank: int, file: str, patient: str
) -> None:
    made = run(view(rank, (*elsewhere("answer = ask(server)"), frame(file, 5, "wait")), 55))

    assert [state_of(made, patient=each).state for each in (True, False)] == [patient, "hangs"]


def test_nodes_that_are_still_being_started_are_given_time() -> None:
    start = (*elsewhere("dist.init_process_group()", 8), frame(TORCH_START, 3, "init_process_group"))
    made = incident(view(0, start, 0, joined=False), world=2)

    assert [state_of(made, patient=each).state for each in (True, False)] == ["works", "hangs"]


def test_each_activity_has_something_to_do_next() -> None:
    assert all(book.remedy("hang", remedy_name(kind)).text for kind in Activity)


@each(
    ("text", "waits", "kind"),
    [
        ("cursor.execute(query)", "", Activity.DATABASE),
        ("time.sleep(9)", "", Activity.SLEEP),
        ("for batch in loader:", "", Activity.DATA),
        ("file.write(x)", "nfs_wait_bit", Activity.NETWORK_FILE_SYSTEM),
        ("lock.acquire()", "", Activity.LOCK),
        ("loss.item()", "", Activity.DEVICE),
        ("library.call()", "", None),
    ],
)
def test_the_fix_says_what_to_do_next_on_the_host_of_that_rank(text: str, waits: str, kind: Activity | None) -> None:
    (finding,) = judge(run(view(2, elsewhere(text), 55, waits=waits))).findings

    assert finding.fix is not None
    assert finding.fix.text.startswith("on node1: ")
    assert finding.fix.text.endswith(book.remedy("hang", remedy_name(kind)).text)


def test_a_loader_without_workers_is_given_no_timeout() -> None:
    fetch = frame("/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", 5, "fetch")
    fixes = []
    for below in ((LOADER,), (LOADER, fetch)):
        (finding,) = judge(run(view(2, (*elsewhere("for batch in loader:"), *below), 55))).findings
        assert finding.fix is not None
        fixes.append((finding.fix.text, len(finding.fix.steps)))

    assert [book.remedy("hang", "data").text in text for text, _ in fixes] == [True, False]
    assert book.remedy("hang", "without-workers").text in fixes[1][0]


@each("working", [(0,), (0, 1, 2, 3)])
def test_ranks_that_work_and_wait_for_nobody_do_not_hang(working: tuple[int, ...]) -> None:
    busy = {rank: "it used 99% of a processor" if rank in working else "" for rank in range(4)}
    made = incident(*(view(rank, elsewhere("loss = model(batch)"), 56, activity=busy[rank]) for rank in range(4)))

    assert judge(made).findings == ()


OWNERS = {
    "waits for a database": (
        "cursor",
        "cur",
        "conn",
        "con",
        "self._conn",
        "db",
        "self.db",
        "session",
        "con.cursor()",
        "sqlite3.connect(path, timeout=9)",
    ),
    "": ("context", "self.context", "ops", "repo", "current_graph", "engine", "connector_of", "mycontext"),
}


@each("call", ["execute(x)", "executemany(x, y)", "commit()"])
@each("words", OWNERS)
def test_only_what_is_called_as_databases_are_is_one(words: str, call: str) -> None:
    stacks = {owner: elsewhere(f"result = {owner}.{call}") for owner in OWNERS[words]}

    assert {owner: activity_in(stack, "futex_do_wait").words for owner, stack in stacks.items()} == dict.fromkeys(
        stacks, words or "waits for a lock or another thread"
    )


@each("gathers", [True, False])
def test_where_a_forward_of_zero_3_gathers_the_fix_names_leaf_modules(gathers: bool) -> None:
    inner = frame("/v/site-packages/deepspeed/runtime/zero/partitioned_param_coordinator.py", 5, "fetch_sub_module")
    stack = (calling("all_gather")[0], *([inner] if gathers else []), calling("all_gather")[1])
    odd = view(1, stack, 56, operations=(operation(56, "all_gather", 68),))
    usual = [view(rank, calling("all_reduce"), 56, operations=(operation(56, "all_reduce", 9),)) for rank in (0, 2, 3)]

    (finding,) = judge(incident(usual[0], odd, *usual[1:])).findings

    assert finding.rule == "hang-other-operation"
    assert ("set_z3_leaf_modules" in (finding.fix.text if finding.fix else "")) == gathers


RAS = """NCCL version 2.28 compiled with CUDA 13.0

Job summary
===========
      1          2            1          2        2

Errors
======

DEAD
  1 job process is considered dead (unreachable via the RAS network)
"""


@pytest.mark.parametrize(("answer", "said"), [(RAS, "DEAD"), ("Job summary\n===\n", "sees no error"), (None, "")])
def test_where_all_have_come_nccl_is_asked(answer: str | None, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = incident(*(view(rank, calling("all_reduce"), 56, world=2) for rank in range(2)), world=2)
    on_gpus = replace(
        made, ranks=tuple(replace(v, sample=v.sample and replace(v.sample, cuda=True)) for v in made.ranks)
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{server.getsockname()[1]}")
        if answer is None:
            server.close()
        else:
            threading.Thread(target=answers, args=(server, answer)).start()
        told = with_nccl(on_gpus, judge(on_gpus).findings)
    without = with_nccl(made, judge(made).findings)

    assert without == made
    assert any(said in line for line in told.nccl) == (answer is not None)
    assert judge(told).findings[0].evidence[: len(told.nccl)] == told.nccl


def answers(server: socket.socket, text: str) -> None:
    connection, _ = server.accept()
    with connection:
        assert connection.recv(100) == b"verbose status\n"
        connection.sendall(text.encode())


SHUTDOWN = frame("/usr/lib/python3.11/threading.py", 1590, "_shutdown")
LOGGER = ThreadStack(name="logger", frames=elsewhere("queue.get()", 90))
UPLOAD = ThreadStack(name="upload", frames=(*elsewhere(), frame("/usr/lib/python3.11/ssl.py", 9, "write")))


def past(rank: int, *frames: Frame, thread: ThreadStack = LOGGER, **more: object) -> RankView:
    """A rank after destroy_process_group."""
    made = view(rank, frames, 0, world=2, joined=False)
    assert made.sample is not None
    stacks = (*made.sample.threads, thread)
    return replace(made, sample=replace(made.sample, parted=True, threads=stacks, all_threads=True, **more))  # type: ignore[arg-type]


def test_a_rank_that_does_not_end_after_its_group_was_destroyed_is_told() -> None:
    over = view(1, elsewhere(), 55, world=2, state="", ended="exit status 0", leaving=True)
    cases = [
        (past(0, SHUTDOWN), "does not exit: its script has ended and waits for a non-daemon thread"),
        (
            past(0, *elsewhere("thread.join()")),
            "does not exit: it has left its process group, and waits for another thread",
        ),
        (past(0, *elsewhere(), leaving=True), "does not exit: its interpreter is shutting down"),
    ]
    for stuck, words in cases:
        for other in (over, past(1, SHUTDOWN)):
            made = incident(stuck, other, world=2)
            findings = judge(made).findings
            assert {(each.rule, each.severity) for each in findings} == {("hang-at-exit", Severity.ERROR)}
            assert findings[0].title.startswith("rank 0 (node1, pid 100) " + words), findings[0].title
            assert len(findings) == (1 if other is over else 2)
    assert "rank 0: its thread logger is in train.py:90" in "\n".join(
        judge(incident(cases[0][0], over)).findings[0].evidence
    )


def test_a_script_that_goes_on_after_its_group_is_accused_of_nothing() -> None:
    """An upload, a merge, a service: no rank waits for it. It is told late, as a warning, and nothing is ended for it."""
    over = view(1, elsewhere(), 55, world=2, state="", ended="exit status 0", leaving=True)
    uploads = past(0, *elsewhere("time.sleep(0.5)"))

    (found,) = judge(incident(uploads, over, world=2)).findings

    assert (found.rule, found.severity) == ("hang-at-exit", Severity.WARNING)


def test_a_rank_that_makes_its_group_anew_is_not_at_its_end() -> None:
    made = (*elsewhere(), frame(TORCH, 9, "init_process_group", "_store_based_barrier(rank, store)"))
    again = (past(0, *made), past(1, *made))

    assert "hang-at-exit" not in {found.rule for found in judge(incident(*again, world=2)).findings}


def test_ranks_that_go_round_loops_of_their_own_may_go_on() -> None:
    """A rank that trains in small pieces, one that polls for its checkpoints: both sleep whenever one looks."""
    still = [view(rank, elsewhere(), 1, world=2) for rank in (0, 1)]
    for wakes, severity in ((0, Severity.ERROR), (300, Severity.WARNING)):
        (found,) = judge(incident(replace(still[0], wakes=wakes), still[1], world=2)).findings

        assert (found.rule, found.severity) == ("hang-all-outside", severity)


def test_a_rank_that_is_not_there_yet_may_be_the_child_of_one_that_waits() -> None:
    """Lightning's rank 0 starts the others, which import torch for a while."""
    made = (*elsewhere(), frame(TORCH, 9, "init_process_group", "_store_based_barrier(rank, store)"))
    waits = view(0, made, 0, world=2, joined=False)
    for activity, severity in (("", Severity.ERROR), ("its child processes read or wrote 92 MiB", Severity.WARNING)):
        (found,) = judge(incident(replace(waits, activity=activity), world=2)).findings

        assert (found.rule, found.severity) == ("hang-not-started", severity)


def test_a_loop_around_a_process_may_wait_for_its_work() -> None:
    polls = view(0, elsewhere("while child.poll() is None: time.sleep(0.5)"), 1, world=2)
    waits = view(1, calling("barrier"), 2, world=2)
    for wakes, children, patient in ((100, 1, True), (100, 0, False), (0, 1, False)):
        stands = incident(replace(polls, wakes=wakes, children=children), waits, world=2)

        assert may_wait_outside(stands, judge(stands)) is patient


@each(("wakes", "children", "polls"), list(product((0, 100), (0, 1), ("", "while child.poll() is None:"))))
@each("behind", [True, False])
def test_a_loop_around_a_living_child_is_a_warning_that_says_so(
    wakes: int, children: int, polls: str, behind: bool
) -> None:
    """What the child does may be on a GPU, or on another host."""
    rank = view(0, elsewhere("time.sleep(0.5)"), 1 if behind else 2, world=2)
    rank = replace(rank, wakes=wakes, children=children, polls=polls)
    waits = view(1, calling("barrier"), 2, world=2)

    (found,) = judge(incident(rank, waits, world=2)).findings

    is_polled = bool(wakes and children and polls)
    assert found.rule == ("hang-rank-behind" if behind else "hang-rank-outside")
    assert found.severity is (Severity.WARNING if is_polled else Severity.ERROR)
    assert ("waits for a child process that is still running" in found.title) is is_polled
    assert any("in the loop while child.poll() is None:" in line for line in found.evidence) is is_polled


RENDEZVOUS = frame("/v/lib/python3.11/site-packages/torch/distributed/rendezvous.py", 190, "_create_c10d_store")


@each(
    ("unserved", "addresses", "world", "rule"),
    [
        ((True, True), ("localhost:1", "localhost:1"), 2, "hang-store-unserved"),
        ((True, False), ("localhost:1", "localhost:1"), 2, None),
        ((True, True), ("localhost:1", "localhost:2"), 2, None),
        # the one that is not there yet may be the one that serves it
        ((True, True), ("localhost:1", "localhost:1"), 3, "hang-not-started"),
    ],
)
def test_a_store_that_nobody_serves_is_told_where_all_ranks_want_to_join_it(
    unserved: tuple[bool, ...], addresses: tuple[str, ...], world: int, rule: str | None
) -> None:
    """Under torchrun all ranks of torch's RPC are clients."""
    views = []
    for rank, (is_unserved, address) in enumerate(zip(unserved, addresses, strict=True)):
        made = past(rank, *elsewhere("rpc.init_rpc(name)"), RENDEZVOUS)
        assert made.sample is not None
        views.append(replace(made, sample=replace(made.sample, rendezvous=address), unserved=is_unserved))

    found = [finding.rule for finding in judge(incident(*views, world=world)).findings]

    assert "hang-at-exit" not in found
    assert found == ([rule] if rule else found)
    assert ("hang-store-unserved" in found) is (rule == "hang-store-unserved")


@each("text", ["return sock.recv(4)", "fcntl.flock(file, 2)", "db.execute(query)"])
@each("in_loader", [True, False])
def test_a_dataset_that_waits_within_the_rank_is_a_hang_at_its_time(text: str, in_loader: bool) -> None:
    """With num_workers=0. A script's own wait for a server is given more."""
    fetch = frame("/v/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", 54, "fetch")
    own = frame("/home/a/data.py", 4, "__getitem__", text)
    behind = view(1, (*elsewhere("for batch in loader:"), *((LOADER, fetch) if in_loader else ()), own), 4, world=2)

    made = incident(view(0, calling("all_reduce"), 5, world=2), behind, world=2)

    assert state_of(made, patient=True).state == (HANGS if in_loader else WORKS)


@each(
    ("kind", "still", "state"),
    [
        *((kind, 9.0, LATE) for kind in ("behind", "loader", "outside", "disk", "interpreter")),
        *((kind, 41.0, HANGS) for kind in ("behind", "loader", "outside", "disk", "interpreter")),
        *((kind, 9.0, HANGS) for kind in ("gone", "stopped", "lock")),
    ],
)
def test_a_wait_that_may_end_is_late_until_it_has_lasted_many_times_the_limit(
    kind: str, still: float, state: str
) -> None:
    made = replace(run(lying(1, kind)), still=still, after=8.0)
    judgement = state_of(made, patient=False)
    (finding,) = judge(made).findings

    assert judgement == Judgement(state=state, late=(1,) if state == LATE else ())
    assert (finding.severity is Severity.WARNING) is (state == LATE)
    if kind in {"behind", "outside"}:
        assert finding.title.startswith("rank 1 (node1, pid 101) is 9 s late: sleeps at") is (state == LATE)
        assert ("the wait may still end; it counts as a hang after 40 s" in finding.evidence) is (state == LATE)


def test_torch_s_own_timeout_ends_lateness_sooner() -> None:
    made = replace(run(lying(1, "behind")), after=8.0)
    views = []
    for each_view in made.ranks:
        assert each_view.sample is not None
        groups = tuple(replace(group, timeout=20.0) for group in each_view.sample.groups)
        views.append(replace(each_view, sample=replace(each_view.sample, groups=groups)))

    later = [replace(made, ranks=tuple(views), still=still) for still in (9.0, 13.0)]
    assert [state_of(each, patient=False).state for each in later] == [LATE, HANGS]


def test_a_rank_that_waits_for_a_thread_that_is_not_there_is_hung_at_once() -> None:
    joins = view(1, (*elsewhere("thread.join()"), frame("/usr/lib/python3.11/threading.py", 1, "join")), 55)
    assert joins.sample is not None
    for has_thread in (False, True):
        threads = (*joins.sample.threads, *([ThreadStack(name="T", frames=elsewhere())] if has_thread else []))
        alone = replace(joins, sample=replace(joins.sample, threads=threads, all_threads=True))

        judgement = state_of(replace(run(alone), still=9.0, after=8.0), patient=False)
        assert judgement.state == (LATE if has_thread else HANGS)


@each(
    ("text", "kernel", "rule"),
    [
        ("work.wait()", "futex_do_wait", "hang-unclear"),
        ("", "futex_do_wait", "hang-unclear"),
        ("", "", "hang-unclear"),
        ("", "hrtimer_nanosleep", "hang-rank-outside"),
        ("lock.acquire()", "futex_do_wait", "hang-rank-outside"),
    ],
)
def test_a_running_rank_whose_line_could_not_be_read_is_not_accused_of_a_wait_that_may_be_a_collective(
    text: str, kernel: str, rule: str
) -> None:
    """Root reads no source line of another user's rank."""
    seen = [view(0, elsewhere(text), {}, world=2, waits=kernel), view(1, calling("all_reduce"), {}, world=2)]
    for ranks in (seen, [seen[0], replace(seen[0], rank=1)]):
        (found,) = judge(incident(*ranks, world=2, source=PROCESSES)).findings

        assert found.rule == (rule if ranks is seen else rule.replace("rank", "all"))
        assert ("unread" in " ".join(found.evidence)) is (rule == "hang-unclear" and not text)


def test_what_goes_on_after_the_training_is_no_hang() -> None:
    over = view(1, elsewhere(), 55, world=2, state="", ended="exit status 0", leaving=True)
    works = replace(past(0, *elsewhere()), activity="it used 99% of a processor")
    never = view(0, elsewhere(), 0, world=2, joined=False)
    alone = replace(over, sample=never.sample)
    uploads = incident(past(0, SHUTDOWN, thread=UPLOAD), over, world=2)

    assert judge(incident(works, over, world=2)).findings == ()
    # what never had a process group is no training
    assert judge(incident(never, alone, world=2)).findings == ()
    assert may_wait_outside(uploads, judge(uploads))
    # another one still trains
    assert [
        each.rule for each in judge(incident(past(0, SHUTDOWN), view(1, calling("barrier"), 9, world=2))).findings
    ] != ["hang-at-exit"]
