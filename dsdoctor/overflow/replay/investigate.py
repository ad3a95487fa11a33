"""A step overflowed: replays its micro-batches with every module and operation measured -> one report per rank.

All ranks call these functions together and in the same order, because the functions communicate. What decides which are
called is the same on every rank.
"""

import math
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Held, Origin, RankReport, Scale, first_bad
from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats
from dsdoctor.overflow.hooks import engine as deepspeed_engine
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hooks, Position
from dsdoctor.overflow.measure.measure import Meter, flag
from dsdoctor.overflow.measure.readings import BAD_COLUMNS, Meters, Readings, leaves
from dsdoctor.overflow.replay.operations import Operations, PlacedReadings
from dsdoctor.overflow.replay.provenance import (
    History,
    Names,
    Provenance,
    ignored_labels,
    names_of,
    of_the_model,
    rows_of,
    rows_text,
    with_buffers,
)
from dsdoctor.overflow.replay.replay import BatchRecorder, MicroBatch, Replayed, began, is_not_finite, replay
from dsdoctor.rules import book

HIGH_SCALE = 2.0**10
"""A loss scale below it makes inf in float16 only of gradients above 64, which no ordinary loss has."""
MAX_GRADIENTS = 24
"""Gradients that a report names: the bad ones first, then the largest."""


@dataclass(kw_only=True)
class ReplayObservations:
    """What a replay showed on this rank: the first bad value and what led to it, and the local gradients. ``losses``: the live
    ones, if there is one for each micro-batch."""

    first_bad: FirstBad | None = None
    frames: tuple[Frame, ...] = ()
    origin: Origin | None = None
    received: Origin | None = None
    minus_inf: Origin | None = None
    held: Held | None = None
    rows: str = ""
    ignored: str = ""
    local: list[TensorStats] = field(default_factory=list)
    unmeasured: list[str] = field(default_factory=list)
    losses: tuple[float, ...] = ()


@torch.no_grad()
def any_bad_gradient(engine: Any, meters: Meters) -> bool:
    """Whether any gradient piece of this rank holds nan or inf: each is read once, with one wait per device."""
    used: dict[torch.device, Meter] = {}
    for piece in deepspeed_engine.pieces(engine):
        meter = used.get(piece.device) or used.setdefault(piece.device, meters.take(piece.device))
        meter.scan(piece)
    bad = any(bool(meter.read()[:, :BAD_COLUMNS].any()) for meter in used.values())
    for meter in used.values():
        meters.give_back(meter)
    return bad


def bad_gradients(engine: Any) -> tuple[TensorStats, ...]:
    """The parameters whose gradients, as DeepSpeed reduced them, hold nan or inf in the pieces that this rank holds."""
    readings = Readings(Meters())
    named = [(name, readings.look(piece)) for name, piece in deepspeed_engine.gradients(engine)]
    readings.settle()
    if not readings.any_bad:
        return ()
    stats = [readings.stats(number, name) for name, number in named if isinstance(number, int)]
    return tuple(tensor for tensor in stats if tensor.is_bad)[:MAX_GRADIENTS]


def first_report(engine: Any, decision: deepspeed_engine.Decision, *, losses: tuple[float, ...]) -> RankReport:
    """What is known without a replay."""
    pipeline = deepspeed_engine.is_pipeline(engine)
    return RankReport(
        rank=ranks.this_rank(),
        world=ranks.world(),
        host=socket.gethostname(),
        stage=deepspeed_engine.pipeline_stage(engine)[0] if pipeline else None,
        step=decision.step,
        dtype=str(deepspeed_engine.dtype(engine)).removeprefix("torch."),
        zero_stage=deepspeed_engine.zero_stage(engine),
        scale=Scale(value=decision.loss_scale or deepspeed_engine.loss_scale(engine) or 1.0, floor=decision.floor),
        losses=losses,
        named=bad_gradients(engine),
    )


