"""One pool of compilers: how many run at a time, in which order, and what happens when one fails."""

import threading
import time
from dataclasses import replace

import pytest

from dsdoctor.builder.make.compile import CompileJob, Pool, carry_out


class Watched:
    """Runs jobs by sleeping; remembers the order in which they began and how many ran at a time."""

    def __init__(self, failing: str = "") -> None:
        self.begun: list[str] = []
        self.most = self._busy = 0
        self._failing, self._lock = failing, threading.Lock()

    def __call__(self, job: CompileJob) -> bool:
        with self._lock:
            self.begun.append(job.name)
            self._busy += 1
            self.most = max(self.most, self._busy)
        time.sleep(0.03)
        with self._lock:
            self._busy -= 1
        return job.name != self._failing


def job(name: str, cost: float = 1.0, *, group: str = "", memory: int = 0, after: tuple[str, ...] = ()) -> CompileJob:
    return CompileJob(name=name, group=group or name, cost=cost, memory=memory, after=frozenset(after))


def carried(jobs: list[CompileJob], *, tokens: int, memory: int | None = None, failing: str = "") -> Watched:
    watched = Watched(failing)
    carry_out(jobs, Pool(tokens, memory), watched, lambda: None)
    return watched


def test_as_many_run_as_there_are_tokens() -> None:
    watched = carried([job(str(number)) for number in range(6)], tokens=3)

    assert watched.most == 3
    assert sorted(watched.begun) == [str(number) for number in range(6)]


def test_the_longest_begins_first() -> None:
    jobs = [job("short", 1), job("longest", 9), job("long", 5)]

    assert carried(jobs, tokens=1).begun == ["longest", "long", "short"]


def test_memory_holds_back_what_does_not_fit_and_lets_the_largest_run_alone() -> None:
    jobs = [job(str(number), memory=4) for number in range(4)] + [job("huge", memory=99)]

    watched = carried(jobs, tokens=4, memory=9)

    assert watched.most == 2
    assert len(watched.begun) == 5


def test_a_link_waits_for_its_objects_and_is_next_then() -> None:
    jobs = [
        job("a.o", 3, group="a"),
        job("a.so", float("inf"), group="a", after=("a.o",)),
        job("b.o", 2, group="b"),
        job("c.o", 1, group="c"),
    ]

    assert carried(jobs, tokens=1).begun == ["a.o", "a.so", "b.o", "c.o"]


def test_what_fails_ends_its_own_group_and_no_other() -> None:
    jobs = [
        job("a1", 9, group="a"),
        job("a2", 1, group="a"),
        job("a.so", 99, group="a", after=("a1", "a2")),
        job("b", 5),
    ]

    assert carried(jobs, tokens=1, failing="a1").begun == ["a1", "b"]


def test_a_job_with_threads_takes_a_slot_for_each() -> None:
    jobs = [CompileJob(name=str(number), group=str(number), cost=1, slots=2) for number in range(4)]

    assert carried(jobs, tokens=5).most == 2
    assert carried([replace(jobs[0], slots=9)], tokens=2).begun == ["0"]


def test_what_breaks_a_job_stops_the_others_and_is_raised() -> None:
    stopped = threading.Event()

    def run(started_job: CompileJob) -> bool:
        if started_job.name == "breaks":
            raise KeyboardInterrupt
        return stopped.wait(60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        carry_out([job("runs", 3), job("breaks", 2), job("never", 0)], Pool(2), run, stopped.set)
    assert time.monotonic() - started < 40
    assert stopped.is_set()
