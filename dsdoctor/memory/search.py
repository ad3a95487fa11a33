"""The largest micro batch that fits a GPU, and the fewest GPUs that do, by prediction. Pure: runs are handed in."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dsdoctor.memory.changes import Situation
from dsdoctor.memory.models import Run

MOST_BATCH = 1 << 14
MOST_RANKS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Searched:
    """``batch``: the largest micro batch that fits so many ranks, 0 for none. ``ranks``: the fewest that fit the batch that
    was asked for, None where even thousands do not."""

    batch: int
    batch_peak: int
    ranks: int | None
    ranks_peak: int | None


def between(one: Run, two: Run, batch: int) -> Run:
    """The run of a batch, on the line through those of two batches: tensors grow with it or do not.

    Raises ValueError where the two do not do the same.
    """
    if [event[:2] for event in one.events] != [event[:2] for event in two.events] or one.batch == two.batch:
        raise ValueError("runs of two batches are not alike")

    def on_line(first: int, second: int) -> int:
        return max(0, first + (second - first) * (batch - one.batch) // (two.batch - one.batch))

    events = tuple(
        (kind, index, on_line(most, other[2]), on_line(now, other[3]))
        for (kind, index, most, now), other in zip(one.events, two.events, strict=True)
    )
    return replace(
        one,
        batch=batch,
        events=events,
        logits=on_line(one.logits, two.logits),
        inputs=on_line(one.inputs, two.inputs),
    )


def search(now: Situation, one: Run, two: Run, limit: int) -> Searched:
    """What fits ``limit`` bytes on each GPU."""

    def peak(batch: int, ranks: int) -> int:
        run = between(one, two, batch)
        return replace(now, run=run, layout=replace(now.layout, world=ranks)).predicted().peak.device

    wanted = now.run.batch if now.run else 1
    batch = largest(lambda batch: peak(batch, now.layout.world) <= limit, MOST_BATCH)
    fewest = smallest(lambda ranks: peak(wanted, ranks) <= limit, MOST_RANKS)
    return Searched(
        batch=batch,
        batch_peak=peak(batch, now.layout.world) if batch else 0,
        ranks=fewest,
        ranks_peak=peak(wanted, fewest) if fewest else None,
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, where smaller ones fit as well; 0 for none.

    >>> largest(lambda n: n <= 37, 100), largest(lambda n: False, 8), largest(lambda n: True, 9)
    (37, 0, 9)
    """
    if not fits(1):
        return 0
    good, step = 1, 1
    while good + step <= most and fits(good + step):
        good, step = good + step, step * 2
    while step:
        if good + step <= most and fits(good + step):
            good += step
        else:
            step //= 2
    return good


def smallest(fits: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to ``most`` that fits, where larger ones fit as well; None for none.

    >>> smallest(lambda n: n >= 37, 100), smallest(lambda n: False, 8), smallest(lambda n: True, 9)
    (37, None, 1)
    """
    below = largest(lambda number: not fits(number), most)
    return below + 1 if below < most else None
