"""What is kept of the steps for the one that goes wrong: losses, overflows, learning rates, updates, which weights and inputs grew.

What became bad first is known on all ranks; the rest is asked of all of them together. Weights are sampled in a few steps, and read
whole only where one became bad. Changes nothing that it is given.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import Tensor

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Growth, RankReport, Tried
from dsdoctor.overflow.frames.frame import CallPhase, Frame
from dsdoctor.overflow.hooks import engine as deepspeed_engine
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.replay.remedy import candidate_modules, try_fp32
from dsdoctor.overflow.replay.replay import BatchRecorder
from dsdoctor.overflow.verdict.evidence import EXTREME_WEIGHT, earliest_bad, stays_bad

HALVES = (torch.float16, torch.bfloat16)
MAX_WEIGHTS = 64
"""Weights of which a sample is kept over a step."""
MAX_SAMPLE_ELEMENTS = 4096
MAX_NAMES = 4
MAX_RATES = 64
"""Steps whose learning rate is kept."""
MIN_RATE_JUMP = 5.0
"""A learning rate that becomes so many times larger from one step to the next is worth a word."""
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""What Adam and its kin, RMSprop and Adagrad divide by the root of, with eps added."""
CHUNK_ELEMENTS = 1 << 24
"""Elements that are looked at together: a partition may have billions."""
MAX_POINTS = 16
"""Readings of each weight that are kept: where there are more, every second one goes, but for the first."""
MAX_ALWAYS_REPLAYED = 3
"""So many overflows are always replayed, in a row or, with a dynamic loss scale, in all; after them only those whose number is
a power of two: a dynamic scale goes too high every thousand steps or so, and that is normal."""
MAX_LOSSES = 1024
CHECK_INTERVAL_STEPS = 100
"""Steps from check to check; the first ones are looked at after 1, 2, 4, 8 and so on."""
NAMES_OF_HALVES = ("float16", "bfloat16")
MADE_HERE = (BadKind.MODULE, BadKind.BETWEEN, BadKind.LOSS, BadKind.GRADIENT)
"""Kinds for which another precision may help: not where the batch or a weight is bad already."""


class WeightUpdates:
    """A sample of the weights that the optimizer writes in a half precision, before and after one step."""

    def __init__(self, engine: Any) -> None:
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._before = [(parameter, *sample) for parameter in _stepped(engine) if (sample := _sampled(parameter))]
        self._rates = any(group.get("lr", 0) for group in groups(engine))

    @torch.no_grad()
    def unchanged(self) -> tuple[tuple[str, float], ...]:
        """Names and the share of the weights with a gradient that the step left as they were, the largest first."""
        found = []
        for parameter, before, moves in self._before if self._rates else ():
            after = _sample_of(parameter)
            moving = int(moves.sum())
            if moving:
                same = int(((after == before) & moves).sum())
                found.append((self._names.get(id(parameter), f"a weight {tuple(parameter.shape)}"), same / moving))
        # only where it is so in most weights: a single layer that has converged is none of our business
        is_majority = sum(share > 0.5 for _, share in found) > len(found) / 2
        return tuple(sorted(found, key=lambda pair: -pair[1])[:MAX_NAMES]) if is_majority else ()


def _stepped(engine: Any) -> Iterator[Tensor]:
    """The weights that the innermost optimizer writes, if they are halves: with float32 copies it writes those."""
    number = 0
    for group in groups(engine):
        for parameter in group["params"]:
            if isinstance(parameter, Tensor) and parameter.dtype in HALVES and number < MAX_WEIGHTS:
                number += 1
                yield parameter


