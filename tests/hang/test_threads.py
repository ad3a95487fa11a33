"""A script that trains in another thread than the one that made the process group, as Ray Train does."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsdoctor.hang.local_rank import decoded
from dsdoctor.hang.models import Sample
from dsdoctor.hang.sampler import Sampler
from dsdoctor.hang.stacks import own_frame
from tests.each import each
from tests.hang.test_launchers import free_port
from tests.hang.test_parts import ring

C10D = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


def polls(enough: threading.Event) -> None:
    """An event loop as scripts write them."""
    while not enough.wait(0.01):
        pass


def awaits(enough: threading.Event) -> None:
    async def loop() -> None:
        while not enough.is_set():
            await asyncio.sleep(0.01)

    asyncio.run(loop())


class Script:
    """One thread makes the group and then runs a loop; the other one trains: it calls a collective, and then stands elsewhere."""

    def __init__(self, folder: Path, loop: Callable[[threading.Event], None], *, calls: bool) -> None:
        self.enough, self.elsewhere, self.made = threading.Event(), threading.Event(), threading.Event()
        self._folder, self._loop, self._calls = folder, loop, calls
        self._called = threading.Event()
        self.threads = [threading.Thread(target=self.serve), threading.Thread(target=self.train, name="trains")]

    def serve(self) -> None:
        with ring(self._folder) as (writer, reader):
            self.sampler = Sampler(
                writer, str(self._folder / "words"), rank=0, world=2, patience=0.0, tend=lambda: None
            )
            self.reader = reader
            self.made.set()
            self._loop(self.enough)

    def train(self) -> None:
        if self._calls:
            scope: dict[str, Any] = {"wait": self._called.wait}
            exec(compile("def all_reduce():\n    wait()\n", C10D, "exec"), scope)
            scope["all_reduce"]()
        self.stands()

    def stands(self) -> None:
        self.elsewhere.set()
        self.enough.wait()

    def looked(self) -> Sample:
        """What is seen of it while it trains, and then where it stands."""
        for thread in self.threads:
            thread.start()
        self.made.wait()
        try:
            for _ in range(3):
                self.sampler.look()
            self._called.set()
            self.elsewhere.wait()
            # an event loop is awake for a moment now and then, and then it may be the one that trains
            for _ in range(10):
                time.sleep(0.05)
                self.sampler.look()
                sample = decoded(self.reader.payload() or b"", Sample)
                if sample is not None and sample.thread == self.threads[1].native_id:
                    break
        finally:
            self.enough.set()
            for thread in self.threads:
                thread.join()
        assert sample is not None
        return sample


@each(("loop", "calls"), [(polls, True), (awaits, True), (awaits, False)])
def test_the_thread_that_calls_the_collectives_is_judged_and_not_the_event_loop(
    loop: Callable[[threading.Event], None], calls: bool, tmp_path: Path
) -> None:
    script = Script(tmp_path, loop, calls=calls)
    sample = script.looked()
    (tmp_path / "ring").unlink()
    main = next(thread for thread in sample.threads if thread.main)

    assert (main.name, sample.thread) == ("trains", script.threads[1].native_id)
    own = own_frame(main.frames)
    assert own is not None
    assert own.function == "stands"
    assert "serve" in {frame.function for thread in sample.threads if not thread.main for frame in thread.frames}


def test_what_torch_has_recorded_tells_which_thread_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(tmp_path, polls, calls=False)

    def recorded() -> bytes:
        one = {
            "process_group": ["0", ""],
            "profiling_name": "gloo:all_reduce",
            "time_created_ns": time.time_ns(),
            "state": "started",
        }
        # a checkpoint that is saved beside the training calls collectives, too
        idents = [script.threads[0].ident, *[script.threads[1].ident] * 3, 7]
        entries = [
            {**one, "collective_seq_id": number, "thread_id": str(ident)} for number, ident in enumerate(idents, 1)
        ]
        return json.dumps({"entries": entries}).encode()

    c10d = SimpleNamespace(_dump_fr_trace_json=recorded)
    module = ModuleType("torch._C")
    vars(module)["_distributed_c10d"] = c10d
    monkeypatch.setitem(sys.modules, "torch._C", module)

    assert script.looked().threads[0].name == "trains"


class Heir:
    """The thread that trained has ended, and a later one has its identifier; the one that made the group waits for something."""

    def __init__(self) -> None:
        self._called, self._enough, self._stands = threading.Event(), threading.Event(), threading.Event()

    def train(self) -> None:
        scope: dict[str, Any] = {"wait": self._called.wait}
        exec(compile("def recv():\n    wait()\n", C10D, "exec"), scope)
        scope["recv"]()

    def later(self) -> None:
        self._stands.set()
        self._enough.wait()

    def looked(self, sampler: Sampler, recorded: list[tuple[int, int]]) -> None:
        """One look while the first thread trains, then one at the threads that are left. ``recorded``: torch's own record."""
        first = threading.Thread(target=self.train, name="trained")
        first.start()
        for _ in range(3):
            sampler.look()
        recorded.append((first.ident or 0, time.time_ns()))
        self._called.set()
        first.join()
        # a thread's start is told in hundredths of a second
        time.sleep(0.05)
        tries = []
        try:
            for number in range(50):
                self._stands.clear()
                tries.append(threading.Thread(target=self.later, name=f"later {number}"))
                tries[-1].start()
                self._stands.wait()
                if tries[-1].ident == first.ident:
                    break
            assert first.ident in {thread.ident for thread in tries}
            sampler.look()
        finally:
            self._enough.set()
            for thread in tries:
                thread.join()


