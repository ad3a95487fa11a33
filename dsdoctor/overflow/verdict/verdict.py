"""The reports of all ranks -> what went wrong first, where, on which ranks, and what to do. Pure; knows no torch.

Each generator of CAUSES and BESIDE is one verdict: its docstring is its manual page, its name with hyphens is its rule.
"""

import inspect
from collections.abc import Iterable

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.verdict.evidence import Verdict, rule_of
from dsdoctor.overflow.verdict.forward import (
    loss_not_finite,
    nan_in_the_batch,
    overflow_between_modules,
    overflow_in_module,
    weight_not_finite,
)
from dsdoctor.overflow.verdict.gradients import (
    gradient_above_scale,
    gradient_norm_overflows,
    gradient_not_finite,
    gradient_stays_at_scale_one,
    overflow_not_reproduced,
)
from dsdoctor.overflow.verdict.steps import (
    bad_step_applied,
    checkpoint_not_loaded,
    loss_not_scaled,
    steps_skipped_in_a_row,
)
from dsdoctor.overflow.verdict.underflow import activations_underflow, gradients_underflow, updates_too_small


def judge(rank_reports: Iterable[RankReport]) -> tuple[Finding, ...]:
    """The verdicts on one bad step, the cause first. Takes the reports of all ranks that took part, in any order."""
    ordered = tuple(sorted(rank_reports, key=lambda rank_report: rank_report.rank))
    cause = next((found for verdict in CAUSES for found in verdict(ordered)), None)
    beside = tuple(found for verdict in BESIDE for found in verdict(ordered))
    return (*(() if cause is None else (cause,)), *beside)


def manual_pages() -> dict[str, str]:
    """The manual page of each verdict by its rule."""
    return {rule_of(verdict): inspect.getdoc(verdict) or "" for verdict in (*CAUSES, *BESIDE)}


# the first of these that yields a finding is the cause: what explains more comes first
CAUSES: tuple[Verdict, ...] = (
    nan_in_the_batch,
    weight_not_finite,
    overflow_in_module,
    overflow_between_modules,
    loss_not_finite,
    gradient_stays_at_scale_one,
    gradient_above_scale,
    gradient_norm_overflows,
    overflow_not_reproduced,
    gradient_not_finite,
)
# all of these are reported, whatever the cause is
BESIDE: tuple[Verdict, ...] = (
    bad_step_applied,
    loss_not_scaled,
    steps_skipped_in_a_row,
    checkpoint_not_loaded,
    activations_underflow,
    gradients_underflow,
    updates_too_small,
)
