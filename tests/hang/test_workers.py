"""What a rank waits for that is not in its own main thread: its data loader's workers, and threads that have ended."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dsdoctor.core.finding import Severity
from dsdoctor.hang.activity import activity_of, remediation
from dsdoctor.hang.inspection import loader_workers
from dsdoctor.hang.models import LoaderWorker, RankView, ThreadDeath
from dsdoctor.hang.outside import workers_of
from dsdoctor.hang.processes import waits_in
from dsdoctor.hang.stacks import Sources
from dsdoctor.hang.verdict import is_working, judge
from dsdoctor.rules import book
from tests.each import each
from tests.hang.made import calling, elsewhere, frame, incident, view

LOADER = (*elsewhere("for batch in loader:"), frame("/v/site-packages/torch/utils/data/dataloader.py", 5, "__next__"))
SCRIPT = """
import faulthandler, os, signal, sys, threading, time
faulthandler.register(signal.SIGUSR2, file=open(sys.argv[1], "w"), all_threads=False)
held = threading.Lock()
held.acquire()
def locked():
    with held:
        pass
def far_away():
    time.sleep(99)
def own_handler():
    signal.signal(signal.SIGUSR2, lambda *_: open(sys.argv[1] + ".ran", "w"))
    far_away()
def more_handlers():
    signal.signal(signal.SIGQUIT, lambda *_: None)
    far_away()
if (child := os.fork()) == 0:
    globals()[sys.argv[2]]()
