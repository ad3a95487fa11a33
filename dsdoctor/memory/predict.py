"""A rank's ledger, predicted; what to change so that less memory is taken, cheapest first; and what fits a number of GPUs.

Two steps are followed from call to call, then a checkpoint is saved. Each change is predicted anew, none is a rule of thumb. What
a GPU holds beyond live tensors is a range that was not measured here: its figures are assumptions.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from dsdoctor.memory import ledger as names
from dsdoctor.memory.ledger import Ledger, follow, head_end, parts
from dsdoctor.memory.models import Kind, Layout, ModelShape, Moment, Point, Prediction, Run, ZeroSettings
from dsdoctor.memory.stage3 import Stage3
from dsdoctor.memory.stage12 import Bf16Stage1, Stage0, Stage12
from dsdoctor.rules import book

GIB = 1 << 30
SLACK = 50
"""Of this many bytes of tensors the allocator holds one more at least."""
MAX_SLACK = 8
"""Of this many, one more at most."""
MAX_MICRO_STEPS = 3
"""So many micro batches of a step are followed at most: the first, one that adds to it, and the one that ends it."""
CHUNKS = 8
MODERATE_BUCKET = 50_000_000
NEAR = 20_000_000
MIN_WON_SHARE = 0.01
"""Of the peak: a change that wins less is not advised."""
SHARE_THAT_MATTERS = 0.05
"""Of the peak: a change that wins less is not the first to be advised."""
MAX_LEFT_SHARE = 0.98
"""What is left of the peak after a change that is worth its cost, at most."""
ZERO = "zero_optimization."
MAX_BATCH = 1 << 14
MAX_RANKS = 1 << 12


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """A thing whose bytes are not computed: from ``low`` to ``high``."""

    what: str
    low: int
    high: int


class Stage(Protocol):
    """What a stage of ZeRO does at each call, to a ledger."""

    def initialize(self) -> None:
        """deepspeed.initialize."""

    def micro_step(self, number: int, *, last: bool) -> None:
        """One of the micro batches of a step begins, counted from 0. ``last``: the step follows it."""

    def forward_begins(self, again: frozenset[int]) -> None:
        """The engine is called. ``again``: modules that the backward pass will call once more (activation checkpointing)."""

    def before_forward(self, module: int) -> None:
        """A module that has parameters is called."""

    def after_forward(self, module: int) -> None:
        """It has returned."""

    def before_backward(self, module: int) -> None:
        """The gradient of its output is there."""

    def after_backward(self, module: int) -> None:
        """The gradients of its inputs are there."""

    def gradient(self, number: int) -> None:
        """A parameter's gradient is there."""

    def backward_ends(self) -> None:
        """All gradients are there."""

    def step(self) -> None:
        """engine.step, at a boundary of accumulation."""

    def save(self) -> None:
        """engine.save_checkpoint."""


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
class CombinedChanges:
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


@dataclass(frozen=True, kw_only=True)
class Searched:
    """``batch``: the largest micro batch that fits so many ranks, 0 for none. ``ranks``: the fewest that fit the batch that
    was asked for, None where even thousands do not."""

    batch: int
    batch_peak: int
    ranks: int | None
    ranks_peak: int | None


def predict(settings: ZeroSettings, model: ModelShape, run: Run | None, layout: Layout) -> Prediction:
    """A rank's ledger. Without a run, states alone: the peaks of forward and backward are not told."""
    ledger = Ledger(together=layout.together)
    stage = stage_of(ledger, settings, model, layout)
    ledger.begin()
    stage.initialize()
    ledger.begin()
    moments = [ledger.moment(Point.AFTER_INITIALIZE)]
    follows = run is not None and not run.error
    if run is not None and follows:
        ledger.hold(names.INPUTS, run.inputs)
        moments += _micro_steps(ledger, stage, settings, run, (Point.FIRST_FORWARD, Point.FIRST_BACKWARD))
    elif settings.stage != 3:
        stage.micro_step(0, last=True)
        for number in reversed(model.trained):
            stage.gradient(number)
        stage.backward_ends()
    moments.append(_step(ledger, stage, Point.FIRST_STEP))
    ledger.begin()
    moments.append(ledger.moment(Point.AFTER_STEP))
    if run is not None and follows:
        moments += _micro_steps(ledger, stage, settings, run, (Point.FORWARD, Point.BACKWARD))
        moments.append(_step(ledger, stage, Point.STEP))
    ledger.begin()
    stage.save()
    moments.append(ledger.moment(Point.SAVE))
    return Prediction(layout=layout, moments=tuple(moments))