@each(("with_record",), [(False,), (True,)])
def test_a_thread_that_has_the_identifier_of_an_ended_one_is_not_taken_for_it(
    with_record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []

    def recorded() -> bytes:
        one = {"process_group": ["0", ""], "profiling_name": "gloo:recv", "state": "completed"}
        entries = [
            {**one, "collective_seq_id": number, "time_created_ns": when, "thread_id": str(ident)}
            for number, (ident, when) in enumerate(calls, 1)
        ]
        return json.dumps({"entries": entries}).encode()

    if with_record:
        module = ModuleType("torch._C")
        vars(module)["_distributed_c10d"] = SimpleNamespace(_dump_fr_trace_json=recorded)
        monkeypatch.setitem(sys.modules, "torch._C", module)
    with ring(tmp_path) as (writer, reader):
        sampler = Sampler(writer, str(tmp_path / "words"), rank=0, world=2, patience=0.0, tend=lambda: None)
        sampler.pid = os.getpid()
        Heir().looked(sampler, calls)
        sample = decoded(reader.payload() or b"", Sample)

    assert sample is not None
    main = next(thread for thread in sample.threads if thread.main)
    assert main.name == "MainThread"
    assert "looked" in {frame.function for frame in main.frames}


def test_where_the_thread_that_made_the_group_has_ended_its_identifier_accuses_nobody(tmp_path: Path) -> None:
    made: list[Sampler] = []
    stands, enough = threading.Event(), threading.Event()

    def later() -> None:
        stands.set()
        enough.wait()

    with ring(tmp_path) as (writer, reader):
        words = str(tmp_path / "words")
        maker = threading.Thread(
            target=lambda: made.append(Sampler(writer, words, rank=0, world=2, patience=0.0, tend=lambda: None))
        )
        maker.start()
        maker.join()
        tries = []
        try:
            for _ in range(50):
                stands.clear()
                tries.append(threading.Thread(target=later))
                tries[-1].start()
                stands.wait()
                if tries[-1].ident == maker.ident:
                    break
            assert maker.ident in {thread.ident for thread in tries}
            made[0].pid = os.getpid()
            watch = threading.Thread(target=made[0].look)
            watch.start()
            watch.join()
        finally:
            enough.set()
            for thread in tries:
                thread.join()
        sample = decoded(reader.payload() or b"", Sample)

    assert sample is not None
    assert (sample.threads[0].name, sample.thread) == ("MainThread", os.getpid())


TRAIN = """
import sys, threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
def train():
    for step in range(10_000):
        if dist.get_rank() == 1 and step == 100:
            time.sleep(3600)
        dist.all_reduce(torch.ones(3))
        time.sleep(0.02)
threading.Thread(target=train, name="TrainThread", daemon=True).start()
while True:
    time.sleep(0.1)
"""


AT_EXIT = """
import threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(100):
    dist.all_reduce(torch.ones(3))
    time.sleep(0.02)
dist.destroy_process_group()
def log():
    time.sleep(3600)
if rank == 0:
    threading.Thread(target=log, name="logger").start()
"""


def said_by_ranks(folder: Path, script: str) -> str:
    """What two ranks print that are stopped when they hang."""
    (folder / "train.py").write_text(script)
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dsdoctor.run", "--hang-after", "5", "--on-hang", "stop", "train.py"]
    ranks = [
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, **told, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    return "".join(rank.communicate(timeout=200)[1] for rank in ranks)


@pytest.mark.launch
def test_a_rank_whose_thread_trains_is_told_with_the_line_of_that_thread(tmp_path: Path) -> None:
    said = said_by_ranks(tmp_path, TRAIN)

    assert (
        "has not reached the collective: sleeps at train.py:9 in train: time.sleep(3600); rank 0 is blocked in all_reduce"
        in said
    ), said
    assert "rank 1 calls its collectives in its thread TrainThread" in said


@pytest.mark.launch
def test_a_rank_that_does_not_end_after_its_process_group_was_destroyed_is_told(tmp_path: Path) -> None:
    said = said_by_ranks(tmp_path, AT_EXIT)

    assert "does not exit: its script has ended and waits for a non-daemon thread" in said, said
    assert "its thread logger is in train.py:12 in log: time.sleep(3600)" in said
    assert "[hang-at-exit]" in said
