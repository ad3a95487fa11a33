"""Processes that run now: which of them are ranks, and what two looks from outside tell. The ranks are small scripts whose
collectives lie where torch's do, so nothing is imported; real ranks of torch are in test_launchers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.cli.hang import judge_processes
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.processes import state_of
from dsdoctor.hang.models import MOVED, PROCESSES, Incident, RankView
from dsdoctor.hang.outside import NOT_INSTALLED, REFUSED, py_spy_program, stacks_of
from dsdoctor.hang.verdict import hang_lines, judge
from tests.hang.made import calling, elsewhere, frame, incident, view

APART = 0.5
COLLECTIVES = """
import time
def all_reduce(): time.sleep(600)
def barrier(): time.sleep(600)
"""
SCRIPT = """
import os, subprocess, sys, threading, time
import distributed_c10d as dist
def launch(count):
    word = ["sh", "-c", '"$0" "$@"; true'] if count > 2 else []
    ranks = [
        subprocess.Popen(
            [*word, sys.executable, __file__, *sys.argv[1:]], env={**os.environ, "RANK": str(n), "WORLD_SIZE": str(count)}
        )
        for n in range(count)
    ]
    print("started", flush=True)
    for rank in ranks:
        rank.wait()
def odd(kind):
    if kind == "works":
        while True: pass
    if kind == "barrier":
        dist.barrier()
    if kind == "waits":
        threading.Lock().acquire(); held = threading.Lock(); held.acquire(); held.acquire()
    time.sleep(600)
count, on, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if "RANK" in os.environ:
    print("there", flush=True)
if "RANK" not in os.environ:
    launch(count)
elif os.environ["RANK"] == on:
    odd(kind)
else:
    dist.all_reduce()
"""


@contextmanager
def launched(folder: Path, count: int, on: int, kind: str) -> Iterator[int]:
    """A launcher with so many ranks of which all but one stand in all_reduce."""
    place = folder / "torch" / "distributed"
    place.mkdir(parents=True, exist_ok=True)
    (place / "distributed_c10d.py").write_text(COLLECTIVES)
    (folder / "train.py").write_text(SCRIPT)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    env = {name: value for name, value in os.environ.items() if name not in names} | {"PYTHONPATH": str(place)}
    command = [sys.executable, str(folder / "train.py"), str(count), str(on), kind]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout
        assert all(process.stdout.readline() for _ in range(1 + count))
        time.sleep(0.3)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


KINDS = {
    "sleeps": ("hang-rank-outside", Severity.ERROR, "sleeps at train.py:"),
    "waits": ("hang-rank-outside", Severity.ERROR, "lock"),
    "works": ("hang-rank-outside", Severity.WARNING, "is still working"),
    "barrier": ("hang-other-operation", Severity.ERROR, "in barrier"),
    "stopped": ("hang-rank-stopped", Severity.ERROR, "stopped by a signal"),
}


@pytest.mark.slow
@pytest.mark.skipif(py_spy_program(LocalHost()) is None, reason="needs py-spy")
@pytest.mark.parametrize("kind", KINDS)
def test_a_launcher_s_number_is_enough_to_name_the_rank(kind: str, tmp_path: Path) -> None:
    number = list(KINDS).index(kind)
    count, on = 2 + number % 2, number % 2
    with launched(tmp_path, count, on, kind) as launcher:
        if kind == "stopped":
            os.kill(judge_processes([launcher], LocalHost(), apart=0.0)[0].ranks[on].pid, signal.SIGSTOP)
        # on a busy machine one that works is given little time to show it
        made, verdict = judge_processes([launcher], LocalHost(), apart=3.0 if kind == "works" else APART)

    rule, severity, words = KINDS[kind]
    found = verdict.findings[0]
    assert (made.world, [each.rank for each in made.ranks]) == (count, list(range(count)))
    assert (found.rule, found.severity) == (rule, severity), found
    assert words in found.title
    assert f"rank {on} " in found.title


@pytest.mark.slow
def test_without_py_spy_it_says_so_and_still_sees_what_the_kernel_tells(tmp_path: Path) -> None:
    bare = LocalHost(root=tmp_path)
    with launched(tmp_path, 2, 0, "sleeps") as launcher:
        made, unread = judge_processes([launcher], bare, apart=0.0)
        os.kill(made.ranks[0].pid, signal.SIGSTOP)
        while state_of(made.ranks[0].pid) != "T":
            time.sleep(0.01)
        stopped = judge_processes([launcher], bare, apart=0.0)[1]

    assert [finding.rule for finding in unread.findings] == ["hang-stacks-unread"]
    assert unread.findings[0].title == f"no stack of ranks 0-1: {NOT_INSTALLED}"
    assert [finding.rule for finding in stopped.findings] == ["hang-rank-stopped", "hang-stacks-unread"]


def test_a_process_that_is_not_there_is_no_rank() -> None:
    with pytest.raises(UsageError, match="no such process: 4194305"):
        judge_processes([4194305], LocalHost())


def test_of_a_process_that_is_no_python_py_spy_says_why_not() -> None:
    host = LocalHost()
    if py_spy_program(host) is None:
        pytest.skip("needs py-spy")
    sleeping = subprocess.Popen(["sleep", "60"])
    try:
        said = stacks_of(sleeping.pid, host)
    finally:
        sleeping.kill()
        sleeping.wait()

    assert said == "py-spy does not support this Python"


def running(*views: RankView, world: int = 0) -> Incident:
    """What two looks from outside give: no sequence numbers."""
    bare = [replace(each, sample=each.sample and replace(each.sample, groups=())) for each in views]
    return incident(*bare, world=world or len(views), source=PROCESSES)


OUTSIDE = {
    "all in one collective": (
        running(view(0, calling("barrier"), 0), view(1, calling("barrier"), 0)),
        ["hang-unclear"],
    ),
    "some were not named": (
        running(view(0, calling("barrier"), 0), view(1, calling("all_reduce"), 0), world=4),
        ["hang-unclear"],
    ),
    "one made progress": (running(view(0, calling("barrier"), 0), view(1, elsewhere(), 0, activity=MOVED)), []),
    "all work": (
        running(*(view(rank, elsewhere(), 0, activity="it used 99% of a processor") for rank in range(2))),
        [],
    ),
    "one compiles, and the other waits for its lock": (
        running(view(0, elsewhere("lock.wait()"), 0), view(1, elsewhere(), 0, activity="its child processes took 49%")),
        [],
    ),
    "one waits in C++ for DDP's collective": (
        running(
            view(0, (*elsewhere("loss.backward()"), frame("/v/torch/autograd/graph.py", 9, "_engine_run_backward")), 0),
            view(1, elsewhere(), 0),
        ),
        ["hang-rank-outside"],
    ),
    "one is not let be read": (
        running(view(0, calling("barrier"), 0), view(1, (), 0, unread=REFUSED)),
        ["hang-stacks-unread"],
    ),
    "one ended": (
        running(view(0, calling("barrier"), 0), view(1, (), 0, state="", ended="it ended")),
        ["hang-rank-gone"],
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_two_looks_say_no_more_than_they_saw(name: str) -> None:
    made, rules = OUTSIDE[name]

    verdict = judge(made)

    assert [finding.rule for finding in verdict.findings] == rules
    assert any("no hang detected" in line for line in hang_lines(made, verdict)) == (not rules)
