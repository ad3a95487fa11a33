"""A step overflowed: the batch again, with everything looked at, on all ranks together -> one account per rank.

Every rank calls the same functions in the same order, because what decides is the same on all of them.
"""

import socket
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from dsdoctor.overflow.frames.first_bad import Account, Culprit, Kind, Origin, Scale, culprit, is_mask
from dsdoctor.overflow.frames.frame import Frame, Phase, TensorStats
from dsdoctor.overflow.hooks import engine_adapter, ranks
from dsdoctor.overflow.hooks.batch_record import Page, Position
from dsdoctor.overflow.hooks.module_hooks import Hooks
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.measure.measure import Meter
from dsdoctor.overflow.measure.readings import BAD_COLUMNS, Meters, Readings
from dsdoctor.overflow.replay.operations import Operations
from dsdoctor.overflow.replay.replay import Recorder, Replayed, replay

MOST_GRADIENTS = 24
"""Gradients that an account names: the bad ones first, then the largest."""


@dataclass(kw_only=True)
class Seen:
    """What a replay showed on this rank: the first culprit and what led to it, and the local gradients."""

    culprit: Culprit | None = None
    frames: tuple[Frame, ...] = ()
    origin: Origin | None = None
    minus_inf: Origin | None = None
    local: list[TensorStats] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


@torch.no_grad()
def any_bad_gradient(engine: Any, meters: Meters) -> bool:
    """Whether any gradient piece of this rank holds nan or inf: each is read once, with one wait per device."""
    used: dict[torch.device, Meter] = {}
    for piece in engine_adapter.pieces(engine):
        meter = used.get(piece.device) or used.setdefault(piece.device, meters.take(piece.device))
        meter.scan(piece)
    bad = any(bool(meter.read()[:, :BAD_COLUMNS].any()) for meter in used.values())
    for meter in used.values():
        meters.give_back(meter)
    return bad


def bad_gradients(engine: Any) -> tuple[TensorStats, ...]:
    """The parameters whose gradients, as DeepSpeed reduced them, hold nan or inf in the pieces that this rank holds."""
    readings = Readings(Meters())
    named = [(name, readings.look(piece)) for name, piece in engine_adapter.gradients(engine)]
    readings.settle()
    if not readings.any_bad:
        return ()
    stats = [readings.stats(number, name) for name, number in named if isinstance(number, int)]
    return tuple(one for one in stats if one.is_bad)[:MOST_GRADIENTS]


def first_account(engine: Any, decision: engine_adapter.Decision, *, losses: tuple[float, ...]) -> Account:
    """What is known without a replay."""
    pipeline = engine_adapter.is_pipeline(engine)
    return Account(
        rank=ranks.rank(),
        world=ranks.world(),
        host=socket.gethostname(),
        stage=engine_adapter.pipeline_stage(engine)[0] if pipeline else None,
        step=decision.step,
        dtype=str(engine_adapter.dtype(engine)).removeprefix("torch."),
        zero_stage=engine_adapter.zero_stage(engine),
        scale=Scale(value=decision.loss_scale or engine_adapter.loss_scale(engine) or 1.0, floor=decision.floor),
        losses=losses,
        named=bad_gradients(engine),
    )


def replayed(engine: Any, recorder: Recorder, account: Account, options: Options, *, batch: int) -> list[Account]:
    """The accounts of all ranks after a replay. ``batch``: the guide's number of the step's first micro-batch."""
    seen = Seen()
    done = _replay(engine, recorder, options, seen, account, batch=batch, factor=1.0)
    # what was seen live stands where the replay shows nothing, or only what follows from it
    live = account.culprit is not None and (seen.culprit is None or seen.culprit.kind is Kind.GRADIENT)
    found = account.culprit if live else seen.culprit
    account = msgspec.structs.replace(
        account,
        culprit=found,
        frames=account.frames if live else seen.frames,
        origin=seen.origin,
        minus_inf=seen.minus_inf,
        local=_most_telling(seen.local),
        batch=found.frame.batch if found is not None else batch,
        replayed=_said(done),
    )
    accounts = ranks.gather(account)
    if not _forward_is_clean(accounts) or not any(one.scale.value > 1 for one in accounts):
        return accounts
    plain = Seen()
    _replay(engine, recorder, options, plain, account, batch=batch, factor=1.0 / account.scale.value)
    return ranks.gather(
        msgspec.structs.replace(account, at_scale_one=_most_telling(plain.local) if plain.local else None)
    )