def replayed(
    engine: Any, recorder: BatchRecorder, rank_report: RankReport, *, batch: int, most_frames: int
) -> list[RankReport]:
    """The reports of all ranks after a replay.

    ``batch``: the guide's number of the step's first micro-batch. ``most_frames``: how many frames, the last of them that of
    the first bad call, a report keeps.
    """
    losses = rank_report.losses if len(rank_report.losses) == len(recorder.batches) else ()
    seen = ReplayObservations(losses=losses)
    done = _replay(engine, recorder, seen, rank_report, batch=batch, most_frames=most_frames, factor=1.0)
    apart = _counts_more(rank_report.first_bad, seen.first_bad, held=seen.held is not None)
    if apart:
        seen = ReplayObservations(
            first_bad=rank_report.first_bad, frames=rank_report.frames, local=seen.local, unmeasured=seen.unmeasured
        )
    other_loss = rank_report.bad_output and seen.first_bad is None and any(each.forward for each in done)
    if other_loss:
        apart = book.phrase("overflow", "loss-finite-in-replay")
    of_gradient = seen.first_bad is not None and seen.first_bad.kind is BadKind.GRADIENT
    began_bad = (
        of_gradient
        and all(map(math.isfinite, rank_report.losses))
        and any(began(each, is_not_finite) for each in recorder.batches)
    )
    rank_report = msgspec.structs.replace(
        rank_report,
        other_loss=other_loss,
        began_bad=began_bad,
        first_bad=seen.first_bad,
        frames=seen.frames,
        origin=seen.origin,
        received=seen.received,
        minus_inf=seen.minus_inf,
        held=seen.held,
        rows=seen.rows,
        ignored=rank_report.ignored or seen.ignored,
        local=_worst(seen.local),
        unmeasured=tuple(dict.fromkeys(seen.unmeasured)),
        batch=seen.first_bad.frame.batch if seen.first_bad is not None else batch,
        replayed="; ".join(part for part in (_how_far(done), apart) if part),
        differs_from_live=bool(apart),
    )
    rank_reports = ranks.gather(rank_report)
    forward_is_bad = any(
        report.first_bad is not None and report.first_bad.kind is not BadKind.GRADIENT for report in rank_reports
    )
    if forward_is_bad or not any(report.scale.value > 1 for report in rank_reports):
        return rank_reports
    if _may_be_of_the_scale(recorder, rank_report, engine.device):
        return rank_reports
    plain, factor = ReplayObservations(), 1.0 / rank_report.scale.value
    _replay(engine, recorder, plain, rank_report, batch=batch, most_frames=most_frames, factor=factor)
    return ranks.gather(msgspec.structs.replace(rank_report, at_scale_one=_worst(plain.local) if plain.local else None))


def _may_be_of_the_scale(recorder: BatchRecorder, rank_report: RankReport, device: torch.device) -> bool:
    """Whether a high loss scale may have made the inf with which backwards began, on any rank: no smaller factor makes those
    finite again in a replay. A nan is of another kind."""
    high = rank_report.began_bad and rank_report.scale.value >= HIGH_SCALE
    has_nan = any(began(each, torch.isnan) for each in recorder.batches)
    return ranks.any_rank(high, device) and not ranks.any_rank(has_nan, device)


def _counts_more(live: FirstBad | None, again: FirstBad | None, *, held: bool) -> str:
    """Why what the frames level saw live counts and not what the replay shows; empty where both saw the same, or nothing was
    seen live. A compiled engine's frames have no inputs, so that they are no better than a replay."""
    if live is None or (again is not None and again.kind is not BadKind.GRADIENT and not live.frame.inputs):
        return ""
    # what lies in a buffer only the replay tells from what the module made
    kinds = (live.kind, BadKind.WEIGHT) if held else (live.kind,)
    where = (live.frame.module, live.frame.micro)
    if again is not None and again.kind in kinds and where == (again.frame.module, again.frame.micro):
        return ""
    shown = "nothing bad" if again is None else f"first {again.frame.module or 'the model'}, {again.tensor.name}"
    return book.phrase("overflow", "other-in-replay", shown=shown)


