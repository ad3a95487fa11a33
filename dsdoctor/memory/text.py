"""A ledger of memory -> lines."""

import textwrap
from collections.abc import Iterator

from dsdoctor.memory.judge import MemoryReport
from dsdoctor.memory.models import Moment, Place, Point, Prediction, Run
from dsdoctor.memory.predict import Change
from dsdoctor.ui.table import table
from dsdoctor.ui.terminal import VerdictLine

GIB, MIB = 1 << 30, 1 << 20
COLUMNS = {
    "start": (Point.AFTER_INITIALIZE,),
    "forward": (Point.FIRST_FORWARD, Point.FORWARD),
    "backward": (Point.FIRST_BACKWARD, Point.BACKWARD),
    "step": (Point.FIRST_STEP, Point.STEP),
    "after": (Point.AFTER_STEP,),
    "save": (Point.SAVE,),
}
MAX_CHANGES = 9
MAX_LABEL_WIDTH = 26
"""A row's name is broken there: with six columns it fits 80."""


def memory_lines(done: MemoryReport, width: int | None = None) -> Iterator[str]:
    """The ledger, what to change, the peak and what is beside it. ``width``: of the terminal, where lines are broken."""
    settings, model, world = done.now.settings, done.now.model, done.now.layout.world
    run = done.now.run
    batch = f", {batch_words(run)}" if run else ""
    how = f"ZeRO stage {settings.stage}, {settings.dtype}, {world} rank{'s' if world > 1 else ''}"
    yield f"{model.name}, {model.elements:,} parameters; {how}{batch}; DeepSpeed {settings.version}"
    yield ""
    unit, name = (GIB, "GiB") if done.prediction.peak.device >= GIB else (MIB, "MiB")
    yield f"{name} on a rank's device, at the peak of each part:"
    yield from ledger_lines(done.prediction, "device", unit, width)
    if any(moment.host for moment in done.prediction.moments):
        yield ""
        yield f"{name} of host memory per rank, at the same moments:"
        yield from ledger_lines(done.prediction, "host", unit, width)
    yield from host_lines(done)
    yield from change_lines(done.changes)
    yield from search_lines(done)
    yield ""
    yield VerdictLine(peak_line(done))
    low, high = (sum(each) for each in zip(*((b.low, b.high) for b in done.overheads), strict=True))
    names = "; ".join(f"{b.what} {amount(b.low)} to {amount(b.high)}" for b in done.overheads)
    yield f"plus overhead, not measured here: {amount(low)} to {amount(high)} ({names})"
    peak = done.prediction.peak.device
    most = max(peak, done.upper.peak.device if done.upper else 0)
    yield f"on each GPU: {amount(peak + low)} at least, {amount(most + high)} to be safe"


def host_lines(done: MemoryReport) -> Iterator[str]:
    """Host memory: of a node, where something is offloaded, and while a checkpoint is loaded."""
    ranks, host = done.on_node, max(moment.host for moment in done.prediction.moments)
    if host and ranks > 1:
        yield f"  the {ranks} ranks of a node keep {amount(host * ranks)} of host memory together"
    together = f", {amount(done.host_loading * ranks)} on a node" if ranks > 1 else ""
    yield f"  loading a checkpoint takes {amount(done.host_loading)} of host memory on each rank that loads all of it{together}"


def batch_words(run: Run) -> str:
    """What a micro batch is.

    >>> batch_words(Run(batch=2, sequence=8, checkpointing=False, shape=(2, 3, 224, 224), tokens=False))
    'micro batch 2 x 3 x 224 x 224'
    >>> batch_words(Run(batch=2, sequence=8, checkpointing=True))
    'micro batch 2 x 8 tokens, activation checkpointing'
    """
    how = ", activation checkpointing" if run.checkpointing else ""
    if run.tokens:
        return f"micro batch {run.batch} x {run.sequence} tokens{how}"
    return f"micro batch {' x '.join(map(str, run.shape))}{how}"


def peak_line(done: MemoryReport) -> str:
    """The peak; what it leaves out, or between what it lies."""
    peak = done.prediction.peak
    where = peak.point.value.replace("_", " ")
    if done.now.run is None or done.now.run.error:
        return f"peak without activations: {amount(peak.device)} of tensors, in {where}; the real peak is higher"
    if done.upper is not None and done.upper.peak.device > peak.device:
        high = amount(done.upper.peak.device)
        return f"peak: {amount(peak.device)} to {high} of tensors, in {where}, depending on attention's kernel"
    return f"peak: {amount(peak.device)} of tensors, in {where}"


