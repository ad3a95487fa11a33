"""What is on a GPU beside live tensors, as ranges. None of it was measured here: the figures are assumptions."""

from dataclasses import dataclass

GIB = 1 << 30
SLACK = 50
"""Of this many bytes of tensors the allocator holds one more at least."""


@dataclass(frozen=True, kw_only=True)
class Unmeasured:
    """A thing whose bytes are not computed: from ``low`` to ``high``."""

    what: str
    low: int
    high: int


def beside_tensors(peak: int, *, world: int) -> tuple[Unmeasured, ...]:
    """Context and libraries, buffers for communication, and what the caching allocator holds beyond live tensors."""
    context = Unmeasured(what="CUDA context and libraries", low=int(0.4 * GIB), high=int(1.2 * GIB))
    nccl = Unmeasured(what="NCCL buffers", low=int(0.1 * GIB), high=int(1.5 * GIB))
    slack = Unmeasured(what="slack and fragments of torch's allocator", low=peak // SLACK, high=peak // 8)
    return (context, *([nccl] if world > 1 else []), slack)


def room(memory: int, *, world: int) -> int:
    """Bytes of tensors that a GPU has place for, with the least that is beside them.

    >>> room(80 << 30, world=1) >> 30
    78
    """
    fixed = sum(each.low for each in beside_tensors(0, world=world))
    return (memory - fixed) * SLACK // (SLACK + 1)
