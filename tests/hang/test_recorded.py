"""What a rank notes of its end and of its calls: exceptions of the script and of threads, torch's record in little room."""

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dsdoctor.core.text import decode, encode
from dsdoctor.hang.models import GroupState, Operation, RankView
from dsdoctor.hang.waiting import Difference, Waiting, recorded_calls
from dsdoctor.ranks.flight_recorder import history
from dsdoctor.run.hang import note_failures
from tests.hang.made import elsewhere, view


@pytest.mark.parametrize("odd", [3, 700, 1100])
def test_a_difference_of_long_ago_is_found_in_the_short_history(odd: int) -> None:
    def group(rank: int) -> GroupState:
        calls = [
            {
                "sequence": number,
                "name": "all_gather" if number % 3 else "all_reduce",
                "sizes": [[7 if number >= odd and rank and number % 2 else 8]],
                "place": [{"file": "/a/train.py", "line": 9 + (rank and number >= odd - 1), "function": "f"}],
            }
            for number in range(1, 1151)
        ]
        told = {"name": "0", "ranks": (0, 1), "sequence": 1150, "history": history(calls, 1200)}
        return decode(encode(told), GroupState)

    made = [view(rank, elsewhere(), 1150, world=2) for rank in range(2)]
    views = [replace(each, sample=replace(each.sample, groups=(group(each.rank),))) for each in made if each.sample]
    waiting = Waiting(tuple(views))
    (difference,) = waiting.differences()

    assert difference.sequence == odd + (odd % 2 == 0)
    assert {str(call.place[0].line): ranks for call, ranks in difference.calls} == {"9": (0,), "10": (1,)}
    assert waiting.before(difference)[0].startswith(f"the calls number {odd - 1} already matched")


def test_a_size_that_differed_now_and_then_long_ago_is_no_difference() -> None:
    def group(rank: int) -> GroupState:
        calls = [
            {"sequence": number, "name": "all_gather", "sizes": [[8 + (rank if number % 10 == 0 else 0)]]}
            for number in range(1, 1151)
        ]
        return decode(
            encode({"name": "0", "ranks": (0, 1), "sequence": 9, "history": history(calls, 1200)}), GroupState
        )

    made = [view(rank, elsewhere(), 1150, world=2) for rank in range(2)]
    views = [replace(each, sample=replace(each.sample, groups=(group(each.rank),))) for each in made if each.sample]

    assert not list(Waiting(tuple(views)).differences())


def test_failures_of_the_script_and_of_threads_are_noted_and_printed_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: printed.append(kind.__name__))
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.append(args.exc_type.__name__))
    noted: list[tuple[str, str]] = []
    sampler = SimpleNamespace(
        failed=lambda failure: noted.append(("", failure.line)),
        thread_ended=lambda name, failure: noted.append((name, failure.line)),
    )
    note_failures(sampler)
    thread = threading.Thread(target=lambda: {}["text"], name="feeds")
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("a"), None)

    assert printed == ["KeyError", "ValueError"]
    assert noted == [("feeds", "KeyError: 'text'"), ("", "ValueError: a")]


@pytest.mark.parametrize("odd", [0, 1])
def test_who_makes_a_call_for_the_first_time_is_told_where_the_others_had_made_theirs(odd: int) -> None:
    def group(rank: int) -> GroupState:
        calls = [
            {"sequence": number, "name": ("all_gather", "all_reduce")[number % 2], "sizes": [[8]]}
            for number in range(40)
        ]
        last = {"sequence": 40, "name": "all_gather", "sizes": [[528 if rank == odd else 8]]}
        return decode(
            encode({"name": "0", "ranks": (0, 1), "sequence": 41, "history": history([*calls, last], 1200)}), GroupState
        )

    made = [view(rank, elsewhere(), 41, world=2) for rank in range(2)]
    views = [replace(each, sample=replace(each.sample, groups=(group(each.rank),))) for each in made if each.sample]
    waiting = Waiting(tuple(views))
    (told,) = waiting.first_time(Difference(group="0", sequence=40, calls=calls_of(views, 40)))

    assert told.startswith(
        f"rank {odd} made that call for the first time in what is recorded, rank {1 - odd} had made its"
    )


def calls_of(views: list[RankView], sequence: int) -> tuple[tuple[Operation, tuple[int, ...]], ...]:
    """The calls of two ranks under one number."""
    samples = [each.sample for each in views if each.sample]
    return tuple(
        (next(call for call in recorded_calls(sample.groups[0]) if call.sequence == sequence), (sample.rank,))
        for sample in samples
    )