print(child, flush=True)
sys.stdin.read()
os.killpg(0, signal.SIGKILL)
"""


def loading(rank: int, *workers: LoaderWorker, world: int = 2) -> RankView:
    return view(rank, LOADER, 5, world=world, workers=workers)


@each(
    ("stands", "told"),
    [
        ("locked", "waits for a lock or another thread at worker.py:7 in locked: with held:"),
        ("far_away", "sleeps at worker.py:10 in far_away: "),
    ],
)
def test_a_forked_worker_tells_its_line_through_the_fault_handler_of_its_rank(
    stands: str, told: str, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "stacks"), stands]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        # the worker may not have come to its line yet
        for _ in range(200):
            if told in str(workers := seen(rank.pid, tmp_path, child)):
                break
            time.sleep(0.05)
        os.killpg(rank.pid, 9)

    assert len(workers) == 1
    assert told in workers[0].line
    assert workers[0].at_lock == workers[0].blocked == (stands == "locked")


@each(
    ("stands", "answer", "named", "told"),
    [
        ("own_handler", False, True, 1),
        ("more_handlers", True, True, 1),
        ("far_away", False, True, 1),
        ("far_away", True, False, 0),
    ],
)
def test_a_child_that_may_have_a_handler_of_its_own_is_sent_no_signal(
    stands: str, answer: bool, named: bool, told: int, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "stacks"), stands]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        for _ in range(200):
            if "nanosleep" in waits_in(child):
                break
            time.sleep(0.05)
        workers = seen(rank.pid, tmp_path, *((child,) if named else ()), answer=answer)
        # a signal would be handled before the child is seen to sleep again
        time.sleep(0.2)
        os.killpg(rank.pid, 9)

    assert len(workers) == told
    assert all("in the kernel" in worker.line and not worker.blocked for worker in workers)
    assert not (tmp_path / "stacks").stat().st_size
    assert not (tmp_path / "stacks.ran").exists()


@each(
    ("stands", "sent", "told"),
    [("locked", 0, "in the kernel: futex"), ("far_away", signal.SIGSTOP, "is stopped by a signal")],
)
def test_a_worker_that_is_stopped_or_sleeps_in_a_futex_may_never_answer(
    stands: str, sent: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "worker.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "stacks"), stands]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        os.kill(child, sent)
        for _ in range(200):
            if told in str(workers := seen(rank.pid, tmp_path, child, answer=False)):
                break
            time.sleep(0.05)
        os.killpg(rank.pid, 9)

    assert [(told in worker.line, worker.blocked, worker.at_lock) for worker in workers] == [(True, True, False)]
    assert [bool(worker.stopped) for worker in workers] == [sent == signal.SIGSTOP]


def seen(pid: int, folder: Path, *children: int, answer: bool = True) -> tuple[LoaderWorker, ...]:
    made = loading(0)
    assert made.sample is not None
    sample = replace(made.sample, signal_is_ours=True, loader_workers=children, workers_answer=answer)
    return workers_of(replace(made, pid=pid, sample=sample), folder / "stacks", Sources())


NEXT = "def __next__(self):\n    look()"


@each(
    ("iterator", "source", "answer"),
    [
        ({}, "import torch", True),
        ({}, "import os, signal", False),
        ({}, "from signal import signal", False),
        ({"_worker_init_fn": print}, "import torch", False),
        ({"_worker_init_fn": "unknown"}, "import torch", False),
        ({"method": "spawn"}, "import torch", False),
        ({}, None, False),
    ],
)
def test_workers_answer_only_where_no_code_of_the_script_can_have_set_a_handler(
    iterator: dict[str, Any], source: str | None, answer: bool, tmp_path: Path
) -> None:
    # a file is read once
    file = tmp_path / f"data{len(source or '')}.py"
    if source is not None:
        file.write_text(source)
    modules = {"data": SimpleNamespace(__file__=str(file)), "torch.ops": SimpleNamespace(__file__="_ops.py")}
    worker = SimpleNamespace(_popen=SimpleNamespace(pid=77, method=iterator.get("method", "fork")))
    made = SimpleNamespace(_workers=[worker], _worker_init_fn=iterator.get("_worker_init_fn"))
    seen: list[tuple[list[int], bool]] = []
    scope: dict[str, Any] = {"look": lambda: seen.append(loader_workers(sys._getframe(1), modules))}
    exec(compile(NEXT, "/v/site-packages/torch/utils/data/dataloader.py", "exec"), scope)
    # below a thread's frames there are none of pytest's
    thread = threading.Thread(target=scope["__next__"], args=(made,))
    thread.start()
    thread.join()

    assert seen == [([77], answer)]


@each(
    ("line", "blocked", "severity"),
    [
        ("its worker 7 sleeps at data.py:3 in __iter__: time.sleep(22)", False, Severity.WARNING),
        ("its worker 7 waits for a lock at data.py:3 in get: with LOCK:", True, Severity.ERROR),
        ("", False, Severity.ERROR),
    ],
)
def test_ranks_that_all_wait_for_workers_that_may_read_from_far_away_are_no_error(
    line: str, blocked: bool, severity: Severity
) -> None:
    workers = (LoaderWorker(line=line, blocked=blocked),) if line else ()
    made = incident(*(loading(rank, *workers) for rank in range(2)), world=2)
    (finding,) = judge(made).findings

    assert (finding.rule, finding.severity) == ("hang-all-outside", severity)
    assert is_working(judge(made)) == (severity is Severity.WARNING)
    assert any(line in each for each in finding.evidence)


def test_a_rank_that_others_wait_for_tells_where_its_worker_stands() -> None:
    line = "its worker 7 waits for a lock at data.py:3 in __getitem__: with LOCK:"
    made = incident(
        view(0, calling("all_reduce"), 6, world=2),
        loading(1, LoaderWorker(line=line, at_lock=True, blocked=True)),
        world=2,
    )
    (finding,) = judge(made).findings

    assert (finding.rule, finding.severity) == ("hang-rank-behind", Severity.ERROR)
    assert f"rank 1: {line}" in finding.evidence
    assert finding.fix is not None
    assert "multiprocessing_context" in finding.fix.text


@each("died", [True, False])
def test_a_rank_that_waits_for_a_thread_that_has_ended_is_told_by_what(died: bool) -> None:
    waits = (*elsewhere("b = self.q.get()"), frame("/usr/lib/python3.11/queue.py", 171, "get"))
    made = view(1, waits, 5, world=2)
    deaths = (ThreadDeath(name="prefetch", failure="KeyError: 'text'", frames=elsewhere("rec['text']", 6)),)
    assert made.sample is not None
    made = replace(made, sample=replace(made.sample, all_threads=True, deaths=deaths if died else ()))
    (finding,) = judge(incident(view(0, calling("all_reduce"), 6, world=2), made, world=2)).findings

    told = "rank 1: its thread prefetch ended with KeyError: 'text' at train.py:6 in main: rec['text']"
    assert activity_of(made).waits_for_thread
    assert (told in finding.evidence) == died
    assert (book.remedy("hang", "thread-died").text in remediation(made).text) == died
    assert (book.remedy("hang", "no-thread-left").text in remediation(made).text) != died


def test_a_rank_with_fewer_calls_is_told_so_where_another_line_may_be_innocent() -> None:
    made = incident(
        view(0, calling("all_reduce"), {"0": 3, "1": 36}, world=3),
        view(1, calling("barrier"), {"0": 4, "1": 35}, world=3),
        view(2, calling("all_reduce"), {"0": 3, "1": 36}, world=3),
        world=3,
    )
    (finding,) = judge(made).findings
    told = next(line for line in finding.evidence if "has called 35 collectives of group 1, ranks 0, 2 36" in line)

    assert finding.rule == "hang-other-operation"
    assert "it either skipped a call earlier" in told
    assert sum(" collectives of group " in line for line in finding.evidence) == 1


def test_a_stopped_worker_is_resumed_by_its_own_number_and_is_a_hang_at_once() -> None:
    worker = LoaderWorker(line="its worker 77 is stopped by a signal", blocked=True, stopped=77)
    made = replace(
        incident(view(0, calling("all_reduce"), 6, world=2), loading(1, worker), world=2), still=9.0, after=8.0
    )
    (finding,) = judge(made).findings

    assert finding.severity is Severity.ERROR
    assert finding.fix is not None
    assert [step.line for step in finding.fix.steps] == ["kill -CONT 77"]
