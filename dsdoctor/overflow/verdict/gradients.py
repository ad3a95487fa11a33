"""Verdicts on a step whose forward is finite and whose gradients are not: reports of all ranks -> a Finding.

Pure; knows no torch.
"""

from collections.abc import Iterator

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.frames.dtypes import LIMITS
from dsdoctor.overflow.frames.first_bad import BadKind, RankReport
from dsdoctor.overflow.verdict.advice import RankReports, what_was_tried
from dsdoctor.overflow.verdict.evidence import (
    bad_gradient,
    earliest_bad,
    evidence,
    finding,
    gradient_names,
    near,
    rule_of,
    stays_bad,
)

SQUARES_END = LIMITS["float32"] ** 0.5
"""The square of a larger number is inf in float32."""

NORMAL_SKIPS = 30
"""Steps in a row that a dynamic loss scale may skip while it is searched: from 2**24 down to 1, and a few."""


def gradient_stays_at_scale_one(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient is not finite even with a loss scale of 1, while the forward is finite.

    The operation that the finding names divides by zero in its backward, takes the root of zero, or makes values beyond the
    limit of its dtype.

    Why it matters: lowering the loss scale does not help. DeepSpeed lowers it step by step to its floor and then gives up
    ("already at minimum").

    How to fix it: keep the input of the operation that is named away from zero (add an epsilon), run it in float32 with
    dsdoctor.fp32_forward, or clip what comes into it.

    Since: 0.1
    """
    bad = [rank_report for rank_report in rank_reports if stays_bad(rank_report)]
    if bad and any(rank_report.named or rank_report.local or rank_report.first_bad for rank_report in rank_reports):
        earliest = earliest_bad(rank_reports, BadKind.GRADIENT)
        first = bad[0] if earliest is None else earliest[0]
        scaled = first.dtype == "float16" or first.scale.value > 1
        scale = "at a loss scale of 1 too" if scaled else "without any loss scale"
        yield finding(
            gradient_stays_at_scale_one,
            f"{bad_gradient(first, rank_reports)}, {scale}, and the forward is finite",
            rank_reports,
            (first, first.first_bad),
            _what_to_do(rank_reports, first),
        )


def _what_to_do(rank_reports: RankReports, rank_report: RankReport) -> str:
    cure = rank_report.origin.cure if rank_report.origin is not None else ""
    return " ".join(part for part in (cure, what_was_tried(rank_reports, rank_report.first_bad)) if part) or (
        "Keep the operation that is named away from zero (an epsilon), run it in float32 "
        "(dsdoctor.fp32_forward), or clip what comes into it."
    )


def gradient_above_scale(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient overflowed because the loss scale is too high, while the forward is finite.

    Dynamic loss scaling finds the highest scale that fits by going too high now and then: the step is skipped, the scale
    is lowered, and training goes on.

    Why it matters: now and then it is normal. Something is growing only if it happens in most steps, and once the scale is
    at its floor every such step is lost.

    How to fix it: nothing is to be done, unless the finding is a warning. At the floor lower min_loss_scale in the fp16
    section of the DeepSpeed configuration.

    Since: 0.1
    """
    scaled = [rank_report for rank_report in rank_reports if rank_report.scale.value > 1 and rank_report.named]
    if not scaled or any(stays_bad(rank_report) or rank_report.other_loss for rank_report in rank_reports):
        return
    first = scaled[0]
    floor = first.scale.floor
    at_floor = floor is not None and first.scale.value <= floor
    make = Finding.warning if at_floor or first.skipped > NORMAL_SKIPS else Finding.note
    yield make(
        rule_of(gradient_above_scale),
        f"step {first.step} skipped: the gradient of {gradient_names(rank_reports)} overflows "
        f"at a loss scale of {near(first.scale.value)}{_scale_that_fits(first)}",
        evidence=evidence(rank_reports, first),
        fix="Lower min_loss_scale in the fp16 section: the scale is at its floor."
        if at_floor
        else "Nothing: the scale is lowered, and training goes on.",
    )


def _scale_that_fits(rank_report: RankReport) -> str:
    """The highest scale at which the gradients are finite, if they were replayed at scale 1."""
    largest = max((tensor.absmax or 0.0 for tensor in rank_report.at_scale_one or ()), default=0.0)
    if not largest:
        return ""
    return f"; the largest at scale 1 is {largest:.3g}, so it fits up to {near(LIMITS['float16'] / largest)}"


def gradient_norm_overflows(rank_reports: RankReports) -> Iterator[Finding]:
    """Every gradient is finite and their norm is not: the sum of their squares is beyond float32.

    Why it matters: the gradients have exploded, and clipping them by their norm cannot work any more. DeepSpeed skips the
    step.

    How to fix it: lower the learning rate, or look for a weight or an activation that has grown before it.

    Since: 0.1
    """
    local = [(tensor, rank_report) for rank_report in rank_reports for tensor in rank_report.local]
    if local and not any(rank_report.first_bad or rank_report.named for rank_report in rank_reports):
        largest, rank_report = max(local, key=lambda pair: pair[0].absmax or 0.0)
        if (largest.absmax or 0.0) > SQUARES_END:
            yield Finding.error(
                rule_of(gradient_norm_overflows),
                f"step {rank_report.step}: every gradient is finite and their norm is not: "
                f"{largest.name} has {largest.absmax:.3g}",
                evidence=evidence(rank_reports, rank_report),
                affects=(largest.name,),
                fix="Lower the learning rate, or look for a weight or an activation that has grown before it.",
            )


def overflow_not_reproduced(rank_reports: RankReports) -> Iterator[Finding]:
    """DeepSpeed found an overflow, and the replay of the same batch with the same random numbers is finite.

    Why it matters: something differs between the two runs: an operation that is not deterministic, inputs that were changed
    in place after the forward, or a GPU that computes wrongly now and then.

    How to fix it: if it comes back on one rank only, suspect that rank's GPU: run its memory test and look at its ECC
    counters. Else watch every module in every batch, which shows the overflow live:

        $ python -m dsdoctor.run --overflow frames train.py

    Since: 0.1
    """
    if all(rank_report.first_bad is None for rank_report in rank_reports) and any(
        rank_report.replayed for rank_report in rank_reports
    ):
        named = next((rank_report for rank_report in rank_reports if rank_report.named), rank_reports[0])
        names = gradient_names(rank_reports) or "some gradient"
        yield Finding.warning(
            rule_of(overflow_not_reproduced),
            f"step {named.step}: {names} overflowed, and the replay of the batch ({named.replayed}) shows nothing bad",
            evidence=evidence(rank_reports, named),
            fix="If it comes back on one rank only, suspect its GPU; else use --overflow frames to see it live.",
        )


def gradient_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """Gradients are not finite, and the batch could not be replayed: the names of the parameters are all that is known.

    Why it matters: DeepSpeed skips the step, or the weights become nan where it does not check. Where the nan or inf came
    from is not known yet.

    How to fix it: watch every module in every batch, which shows the next overflow live.

        $ python -m dsdoctor.run --overflow frames train.py

    Since: 0.1
    """
    named = [rank_report for rank_report in rank_reports if rank_report.named]
    if named:
        yield Finding.error(
            rule_of(gradient_not_finite),
            f"step {named[0].step}: the gradient of {gradient_names(rank_reports)} is not finite",
            evidence=evidence(rank_reports, named[0]),
            fix="Watch with --overflow frames to see where it comes from.",
        )
