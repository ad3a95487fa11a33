"""Two sets of traces and what the user asked for -> the pairs of batches to compare, read one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.frames.frame import Frame
from dsdoctor.overflow.trace.difference import Pair, Side
from dsdoctor.overflow.trace.selection import Selection, Traces
from dsdoctor.overflow.trace.trace_file import Batches, find_batches


@dataclass(frozen=True, kw_only=True)
class ChosenBatch:
    """A batch and a rank of one side; None: all that both sides have."""

    batch: int | None = None
    rank: int | None = None


def pairs(a: Traces, b: Traces, chosen_a: ChosenBatch, chosen_b: ChosenBatch, selection: Selection) -> Iterator[Pair]:
    """The pairs, batch by batch and within a batch rank by rank. Raises UsageError when there is nothing to pair.

    A batch or rank that only one side names is taken of the other side too.
    """
    rank_pairs = _pair_ranks(a, b, chosen_a.rank, chosen_b.rank)
    found_a = {rank: find_batches(a.of(rank).path) for rank, _ in rank_pairs}
    found_b = {rank: find_batches(b.of(rank).path) for _, rank in rank_pairs}
    batch_pairs = _pair_batches(found_a, found_b, chosen_a.batch, chosen_b.batch)
    for batch_a, batch_b in batch_pairs:
        for rank_a, rank_b in rank_pairs:
            frames_a = _wanted(found_a[rank_a], batch_a, selection)
            frames_b = _wanted(found_b[rank_b], batch_b, selection)
            if frames_a or frames_b:
                side_a, side_b = Side(rank=rank_a, batch=batch_a), Side(rank=rank_b, batch=batch_b)
                yield Pair(a=side_a, b=side_b, frames_a=frames_a, frames_b=frames_b)


def _wanted(batches: Batches, batch: int, selection: Selection) -> tuple[Frame, ...]:
    return tuple(frame for frame in batches.frames(batch) if selection.takes(frame))


def _pair_ranks(a: Traces, b: Traces, rank_a: int | None, rank_b: int | None) -> tuple[tuple[int, int], ...]:
    if rank_a is not None or rank_b is not None:
        first = rank_a if rank_a is not None else rank_b if rank_b in a.ranks else _only(a)
        second = rank_b if rank_b is not None else rank_a if rank_a in b.ranks else _only(b)
        return ((a.of(first).rank, b.of(second).rank),)
    if len(a.ranks) == len(b.ranks) == 1:
        return ((a.ranks[0], b.ranks[0]),)
    common = tuple((rank, rank) for rank in a.ranks if rank in b.ranks)
    if not common:
        raise UsageError(
            f"A has rank {_named(a.ranks)}, B has rank {_named(b.ranks)}", hint="name them: --rank-a 0 --rank-b 3"
        )
    return common


def _only(traces: Traces) -> int:
    """The one rank there is. Raises UsageError where there are several."""
    if len(traces.ranks) > 1:
        raise UsageError(
            f"one side has rank {_named(traces.ranks)}: which one?", hint="name both: --rank-a 0 --rank-b 3"
        )
    return traces.ranks[0]


def _pair_batches(
    a: dict[int, Batches], b: dict[int, Batches], batch_a: int | None, batch_b: int | None
) -> tuple[tuple[int, int], ...]:
    on_a = sorted({batch for batches in a.values() for batch in batches.spans})
    on_b = sorted({batch for batches in b.values() for batch in batches.spans})
    if batch_a is not None or batch_b is not None:
        first = batch_a if batch_a is not None else batch_b
        second = batch_b if batch_b is not None else batch_a
        return ((_known("A", on_a, first), _known("B", on_b, second)),)
    common = tuple((batch, batch) for batch in sorted(set(on_a) & set(on_b)))
    if not common:
        raise UsageError(
            f"A has batches {_named(on_a)}, B has batches {_named(on_b)}",
            hint="name one of each: --batch-a 149 --batch-b 150",
        )
    return common


def _known(side: str, batches: list[int], batch: int | None) -> int:
    if batch not in batches:
        raise UsageError(f"{side} has no batch {batch}", hint=f"it has {_named(batches)}")
    return batch


def _named(numbers: list[int] | tuple[int, ...]) -> str:
    """Numbers in words: few are all named.

    >>> _named([1, 3]), _named(list(range(200))), _named([])
    ('1, 3', '200 from 0 to 199', 'none')
    """
    if len(numbers) > 8:
        return f"{len(numbers)} from {numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers)) or "none"