def changes(now: Situation) -> tuple[Change, ...]:
    """All changes that win at least MIN_WON_SHARE of the peak, in the order of what they cost; those that win little come last."""
    before = now.predicted()
    host = max(moment.host for moment in before.moments)
    found = []
    for look in CANDIDATES:
        for candidate in look(now):
            after = candidate.after.predicted()
            won = before.peak.device - after.peak.device
            if won > 0 and won >= before.peak.device * MIN_WON_SHARE:
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
    return tuple(sorted(found, key=lambda change: change.won < before.peak.device * SHARE_THAT_MATTERS))


def combine(now: Situation, limit: int) -> CombinedChanges:
    """One change after the other, cheapest first, until the peak is within ``limit``; those that win next to nothing are
    left out."""
    names: list[str] = []
    peak = now.predicted().peak.device
    for look in CANDIDATES:
        for candidate in look(now):
            after = candidate.after.predicted().peak.device
            if peak <= limit:
                return CombinedChanges(what=tuple(names), peak=peak, fits=True)
            if after < peak * MAX_LEFT_SHARE:
                now, peak = candidate.after, after
                names.append(candidate.what)
                break
    return CombinedChanges(what=tuple(names), peak=peak, fits=peak <= limit)


def search(now: Situation, one: Run, two: Run, limit: int, *, on_node: int = 1) -> Searched:
    """What fits ``limit`` bytes on each GPU. GPUs are counted in whole nodes of ``on_node``, beyond the first."""

    def peak(batch: int, ranks: int) -> int:
        run = between(one, two, batch)
        return replace(now, run=run, layout=replace(now.layout, world=ranks)).predicted().peak.device

    wanted = now.run.batch if now.run else 1
    batch = largest(lambda batch: peak(batch, now.layout.world) <= limit, MAX_BATCH)
    fewest = whole_nodes(smallest(lambda ranks: peak(wanted, ranks) <= limit, MAX_RANKS), on_node)
    return Searched(
        batch=batch,
        batch_peak=peak(batch, now.layout.world) if batch else 0,
        ranks=fewest,
        ranks_peak=peak(wanted, fewest) if fewest else None,
    )