def _replay(
    engine: Any, recorder: Recorder, options: Options, seen: Seen, account: Account, *, batch: int, factor: float
) -> tuple[Replayed, ...]:
    @contextmanager
    def around(number: int) -> Iterator[None]:
        pages: list[Page] = []
        place = Position(step=account.step, micro=number, stage=account.stage)
        hooks = Hooks(engine.module, on_page=pages.append, position=lambda: place, gradients=True, rank=account.rank)
        hooks.batch = batch + number
        readings = Readings(Meters())
        operations = Operations(readings, lambda: len((hooks.page or pages[-1]).calls) if hooks.page or pages else 0)
        try:
            with _remembering_lines(), operations:
                yield
        finally:
            hooks.detach()
            readings.settle()
            for page in pages:
                page.settle()
                _look_at(page, seen, operations, options)

    return replay(recorder, around=around, factor=factor)


@contextmanager
def _remembering_lines() -> Iterator[None]:
    """Autograd notes where each node was made, so that a backward can be told by its line of the forward."""
    before = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        yield
    finally:
        torch.autograd.set_detect_anomaly(*before)


def _look_at(page: Page, seen: Seen, operations: Operations, options: Options) -> None:
    """Take from a micro-batch what it adds: forward goes before backward, the earlier before the later."""
    frames = tuple(page.frames())
    seen.local += local_gradients(frames)
    found = culprit(frames) if page.readings.any_bad else None
    known = seen.culprit
    if found is None or (known is not None and (known.kind is not Kind.GRADIENT or found.kind is Kind.GRADIENT)):
        return
    seen.culprit = found
    seen.frames = last_frames(frames, found, options.max_frames_to_save)
    if found.kind not in (Kind.DATA, Kind.WEIGHT):
        seen.origin = operations.first_bad(found.frame.order, backward=found.kind is Kind.GRADIENT)
    seen.minus_inf = operations.first_minus_inf() if any(is_mask(one) for one in found.frame.inputs) else None


def last_frames(frames: Iterable[Frame], found: Culprit, most: int) -> tuple[Frame, ...]:
    """The last frames up to the culprit's, in its phase and with what led to it."""
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
            if frame.phase is Phase.BACKWARD and not place.startswith(("input", "output")):
                yield msgspec.structs.replace(stats, name=".".join(part for part in (frame.module, place) if part))


def _most_telling(gradients: Iterable[TensorStats]) -> tuple[TensorStats, ...]:
    ordered = sorted(gradients, key=lambda one: (not one.is_bad, -(one.absmax or 0.0)))
    return tuple(ordered[:MOST_GRADIENTS])


def _forward_is_clean(accounts: list[Account]) -> bool:
    return all(one.culprit is None or one.culprit.kind is Kind.GRADIENT for one in accounts)


def _said(done: tuple[Replayed, ...]) -> str:
    """How far the replay came, in words; empty: not at all."""
    if not any(one.forward for one in done):
        return ""
    whole = all(one.backward for one in done)
    why_not = sorted({one.why_not for one in done if one.why_not})
    changed = any(one.changed_inputs for one in done)
    parts = ["forward and backward" if whole else "forward only" + (f" ({why_not[0]})" if why_not else "")]
    parts += ["its inputs were changed in place since"] if changed else []
    return "; ".join(parts)
