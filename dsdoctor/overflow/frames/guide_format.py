"""Frames -> the guide's printed format: two columns of figures, then where. Text only."""

from collections.abc import Iterable, Iterator

from dsdoctor.overflow.frames.frame import CallPhase, Frame, Item, Other

PREFIX = " " * 17
COLUMNS = f"{'abs min':8} {'abs max':8} metadata"


def starting(batch: int) -> str:
    """The two lines that open a batch, after two blank ones."""
    return f"\n\n{PREFIX} *** Starting batch number={batch} ***\n{COLUMNS}"


def lines(frame: Frame) -> Iterator[str]:
    """The lines of one frame."""
    yield f"{PREFIX} {frame.module} {frame.kind}"
    yield from (item_line(item) for item in frame.tensors)
    if frame.raised:
        yield f"{'raised':>17} forward"


def item_line(item: Item) -> str:
    """One line: abs min, abs max and the place. A nan hides both figures, an inf is the largest, as in the guide.

    >>> from dsdoctor.overflow.frames.frame import TensorStats
    >>> item_line(TensorStats(name="input[0]", dtype="float16", shape=(2,), count=2, absmin=0.00026, absmax=62700.0))
    '2.60e-04 6.27e+04 input[0]'
    >>> item_line(TensorStats(name="output", dtype="float16", shape=(2,), count=2, absmin=0.0, absmax=9.0, posinf=1))
    '0.00e+00      inf output'
    >>> item_line(Other(name="output[1]", what="None"))
    '             None output[1]'
    """
    if isinstance(item, Other):
        return f"{item.what:>17} {item.name}"
    if item.count == 0:
        return f"{'empty':>17} {item.name}"
    infinite = item.posinf or item.neginf
    least = float("nan") if item.nan else float("inf") if item.absmin is None else item.absmin
    most = float("nan") if item.nan else float("inf") if infinite or item.absmax is None else item.absmax
    return f"{least:8.2e} {most:8.2e} {item.name}"


def text(frames: Iterable[Frame]) -> str:
    """Frames as the guide prints them; the first frame of a batch opens with the batch's two lines."""
    parts: list[str] = []
    for frame in frames:
        if frame.order == 0 and frame.phase is CallPhase.FORWARD:
            parts.append(starting(frame.batch))
        parts.extend(lines(frame))
    return "\n".join(parts)


def detected(batch: int, frames: tuple[Frame, ...]) -> str:
    """What the guide prints at a hit."""
    head = f"\nDetected inf/nan during batch_number={batch}\nLast {len(frames)} forward frames:\n{COLUMNS}\n"
    return head + text(frames) + "\n\n\n"


def first_words(frame: Frame) -> Iterator[str]:
    """What the guide prints as soon as it meets bad values: ``output has infs``."""
    for stats in frame.measured:
        if stats.nan:
            yield f"{stats.name} has nans"
        if stats.posinf or stats.neginf:
            yield f"{stats.name} has infs"
