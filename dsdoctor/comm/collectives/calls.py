"""Collectives: their values, how each is called, and which belong to a test; rounds of pairs, and what all ranks agree on."""

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dsdoctor.comm.models import Mode, RankGroup

if TYPE_CHECKING:
    import torch


# The values that ranks send: a call of a collective -> its input, and the reduced result of all ranks.
#
# They depend on rank and position, and are exact in their dtype even when added up over all ranks. Deterministic; never talks to
# another rank.


Pair = tuple[int, int]
MAX_RANKS_IN_PAIRS = 64
"""The largest number of ranks of which every pair is tried."""
MAX_SAMPLED_ROUNDS = 16
"""The number of rounds, so of partners of each rank, above that."""
EXACT = {"float32": 1 << 24, "float16": 1 << 11, "bfloat16": 1 << 8, "int64": 1 << 20}
"""The largest number up to which a dtype holds every integer. int64's own is larger: see ``BOTH_WORDS``."""

BOTH_WORDS = (1 << 32) + 1
"""int64 values are multiples of this, so that the upper half of each word carries them too; 2^20 of them stay below 2^53."""

CODES, RUN = 1021, 61
"""Two primes: the position code runs up by one an element for 61 elements, then starts one higher; all repeats after 62,281."""

UNTOUCHED = -77
"""The value of a result before a collective writes it; no rank sends this value."""


class Reduction(enum.Enum):
    """How the ranks' values become one; the value is the name of torch's ReduceOp."""

    SUM = "SUM"
    MAX = "MAX"
    MIN = "MIN"
    AVG = "AVG"


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective to be done: ``elements`` a rank (a chunk, where a collective has one for each rank), from or to ``root``.

    ``inverted`` are the ranks that send the inverse of their values: how the error then changes shows which rank is wrong.
    """

    group: RankGroup
    dtype: str
    elements: int
    root: int = 0
    reduction: Reduction | None = None
    inverted: frozenset[int] = frozenset()

    def sent(self, rank: int, start: int, stop: int) -> "torch.Tensor":
        """What ``rank`` sends in the positions from ``start`` to ``stop``, on this rank's device."""
        return _spread(_column(self, rank), self, start, stop)

    def mine(self, length: int) -> "torch.Tensor":
        """This rank's own input."""
        return self.sent(self.group.rank, 0, length)

    def reduced(self, start: int, stop: int) -> "torch.Tensor":
        """What all ranks' inputs become in the positions from ``start`` to ``stop``."""
        return _spread(_all_columns(self), self, start, stop)

    def blank(self, length: int) -> "torch.Tensor":
        """A buffer for a result, in which nothing has been written yet."""
        import torch

        return torch.full((length,), UNTOUCHED, dtype=getattr(torch, self.dtype), device=self.group.device)

    @property
    def tolerance(self) -> float:
        """The relative error that a right result may have: NCCL multiplies by 1/n before it adds, which is exact for powers
        of two only."""
        world = self.group.world
        if self.reduction is not Reduction.AVG or world & (world - 1) == 0:
            return 0.0
        return (world + 1) / EXACT[self.dtype]


