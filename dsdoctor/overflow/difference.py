"""What two runs, batches or ranks differ in. Data only."""

import enum
from dataclasses import dataclass

from dsdoctor.overflow.frames.frame import Frame, Phase, TensorStats


class What(enum.Enum):
    """In which figure two tensors differ most."""

    NOT_FINITE = "nan or inf"
    ABSMAX = "abs max"
    ABSMIN = "abs min"
    ZEROS = "zeros"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two: which batch of which rank."""

    rank: int
    batch: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The frames of a batch on both sides."""

    a: Side
    b: Side
    frames_a: tuple[Frame, ...]
    frames_b: tuple[Frame, ...]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which tensor of which call. ``kind``: the module's class."""

    a: Side
    b: Side
    phase: Phase
    module: str
    kind: str
    call: int
    tensor: str


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Two tensors of one place. ``ratio``: the larger figure over the smaller, 1 or more; ``tolerance``: what was allowed."""

    place: Place
    what: What
    ratio: float
    tolerance: float
    diverges: bool
    a: TensorStats
    b: TensorStats


@dataclass(kw_only=True)
class Change:
    """A shape or dtype that differs: how often, and where first."""

    a: str
    b: str
    count: int
    first: Place


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs, batches or ranks differ in. ``agreed``: tensors before ``first``; ``largest``: one a module."""

    pairs: int
    tensors: int
    agreed: int
    diverging: int
    bad_in_both: int
    first: Difference | None
    first_bad: Difference | None
    largest: tuple[Difference, ...]
    shapes: tuple[Change, ...]
    dtypes: tuple[Change, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
