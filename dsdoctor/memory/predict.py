"""Settings, a model's shape and a run -> a rank's ledger: two steps are followed from call to call, then a checkpoint is saved."""

from typing import Protocol

from dsdoctor.memory import names
from dsdoctor.memory.account import Account
from dsdoctor.memory.activations import follow, parts
from dsdoctor.memory.models import Kind, Layout, ModelShape, Moment, Point, Prediction, Run, ZeroSettings
from dsdoctor.memory.stage0 import Stage0
from dsdoctor.memory.stage3 import Stage3
from dsdoctor.memory.stage12 import Bf16Stage1, Stage12


class Stage(Protocol):
    """What a stage of ZeRO does at each call, to an account."""

    def initialize(self) -> None:
        """deepspeed.initialize."""

    def micro_step(self, number: int, *, last: bool) -> None:
        """One of the micro batches of a step begins, counted from 0. ``last``: the step follows it."""

    def forward_begins(self) -> None:
        """The engine is called."""

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


MICRO_STEPS = 3
"""So many micro batches of a step are followed at most: the first, one that adds to it, and the one that ends it."""


def stage_of(account: Account, settings: ZeroSettings, model: ModelShape, layout: Layout) -> Stage:
    """The wrapper that DeepSpeedEngine._do_optimizer_sanity_check chooses."""
    if settings.stage == 0:
        return Stage0(account, settings, model, layout)
    if settings.stage == 3:
        return Stage3(account, settings, model, layout)
    mixed = settings.dtype == "bfloat16" and settings.accumulation_dtype == "float32"
    if settings.stage == 1 and mixed and settings.offload_optimizer == "none":
        return Bf16Stage1(account, settings, model, layout)
    return Stage12(account, settings, model, layout)


def predict(settings: ZeroSettings, model: ModelShape, run: Run | None, layout: Layout) -> Prediction:
    """A rank's ledger. Without a run, states alone: the peaks of forward and backward are not told."""
    account = Account(together=layout.together)
    stage = stage_of(account, settings, model, layout)
    account.begin()
    stage.initialize()
    account.begin()
    moments = [account.moment(Point.AFTER_INITIALIZE)]
    follows = run is not None and not run.error
    if run is not None and follows:
        account.hold(names.INPUTS, run.inputs)
        moments += _micro_steps(account, stage, settings, run, (Point.FIRST_FORWARD, Point.FIRST_BACKWARD))
    elif settings.stage != 3:
        stage.micro_step(0, last=True)
        for number in reversed(model.trained):
            stage.gradient(number)
        stage.backward_ends()
    moments.append(_step(account, stage, Point.FIRST_STEP))
    account.begin()
    moments.append(account.moment(Point.AFTER_STEP))
    if run is not None and follows:
        moments += _micro_steps(account, stage, settings, run, (Point.FORWARD, Point.BACKWARD))
        moments.append(_step(account, stage, Point.STEP))
    account.begin()
    stage.save()
    moments.append(account.moment(Point.SAVE))
    return Prediction(layout=layout, moments=tuple(moments))


def _step(account: Account, stage: Stage, point: Point) -> Moment:
    account.begin()
    stage.step()
    return account.moment(point)


def _micro_steps(
    account: Account, stage: Stage, settings: ZeroSettings, run: Run, points: tuple[Point, Point]
) -> list[Moment]:
    """The most of forward and of backward over the micro batches of a step."""
    many = min(settings.accumulation_steps, MICRO_STEPS)
    found: dict[Point, Moment] = {}
    for number in range(many):
        stage.micro_step(number, last=number == many - 1)
        account.begin()
        stage.forward_begins()
        for point, events in zip(points, parts(run), strict=True):
            if point is points[1]:
                account.begin()
            for kind, index in follow(account, run, events):
                _tell(stage, kind, index)
            moment = account.moment(point)
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
