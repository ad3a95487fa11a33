"""How much room a run has below a dtype's limit -> lines for a terminal, the fp32 list among them."""

import math
from collections.abc import Iterator

from dsdoctor.overflow.trace.headroom import Headroom, Room
from dsdoctor.report.trace.lines import WHOLE, clean, counted

MOST_ROOMS = 20
MOST_SHORT = 200


def headroom_lines(found: Headroom, *, every: bool = False) -> Iterator[str]:
    """The table, least room first; then the fp32 list to paste."""
    rooms = [room for room in found.modules if room.bits is not None or room.bad]
    short = sum(_mark(room, found) != "✓" for room in rooms)
    shown = rooms if every else rooms[: max(MOST_ROOMS, min(short, MOST_SHORT))]
    yield f"  {'bits':>6}  {'abs max':>8}  {'min > 0':>8}  {'dtype':<13} module, tensor"
    yield from (_room_line(room, found) for room in shown)
    if len(shown) < len(rooms):
        yield f"  and {len(rooms) - len(shown):,} more modules with more room (--all shows them)"
    yield from _trend_lines(found)
    yield from _gradient_lines(found)
    if found.masks:
        yield f"· {found.masks:,} masks (filled with -inf or the dtype's own limit) were left out"
    yield from _verdict_lines(found)


def _mark(room: Room, found: Headroom) -> str:
    if room.bad or (room.bits is not None and room.bits < 0):
        return "✗"
    return "!" if (room.bits is not None and room.bits < found.margin) or room.fades else "✓"


def _room_line(room: Room, found: Headroom) -> str:
    bits = "" if room.bits is None else f"{room.bits:.1f}"
    most = f"{room.peak.value:.2e}" if room.peak else ""
    least = "" if room.least is None else f"{room.least:.2e}"
    at = f", {room.peak.tensor} (batch {room.peak.batch}, rank {room.peak.rank})" if room.peak else ""
    said = [
        *(["nan or inf already"] if room.bad else []),
        *(_lower_end(room, found)),
    ]
    return clean(
        f"{_mark(room, found)} {bits:>6}  {most:>8}  {least:>8}  {room.peak.dtype if room.peak else '':<13} "
        f"{room.module or WHOLE} {room.kind}{at}{'; ' if said else ''}{', '.join(said)}"
    )


def _lower_end(room: Room, found: Headroom) -> Iterator[str]:
    if room.vanishes:
        yield f"an input or output would be zero as a whole in {found.dtype}"
    elif room.fades:
        yield "an input or output fades: all of it is below normal"


def _trend_lines(found: Headroom) -> Iterator[str]:
    """Who grows towards the limit, soonest first; only a few, because modules that feed each other grow alike."""
    growing = [(room.trend.reaches_in, room) for room in found.modules if room.trend]
    for left, room in sorted(growing, key=lambda pair: pair[0])[:5]:
        assert room.trend is not None
        yield clean(
            f"! {room.module or WHOLE} doubles every {_whole(room.trend.doubles_every)} batches: "
            f"at this pace it reaches {found.limit:g} in about {_whole(left)} batches"
        )


def _whole(number: float) -> str:
    """A number of batches, no more exact than it is.

    >>> _whole(0.42), _whole(3.14159), _whole(1234.5)
    ('0.42', '3.1', '1200')
    """
    return f"{float(f'{number:.2g}'):.10g}"


def _gradient_lines(found: Headroom) -> Iterator[str]:
    gradients = found.gradients
    if gradients is None:
        return
    peak = gradients.peak
    scaled = f" at a loss scale of {gradients.scale:g}" if gradients.scale != 1 else ""
    yield clean(
        f"· gradients: the largest is {peak.value:.2e}{scaled} in {gradients.module or WHOLE} (batch {peak.batch}, "
        f"rank {peak.rank}): a loss scale of up to 2^{math.log2(gradients.fits_scale):.0f} fits {found.dtype}"
    )
    if gradients.needs_scale <= 1:
        return
    needs = f"2^{math.log2(gradients.needs_scale):.0f}"
    beyond = gradients.needs_scale > gradients.fits_scale
    yield clean(
        f"{'!' if beyond else '·'} gradients: at a loss scale of 1 those of {gradients.smallest_at} stay below "
        f"{gradients.smallest:.2e}, so that it takes a scale of {needs} to bring the largest of them into {found.dtype}"
        + (": no loss scale serves both" if beyond else "")
    )


def _verdict_lines(found: Headroom) -> Iterator[str]:
    count = len(found.modules)
    seen = counted(found.batches, "batch", "batches")
    bare = f"{found.margin:g} {'bit' if found.margin == 1 else 'bits'} to spare"
    if not found.keep and not any(room.bad for room in found.modules):
        yield f"✓ all {count:,} modules fit {found.dtype} with {bare}, in {seen}"
        return
    short = sum(_mark(room, found) == "✗" or (room.bits or 99) < found.margin for room in found.modules)
    yield f"✗ {short:,} of {count:,} modules {'does' if short == 1 else 'do'} not fit {found.dtype} with {bare}, in {seen}"
    if found.keep:
        yield "    Fix: run these in fp32"
        yield from _paste(found.keep)
    if found.keep_under_autocast != found.keep:
        yield "    with torch.autocast, where outputs may stay fp32, these are enough"
        yield from _paste(found.keep_under_autocast)


def _paste(names: tuple[str, ...]) -> Iterator[str]:
    yield "      dsdoctor.keep_in_fp32(model, ["
    yield from (f"          {name!r}," for name in names)
    yield "      ])"
