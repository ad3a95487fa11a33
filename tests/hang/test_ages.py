"""How old what is known of a rank is: what is older than the stillness that is told of accuses nobody."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from dsdoctor.hang.channel import Answer, NodeReport, Nodes
from dsdoctor.hang.incident_view import IncidentView
from dsdoctor.hang.local_rank import LocalRank
from dsdoctor.hang.models import NOT_LOOKED, RankView
from dsdoctor.hang.ring import RingWriter
from dsdoctor.hang.stacks import grouped_stacks
from dsdoctor.hang.supervisor import WORKS
from dsdoctor.hang.verdict import hang_lines, is_working, judge
from dsdoctor.run.hang_report import state_of
from tests.hang.made import calling, elsewhere, incident, view
from tests.hang.test_nodes import own
from tests.hang.test_parts import run_on

HOLDS = """
import ctypes, sys, threading
def watch():
    print(threading.get_native_id(), flush=True)
    held.set()
    while True:
        sum(range(1000))
held = threading.Event()
threading.Thread(target=watch, daemon=True).start()
held.wait()
ctypes.PyDLL(None).sleep(60)
"""


@contextmanager
def holds_the_interpreter() -> Iterator[tuple[int, int]]:
    """A process whose C code lets no other thread run, and the thread that wants to."""
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        yield child.pid, int(child.stdout.readline())
        child.kill()


@contextmanager
def waits_for_something() -> Iterator[tuple[int, int]]:
    """This process, and a thread that waits for a lock."""
    enough = threading.Event()
    thread = threading.Thread(target=enough.wait)
    thread.start()
    yield os.getpid(), thread.native_id or 0
    enough.set()
    thread.join()


def seen(folder: Path, pid: int, watcher: int, seconds: float) -> RankView:
    """A rank whose newest sample is so old."""
    path = folder / f"rank-00001-{pid}.ring"
    path.unlink(missing_ok=True)
    writer = RingWriter(path)
    frames = [{"file": "/home/a/train.py", "line": 6, "function": "main"}]
    sample = {"rank": 1, "world": 2, "pid": pid, "time": 0.0, "joined": True, "watcher": watcher}
    sample["threads"] = [{"name": "MainThread", "frames": frames, "main": True}]
    writer.write(json.dumps(sample).encode(), clock=time.monotonic() - seconds, progress=1, stack=1, flags=0)
    writer.close()
    rank = LocalRank(path, "node1")
    rank.look()
    found = rank.view()
    rank.close()
    return found


def test_only_c_code_that_holds_the_interpreter_is_told_of_a_rank_that_no_longer_looks(tmp_path: Path) -> None:
    def rules(found: RankView) -> list[str]:
        return [each.rule for each in judge(incident(waits, found, world=2)).findings]

    waits = view(0, calling("all_reduce"), 8, world=2)
    with holds_the_interpreter() as (pid, watcher):
        held = seen(tmp_path, pid, watcher, 31.0)
    with waits_for_something() as (pid, watcher):
        stopped = seen(tmp_path, pid, watcher, 31.0)
        fresh = seen(tmp_path, pid, watcher, 1.0)
    # the thread has ended
    gone = seen(tmp_path, os.getpid(), watcher, 31.0)

    assert [each.unread for each in (held, stopped, fresh, gone)] == ["", NOT_LOOKED, "", NOT_LOOKED]
    assert [rules(each) for each in (held, stopped, gone)] == [["hang-interpreter-held"], *[["hang-stacks-unread"]] * 2]
    assert rules(fresh) == ["hang-rank-outside"]


def test_a_sample_that_is_older_than_the_stillness_accuses_no_rank() -> None:
    # the watch was blind, and both have gone on half a minute ago
    blind = [
        replace(view(rank, elsewhere("time.sleep(9)", 6), 8, world=2), unread=NOT_LOOKED, silent=31.0, age=31.0)
        for rank in range(2)
    ]
    made = incident(*blind, world=2)
    verdict = judge(made)
    lines = list(hang_lines(made, verdict))

    assert [each.rule for each in verdict.findings] == ["hang-stacks-unread"]
    assert is_working(verdict)
    # a full machine may have had no time for the watch: a healthy run is told nothing
    assert state_of(made, patient=False).state == ""
    dead = incident(*(replace(each, age=90.0) for each in blind), world=2)
    assert state_of(dead, patient=False).state == WORKS
    assert "sleeps" not in verdict.findings[0].title
    assert "    ranks 0-1, 31 s ago:" in lines
    # nor is one that has not joined by what it said then
    starting = view(0, calling("init_process_group"), 0, world=2, joined=False)
    assert [each.rule for each in judge(incident(starting, blind[1], world=2)).findings] == ["hang-stacks-unread"]


def test_a_stack_is_shown_with_its_age() -> None:
    old = replace(view(1, elsewhere(), 8, world=2), age=4.2)
    made = incident(view(0, calling("all_reduce"), 9, world=2), old, world=2)

    assert IncidentView(made).where(old).endswith("time.sleep(9) (seen 4 s ago)")
    assert (
        judge(made)
        .findings[0]
        .title.startswith("rank 1 (node1, pid 101) has not reached the collective: sleeps at train.py:33")
    )
    assert [line for line in grouped_stacks(made.ranks) if line.startswith("rank")] == ["rank 0:", "rank 1, 4 s ago:"]


def test_a_node_that_has_gone_on_since_its_report_accuses_none_of_its_ranks() -> None:
    nodes = Nodes(run_on(1), "node1")
    report = NodeReport(host="node2", still=7.0, ranks=(1,), views=(view(1, elsewhere(), 55, world=2),))
    nodes.note(report)
    time.sleep(0.05)
    before = nodes.joined(own(), 60.0, Answer(host="node1"), together=0.0)
    nodes.note(replace(report, still=9.0, views=()))
    same = nodes.joined(own(), 60.0, Answer(host="node1"), together=0.0)
    nodes.note(replace(report, still=0.0, views=()))
    after = nodes.joined(own(), 60.0, Answer(host="node1"), together=0.0)

    assert [[each.rank for each in found.ranks] for found in (before, same, after)] == [[0, 1], [0, 1], [0]]
    assert before.ranks[1].age >= 0.05