def _replay(
    engine: Any,
    recorder: BatchRecorder,
    seen: ReplayObservations,
    rank_report: RankReport,
    *,
    batch: int,
    most_frames: int,
    factor: float,
) -> tuple[Replayed, ...]:
    @contextmanager
    def around(number: int) -> Iterator[None]:
        records: list[BatchRecord] = []
        place = Position(step=rank_report.step, micro=number, stage=rank_report.stage)
        readings = PlacedReadings(Meters())
        operations = readings.operations = Operations(readings)
        names = names_of(engine.module, operations)
        hooks = Hooks(
            engine.module,
            on_record=records.append,
            position=lambda: place,
            gradients=True,
            rank=rank_report.rank,
            readings=lambda _: readings,
        )
        hooks.batch = batch + number
        rows = OutputRows(recorder.batches[number])
        handle = engine.module.register_forward_hook(rows.look)
        known = seen.first_bad
        try:
            with _remembering_lines(), operations:
                yield
        finally:
            handle.remove()
            hooks.detach()
            if engine.device.type == "cuda":
                # ZeRO-3 gathers in a stream of its own, where the readings of that were queued too
                torch.cuda.synchronize(engine.device)
            readings.settle()
            for record in records:
                record.settle()
                history = History(operations.done, readings.stats)
                look_at(engine, record, seen, history, readings, names, most_frames)
            if seen.first_bad is not None and seen.first_bad is not known:
                seen.rows, seen.ignored = rows.bad_rows(seen.first_bad)

    return replay(recorder, around=around, factor=factor)


class OutputRows:
    """Where in one micro-batch the bad values are: in its inputs, or in what the model made of it."""

    def __init__(self, batch: MicroBatch) -> None:
        self._batch = batch
        self._rows = rows_of((batch.args, batch.kwargs))
        self._text = ""

    def look(self, _module: Any, _args: Any, output: Any) -> None:
        """The model's output is there."""
        if self._rows is not None and torch._C._current_graph_task_id() == -1:
            self._text = rows_text("in the model's output", leaves(output), self._rows)

    def bad_rows(self, found: FirstBad) -> tuple[str, str]:
        """Which rows are bad, and whether the labels count, where the one or the other says something."""
        if found.kind is BadKind.DATA and self._rows is not None:
            return rows_text("in the batch", leaves((self._batch.args, self._batch.kwargs)), self._rows), ""
        if found.kind is BadKind.LOSS:
            return "", ignored_labels(self._batch.kwargs)
        return (self._text if found.kind in (BadKind.MODULE, BadKind.BETWEEN) else ""), ""


@contextmanager
def _remembering_lines() -> Iterator[None]:
    """Autograd notes where each node was made, so that a backward can be named by the line of its forward."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(*before)


def look_at(
    engine: Any,
    record: BatchRecord,
    seen: ReplayObservations,
    history: History,
    readings: PlacedReadings,
    names: Names,
    most_frames: int,
) -> None:
    """Take over what a micro-batch adds: a bad forward replaces a bad backward, and else the earlier one is kept. But what lies in
    a tensor that each batch writes may have come there live, out of a later micro-batch: an operation that made it, or that
    batch's own nan, replaces it. So does a later micro-batch, if the earlier one was finite live."""
    frames = tuple(record.frames())
    seen.local += local_gradients(frames)
    seen.unmeasured += [f"{frame.module}.{name}".lstrip(".") for frame in frames for name in frame.unmeasured]
    found = first_bad(frames) if record.readings.any_bad else None
    known = seen.first_bad
    is_later = known is not None and (known.kind is not BadKind.GRADIENT or (found and found.kind is BadKind.GRADIENT))
    held = seen.held if seen.origin is None else None
    may_be_of_later = held is not None and (held.written is not None or _is_of_later(seen, found))
    if found is None or (is_later and not may_be_of_later):
        return
    came = _provenance(engine, record, found, history, readings)
    begins_here = found.kind is BadKind.DATA or (came.made is not None and found.kind is not BadKind.GRADIENT)
    if is_later and not begins_here and not _is_of_later(seen, found):
        return
    if came == Provenance():
        found = with_buffers(engine.module, found)
    seen.frames = last_frames(frames, found, most_frames)
    seen.first_bad, seen.held = found, came.held
    seen.origin, seen.received, seen.minus_inf = came.made, came.received, came.minus_inf
    if came.held is not None:
        held_bad, seen.held = of_the_model(found, came.held, came.value, names)
        seen.first_bad = held_bad if came.made is None else found


