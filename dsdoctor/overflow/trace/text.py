"""Traces -> lines for a terminal: their frames in the guide's format (and in a JSON document, both streamed), what two of them
differ in, and how much room a run has below a dtype's limit, the fp32 list among it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from dsdoctor.core.text import and_more, encode
from dsdoctor.overflow.frames import frame as guide_format
from dsdoctor.overflow.frames.frame import CallPhase, StepEnd, TensorStats
from dsdoctor.overflow.trace.compare import Comparison, DifferenceKind, FormChange, Side, TensorDifference, TensorPlace
from dsdoctor.overflow.trace.headroom import Headroom, Room
from dsdoctor.overflow.trace.trace_file import Ranked, RankTrace, Traces
from dsdoctor.ui.screen import SCHEMA
from dsdoctor.ui.terminal import printable

WHOLE_MODEL = "(the whole model)"
MAX_NAMES = 12
MAX_ALIKE = 5
"""Rows of a table in which nothing diverges."""
MAX_ROOMS = 20
MAX_SHORT = 200


def counted(count: int, singular: str, plural: str) -> str:
    """A number and its unit, in the singular or the plural.

    >>> counted(1, "batch", "batches"), counted(1200, "batch", "batches")
    ('1 batch', '1,200 batches')
    """
    return f"{count:,} {singular if count == 1 else plural}"


def clean(line: str) -> str:
    """A line whose control characters are shown and not obeyed. Fast where there are none."""
    return line if line.isprintable() else printable(line)


def source_line(source: RankTrace) -> str:
    """Who wrote a trace.

    >>> from pathlib import Path
    >>> from dsdoctor.overflow.frames.frame import Header
    >>> header = Header(schema="", dsdoctor="0.1", rank=3, world=8, torch="2.13.0", zero_stage=2, dtype="float16")
    >>> source_line(RankTrace(path=Path("a.jsonl"), header=header))
    'a.jsonl: rank 3 of 8, float16, ZeRO-2, torch 2.13.0, dsdoctor 0.1'
    """
    head = source.header
    parts = [
        f"rank {head.rank} of {head.world}",
        head.host and f"on {head.host}",
        "" if head.stage is None else f"pipeline stage {head.stage}",
        head.dtype,
        "" if head.zero_stage is None else f"ZeRO-{head.zero_stage}",
        head.torch and f"torch {head.torch}",
        head.deepspeed and f"DeepSpeed {head.deepspeed}",
        head.dsdoctor and f"dsdoctor {head.dsdoctor}",
        head.started and f"started {head.started}",
    ]
    return f"{source.path}: {', '.join(part for part in parts if part)}"


def source_lines(traces: Traces, name: str = "") -> Iterator[str]:
    """Who wrote the traces: the first in full, of the others the number."""
    more = f" and {len(traces.sources) - 1} more of this run" if len(traces.sources) > 1 else ""
    yield f"{name}{source_line(traces.sources[0])}{more}"
    yield from (f"! {note}" for note in traces.notes)


def shown_lines(lines: Iterable[Ranked], *, with_rank: bool) -> Iterator[str]:
    """Frames as the guide prints them. A head whenever the batch, the rank or the phase is another one."""
    place: tuple[int, int, CallPhase] | None = None
    for rank, line in lines:
        if isinstance(line, StepEnd):
            yield step_line(rank if with_rank else None, line)
            continue
        here = (line.batch, rank, line.phase)
        if here != place:
            what = "Starting batch" if line.phase is CallPhase.FORWARD else "Backward of batch"
            of_rank = f" rank={rank}" if with_rank else ""
            yield from (
                "",
                "",
                f"{guide_format.PREFIX} *** {what} number={line.batch}{of_rank} ***",
                guide_format.COLUMNS,
            )
            place = here
        yield from map(clean, guide_format.lines(line))


def step_line(rank: int | None, step: StepEnd) -> str:
    """The end of a step in the guide's manner.

    >>> step_line(None, StepEnd(step=4, batch=9, overflow=True, loss_scale=65536.0, loss="nan")).strip()
    '*** Step 4 after batch 9: overflow, skipped; loss scale 65536; loss nan ***'
    """
    parts = [
        "" if step.overflow is None else "overflow, skipped" if step.overflow else "no overflow",
        "" if step.loss_scale is None else f"loss scale {step.loss_scale:g}",
        step.loss and f"loss {step.loss}",
    ]
    what = "; ".join(part for part in parts if part) or "over"
    of_rank = "" if rank is None else f" rank={rank}"
    return clean(f"{guide_format.PREFIX} *** Step {step.step} after batch {step.batch}{of_rank}: {what} ***")


def shown_document(traces: Traces, lines: Iterable[Ranked]) -> Iterator[str]:
    """The document of ``trace show`` up to its findings, piece by piece: what was selected may be gigabytes."""
    head = {"schema": SCHEMA, "command": "trace show", "traces": [_source_part(source) for source in traces.sources]}
    yield encode(head).decode()[:-1]
    yield ',"lines":['
    comma = ""
    for rank, line in lines:
        kind = "step" if isinstance(line, StepEnd) else "frame"
        yield f'{comma}{{"rank":{rank},"{kind}":{encode(line).decode()}}}'
        comma = ","


def shown_document_end(findings: tuple[Any, ...]) -> str:
    """The rest of the document of ``trace show``."""
    return f'],"findings":{encode(findings).decode()}}}\n'


def _source_part(source: RankTrace) -> dict[str, Any]:
    return {"file": str(source.path), "header": source.header}


def source_parts(traces: Traces) -> list[dict[str, Any]]:
    """The traces as a document names them."""
    return [_source_part(source) for source in traces.sources]


def comparison_lines(found: Comparison) -> Iterator[str]:
    """What differs: the first place, then the largest differences, then what only one side has."""
    yield from _first_lines(found)
    for change in found.shapes[:MAX_NAMES]:
        yield f"· shape {change.a} against {change.b}: {_times(change)}"
    for change in found.dtypes:
        yield f"· {change.a} against {change.b}: {_times(change)}"
    if found.bad_in_both:
        yield f"! nan or inf on both sides in {found.bad_in_both:,} tensors, which were not compared"
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            yield f"! only in {side}: {clean(and_more(names, MAX_NAMES))}"
    shown = [difference for difference in found.largest if difference.diverges] or found.largest[:MAX_ALIKE]
    if shown:
        yield ""
        yield f"  {'ratio':>9}  {'A':>9}  {'B':>9}  {'of':<10} module, tensor"
        yield from map(_row, shown)


def _first_lines(found: Comparison) -> Iterator[str]:
    if found.first is None:
        yield f"✓ no divergence: {found.tensors:,} tensors in {counted(found.pairs, 'batch', 'batches')} agree"
        return
    first, bad = found.first, found.first_bad
    yield f"✗ first divergence: {name_of(first.place)}, {first.place.tensor}: {_in_words(first)}"
    yield f"    {_where(first.place)}; {found.agreed:,} of {found.tensors:,} tensors come before it and agree"
    yield f"    {_origin(first)}"
    if bad is not None and bad is not first:
        yield f"✗ first nan or inf on one side only: {name_of(bad.place)}, {bad.place.tensor}: {_in_words(bad)}"
        yield f"    {_where(bad.place)}"
    yield f"  {found.diverging:,} tensors diverge in all"


def name_of(place: TensorPlace) -> str:
    """The module, its class, and which call of a batch it was."""
    call = f", call {place.call}" if place.call else ""
    return clean(f"{place.module or WHOLE_MODEL} {place.kind}{call}")


def _where(place: TensorPlace) -> str:
    if place.a == place.b:
        return f"{place.phase.value} of {_side(place.a)}"
    return f"{place.phase.value} of {_side(place.a)} against {_side(place.b)}"


def _side(side: Side) -> str:
    return f"batch {side.batch}, rank {side.rank}"


def _in_words(difference: TensorDifference) -> str:
    if difference.what is DifferenceKind.NOT_FINITE:
        return f"{_figure(difference.a, difference.what)} against {_figure(difference.b, difference.what)}"
    if difference.what is DifferenceKind.ZEROS:
        return (
            f"{_figure(difference.a, difference.what)} against {_figure(difference.b, difference.what)} of it are zero"
        )
    return (
        f"{difference.what.value} {_figure(difference.a, difference.what)} against {_figure(difference.b, difference.what)}, "
        f"a factor of {difference.ratio:.4g} (rounding: up to {difference.tolerance:.4g})"
    )


def _figure(tensor: TensorStats, what: DifferenceKind) -> str:
    """The figure in question of one side."""
    if what is DifferenceKind.NOT_FINITE and tensor.is_bad:
        inf = tensor.posinf + tensor.neginf
        return " and ".join([*([f"{tensor.nan:,} nan"] if tensor.nan else []), *([f"{inf:,} inf"] if inf else [])])
    if what is DifferenceKind.ZEROS:
        return f"{tensor.zeros / max(tensor.count, 1):.0%}"
    value = tensor.absmin if what is DifferenceKind.ABSMIN else tensor.absmax
    return "none" if value is None else f"{value:.2e}"


def _origin(first: TensorDifference) -> str:
    """What the kind of tensor says about the cause."""
    name = first.place.tensor
    if first.place.phase is CallPhase.BACKWARD:
        return "the forward agrees: it is the gradient that differs"
    if name.startswith("output"):
        return "its weights and inputs agree: it originated in this module"
    if name.startswith("input"):
        return "no module's output before it differs: it is in the batch itself, or originated between modules"
    return "it is a weight or buffer: it differed before the batch began"


def _row(difference: TensorDifference) -> str:
    mark = "✗" if difference.diverges else "·"
    times = "inf" if difference.ratio == float("inf") else f"{difference.ratio:.4g}"
    backward = " (backward)" if difference.place.phase is CallPhase.BACKWARD else ""
    figures = [_figure(side, difference.what).replace(" and ", "+") for side in (difference.a, difference.b)]
    return (
        f"{mark} {times:>9}  {figures[0]:>9}  {figures[1]:>9}  {difference.what.value:<10} "
        f"{name_of(difference.place)}, {difference.place.tensor}{backward}, batch {difference.place.a.batch}"
    )


def _times(change: FormChange) -> str:
    return f"{counted(change.count, 'tensor', 'tensors')}, first {name_of(change.first)}, {change.first.tensor}"


def headroom_lines(found: Headroom, *, every: bool = False) -> Iterator[str]:
    """The table, least room first; then the fp32 list to paste."""
    rooms = [room for room in found.modules if room.bits is not None or room.bad]
    short = sum(_mark(room, found) != "✓" for room in rooms)
    shown = rooms if every else rooms[: max(MAX_ROOMS, min(short, MAX_SHORT))]
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
    notes = ["nan or inf already"] if room.bad else []
    if room.vanishes:
        notes.append(f"an input or output would be entirely zero in {found.dtype}")
    elif room.fades:
        notes.append("an input or output is entirely subnormal")
    return clean(
        f"{_mark(room, found)} {bits:>6}  {most:>8}  {least:>8}  {room.peak.dtype if room.peak else '':<13} "
        f"{room.module or WHOLE_MODEL} {room.kind}{at}{'; ' if notes else ''}{', '.join(notes)}"
    )


def _trend_lines(found: Headroom) -> Iterator[str]:
    """Who grows towards the limit, soonest first; only a few, because modules that feed each other grow alike."""
    growing = [(room.trend.reaches_in, room) for room in found.modules if room.trend]
    for left, room in sorted(growing, key=lambda pair: pair[0])[:5]:
        assert room.trend is not None
        yield clean(
            f"! {room.module or WHOLE_MODEL} doubles every {_whole(room.trend.doubles_every)} batches: "
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
        f"· gradients: the largest is {peak.value:.2e}{scaled} in {gradients.module or WHOLE_MODEL} (batch {peak.batch}, "
        f"rank {peak.rank}): a loss scale of up to 2^{math.log2(gradients.fits_scale):.0f} fits {found.dtype}"
    )
    if gradients.needs_scale <= 1:
        return
    needs = f"2^{math.log2(gradients.needs_scale):.0f}"
    beyond = gradients.needs_scale > gradients.fits_scale
    yield clean(
        f"{'!' if beyond else '·'} gradients: at a loss scale of 1 those of {gradients.smallest_at} stay below "
        f"{gradients.smallest:.2e}, so a scale of {needs} to bring the largest of them into {found.dtype}"
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
