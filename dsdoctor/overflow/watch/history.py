"""What is kept of the steps for the one that goes wrong: which weights and inputs grew, the learning rates, what helps.

What became bad first is known on all ranks; the rest is asked of all of them together.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import torch

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Growth, RankReport, Tried
from dsdoctor.overflow.frames.frame import Frame
from dsdoctor.overflow.hooks import engine as engine_facts
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.remedy import candidate_modules, try_fp32
from dsdoctor.overflow.replay.replay import BatchRecorder
from dsdoctor.overflow.verdict.evidence import earliest_bad, stays_bad
from dsdoctor.overflow.watch.growth import InputSizes, WeightSizes
from dsdoctor.overflow.watch.optimizer import LearningRates, is_frozen, zero_over_zero
from dsdoctor.overflow.watch.steps import is_power_of_two

CHECK_INTERVAL_STEPS = 100
"""Steps from check to check; the first ones are looked at after 1, 2, 4, 8 and so on."""
NAMES_OF_HALVES = ("float16", "bfloat16")
MADE_HERE = (BadKind.MODULE, BadKind.BETWEEN, BadKind.LOSS, BadKind.GRADIENT)
"""Kinds for which another precision may help: not where the batch or a weight is bad already."""


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
        if self._may_help(report, found, rank_reports) and _has_it(recorder, found, self._engine.device):
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
        if engine_facts.is_pipeline(self._engine) or any(each.differs_from_live for each in rank_reports):
            return False
        return report.dtype in NAMES_OF_HALVES or any(
            tensor.dtype in NAMES_OF_HALVES for tensor in found.frame.measured
        )


def _has_it(recorder: BatchRecorder, found: FirstBad, device: torch.device) -> bool:
    return not ranks.any_rank(found.frame.micro >= len(recorder.batches), device)
