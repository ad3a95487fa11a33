"""Who ended first, for which others only followed: every kind of end with every kind of following, told once."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from dsdoctor.core.finding import Severity
from dsdoctor.hang import supervisor as supervisor_module
from dsdoctor.hang.channel import RunIdentity
from dsdoctor.hang.incident_view import ASKED_TO_END, CRASHES, first_to_exit, last_seen
from dsdoctor.hang.models import Frame, HangOptions, Incident, RankView
from dsdoctor.hang.ring import RingWriter
from dsdoctor.hang.supervisor import Judgement, Supervisor, Task
from dsdoctor.hang.verdict import judge
from tests.each import each
from tests.hang.made import calling, elsewhere, frame, incident, operation, view

PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:7"
OWN = (frame("/home/a/train.py", 9, "step", "raise KeyError"), frame("/v/lib/python3.11/json/x.py", 3, "load"))


def ended(rank: int, how: str, at: float, *, failure: str = "", told: bool = False, **more: object) -> RankView:
    made = view(rank, elsewhere(), 55, world=3, failure=failure, state="", ended=how, ended_at=at, **more)
    assert made.sample is not None
    return replace(made, sample=replace(made.sample, told=told, failed_in=OWN if failure else ()))


ENDS = {
    "os._exit, sys.exit": ("exit status 3", ""),
    "the end of its script": ("exit status 0", ""),
    "an exception": ("exit status 1", "KeyError: 'x'"),
    "ctrl-c": ("killed by SIGINT", "KeyboardInterrupt: "),
    "a signal to it alone": ("killed by SIGTERM", ""),
    "memory": ("killed by SIGKILL", ""),
    "C code": ("killed by SIGSEGV", ""),
    "gloo": ("killed by SIGABRT", ""),
}
FOLLOWING = {
    "says so": ("exit status 1", PEER),
    "is ended by the launcher meanwhile": ("killed by SIGTERM", PEER),
    "is killed by the launcher": ("killed by SIGKILL", PEER),
}


@each(("end", "following", "rank"), list(product(ENDS, FOLLOWING, (0, 2))))
def test_the_rank_that_ended_first_is_told_with_how(end: str, following: str, rank: int) -> None:
    how, failure = ENDS[end]
    ranks = [
        ended(other, *FOLLOWING[following][:1], 2.0 + other, failure=FOLLOWING[following][1])
        for other in range(3)
        if other != rank
    ]
    ranks.append(ended(rank, how, 1.0, failure=failure))

    assert first_to_exit(ranks) == (rank,)
    (finding,) = judge(incident(*ranks, world=3, first_ended=(rank,))).findings
    assert finding.rule == "hang-rank-gone"
    assert f"rank {rank} (node1" in finding.title
    assert how in finding.title
    assert failure in finding.title


@each("end", list(ENDS))
def test_ranks_that_all_end_alike_are_no_news(end: str) -> None:
    how, failure = ENDS[end]
    alike = [ended(rank, how, 1.0 + rank, failure=failure) for rank in range(3)]
    asked = how.startswith("killed by SIG") and not how.endswith(("SIGTERM", "SIGINT"))

    assert first_to_exit(alike) == ((0, 1, 2) if asked else ())


def test_what_a_launcher_ends_after_one_has_failed_by_itself_proves_nothing() -> None:
    """All might have failed alike: nobody says that another one is gone."""
    ranks = [ended(0, "exit status 3", 1.0), ended(1, "killed by SIGTERM", 2.0), ended(2, "killed by SIGTERM", 2.0)]

    assert first_to_exit(ranks) == ()


def test_an_exception_that_another_rank_has_told_of_is_not_told_again() -> None:
    first = ended(0, "exit status 1", 1.0, failure="KeyError: 'x'")
    others = [ended(1, "exit status 1", 2.0, failure=PEER), ended(2, "exit status 1", 2.0, failure=PEER)]

    assert first_to_exit([first, *others]) == (0,)
    assert first_to_exit([first, others[0], ended(2, "exit status 1", 2.0, failure=PEER, told=True)]) == ()
    # those that are left may still say it
    assert first_to_exit([first, others[0], view(2, elsewhere(), 55)]) == ()


@each("name", ["SIGKILL", "SIGABRT", *sorted(CRASHES), *ASKED_TO_END, "SIGXCPU"])
def test_the_kernel_is_asked_about_memory_only_where_it_may_have_killed(name: str) -> None:
    (finding,) = judge(
        incident(view(0, calling("all_reduce"), 41, world=3), ended(1, f"killed by {name}", 1.0))
    ).findings

    assert finding.rule == "hang-rank-gone"
    assert finding.fix is not None
    assert ("oom" in str([each.template for each in finding.fix.steps])) == (name == "SIGKILL")


@each(
    ("frames", "leaving", "told"),
    [
        (elsewhere(), False, "rank 1 was last seen, 0.4 s before its end, at train.py:33 in main: time.sleep(9)"),
        (
            (*elsewhere(), *OWN[1:]),
            False,
            "rank 1 was last seen, 0.4 s before its end, at train.py:33 in main: time.sleep(9)",
        ),
        (OWN[1:], False, ""),
        ((frame("/x/dsdoctor/hang/sampler.py", 78, "close"),), True, ""),
        (elsewhere(), True, ""),
    ],
)
def test_where_a_rank_was_last_is_told_of_the_users_own_lines_with_their_age(
    frames: tuple[Frame, ...], leaving: bool, told: str
) -> None:
    made = view(1, frames, 5, leaving=leaving, state="", ended="exit status 0", ended_at=100.4)
    assert made.sample is not None

    assert last_seen(replace(made, sample=replace(made.sample, time=100.0))) == told


def test_a_rank_that_raised_is_placed_where_that_came_from() -> None:
    assert last_seen(ended(1, "exit status 1", 1.0, failure="KeyError: 'x'")) == (
        "rank 1 raised it at train.py:9 in step: raise KeyError"
    )


def test_a_rank_that_came_to_its_end_after_the_ranks_had_parted_is_not_accused() -> None:
    calls = [operation(40, "all_gather", 8, state="done"), operation(40, "all_reduce", 8, state="done")]
    views = [
        view(0, elsewhere(), 42, world=2, operations=(calls[0],), failure=PEER, state="", ended="exit status 1"),
        view(1, elsewhere(), 41, world=2, operations=(calls[1],), leaving=True, state="", ended="exit status 0"),
    ]
    (finding,) = judge(incident(*views, world=2, first_ended=(1,))).findings

    assert finding.rule == "hang-other-operation"
    assert finding.severity is Severity.ERROR
    assert "at position 40: rank 0: all_gather of 8; rank 1: all_reduce of 8" in finding.title
    assert "rank 1 ended: exit status 0" in finding.evidence


def test_of_a_rank_that_came_to_its_end_both_possibilities_are_told() -> None:
    views = [
        view(0, elsewhere(), 42, world=2, failure=PEER, state="", ended="exit status 1"),
        view(1, elsewhere(), 41, world=2, leaving=True, state="", ended="exit status 0"),
    ]
    (finding,) = judge(incident(*views, world=2, first_ended=(1,))).findings

    assert "rank 1 had called 41 collectives of group 0 when it ended, rank 0 42" in finding.evidence
    assert finding.fix is not None
    assert "either rank 1 leaves earlier" in finding.fix.text
    assert "or they call collectives that it doesn't" in finding.fix.text


@pytest.mark.parametrize("step", [-7200.0, 0.0, 7200.0])
def test_a_clock_that_is_set_between_two_ends_changes_nothing(
    step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NTP, or an administrator, sets the time of day: who ended first, and how lately, is told by another clock."""
    told: list[Incident] = []
    task = Task(
        folder=tmp_path,
        options=HangOptions(after=60.0),
        run=RunIdentity(key="k", master="127.0.0.1", ports=(1,), secret=b""),
        host="node1",
        tell=lambda incident, _node: told.append(incident),
        write=told.append,
        mention=lambda *_: None,
        judge=lambda _incident: Judgement(state=""),
    )
    processes = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    rings = [RingWriter(tmp_path / f"rank-{rank:05d}-{each.pid}.ring") for rank, each in enumerate(processes)]
    supervisor = Supervisor(task)

    def is_killed(rank: int, signal: int) -> None:
        processes[rank].send_signal(signal)
        # it stays to be seen with its status: nobody has waited for it yet
        os.waitid(os.P_PID, processes[rank].pid, os.WEXITED | os.WNOWAIT)
        supervisor.node.look()

    try:
        for rank, each in enumerate(rings):
            sample = {"rank": rank, "world": 3, "pid": processes[rank].pid, "time": time.monotonic(), "joined": True}
            each.write(json.dumps(sample).encode(), clock=time.monotonic(), progress=1, stack=1, flags=0)
        supervisor.node.look()
        now, began = time.time, time.monotonic()
        is_killed(1, signal.SIGSEGV)
        supervisor._tell_of_an_end()
        monkeypatch.setattr(time, "time", lambda: now() + step)
        supervisor._tell_of_an_end()
        assert told == [] or time.monotonic() - began > supervisor_module.FOLLOW_SECONDS, (
            "the others had no time to follow"
        )
        is_killed(0, signal.SIGTERM)
        is_killed(2, signal.SIGTERM)
        supervisor._tell_of_an_end()
    finally:
        for each in rings:
            each.close()
        for process in processes:
            process.kill()
            process.communicate()

    assert [incident.first_ended for incident in told] == [(1,)]
