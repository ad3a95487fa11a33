"""The catalogue of collectives, and the steps of a test: its mode and the group -> which collective runs on which data.

Adding a collective is one record; see ``calls``. Nothing here talks to another rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dsdoctor.comm.collectives import calls
from dsdoctor.comm.collectives.calls import Buffer, Want
from dsdoctor.comm.collectives.values import CollectiveCall, Reduction
from dsdoctor.comm.models import Mode, RankGroup

FLOATS = ("float32", "float16", "bfloat16")
DTYPES = (*FLOATS, "int64")
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8}
ONE, ODD, LARGE, LARGEST = 1, 4099, 1 << 20, 1 << 24
"""Elements of a whole buffer: a single one, a prime number, 4 MiB and 64 MiB of float32."""

MIB = 1 << 20
MOST_ROOTS = 16


@dataclass(frozen=True, kw_only=True)
class Collective:
    """``run`` gets this rank's input of ``length`` elements and returns its result, None where it has none; ``expect`` likewise.

    ``in_place``: the input is overwritten. ``rooted``: it has a root. ``split``: one of its buffers holds a chunk for each rank.
    ``least``: the fewest ranks.
    """

    name: str
    run: Callable[[CollectiveCall, Buffer], Buffer | None]
    expect: Callable[[CollectiveCall], Want | None]
    length: Callable[[CollectiveCall], int] = calls.chunk
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
    more += [(others, ONE), (others, LARGE), (plain, LARGEST)] if mode is Mode.FULL else []
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
    spread = range(0, world, -(-world // MOST_ROOTS))
    roots = sorted({*spread, world - 1}) if collective.rooted else [0]
    return [ExchangeStep(collective=collective, dtype=dtype, elements=elements, root=root) for root in roots]


_all_reduce = partial(Collective, run=calls.all_reduce, expect=calls.reduced, in_place=True)
_all_gather = partial(Collective, expect=calls.of_all, split=True)
_reduce_scatter = partial(Collective, expect=calls.my_part_reduced, length=calls.chunks, split=True)
_rooted = partial(Collective, rooted=True)
SUM, AVG = Reduction.SUM, Reduction.AVG

COLLECTIVES = (
    _all_reduce(name="all_reduce sum", reduction=SUM),
    _all_reduce(name="all_reduce max", reduction=Reduction.MAX),
    _all_reduce(name="all_reduce min", reduction=Reduction.MIN),
    _all_reduce(name="all_reduce avg", reduction=AVG, dtypes=FLOATS),
    Collective(
        name="all_reduce sum of a slice",
        run=calls.all_reduce_slice,
        expect=calls.reduced_in_guards,
        reduction=SUM,
    ),
    _all_gather(name="all_gather", run=calls.all_gather),
    _all_gather(name="all_gather in place", run=calls.all_gather_in_place),
    _reduce_scatter(name="reduce_scatter", run=calls.reduce_scatter, reduction=SUM),
    Collective(name="all_to_all", run=calls.all_to_all, expect=calls.my_part_of_all, length=calls.chunks, split=True),
    Collective(
        name="all_to_all uneven",
        run=calls.all_to_all_uneven,
        expect=calls.my_portion_of_all,
        length=calls.uneven_length,
        split=True,
    ),
    _rooted(name="broadcast", run=calls.broadcast, expect=calls.of_root, in_place=True),
    _rooted(name="reduce", run=calls.reduce, expect=calls.reduced_at_root, reduction=SUM, in_place=True),
    _rooted(name="gather", run=calls.gather, expect=calls.of_all_at_root, split=True),
    _rooted(name="scatter", run=calls.scatter, expect=calls.my_part_of_root, length=calls.chunks, split=True),
    Collective(name="send and receive in a ring", run=calls.ring, expect=calls.of_the_one_before, least=2),
    Collective(name="send and receive in pairs", run=calls.pairs, expect=calls.of_partners, split=True, least=2),
)
