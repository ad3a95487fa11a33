"""pick: the wheels of a folder or an index against one machine -> the one that fits it best. Runs nothing of them."""

from pathlib import Path

from dsdoctor.commands.shelf import Candidate, Shelf
from dsdoctor.probe.observe import Say, observe


def pick(python: str, machine: Path | None, place: str, ops: tuple[str, ...], *, say: Say) -> tuple[Candidate, ...]:
    """Every wheel of a folder or an index, the best first: one that fits, then the newest, then the one with most ops.

    One that lacks an op of ``ops`` does not fit. Raises UsageError for a place without DeepSpeed wheels.
    """
    with Shelf([place], observe(python, machine, whole=False), python, say=say) as shelf:
        return shelf.ranked(ops)
