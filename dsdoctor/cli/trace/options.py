"""The options that the trace commands share, and what they come to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import argument, option, options
from dsdoctor.overflow.frames.frame import LIMITS
from dsdoctor.overflow.trace.text import source_lines
from dsdoctor.overflow.trace.trace_file import PHASES, Selection, Traces, numbers
from dsdoctor.ui.terminal import Stream, show

Files = Annotated[Path, argument(metavar="FILE", help="Traces, or folders that hold them.")]
One = Annotated[Path, argument(metavar="A", help="A trace, or a folder of one run.")]
Other = Annotated[Path | None, argument(metavar="[B]", help="Another one. Default: A itself.")]
Modules = Annotated[
    tuple[str, ...],
    options(name="--module", metavar="GLOB", help='Only modules such as "encoder.block.2.*". Repeatable.'),
]
BatchList = Annotated[str | None, option(name="--batch", metavar="LIST", help="Only these batches: 3,10-12.")]
RankList = Annotated[str | None, option(name="--rank", metavar="LIST", help="Only these ranks: 0,2.")]
PhaseName = Annotated[
    str, option(name="--phase", metavar="forward|backward|all", help="Activations, gradients, or both.")
]
Dtype = Annotated[str, option(name="--dtype", metavar="DTYPE", help=f"One of {', '.join(LIMITS)}.")]


def selection_of(
    modules: Sequence[str], batch: str | None, rank: str | None, phase: str, *, bad: bool = False
) -> Selection:
    """The filters that the options come to. Raises UsageError for those that say nothing."""
    if phase not in PHASES:
        raise UsageError(f"--phase {phase!r} is none", hint=f"one of {', '.join(PHASES)}")
    return Selection(
        modules=tuple(modules),
        batches=None if batch is None else numbers(batch, "--batch"),
        ranks=None if rank is None else numbers(rank, "--rank"),
        phase=PHASES[phase],
        bad=bad,
    )


def check_dtype(dtype: str, name: str = "--dtype") -> None:
    """Raise UsageError for a dtype whose limit is not known."""
    if dtype not in LIMITS:
        raise UsageError(f"{name} {dtype!r} is unknown", hint=f"one of {', '.join(LIMITS)}")


def talk(traces: Traces, name: str = "") -> None:
    """Say on stderr whose traces these are."""
    show(Stream(stderr=True), source_lines(traces, name))