@torch.no_grad()
def _sampled(parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    gradient = parameter.grad
    if gradient is None or gradient.shape != parameter.shape or gradient.is_sparse or not parameter.numel():
        return None
    return _sample_of(parameter).clone(), _sample_of(gradient) != 0


def _sample_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // MAX_SAMPLE_ELEMENTS)]


class LearningRates:
    """The learning rates of the last steps."""

    def __init__(self) -> None:
        self._known: deque[tuple[int, float]] = deque(maxlen=MAX_RATES)

    def note(self, engine: Any, step: int) -> None:
        """The largest of the groups' rates; one that lies on a device is left out, since reading it waits."""
        found = [rate for group in groups(engine) if isinstance(rate := group.get("lr"), int | float)]
        if found:
            self._known.append((step, float(max(found, key=lambda rate: rate if math.isfinite(rate) else math.inf))))

    def jumps(self) -> tuple[tuple[int, float, float], ...]:
        """The steps in which the rate became many times larger, or no number, with what it was before and since."""
        found = []
        for (_, before), (step, since) in pairwise(self._known):
            if math.isfinite(before) and (not math.isfinite(since) or 0 < before * MIN_RATE_JUMP < since):
                found.append((step, before, since))
        return tuple(found)


def is_frozen(engine: Any, name: str) -> bool:
    """Whether a weight of the model has no gradient, so that no optimizer writes it."""
    weight = dict(engine.module.named_parameters()).get(name)
    return weight is not None and not weight.requires_grad


@torch.no_grad()
def zero_over_zero(engine: Any) -> int:
    """How many elements of the weights that the optimizer writes on this rank are bad, if its eps is 0 there and every one of
    them has a second moment of 0: its step made 0 / 0 of it. Else 0."""
    found = 0
    for weight, moment in _stepped_with_moments(engine):
        for part, squares in zip(weight.split(CHUNK_ELEMENTS), moment.split(CHUNK_ELEMENTS), strict=True):
            bad = ~torch.isfinite(part)
            number = int(bad.sum())
            if number != int((bad & (squares == 0)).sum()):
                return 0
            found += number
    return found


def _stepped_with_moments(engine: Any) -> Iterator[tuple[Tensor, Tensor]]:
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    eps = [group.get("eps") for group in groups(engine)]
    if not eps or not all(isinstance(each, int | float) for each in eps):
        return
    for weight, state in getattr(inner, "state", {}).items():
        moment = next((state[name] for name in SECOND_MOMENTS if isinstance(state.get(name), Tensor)), None)
        if moment is None or not isinstance(weight, Tensor) or moment.shape != weight.shape:
            continue
        # in a half precision 1e-8 is 0 too
        if all(float(torch.tensor(each, dtype=weight.dtype)) == 0 for each in eps):
            yield weight.detach().reshape(-1), moment.reshape(-1)


def groups(engine: Any) -> list[dict[str, Any]]:
    """The parameter groups of the innermost optimizer."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return getattr(inner, "param_groups", None) or []


class PointsByName:
    """For each name a few steps with a value: the first, and of the others fewer and fewer."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}

    def add(self, name: str, step: int, value: float) -> None:
        """A value of a step that comes after all before."""
        points = self._points.setdefault(name, [])
        points.append((step, value))
        if len(points) > MAX_POINTS:
            points[:] = points[:1] + points[2::2]

    def with_now(self, name: str, step: int, value: float) -> Growth:
        """What is known of a name, and its value now."""
        before = (point for point in self._points.get(name, ()) if point[0] < step)
        return Growth(name=name, points=(*before, (step, value)))


class InputSizes:
    """The largest absolute value of what each module was given, on this rank, in some steps."""

    def __init__(self) -> None:
        self._points = PointsByName()

    def note(self, step: int, frames: Iterable[Frame]) -> None:
        """The frames of a step's forwards."""
        largest: dict[str, float] = {}
        for frame in frames:
            for name, value in _given(frame):
                largest[name] = max(value, largest.get(name, 0.0))
        for name, value in largest.items():
            self._points.add(name, step, value)

    def of(self, found: FirstBad, step: int) -> tuple[Growth, ...]:
        """How what the first bad module was given grew up to now; only what was seen before."""
        seen = (self._points.with_now(name, step, value) for name, value in _given(found.frame))
        return tuple(growth for growth in seen if len(growth.points) > 1)


def _given(frame: Frame) -> Iterable[tuple[str, float]]:
    for tensor in frame.inputs:
        if frame.phase is CallPhase.FORWARD and tensor.absmax is not None and not tensor.is_bad:
            yield f"{tensor.name} of {frame.module or 'the model'}", tensor.absmax


class WeightSizes:
    """The largest absolute value of each weight, as far as this rank holds it, in the steps that are due."""

    def __init__(self) -> None:
        self._points = PointsByName()

    def note(self, engine: Any, step: int) -> None:
        """Read all weights: one pass, one wait for the device. No memory is held for it from one reading to the next."""
        for name, value in _largest(dict(engine.module.named_parameters()), Meters()).items():
            self._points.add(name, step, value)

    def of(self, engine: Any, found: FirstBad, step: int, meters: Meters) -> tuple[Growth, ...]:
        """How the weights of the first bad module grew up to now."""
        module = found.frame.module
        mine = {
            f"{module}.{name}".lstrip("."): parameter
            for place, part in engine.module.named_modules()
            if place == module
            for name, parameter in part.named_parameters(recurse=False)
        }
        return self._grown(_largest(mine, meters), step)

    def extreme(self, engine: Any, step: int, meters: Meters) -> tuple[Growth, ...]:
        """The weights of the whole model that are larger than any of an ordinary one: their values may go bad modules later."""
        now = _largest(dict(engine.module.named_parameters()), meters)
        return self._grown({name: value for name, value in now.items() if value >= EXTREME_WEIGHT}, step)

    def _grown(self, now: dict[str, float], step: int) -> tuple[Growth, ...]:
        return tuple(self._points.with_now(name, step, value) for name, value in now.items())


@torch.no_grad()
def _largest(parameters: dict[str, Any], meters: Meters) -> dict[str, float]:
    readings = Readings(meters)
    held = {name: readings.look(getattr(each, "ds_tensor", each)) for name, each in parameters.items()}
    readings.settle()
    stats = {name: readings.stats(number, name) for name, number in held.items() if isinstance(number, int)}
    return {name: each.absmax for name, each in stats.items() if each.absmax is not None}


class StepLosses:
    """The losses of a step: those that ``engine.backward`` was given, else those in the outputs of its forwards."""

    def __init__(self) -> None:
        self._given: list[Tensor] = []
        self._in_outputs: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """A loss that ``engine.backward`` was given."""
        self._given.append(loss.detach())
        del self._given[:-MAX_LOSSES]

    def add_output(self, output: Any) -> None:
        """The output of a forward, which may hold a loss."""
        loss = loss_in(output)
        if loss is not None:
            self._in_outputs.append(loss.detach())
            del self._in_outputs[:-MAX_LOSSES]

    def known(self) -> list[Tensor]:
        """The losses, one per micro-batch."""
        return self._given or self._in_outputs

    def any_bad(self) -> bool:
        """Whether a loss is not finite. Waits for the device, so only after DeepSpeed has waited for it itself."""
        return any(map(_is_bad, self.known()))

    def any_bad_output(self) -> bool:
        """Whether a loss that the model gave is not finite, whatever the script made of it. Waits for the device."""
        return any(map(_is_bad, self._in_outputs))

    def clear(self) -> None:
        """The step is over."""
        self._given, self._in_outputs = [], []


def _is_bad(loss: Tensor) -> bool:
    # one number is read, and judged here: cheaper than an operation whose result is read
    return not (math.isfinite(loss.item()) if loss.numel() == 1 else bool(torch.isfinite(loss).all()))


def loss_in(output: Any) -> Tensor | None:
    """The loss in a model's output: a scalar, what is called so, or the first of a tuple if that is a scalar."""
    if isinstance(output, dict | Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple) and output:
        output = output[0]
    else:
        output = getattr(output, "loss", output)
    return output if isinstance(output, Tensor) and output.dim() == 0 and output.is_floating_point() else None


class OverflowCount:
    """How many steps overflowed, in a row and in all, and how many in a row were skipped."""

    def __init__(self) -> None:
        self._in_a_row = self._in_all = self.skipped = 0

    def add(self, *, skipped: bool) -> None:
        """A step overflowed. ``skipped``: it is not applied."""
        self._in_a_row += 1
        self._in_all += 1
        self.skipped += skipped

    def clean_step(self) -> None:
        """A step did not overflow."""
        self._in_a_row = self.skipped = 0

    def is_replayed(self, *, dynamic: bool) -> bool:
        """Whether the overflow that was added last is replayed. ``dynamic``: the loss scale is.

        >>> count, replays = OverflowCount(), []
        >>> for _ in range(9):
        ...     count.add(skipped=True)
        ...     replays.append(count.is_replayed(dynamic=False))
        >>> [number for number, replay in enumerate(replays, start=1) if replay]
        [1, 2, 3, 4, 8]
        """
        often = self._in_all if dynamic else self._in_a_row
        return (
            often <= MAX_ALWAYS_REPLAYED
            or is_power_of_two(often)
            or (self._in_a_row > 1 and is_power_of_two(self._in_a_row))
        )


def is_power_of_two(number: int) -> bool:
    """1, 2, 4, 8 and so on."""
    return number & (number - 1) == 0


def is_due(step: int) -> bool:
    """Whether a step is one that is looked at.

    >>> [step for step in range(401) if is_due(step)]
    [0, 1, 3, 7, 15, 31, 63, 99, 199, 299, 399]
    """
    number = step + 1
    return number % CHECK_INTERVAL_STEPS == 0 or (number < CHECK_INTERVAL_STEPS and is_power_of_two(number))


class StepHistory:
    """What is kept between the steps for the day on which one goes wrong."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._sizes = WeightSizes()
        self._inputs = InputSizes()
        self._rates = LearningRates()
        self._meters = Meters()

    def note_rates(self, step: int) -> None:
        """A step is decided; costs nothing."""
        self._rates.note(self._engine, step)

    def note_weights(self, step: int) -> None:
        """A step in which the weights are read."""
        self._sizes.note(self._engine, step)

    def note_inputs(self, step: int, frames: Iterable[Frame]) -> None:
        """The frames of such a step, where the level takes any."""
        self._inputs.note(step, frames)

    def examined(self, recorder: BatchRecorder, rank_reports: list[RankReport]) -> list[RankReport]:
        """The reports with what is known of the first bad module's weights and of what helps; as they were where nothing is."""
        chosen = earliest_bad(tuple(rank_reports), *MADE_HERE)
        weight = earliest_bad(tuple(rank_reports), BadKind.WEIGHT)
        if weight is not None and (weight[0].held is None or weight[0].held.kind == "weight"):
            return self._examined_weight(rank_reports, *weight)
        if chosen is None or not all(report.replayed for report in rank_reports):
            return rank_reports
        report, found = chosen
        if found.kind is BadKind.GRADIENT and not any(map(stays_bad, rank_reports)):
            return rank_reports
        mine = next(each for each in rank_reports if each.rank == ranks.this_rank())
        attempts: tuple[Tried, ...] = ()
        has_batch = found.frame.micro < len(recorder.batches)
        if self._may_help(report, found, rank_reports) and not ranks.any_rank(not has_batch, self._engine.device):
            factor = 1.0 / max(1.0, mine.scale.value)
            number = found.frame.micro
            mine_only = candidate_modules(self._engine.module, found) if report.rank == ranks.this_rank() else ()
            # only the rank that has the module knows what is around it, and all try the same ones
            modules = next(names for names in ranks.gather(mine_only) if names)
            attempts = try_fp32(self._engine, recorder, number=number, modules=modules, factor=factor)
        growth = self._sizes.extreme(self._engine, report.step, self._meters)
        inputs: tuple[Growth, ...] = ()
        if found.kind is BadKind.MODULE:
            own = self._sizes.of(self._engine, found, report.step, self._meters)
            growth = (*own, *(each for each in growth if each not in own))
            inputs = self._inputs.of(found, report.step)
        more = msgspec.structs.replace(mine, tried=attempts, growth=growth, inputs=inputs, rates=self._rates.jumps())
        return ranks.gather(more)

    def _examined_weight(self, rank_reports: list[RankReport], report: RankReport, found: FirstBad) -> list[RankReport]:
        """The step that made a weight bad is over: what is left of it is the learning rate, and what its optimizer keeps."""
        mine = next(each for each in rank_reports if each.rank == ranks.this_rank())
        name = ".".join(part for part in (found.frame.module, found.tensor.name) if part)
        frozen = is_frozen(self._engine, report.held.name if report.held is not None else name)
        zeros = 0 if frozen else zero_over_zero(self._engine)
        return ranks.gather(
            msgspec.structs.replace(mine, rates=self._rates.jumps(), frozen=frozen, zero_over_zero=zeros)
        )

    def _may_help(self, report: RankReport, found: FirstBad, rank_reports: list[RankReport]) -> bool:
        """Whether something is computed in a half precision, and the replay showed what was live."""
        if deepspeed_engine.is_pipeline(self._engine) or any(each.differs_from_live for each in rank_reports):
            return False
        return report.dtype in NAMES_OF_HALVES or any(
            tensor.dtype in NAMES_OF_HALVES for tensor in found.frame.measured
        )