def _is_of_later(seen: ReplayObservations, found: FirstBad | None) -> bool:
    """Whether live the micro-batch of what is known was finite still and this one was not: what is held became bad between."""
    if found is None or seen.first_bad is None or found.kind is BadKind.GRADIENT:
        return False
    before, now = seen.first_bad.frame.micro, found.frame.micro
    if not (0 <= before < now < len(seen.losses)):
        return False
    return math.isfinite(seen.losses[before]) and not math.isfinite(seen.losses[now])


def _provenance(
    engine: Any, record: BatchRecord, found: FirstBad, history: History, readings: PlacedReadings
) -> Provenance:
    if found.kind is BadKind.WEIGHT:
        return Provenance(received=_gathered_from_others(engine, found))
    reading = dict(record.calls[found.frame.order].items).get(found.tensor.name)
    place = readings.places.get(reading) if isinstance(reading, int) else None
    return Provenance() if place is None or found.kind is BadKind.DATA else history.provenance(*place)


def _gathered_from_others(engine: Any, found: FirstBad) -> Origin | None:
    """ZeRO-3: a bad weight whose part on this rank is finite was gathered from the rank that holds the bad one."""
    module = engine.module.get_submodule(found.frame.module)
    part = getattr(getattr(module, found.tensor.name, None), "ds_tensor", None)
    if part is None or not part.numel() or bool(flag(part)):
        return None
    return Origin(op="ZeRO-3", line="")


def last_frames(frames: Iterable[Frame], found: FirstBad, most: int) -> tuple[Frame, ...]:
    """The last ``most`` frames up to the first bad call; of a bad batch the call of the whole model alone."""
    if found.kind is BadKind.DATA:
        return (found.frame,)
    kept: deque[Frame] = deque(maxlen=most)
    for frame in frames:
        if frame.order > found.frame.order and frame.batch == found.frame.batch:
            break
        kept.append(frame)
    return tuple(kept)


def local_gradients(frames: Iterable[Frame]) -> Iterator[TensorStats]:
    """The gradients of parameters among backward frames, under the parameters' full names."""
    for frame in frames:
        for stats in frame.measured:
            place = stats.name.removeprefix("grad ")
            if frame.phase is CallPhase.BACKWARD and not place.startswith(("input", "output")):
                yield msgspec.structs.replace(stats, name=".".join(part for part in (frame.module, place) if part))


def _worst(gradients: Iterable[TensorStats]) -> tuple[TensorStats, ...]:
    ordered = sorted(gradients, key=lambda gradient: (not gradient.is_bad, -(gradient.absmax or 0.0)))
    return tuple(ordered[:MAX_GRADIENTS])


def _how_far(done: tuple[Replayed, ...]) -> str:
    """How far the replay came, in words; empty: not at all."""
    if not any(micro_batch.forward for micro_batch in done):
        return ""
    whole = all(micro_batch.backward for micro_batch in done)
    why_not = sorted({micro_batch.why_not for micro_batch in done if micro_batch.why_not})
    changed = any(micro_batch.changed_inputs for micro_batch in done)
    parts = ["forward and backward" if whole else "forward only" + (f" ({why_not[0]})" if why_not else "")]
    parts += ["its inputs were changed in place since"] if changed else []
    return "; ".join(parts)