def overheads_of(peak: int, *, world: int) -> tuple[Overhead, ...]:
    """Context and libraries, buffers for communication, and what the caching allocator holds beyond live tensors."""
    context = Overhead(what="CUDA context and libraries", low=int(0.4 * GIB), high=int(1.2 * GIB))
    nccl = Overhead(what="NCCL buffers", low=int(0.1 * GIB), high=int(1.5 * GIB))
    slack = Overhead(what=book.phrase("memory", "allocator"), low=peak // SLACK, high=peak // MAX_SLACK)
    return (context, *([nccl] if world > 1 else []), slack)


def room(memory: int, *, world: int, safe: bool = False) -> int:
    """Bytes of tensors that a GPU has place for, with the least that is beside them; ``safe``: with the most.

    >>> room(80 << 30, world=1) >> 30, room(80 << 30, world=1, safe=True) >> 30
    (78, 70)
    """
    fixed, slack = sum(each.low for each in overheads_of(0, world=world)), SLACK
    if safe:
        fixed, slack = sum(each.high for each in overheads_of(0, world=world)), MAX_SLACK
    return (memory - fixed) * slack // (slack + 1)


def whole_nodes(ranks: int | None, on_node: int) -> int | None:
    """So many GPUs as nodes have that hold them: a part of the first, or whole ones.

    >>> whole_nodes(3, 8), whole_nodes(8, 8), whole_nodes(13, 8), whole_nodes(None, 8)
    (3, 8, 16, None)
    """
    return ranks if ranks is None or ranks <= on_node else -(-ranks // on_node) * on_node


def stage_of(ledger: Ledger, settings: ZeroSettings, model: ModelShape, layout: Layout) -> Stage:
    """The wrapper that DeepSpeedEngine._do_optimizer_sanity_check chooses."""
    if settings.stage == 0:
        return Stage0(ledger, settings, model, layout)
    if settings.stage == 3:
        return Stage3(ledger, settings, model, layout)
    mixed = settings.dtype == "bfloat16" and settings.accumulation_dtype == "float32"
    if settings.stage == 1 and mixed and settings.offload_optimizer == "none":
        return Bf16Stage1(ledger, settings, model, layout)
    return Stage12(ledger, settings, model, layout)


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
            cost="gradients are reduced after the backward pass, without overlap",
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
            cost="parameters are gathered more often, with less prefetching",
            set=((ZERO + "stage3_max_reuse_distance", str(near)), (ZERO + "stage3_prefetch_bucket_size", str(ahead))),
            after=with_settings(now, max_reuse_distance=near, prefetch_bucket_size=ahead),
        )


def higher_stage(now: Situation) -> Iterator[Candidate]:
    """The next stages of ZeRO."""
    costs = {
        1: "negligible: communication is unchanged",
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
            cost="about a third more compute: each layer's forward runs twice",
            after=replace(now, run=other),
        )


def chunked_loss(now: Situation) -> Iterator[Candidate]:
    """A loss that makes the logits a piece at a time."""
    if now.run and now.run.logits and not now.run.error:
        yield Candidate(
            what=book.phrase("memory", "chunked-loss", chunks=CHUNKS),
            cost="a different loss function; some compute the head's product twice",
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
            what=book.phrase("memory", "smaller-batch", batch=half, steps=steps),
            cost="smaller matrix products, twice as many",
            set=(("train_micro_batch_size_per_gpu", str(half)), ("gradient_accumulation_steps", str(steps))),
            after=replace(now, run=other),
        )


def offload_optimizer(now: Situation) -> Iterator[Candidate]:
    """The fp32 copy and the optimizer's states on the host."""
    if now.settings.stage and now.settings.offload_optimizer == "none":
        yield Candidate(
            what="the optimizer on the host",
            cost="its step runs on the CPU; gradients and parameters cross PCIe in every step",
            set=((ZERO + "offload_optimizer.device", "cpu"),),
            after=with_settings(now, offload_optimizer="cpu"),
        )


def offload_param(now: Situation) -> Iterator[Candidate]:
    """Parameters on the host, too."""
    if now.settings.stage == 3 and now.settings.offload_param == "none":
        optimizer = now.settings.offload_optimizer if now.settings.offload_optimizer != "none" else "cpu"
        yield Candidate(
            what="parameters and the optimizer on the host",
            cost="each parameter crosses PCIe in forward and in backward",
            set=((ZERO + "offload_param.device", "cpu"), (ZERO + "offload_optimizer.device", optimizer)),
            after=with_settings(now, offload_param="cpu", offload_optimizer=optimizer),
        )


def between(one: Run, two: Run, batch: int) -> Run:
    """The run of a batch, on the line through those of two batches: tensors grow with it or do not.

    Raises ValueError where the two do not do the same.
    """
    if [event[:2] for event in one.events] != [event[:2] for event in two.events] or one.batch == two.batch:
        raise ValueError("two batches do not run alike")

    def on_line(first: int, second: int) -> int:
        return max(0, first + (second - first) * (batch - one.batch) // (two.batch - one.batch))

    events = tuple(
        (kind, index, on_line(most, other[2]), on_line(now, other[3]))
        for (kind, index, most, now), other in zip(one.events, two.events, strict=True)
    )
    return replace(
        one,
        batch=batch,
        events=events,
        logits=on_line(one.logits, two.logits),
        inputs=on_line(one.inputs, two.inputs),
    )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to ``most`` that fits, where smaller ones fit as well; 0 for none.

    >>> largest(lambda n: n <= 37, 100), largest(lambda n: False, 8), largest(lambda n: True, 9)
    (37, 0, 9)
    """
    if not fits(1):
        return 0
    good, step = 1, 1
    while good + step <= most and fits(good + step):
        good, step = good + step, step * 2
    while step:
        if good + step <= most and fits(good + step):
            good += step
        else:
            step //= 2
    return good


def smallest(fits: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 to ``most`` that fits, where larger ones fit as well; None for none.

    >>> smallest(lambda n: n >= 37, 100), smallest(lambda n: False, 8), smallest(lambda n: True, 9)
    (37, None, 1)
    """
    below = largest(lambda number: not fits(number), most)
    return below + 1 if below < most else None


def _step(ledger: Ledger, stage: Stage, point: Point) -> Moment:
    ledger.begin()
    stage.step()
    return ledger.moment(point)


def _micro_steps(
    ledger: Ledger, stage: Stage, settings: ZeroSettings, run: Run, points: tuple[Point, Point]
) -> list[Moment]:
    """The most of forward and of backward over the micro batches of a step."""
    many = min(settings.accumulation_steps, MAX_MICRO_STEPS)
    found: dict[Point, Moment] = {}
    again = frozenset(index for kind, index, *_ in run.events[parts(run)[1]] if kind == Kind.PRE_FORWARD)
    for number in range(many):
        stage.micro_step(number, last=number == many - 1)
        ledger.begin()
        stage.forward_begins(again)
        for point, events in zip(points, parts(run), strict=True):
            if point is points[1]:
                ledger.begin()
            for kind, index in follow(ledger, run, events):
                _tell(stage, kind, index)
            moment = ledger.moment(point)
            if point not in found or moment.device > found[point].device:
                found[point] = moment
    return [found[point] for point in points]


def _tell(stage: Stage, kind: Kind, index: int) -> None:
    modules = {
        Kind.PRE_FORWARD: stage.before_forward,
        Kind.POST_FORWARD: stage.after_forward,
        Kind.PRE_BACKWARD: stage.before_backward,
        Kind.POST_BACKWARD: stage.after_backward,
        Kind.GRADIENT: stage.gradient,
    }
    if kind in modules:
        modules[kind](index)
    elif kind is Kind.END:
        stage.backward_ends()


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