def largest(dtype: str, world: int, reduction: Reduction | None) -> tuple[int, int]:
    """The largest value, and the step between ranks that send one (the others send 0), so that the sum over all ranks is exact.

    >>> largest("float32", 2, Reduction.SUM), largest("bfloat16", 64, Reduction.SUM), largest("bfloat16", 1000, Reduction.SUM)
    ((1021, 1), (4, 1), (2, 8))
    >>> largest("bfloat16", 1000, None)
    (251, 1)
    """
    exact = EXACT[dtype]
    if reduction not in (Reduction.SUM, Reduction.AVG):
        return min(CODES, exact - 5), 1
    every = 1 if 2 * world <= exact else -(-2 * world // exact)
    return min(CODES, exact // -(-world // every)), every


def _column(call: CollectiveCall, rank: int) -> "torch.Tensor":
    """A rank's value for each of the position codes, in int64."""
    import torch

    most, every = largest(call.dtype, call.group.world, call.reduction)
    code = torch.arange(CODES, dtype=torch.int64)
    if call.reduction in (Reduction.SUM, Reduction.AVG):
        mixed = code * 7919 + rank * 104729 + code * rank * 31
        value = 1 + (mixed ^ (mixed >> 7)) % most
        value = torch.where((code + rank) % every == 0, value, torch.zeros_like(value))
    else:
        value = 1 + (code + 7 * rank) % most
    value = value * BOTH_WORDS if call.dtype == "int64" else value
    if (call.reduction is Reduction.MIN) != (rank in call.inverted):
        # -x has the same low bits as x, ~x none of them
        return ~value if call.dtype == "int64" else -value
    return value


def _all_columns(call: CollectiveCall) -> "torch.Tensor":
    """The reduced value for each of the position codes; AVG in float64."""
    import torch

    total = _column(call, 0)
    for rank in range(1, call.group.world):
        column = _column(call, rank)
        if call.reduction is Reduction.MAX:
            total = torch.maximum(total, column)
        elif call.reduction is Reduction.MIN:
            total = torch.minimum(total, column)
        else:
            total = total + column
    return total.to(torch.float64) / call.group.world if call.reduction is Reduction.AVG else total


def _spread(column: "torch.Tensor", call: CollectiveCall, start: int, stop: int) -> "torch.Tensor":
    """The values of the codes at the positions from ``start`` to ``stop``."""
    import torch

    period = RUN * CODES
    position = torch.arange(start % period, start % period + min(stop - start, period), dtype=torch.int64)
    values = column[(position % RUN + position // RUN) % CODES]
    values = values.to(dtype=getattr(torch, call.dtype), device=call.group.device)
    return values if stop - start <= period else values.repeat(-(-(stop - start) // period))[: stop - start]


def inverse_sets(world: int) -> Collection[tuple[frozenset[int], frozenset[int]]]:
    """For each binary digit of a rank's number: the ranks that have it set, and the others.

    >>> [(sorted(ones), sorted(zeros)) for ones, zeros in inverse_sets(4)]
    [([1, 3], [0, 2]), ([2, 3], [0, 1])]
    """
    ranks = frozenset(range(world))
    digits = range(max(world - 1, 1).bit_length())
    ones = [frozenset(rank for rank in ranks if rank >> digit & 1) for digit in digits]
    return [(some, ranks - some) for some in ones]


# How each collective is called, and the expected result: a call -> this rank's result, and what it should be.
#
# torch.distributed's default group must be initialized. Nothing here compares or judges; see ``exchange``.


Buffer = Any
"""A tensor: torch is imported by the data process only."""
GUARD = 3
"""Elements around a buffer that must not be changed."""


@dataclass(frozen=True, kw_only=True)
class Want:
    """What this rank must have: the values, and who sent which part of them (rank, elements); no senders for a reduced
    result."""

    values: Buffer
    senders: tuple[tuple[int, int], ...] = ()


def operator(call: CollectiveCall) -> Any:
    """torch's ReduceOp for the reduction of a call."""
    import torch.distributed as dist

    assert call.reduction is not None
    if (found := getattr(dist.ReduceOp, call.reduction.value, None)) is None:
        raise NotImplementedError(f"torch.distributed has no ReduceOp.{call.reduction.value}")
    return found


def chunk(call: CollectiveCall) -> int:
    """The length of an input of one chunk."""
    return call.elements


def chunks(call: CollectiveCall) -> int:
    """The length of an input of a chunk for each rank."""
    return call.elements * call.group.world


def all_reduce(call: CollectiveCall, mine: Buffer) -> Buffer:
    """In place."""
    newest("all_reduce")(mine, op=operator(call))
    return mine


def all_reduce_slice(call: CollectiveCall, mine: Buffer) -> Buffer:
    """In the middle of a larger buffer, from an odd address on: what is around it must not change."""
    whole = call.blank(len(mine) + 2 * GUARD)
    whole[GUARD:-GUARD] = mine
    newest("all_reduce")(whole[GUARD:-GUARD], op=operator(call))
    return whole


def reduced(call: CollectiveCall) -> Want:
    """All ranks' values, reduced."""
    return Want(values=call.reduced(0, call.elements))


def reduced_in_guards(call: CollectiveCall) -> Want:
    """The reduced values in the middle of untouched ones."""
    whole = call.blank(call.elements + 2 * GUARD)
    whole[GUARD:-GUARD] = call.reduced(0, call.elements)
    return Want(values=whole)


def reduce(call: CollectiveCall, mine: Buffer) -> Buffer | None:
    """In place, at the root."""
    newest("reduce")(mine, call.root, op=operator(call))
    return mine if call.group.rank == call.root else None


def reduced_at_root(call: CollectiveCall) -> Want | None:
    """The reduced values at the root alone."""
    return reduced(call) if call.group.rank == call.root else None


def reduce_scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    """Into one tensor, as ZeRO does."""
    result = call.blank(call.elements)
    newest("reduce_scatter_single", "reduce_scatter_tensor")(result, mine, op=operator(call))
    return result


def my_part_reduced(call: CollectiveCall) -> Want:
    """This rank's chunk of the reduced values."""
    start = call.group.rank * call.elements
    return Want(values=call.reduced(start, start + call.elements))


def all_gather(call: CollectiveCall, mine: Buffer) -> Buffer:
    """Into one tensor, as ZeRO does."""
    result = call.blank(chunks(call))
    newest("all_gather_single", "all_gather_into_tensor")(result, mine)
    return result


def all_gather_in_place(call: CollectiveCall, mine: Buffer) -> Buffer:
    """The input is a part of the result."""
    result = call.blank(chunks(call))
    part = result[call.group.rank * call.elements :][: call.elements]
    part.copy_(mine)
    newest("all_gather_single", "all_gather_into_tensor")(result, part)
    return result


def gather(call: CollectiveCall, mine: Buffer) -> Buffer | None:
    """Into a list at the root."""
    result = call.blank(chunks(call)) if call.group.rank == call.root else None
    newest("gather")(mine, None if result is None else list(result.split(call.elements)), dst=call.root)
    return result


def of_all(call: CollectiveCall) -> Want:
    """Every rank's chunk."""
    return _joined(call, [(rank, 0, call.elements) for rank in range(call.group.world)])


def of_all_at_root(call: CollectiveCall) -> Want | None:
    """Every rank's chunk, at the root alone."""
    return of_all(call) if call.group.rank == call.root else None


def broadcast(call: CollectiveCall, mine: Buffer) -> Buffer:
    """From the root, into a buffer that was not written before."""
    buffer = mine if call.group.rank == call.root else call.blank(call.elements)
    newest("broadcast")(buffer, call.root)
    return buffer


def of_root(call: CollectiveCall) -> Want:
    """The root's values."""
    return _joined(call, [(call.root, 0, call.elements)])


def scatter(call: CollectiveCall, mine: Buffer) -> Buffer:
    """From a list at the root."""
    result = call.blank(call.elements)
    chunks = list(mine.split(call.elements)) if call.group.rank == call.root else None
    newest("scatter")(result, chunks, src=call.root)
    return result


def my_part_of_root(call: CollectiveCall) -> Want:
    """This rank's chunk of the root's."""
    start = call.group.rank * call.elements
    return _joined(call, [(call.root, start, start + call.elements)])


def all_to_all(call: CollectiveCall, mine: Buffer) -> Buffer:
    """In one tensor, as mixtures of experts do."""
    result = call.blank(chunks(call))
    newest("all_to_all_single")(result, mine)
    return result


def my_part_of_all(call: CollectiveCall) -> Want:
    """This rank's chunk of every rank's values."""
    start = call.group.rank * call.elements
    return _joined(call, [(rank, start, start + call.elements) for rank in range(call.group.world)])


def _portion(call: CollectiveCall, sender: int, receiver: int) -> int:
    """How many elements one rank sends another in the uneven all_to_all: none, ``elements``, or twice that."""
    return (sender + 2 * receiver + 1) % 3 * call.elements


def uneven_length(call: CollectiveCall) -> int:
    """The length of the input of an uneven all_to_all."""
    return sum(_portion(call, call.group.rank, receiver) for receiver in range(call.group.world))


def all_to_all_uneven(call: CollectiveCall, mine: Buffer) -> Buffer:
    """With parts of three sizes, none at all among them."""
    rank, ranks = call.group.rank, range(call.group.world)
    sent, got = [_portion(call, rank, other) for other in ranks], [_portion(call, other, rank) for other in ranks]
    result = call.blank(sum(got))
    newest("all_to_all_single")(result, mine, got, sent)
    return result


def my_portion_of_all(call: CollectiveCall) -> Want:
    """This rank's portion of every rank's values."""
    parts = []
    for sender in range(call.group.world):
        start = sum(_portion(call, sender, earlier) for earlier in range(call.group.rank))
        parts.append((sender, start, start + _portion(call, sender, call.group.rank)))
    return _joined(call, parts)


def ring(call: CollectiveCall, mine: Buffer) -> Buffer:
    """To the next rank and from the one before, at once."""
    import torch.distributed as dist

    rank, world = call.group.rank, call.group.world
    result = call.blank(call.elements)
    sends = dist.P2POp(dist.isend, mine, (rank + 1) % world)
    takes = dist.P2POp(dist.irecv, result, (rank - 1) % world)
    for work in dist.batch_isend_irecv([sends, takes]):
        work.wait()
    return result


def of_the_one_before(call: CollectiveCall) -> Want:
    """The values of the rank before."""
    return _joined(call, [((call.group.rank - 1) % call.group.world, 0, call.elements)])


def partners(rank: int, world: int) -> tuple[int | None, ...]:
    """The rank that a rank exchanges with in each round of pairs, None for a round in which it waits."""
    found = []
    for pairs in spread_rounds(world) if world > 1 else ():
        mine = next((pair for pair in pairs if rank in pair), None)
        found.append(None if mine is None else mine[0] + mine[1] - rank)
    return tuple(found)


def pairs(call: CollectiveCall, mine: Buffer) -> Buffer:
    """Send and receive with one rank after the other; the lower of two sends first, because two that both send first would
    wait for ever."""
    import torch.distributed as dist

    others = [other for other in partners(call.group.rank, call.group.world) if other is not None]
    result = call.blank(len(others) * call.elements)
    for other, part in zip(others, result.split(call.elements), strict=False):
        for sends in (call.group.rank < other, call.group.rank > other):
            dist.send(mine, other) if sends else dist.recv(part, other)
    return result


def of_partners(call: CollectiveCall) -> Want:
    """The values of the partner of each round."""
    others = partners(call.group.rank, call.group.world)
    return _joined(call, [(other, 0, call.elements) for other in others if other is not None])


def _joined(call: CollectiveCall, parts: list[tuple[int, int, int]]) -> Want:
    """The parts (rank, start, stop) of what the ranks send, one after the other."""
    import torch

    values = [call.sent(rank, start, stop) for rank, start, stop in parts]
    joined = torch.cat(values) if values else call.blank(0)
    return Want(values=joined, senders=tuple((rank, stop - start) for rank, start, stop in parts))


# The catalogue of collectives, and the steps of a test: its mode and the group -> which collective runs on which data.
#
# Adding a collective is one record; see ``calls``. Nothing here talks to another rank.


FLOATS = ("float32", "float16", "bfloat16")
DTYPES = (*FLOATS, "int64")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
ONE, ODD, LARGE, HUGE = 1, 4099, 1 << 20, 1 << 24
"""Elements of a whole buffer: a single one, a prime number, 4 MiB and 64 MiB of float32."""

MIB = 1 << 20
MAX_ROOTS = 16


@dataclass(frozen=True, kw_only=True)
class Collective:
    """``run`` gets this rank's input of ``length`` elements and returns its result, None where it has none; ``expect`` likewise.

    ``in_place``: the input is overwritten. ``rooted``: it has a root. ``split``: one of its buffers holds a chunk for each rank.
    ``least``: the fewest ranks.
    """

    name: str
    run: Callable[[CollectiveCall, Buffer], Buffer | None]
    expect: Callable[[CollectiveCall], Want | None]
    length: Callable[[CollectiveCall], int] = chunk
    reduction: Reduction | None = None
    dtypes: tuple[str, ...] = DTYPES
    in_place: bool = False
    rooted: bool = False
    split: bool = False
    least: int = 1


@dataclass(frozen=True, kw_only=True)
class ExchangeStep:
    """One exchange of the test: every rank of a group does the same steps in the same order."""

    collective: Collective
    dtype: str
    elements: int
    root: int = 0

    @property
    def op(self) -> str:
        """The collective as it is shown."""
        way = "to" if self.collective.name.startswith(("reduce", "gather")) else "from"
        return f"{self.collective.name} {way} {self.root}" if self.collective.rooted else self.collective.name

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} x {self.elements}"

    @property
    def large(self) -> bool:
        """Whether it takes so long that there may be no time for it."""
        return self.elements * BYTES[self.dtype] >= MIB

    def call(self, group: RankGroup, inverted: frozenset[int] = frozenset()) -> CollectiveCall:
        """This step as one rank of a group does it."""
        return CollectiveCall(
            group=group,
            dtype=self.dtype,
            elements=self.elements,
            root=self.root,
            reduction=self.collective.reduction,
            inverted=inverted,
        )


def steps(mode: Mode, group: RankGroup) -> tuple[ExchangeStep, ...]:
    """What a test of this size exchanges, small before large: the same on every rank."""
    here = [collective for collective in COLLECTIVES if group.world >= collective.least]
    if mode is Mode.QUICK:
        return tuple(_quick(here, group.world))
    found = [step for one in here for dtype in one.dtypes for step in _sized(one, dtype, ODD, group.world)]
    plain = [(collective, "float32") for collective in here]
    others = [(collective, dtype) for collective in here for dtype in collective.dtypes if dtype != "float32"]
    more = [(plain, ONE), (plain, LARGE)]
    more += [(others, ONE), (others, LARGE), (plain, HUGE)] if mode is Mode.FULL else []
    found += [_sized(one, dtype, total, group.world)[-1] for kinds, total in more for one, dtype in kinds]
    return tuple(found)


def _quick(here: list[Collective], world: int) -> list[ExchangeStep]:
    """Each collective once, ZeRO's in every dtype, one element, and the first and last root."""
    zero = [collective for collective in here if collective.name in ("all_reduce sum", "all_gather", "reduce_scatter")]
    found = [step for collective in here for step in _ends(_sized(collective, "float32", ODD, world))]
    found += [step for collective in zero for dtype in DTYPES[1:] for step in _sized(collective, dtype, ODD, world)]
    return found + [step for collective in zero[:1] for step in _sized(collective, "float32", ONE, world)]


def _ends(found: list[ExchangeStep]) -> list[ExchangeStep]:
    return found if len(found) < 3 else [found[0], found[-1]]


def _sized(collective: Collective, dtype: str, total: int, world: int) -> list[ExchangeStep]:
    """A collective on a buffer of about so many elements (an odd number a chunk), from each root (from some in large worlds)."""
    elements = max(total // world, 1) | 1 if collective.split else total
    spread = range(0, world, -(-world // MAX_ROOTS))
    roots = sorted({*spread, world - 1}) if collective.rooted else [0]
    return [ExchangeStep(collective=collective, dtype=dtype, elements=elements, root=root) for root in roots]


_all_reduce = partial(Collective, run=all_reduce, expect=reduced, in_place=True)
_all_gather = partial(Collective, expect=of_all, split=True)
_reduce_scatter = partial(Collective, expect=my_part_reduced, length=chunks, split=True)
_rooted = partial(Collective, rooted=True)
SUM, AVG = Reduction.SUM, Reduction.AVG

COLLECTIVES = (
    _all_reduce(name="all_reduce sum", reduction=SUM),
    _all_reduce(name="all_reduce max", reduction=Reduction.MAX),
    _all_reduce(name="all_reduce min", reduction=Reduction.MIN),
    _all_reduce(name="all_reduce avg", reduction=AVG, dtypes=FLOATS),
    Collective(
        name="all_reduce sum of a slice",
        run=all_reduce_slice,
        expect=reduced_in_guards,
        reduction=SUM,
    ),
    _all_gather(name="all_gather", run=all_gather),
    _all_gather(name="all_gather in place", run=all_gather_in_place),
    _reduce_scatter(name="reduce_scatter", run=reduce_scatter, reduction=SUM),
    Collective(name="all_to_all", run=all_to_all, expect=my_part_of_all, length=chunks, split=True),
    Collective(
        name="all_to_all uneven",
        run=all_to_all_uneven,
        expect=my_portion_of_all,
        length=uneven_length,
        split=True,
    ),
    _rooted(name="broadcast", run=broadcast, expect=of_root, in_place=True),
    _rooted(name="reduce", run=reduce, expect=reduced_at_root, reduction=SUM, in_place=True),
    _rooted(name="gather", run=gather, expect=of_all_at_root, split=True),
    _rooted(name="scatter", run=scatter, expect=my_part_of_root, length=chunks, split=True),
    Collective(name="send and receive in a ring", run=ring, expect=of_the_one_before, least=2),
    Collective(name="send and receive in pairs", run=pairs, expect=of_partners, split=True, least=2),
)


def rounds(world: int) -> tuple[tuple[Pair, ...], ...]:
    """Rounds of disjoint pairs in which every rank meets every other once: the circle method of round-robin tournaments.

    n - 1 rounds for an even n, n for an odd one, where each rank waits once. The lower rank of a pair comes first.

    >>> rounds(4)
    (((0, 3), (1, 2)), ((0, 2), (1, 3)), ((0, 1), (2, 3)))
    >>> rounds(3)
    (((1, 2),), ((0, 2),), ((0, 1),))
    """
    seats = world + world % 2
    return tuple(one_round(world, turn) for turn in range(seats - 1)) if world > 1 else ()


def one_round(world: int, turn: int) -> tuple[Pair, ...]:
    """Rank 0's seat is fixed, the others move on by one place each round; opposite seats meet."""
    seats = world + world % 2
    circle = [0, *((place - turn) % (seats - 1) + 1 for place in range(seats - 1))]
    pairs = (sorted((circle[place], circle[-1 - place])) for place in range(seats // 2))
    return tuple((low, high) for low, high in pairs if high < world)


def spread_rounds(world: int) -> tuple[tuple[Pair, ...], ...]:
    """All rounds, or some spread evenly where there are too many ranks for all."""
    if world <= MAX_RANKS_IN_PAIRS:
        return rounds(world)
    seats = world + world % 2
    return tuple(one_round(world, turn * (seats - 1) // MAX_SAMPLED_ROUNDS) for turn in range(MAX_SAMPLED_ROUNDS))


def agreed(group: RankGroup, value: float) -> float:
    """Rank 0's number on every rank, after all ranks have come here, so that no rank decides by its own clock."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    number = torch.tensor([float(value)], dtype=torch.float64, device=group.device)
    dist.broadcast(number, 0)
    return float(number.item())


def wait_for_device(group: RankGroup) -> None:
    """Wait until the GPU has done its work; on a CPU there is nothing to wait for."""
    if group.device != "cpu":
        import torch

        torch.cuda.synchronize()


def newest(*names: str) -> Callable[..., Any]:
    """The first of these functions that this torch.distributed has: 2.13 renamed two, and warns on every rank of the old names."""
    import torch.distributed as dist

    for name in names:
        if (found := getattr(dist, name, None)) is not None:
            return found  # type: ignore[no-any-return]
    raise NotImplementedError(f"torch.distributed has no {names[-1]}")