def ledger_lines(prediction: Prediction, place: Place, unit: int, width: int | None = None) -> Iterator[str]:
    """A row for each thing, a column for each part of a step."""
    moments = {name: peak_moment(prediction, points) for name, points in COLUMNS.items()}
    shown = {name: moment for name, moment in moments.items() if moment is not None}
    things: dict[str, dict[str, int]] = {}
    for name, moment in shown.items():
        for row in moment.rows:
            if row.place == place:
                things.setdefault(row.what, {})[name] = row.size
    ordered = sorted(things, key=lambda what: -max(things[what].values()))
    rows = [("", *shown)]
    for what in ordered:
        *above, last = textwrap.wrap(what, MAX_LABEL_WIDTH, subsequent_indent="  ")
        rows += [(part, *("" for _ in shown)) for part in above]
        rows.append((last, *(cell(things[what].get(name, 0), unit) for name in shown)))
    totals = [
        moment.device if place == "device" else sum(r.size for r in moment.rows if r.place == "host")
        for moment in shown.values()
    ]
    rows.append(("in all", *(cell(total, unit) for total in totals)))
    yield from (f"  {line}" for line in table(rows, "<" + ">" * len(shown), width=width and width - 2))


def peak_moment(prediction: Prediction, points: tuple[Point, ...]) -> Moment | None:
    """Of some points the moment with most on the device; None where none was computed."""
    found = [moment for moment in prediction.moments if moment.point in points]
    return max(found, key=lambda moment: moment.device, default=None)


def cell(size: int, unit: int) -> str:
    """A figure of the ledger; nothing is a dash."""
    return f"{size / unit:,.2f}" if size else "-"


def change_lines(changes: tuple[Change, ...]) -> Iterator[str]:
    """Each change with what it wins and costs."""
    if not changes:
        return
    yield ""
    yield "possible changes, cheapest first, small ones last (each on its own):"
    for number, change in enumerate(changes[:MAX_CHANGES], 1):
        host = f", {amount(change.host)} more on the host" if change.host > 0 else ""
        yield f"{number}. {change.what}: {amount(change.won)} less, peak {amount(change.peak)}{host}"
        if change.set:
            yield f"     {', '.join(f'{key} = {value}' for key, value in change.set)}"
        yield f"     costs: {change.cost}"


def search_lines(done: MemoryReport) -> Iterator[str]:
    """What --search found, with the least overhead and to be safe; with all scores of attention, where the kernel decides."""
    found, upper, safe = done.searched, done.searched_upper, done.searched_safe
    if found is None:
        return
    yield ""
    world = done.now.layout.world
    least = f"; {upper.batch or 'none'} if attention stores all scores" if upper and upper.batch != found.batch else ""
    least += f"; {safe.batch or 'none'} to be safe" if safe and safe.batch != found.batch else ""
    if found.batch:
        yield f"the largest micro batch that fits {world} GPUs: {found.batch} (tensors {amount(found.batch_peak)}){least}"
    else:
        yield f"no micro batch fits {world} GPUs"
    batch = done.now.run.batch if done.now.run else 1
    most = (
        f"; {upper.ranks or 'no number'} if attention stores all scores" if upper and upper.ranks != found.ranks else ""
    )
    most += f"; {safe.ranks or 'no number'} to be safe" if safe and safe.ranks != found.ranks else ""
    if found.ranks and found.ranks_peak:
        yield f"the fewest GPUs for a micro batch of {batch}: {found.ranks} (tensors {amount(found.ranks_peak)}){most}"
    else:
        yield f"no number of GPUs fits a micro batch of {batch} with this configuration"


def amount(size: int) -> str:
    """Bytes with the unit that suits them.

    >>> amount(3 << 30), amount(5 << 20), amount(700)
    ('3.0 GiB', '5.0 MiB', '700 bytes')
    """
    if size >= GIB:
        return f"{size / GIB:,.1f} GiB"
    return f"{size / MIB:.1f} MiB" if size >= MIB // 10 else f"{size} bytes"
