"""What to change so that less memory is taken, cheapest first: each change is predicted anew, none is a rule of thumb."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dsdoctor.memory.activations import head_end
from dsdoctor.memory.models import Kind, Layout, ModelShape, Prediction, Run, ZeroSettings
from dsdoctor.memory.predict import predict

CHUNKS = 8
MODERATE_BUCKET = 50_000_000
NEAR = 20_000_000
WORTH = 0.98
"""What is left of the peak after a change that is worth its cost, at most."""
ZERO = "zero_optimization."


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is predicted: a configuration, a model, and one of its runs (None: states alone)."""

    settings: ZeroSettings
    model: ModelShape
    run: Run | None
    layout: Layout

    def predicted(self) -> Prediction:
        """Its ledger."""
        return predict(self.settings, self.model, self.run, self.layout)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing to change. ``set``: keys and values, where it is in the configuration. ``won``: bytes less at the device's
    peak; ``host``: bytes more at the host's."""

    what: str
    cost: str
    set: tuple[tuple[str, str], ...]
    won: int
    peak: int
    host: int


@dataclass(frozen=True, kw_only=True)
class Enough:
    """Changes that are enough together, and what is left at the device's peak. ``fits``: they are."""

    what: tuple[str, ...]
    peak: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A change that was not predicted yet."""

    what: str
    cost: str
    after: Situation
    set: tuple[tuple[str, str], ...] = ()


def changes(now: Situation) -> tuple[Change, ...]:
    """All changes that win something, in the order of what they cost."""
    before = now.predicted()
    host = max(moment.host for moment in before.moments)
    found = []
    for look in CANDIDATES:
        for candidate in look(now):
            after = candidate.after.predicted()
            won = before.peak.device - after.peak.device
            if won > 0:
                more = max(moment.host for moment in after.moments) - host
                found.append(
                    Change(
                        what=candidate.what,
                        cost=candidate.cost,
                        set=candidate.set,
                        won=won,
                        peak=after.peak.device,
                        host=more,
                    )
                )
    return tuple(found)


def enough(now: Situation, limit: int) -> Enough:
    """One change after the other, cheapest first, until the peak is within ``limit``; those that win next to nothing are
    left out."""
    names: list[str] = []
    peak = now.predicted().peak.device
    for look in CANDIDATES:
        for candidate in look(now):
            after = candidate.after.predicted().peak.device
            if peak <= limit:
                return Enough(what=tuple(names), peak=peak, fits=True)
            if after < peak * WORTH:
                now, peak = candidate.after, after
                names.append(candidate.what)
                break
    return Enough(what=tuple(names), peak=peak, fits=peak <= limit)


def with_settings(now: Situation, **values: object) -> Situation:
    """The same with other settings."""
    return replace(now, settings=replace(now.settings, **values))  # type: ignore[arg-type]


def smaller_buckets(now: Situation) -> Iterator[Candidate]:
    """reduce_bucket_size: never more than all gradients together, and no more than hides the latency."""
    trained = sum(now.model.parameters[number][1] for number in now.model.trained)
    size = min(MODERATE_BUCKET, trained)
    if now.settings.stage and size < now.settings.reduce_bucket_size:
        yield Candidate(
            what="a smaller bucket for gradients",
            cost="more and smaller collectives in the backward pass",
            set=((ZERO + "reduce_bucket_size", str(size)),),
            after=with_settings(now, reduce_bucket_size=size),
        )


def no_overlap(now: Situation) -> Iterator[Candidate]:
    """overlap_comm takes a second bucket in stages 1 and 2."""
    if now.settings.stage in {1, 2} and now.settings.overlap_comm:
        yield Candidate(
            what="one bucket instead of two",
            cost="gradients are reduced after they are computed, and not meanwhile",
            set=((ZERO + "overlap_comm", "false"),),
            after=with_settings(now, overlap_comm=False),
        )


def fewer_live_parameters(now: Situation) -> Iterator[Candidate]:
    """Stage 3 keeps what is used again within max_reuse_distance, and gathers ahead up to max_live_parameters."""
    if now.settings.stage == 3:
        near = min(NEAR, now.settings.max_reuse_distance)
        ahead = min(NEAR, now.settings.prefetch_bucket_size)
        yield Candidate(
            what="fewer gathered parameters at a time",
            cost="parameters are gathered again, and less ahead",
            set=((ZERO + "stage3_max_reuse_distance", str(near)), (ZERO + "stage3_prefetch_bucket_size", str(ahead))),
            after=with_settings(now, max_reuse_distance=near, prefetch_bucket_size=ahead),
        )


def higher_stage(now: Situation) -> Iterator[Candidate]:
    """The next stages of ZeRO."""
    costs = {
        1: "none to speak of: as much is communicated",
        2: "gradients are reduced in every micro batch",
        3: "half as much communication again, in forward and backward",
    }
    for stage in range(now.settings.stage + 1, 4):
        if now.layout.world > 1:
            changed = with_settings(now, stage=stage, overlap_comm=stage == 3)
            bucket = min(changed.settings.reduce_bucket_size, MODERATE_BUCKET)
            yield Candidate(
                what=f"ZeRO stage {stage}",
                cost=costs[stage],
                set=((ZERO + "stage", str(stage)), (ZERO + "reduce_bucket_size", str(bucket))),
                after=with_settings(changed, reduce_bucket_size=bucket),
            )


def run_like(now: Situation, batch: int, *, checkpointing: bool) -> Run | None:
    """The run of another batch, where the model was followed with it."""
    if now.run is None:
        return None
    return now.model.run_like(replace(now.run, batch=batch, checkpointing=checkpointing))


def checkpointing(now: Situation) -> Iterator[Candidate]:
    """Activations computed again in the backward pass."""
    other = run_like(now, now.run.batch, checkpointing=True) if now.run else None
    if now.run and not now.run.checkpointing and other:
        yield Candidate(
            what="activation checkpointing: model.gradient_checkpointing_enable()",
            cost="about a third more computing: each layer's forward runs twice",
            after=replace(now, run=other),
        )


def chunked_loss(now: Situation) -> Iterator[Candidate]:
    """A loss that makes the logits a piece at a time."""
    if now.run and now.run.logits and not now.run.error:
        yield Candidate(
            what=f"a loss that makes the logits in {CHUNKS} pieces (Liger's fused linear cross entropy, for one)",
            cost="another loss function; the head's product is computed twice by some",
            after=replace(now, run=in_chunks(now.run)),
        )


def in_chunks(run: Run) -> Run:
    """The run with logits and loss, from the head to the first gradient, divided."""
    end = head_end(run)
    base = run.events[end][3] - run.logits
    first = next((n for n, event in enumerate(run.events) if event[0] == Kind.GRADIENT), end)

    def less(number: int, size: int) -> int:
        return base + (size - base) // CHUNKS if end <= number <= first and size > base else size

    events = tuple((kind, index, less(n, most), less(n, now)) for n, (kind, index, most, now) in enumerate(run.events))
    return replace(run, events=events, logits=run.logits // CHUNKS)


def smaller_batch(now: Situation) -> Iterator[Candidate]:
    """Half the micro batch, twice the accumulation: the same batch altogether."""
    half = now.run.batch // 2 if now.run else 0
    other = run_like(now, half, checkpointing=now.run.checkpointing) if now.run and half else None
    if other:
        steps = now.settings.accumulation_steps * 2
        yield Candidate(
            what=f"micro batch {half}, accumulated over {steps} steps",
            cost="smaller products, twice as many of them",
            set=(("train_micro_batch_size_per_gpu", str(half)), ("gradient_accumulation_steps", str(steps))),
            after=replace(now, run=other),
        )


def offload_optimizer(now: Situation) -> Iterator[Candidate]:
    """The fp32 copy and the optimizer's states on the host."""
    if now.settings.stage and now.settings.offload_optimizer == "none":
        yield Candidate(
            what="the optimizer on the host",
            cost="its step runs on the CPU, and gradients and parameters go over PCIe in every step",
            set=((ZERO + "offload_optimizer.device", "cpu"),),
            after=with_settings(now, offload_optimizer="cpu"),
        )


def offload_param(now: Situation) -> Iterator[Candidate]:
    """Parameters on the host, too."""
    if now.settings.stage == 3 and now.settings.offload_param == "none":
        optimizer = now.settings.offload_optimizer if now.settings.offload_optimizer != "none" else "cpu"
        yield Candidate(
            what="parameters and the optimizer on the host",
            cost="each parameter goes over PCIe for forward and for backward",
            set=((ZERO + "offload_param.device", "cpu"), (ZERO + "offload_optimizer.device", optimizer)),
            after=with_settings(now, offload_param="cpu", offload_optimizer=optimizer),
        )


CANDIDATES: tuple[Callable[[Situation], Iterator[Candidate]], ...] = (
    smaller_buckets,
    fewer_live_parameters,
    no_overlap,
    chunked_loss,
    checkpointing,
    smaller_batch,
    higher_stage,
    offload_optimizer,
    offload_param,
)
