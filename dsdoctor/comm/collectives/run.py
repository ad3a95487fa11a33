"""Runs the steps of a test, one after the other on every rank: steps -> what came out on this rank."""

import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec

from dsdoctor.comm.collectives.catalogue import ExchangeStep
from dsdoctor.comm.collectives.exchange import Progress, exchange, skipped
from dsdoctor.comm.models import RankGroup
from dsdoctor.comm.results import Exchange

FOLLOWED = 6
"""Wrong steps that are examined further."""
LONG = timedelta(hours=1)
"""How long a rank waits for the others at the store; the process that started it ends it before that."""


def run_steps(
    group: RankGroup, steps: Sequence[ExchangeStep], progress: Progress, budget: float | None = None
) -> tuple[Exchange, ...]:
    """Exchange and compare; if anything was wrong on any rank, find out with all ranks whose data it was.

    ``progress`` hears of each before it begins. With ``budget``, rank 0 decides by its clock whether there is time for
    the next large step; those left out are skipped with that reason. Raises what torch raises where communication breaks.
    """
    from dsdoctor.comm.collectives.blame import follow_up

    notes, until = _Notes(group), time.monotonic() + (budget or 0)
    seen: list[Exchange] = []
    for number, step in enumerate(steps, 1):
        if budget is not None and step.large and not notes.go(number, time.monotonic() < until):
            seen.append(skipped(step, f"the {budget:g} s for the exchanges were used up"))
            continue
        progress.tell(number, str(step))
        seen.append(exchange(group, step))
        if reason := seen[-1].skipped:
            progress.skip(number, reason)
    wrong = [number for number, exchanged in enumerate(seen) if exchanged.wrong is not None]
    for turn, number in enumerate(notes.all_wrong(wrong, steps), len(steps) + 1):
        progress.tell(turn, f"{steps[number]}, again, to see whose data is wrong")
        seen[number] = follow_up(group, steps[number], seen[number])
    return tuple(seen)


class _Notes:
    """Notes between ranks through the group's store, which works also where the collectives do not."""

    def __init__(self, group: RankGroup) -> None:
        from torch.distributed import distributed_c10d

        self._group, self._store = group, distributed_c10d._get_default_store()
        turn = self._store.add(f"dsdoctor/turns/{group.rank}", 1)
        self._key = f"dsdoctor/exchanges/{turn}"

    def go(self, number: int, yes: bool) -> bool:
        """Rank 0's answer on every rank."""
        key = f"{self._key}/go/{number}"
        if self._group.rank == 0:
            self._store.set(key, "1" if yes else "0")
            return yes
        return self._wait(key) == b"1"

    def all_wrong(self, mine: Sequence[int], steps: Sequence[ExchangeStep]) -> tuple[int, ...]:
        """The first wrong step of each collective on any rank, the same on every rank; waits until all ranks have written
        theirs.

        Only a rank with something wrong writes a list, and the last rank to come joins the lists: a few messages a rank.
        """
        if mine:
            place = self._store.add(f"{self._key}/lists", 1)
            self._store.set(f"{self._key}/list/{place}", msgspec.json.encode(_firsts(mine, steps)).decode())
        if self._store.add(f"{self._key}/done", 1) == self._group.world:
            lists = range(1, self._store.add(f"{self._key}/lists", 0) + 1)
            told = [msgspec.json.decode(self._wait(f"{self._key}/list/{place}"), type=list[int]) for place in lists]
            wrong = sorted({number for numbers in told for number in numbers})
            self._store.set(f"{self._key}/wrong", msgspec.json.encode(_firsts(wrong, steps)[:FOLLOWED]).decode())
        return tuple(msgspec.json.decode(self._wait(f"{self._key}/wrong"), type=list[int]))

    def _wait(self, key: str) -> bytes:
        self._store.wait([key], LONG)
        return bytes(self._store.get(key))


def _firsts(numbers: Sequence[int], steps: Sequence[ExchangeStep]) -> list[int]:
    """The first of these steps for each collective."""
    first: dict[str, int] = {}
    for number in numbers:
        first.setdefault(steps[number].collective.name, number)
    return sorted(first.values())
