"""The texts in a picture of a run. Module names come from the user's model, so nothing in them is read as a tag."""

import math

from dsdoctor.overflow.frames.dtypes import LIMITS
from dsdoctor.overflow.trace.extremes import Extreme, ModuleRow, Picture
from dsdoctor.ui.page import safe

WHOLE = "(the whole model)"


def label(row: ModuleRow) -> str:
    """A row's name, safe to stand in a page.

    >>> label(ModuleRow("h.1.<script>", "Linear", 1)), label(ModuleRow("", "GPT2", 0))
    ('h.1.&lt;script&gt; (call 1)', '(the whole model)')
    """
    call = f" (call {row.call})" if row.call else ""
    return safe(row.module or WHOLE) + call


def hover(row: ModuleRow, dtype: str) -> str:
    """The text that appears when the mouse is over a row: the figures, of which tensor, in which batch and rank."""
    parts = [f"<b>{label(row)}</b> {safe(row.kind)}"]
    if row.bad:
        bad = row.bad
        parts.append(
            f"<b>{bad.nan} nan, {bad.inf} inf</b> in {safe(bad.tensor)} (batch {bad.batch}, rank {bad.rank}, the first)"
        )
    if row.most:
        room = math.log2(LIMITS[dtype] / row.most.value)
        parts += [f"abs max {_extreme(row.most)}", f"{room:.1f} bits below {dtype}'s limit {LIMITS[dtype]:.4g}"]
    if row.least:
        parts.append(f"least above zero {_extreme(row.least)}")
    return "<br>".join(parts)


def _extreme(extreme: Extreme) -> str:
    return safe(
        f"{extreme.value:.3e} in {extreme.tensor} {extreme.dtype} {list(extreme.shape)}, batch {extreme.batch}, rank {extreme.rank}"
    )


def batches_of(picture: Picture, column: int) -> str:
    """The batches of a column in words.

    >>> batches_of(Picture(first=10, width=1), 3), batches_of(Picture(first=10, width=4), 3)
    ('13', '22-25')
    """
    first = picture.first + column * picture.width
    return str(first) if picture.width == 1 else f"{first}-{first + picture.width - 1}"
