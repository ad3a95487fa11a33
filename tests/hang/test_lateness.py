"""Which rank the others wait for again and again: generated runs in which one is late, ranks take turns, or all differ a little."""

import itertools
import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest

from dsdoctor.hang.models import RankArrivals, SeenStack
from dsdoctor.hang.sampler import MAX_ARRIVALS, Arrivals
from dsdoctor.hang.straggler import Lateness, rank_late_again, summary_line
from tests.each import each
from tests.hang.made import elsewhere, frame, view

STEP, CALLS = 0.1, 3
Delay = Callable[[int, int], float]
"""Seconds by which a rank is late in a step."""


def recorded(calls: Iterable[tuple[int, float]], group: str = "0") -> str:
    """As torch's flight recorder writes it, keys in its order."""
    entries = [
        {
            "collective_seq_id": sequence, "input_sizes": [[4]], "is_p2p": False, "op_id": sequence, "pg_id": 0,
            "process_group": [group, "default_pg"], "profiling_name": "gloo:all_reduce", "retired": True,
            "state": "scheduled", "time_created_ns": int(when * 1e9), "timeout_ms": 1800000,
        }
        for sequence, when in calls
    ]  # fmt: skip
    return json.dumps({"entries": entries, "version": "2.10"}, separators=(",", ":"))


def told(rank: int, steps: range, delay: Delay, number: int) -> RankArrivals:
    """What a rank tells of some steps: the first collective of a step shows who is late, the others follow at once."""
    calls = [
        (step * CALLS + call + 1, 1e9 + step * STEP + (delay(rank, step) if not call else STEP / 2 + call * 1e-3))
        for step, call in itertools.product(steps, range(CALLS))
    ]
    arrivals = Arrivals(after=5.0)
    frames = elsewhere("batch = next(loader)", 41)
    arrivals.note(tuple((frame.file, frame.line, frame.function) for frame in frames))
    assert not arrivals.is_due(5.0 * number - 1)
    assert arrivals.is_due(5.0 * number)
    arrivals.read(recorded(calls))
    return msgspec.convert(arrivals.message(), RankArrivals)


def compared(delay: Delay, *, ranks: int, windows: int = 4, steps: int = 25) -> Lateness:
    lateness = Lateness()
    for number in range(windows):
        part = range(number * steps, (number + 1) * steps)
        lateness.add({rank: told(rank, part, delay, number + 1) for rank in range(ranks)})
    return lateness


@pytest.mark.parametrize(("ranks", "late", "seconds"), [(2, 0, 0.04), (2, 1, 0.01), (4, 3, 0.01), (6, 5, 0.04)])
def test_a_rank_that_is_late_in_every_step_is_named_with_its_cost(ranks: int, late: int, seconds: float) -> None:
    lateness = compared(lambda rank, step: seconds if rank == late else 0.0, ranks=ranks)

    assert lateness.straggler() == late
    assert lateness.lost[late] / lateness.seconds == pytest.approx(seconds / STEP, rel=0.1)


def noise(rank: int, step: int) -> float:
    return random.Random(rank * 7919 + step).random() * 0.02


QUIET: dict[str, Delay] = {
    "alike": lambda rank, step: 0.0,
    "taking turns": lambda rank, step: 0.04 if step % 2 == rank % 2 else 0.0,
    "by chance": noise,
    "late for a moment": lambda rank, step: 0.04 if rank == 1 and step < 20 else 0.0,
    "late by too little": lambda rank, step: 0.004 if rank == 1 else 0.0,
    "late seldom": lambda rank, step: 0.09 if rank == 1 and step % 20 == 0 else 0.0,
}


@pytest.mark.parametrize("kind", QUIET)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_take_turns_or_differ_by_chance_are_left_alone(kind: str, ranks: int) -> None:
    assert compared(QUIET[kind], ranks=ranks).straggler() is None


def test_the_same_calls_are_not_counted_twice() -> None:
    lateness = compared(lambda rank, step: 0.04 * rank, ranks=2, windows=1)
    lateness.add({rank: told(rank, range(25), lambda rank, step: 0.04 * rank, 2) for rank in range(2)})

    assert (lateness.late[1], lateness.windows) == (25, 1)


def test_what_is_said_names_the_line_and_the_share() -> None:
    def delay(rank: int, step: int) -> float:
        return 0.04 if rank == 1 else 0.0

    lateness = compared(delay, ranks=2)
    finding = rank_late_again(lateness, 1, view(1, elsewhere(), 9), told(1, range(3), delay, 9))

    assert "rank 1 (node1, pid 101) is a straggler" in finding.title
    assert "train.py:41 in main" in finding.title
    assert "in 100 of 100 collectives" in finding.evidence[0]
    assert "waited for rank 1 4" in summary_line(lateness, 1)


@each(
    ("file", "text", "waits"),
    [
        ("/home/a/train.py", "batch = next(loader)", True),
        ("/home/a/data.py", "time.sleep(9)", False),
        ("/home/a/train.py", "cursor.execute(query)", False),
    ],
)
def test_a_late_rank_is_given_workers_where_it_waits_for_data_whatever_its_file_is_called(
    file: str, text: str, waits: bool
) -> None:
    lateness = compared(lambda rank, step: 0.04 * rank, ranks=2)
    seen = RankArrivals(number=1, stacks=(SeenStack(looks=3, frames=(frame(file, 41, "main", text),)),))
    finding = rank_late_again(lateness, 1, view(1, elsewhere(), 9), seen)

    assert finding.fix is not None
    assert ("data loader workers" in finding.fix.text) == waits


def test_of_many_calls_the_newest_are_told_and_they_fit() -> None:
    arrivals = Arrivals(after=None)
    assert not arrivals.is_due(0.0)
    assert arrivals.is_due(60.0)
    arrivals.read(recorded((number, number * 1e-3) for number in range(1, 1500)))
    message: Any = arrivals.message()

    assert len(message["groups"][0]["calls"]) < MAX_ARRIVALS * 11
    assert message["groups"][0]["sequence"] == 1500 - MAX_ARRIVALS


@pytest.mark.parametrize("text", ["", "{}", '{"entries":[{"collective_seq_id":1}]}', "\x00" * 50])
def test_a_recorder_of_another_release_tells_nothing(text: str) -> None:
    arrivals = Arrivals(after=None)
    arrivals.read(text)
    message: Any = arrivals.message()

    assert message["groups"] == []
