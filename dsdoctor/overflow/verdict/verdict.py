"""Verdicts on a step whose forward is finite and whose gradients are not: reports of all ranks -> a Finding.

Pure; knows no torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.frames.first_bad import BadKind, RankReport
from dsdoctor.overflow.frames.frame import LIMITS
from dsdoctor.overflow.verdict.evidence import (
    RankReports,
    Verdict,
    bad_gradient,
    earliest_bad,
    evidence,
    finding,
    gradient_names,
    near,
    of_growth,
    ranks_say,
    rule_of,
    stays_bad,
    what_was_tried,
    where,
)
from dsdoctor.overflow.verdict.forward import (
    loss_not_finite,
    nan_in_the_batch,
    overflow_between_modules,
    overflow_in_module,
    weight_not_finite,
)

SQUARES_END = LIMITS["float32"] ** 0.5
"""The square of a larger number is inf in float32."""

MASKED_TOO_LATE = (
    "Look at a logarithm, a root or a division in the script's loss whose result is masked: mask what goes into it instead. If it "
    "happens again, the operation and its line are told."
)
NORMAL_SKIPS = 30
"""Steps in a row that a dynamic loss scale may skip while it is searched: from 2**24 down to 1, and a few."""


def gradient_stays_at_scale_one(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient is not finite even with a loss scale of 1, while the forward is finite."""
    bad = [rank_report for rank_report in rank_reports if stays_bad(rank_report)]
    if bad and any(rank_report.named or rank_report.local or rank_report.first_bad for rank_report in rank_reports):
        earliest = earliest_bad(rank_reports, BadKind.GRADIENT)
        first = bad[0] if earliest is None else earliest[0]
        scaled = first.dtype == "float16" or first.scale.value > 1
        scale = "at a loss scale of 1 too" if scaled else "without any loss scale"
        told = finding(
            gradient_stays_at_scale_one,
            f"{bad_gradient(first, rank_reports)}, {scale}, and the forward is finite",
            rank_reports,
            (first, first.first_bad),
            _what_to_do(rank_reports, first),
        )
        # with its operation it is told in full, although the gradient was bad before
        yield replace(told, affects=("the loss",)) if first.began_bad and first.loss_backward is not None else told


def _what_to_do(rank_reports: RankReports, rank_report: RankReport) -> str:
    if rank_report.began_bad:
        return rank_report.loss_backward.cure if rank_report.loss_backward is not None else MASKED_TOO_LATE
    cure = rank_report.origin.cure if rank_report.origin is not None else ""
    tried = what_was_tried(rank_reports, rank_report.first_bad)
    known = " ".join(part for part in (cure, tried, *of_growth(rank_reports)) if part)
    if known:
        return known
    what = "the operation that is named" if rank_report.origin is not None else "what is computed there"
    wider = "" if rank_report.dtype == "float32" else "run it in float32 (dsdoctor.fp32_forward), "
    return f"Keep {what} away from zero (an epsilon), {wider}or clip what comes into it."


def gradient_above_scale(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient overflowed because the loss scale is too high, while the forward is finite."""
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
    """Every gradient is finite and their norm is not: the sum of their squares is beyond float32."""
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
    """DeepSpeed found an overflow, and the replay of the same batch with the same random numbers is finite."""
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
    """Gradients are not finite, and the batch could not be replayed: the names of the parameters are all that is known."""
    named = [rank_report for rank_report in rank_reports if rank_report.named]
    if named:
        yield Finding.error(
            rule_of(gradient_not_finite),
            f"step {named[0].step}: the gradient of {gradient_names(rank_reports)} is not finite",
            evidence=evidence(rank_reports, named[0]),
            fix="Watch with --overflow frames to see where it comes from.",
        )


# Verdicts on how DeepSpeed treats a step, beside the cause of an overflow: reports of all ranks -> a Finding.
#
# Pure; knows no torch.


def bad_step_applied(rank_reports: RankReports) -> Iterator[Finding]:
    """The gradients are not finite and nothing in DeepSpeed stops the step."""
    if any(rank_report.applied for rank_report in rank_reports):
        first = rank_reports[0]
        yield Finding.error(
            rule_of(bad_step_applied),
            f"DeepSpeed applies step {first.step} although its gradients are not finite: the weights become nan",
            evidence=(f"ZeRO stage {first.zero_stage}, {first.dtype}: no overflow check",),
            fix="Stop before the weights are written with --on-overflow raise, or use ZeRO stage 1, which checks.",
        )


def loss_not_scaled(rank_reports: RankReports) -> Iterator[Finding]:
    """The step divides the gradients by the loss scale, and the loss was never multiplied by it."""
    for rank_report in rank_reports:
        seen, due = rank_report.loss_gradient, rank_report.loss_gradient_due
        if seen is not None and due is not None and due > 1 and abs(seen) < due / 2:
            place = f"step {rank_report.step}, rank {rank_report.rank}"
            yield Finding.warning(
                rule_of(loss_not_scaled),
                f"the loss is not scaled: its gradient is {seen:g}, and the step divides as if it were {due:g}",
                evidence=(f"ZeRO stage {rank_report.zero_stage}, {rank_report.dtype}, {place}",),
                fix="Use ZeRO stage 1, or bf16; or scale the loss yourself with engine.optimizer.loss_scale.",
            )
            return


def checkpoint_not_loaded(rank_reports: RankReports) -> Iterator[Finding]:
    """engine.load_checkpoint found no checkpoint in its folder, returned (None, None), and raised nothing."""
    folder = next((rank_report.not_loaded for rank_report in rank_reports if rank_report.not_loaded), "")
    if folder:
        yield Finding.warning(
            rule_of(checkpoint_not_loaded),
            f"load_checkpoint loaded nothing from {folder}: the training begins anew",
            evidence=(f"step {rank_reports[0].step}: it returned (None, None)",),
            fix="Give the tag of a checkpoint in that folder, or write it into the file called latest there.",
        )


def steps_skipped_in_a_row(rank_reports: RankReports) -> Iterator[Finding]:
    """Step after step is skipped, so no weight changes any more."""
    most = max((rank_report.skipped for rank_report in rank_reports), default=0)
    if most > (NORMAL_SKIPS if rank_reports[0].dtype == "float16" else 2):
        last = rank_reports[0].step - most
        yield Finding.error(
            rule_of(steps_skipped_in_a_row),
            f"{most} steps in a row were skipped: no weight has changed {f'since step {last}' if last >= 0 else 'yet'}",
            fix="Stop the run: it does not learn.",
        )


# Verdicts on what became too small to count, in steps that nothing else is wrong with: reports of ranks -> a Finding. Pure.


ALARM = 0.3
"""The share of gradient elements that must be flushed, and would not be at a larger scale: healthy fp16 runs have under a tenth."""
UNCHANGED = 0.75
"""The share of weights with a gradient that a step leaves as they are, in two checks one after the other."""


def activations_underflow(rank_reports: RankReports) -> Iterator[Finding]:
    """What a module was given or gave is zero in float16, and would not be in float32."""
    seen = [(report, report.vanished) for report in rank_reports if report.vanished is not None]
    if not seen:
        return
    report, lost = min(seen, key=lambda pair: (pair[1].frame.micro, pair[1].frame.order, pair[0].rank))
    ranks = tuple(each.rank for each, _ in seen)
    who = ranks_say(ranks, len(rank_reports)) if len(ranks) < len(rank_reports) else ""
    yield Finding.warning(
        rule_of(activations_underflow),
        f"step {report.step}: float16 flushes {lost.share:.0%} of {lost.name} of {where(lost.frame)} to zero; in float32 the "
        f"largest is {lost.largest:.3g}{who}",
        evidence=(f"micro-batch {lost.frame.micro}, rank {report.rank}: replayed in float16 and in float32",),
        affects=(lost.frame.module or "the model",),
        fix="Train in bfloat16, which has float32's range; or look for the factor or the norm that makes its values so small.",
    )


def gradients_underflow(rank_reports: RankReports) -> Iterator[Finding]:
    """Gradients are flushed to zero in float16, or are denormal there, and would not be at a larger loss scale."""
    bad = [report for report in rank_reports if report.flushed is not None and report.flushed.share > ALARM]
    worst = max(
        (report.flushed for report in bad if report.flushed is not None), key=lambda each: each.share, default=None
    )
    if worst is None:
        return
    if not worst.fits:
        yield Finding.warning(
            rule_of(gradients_underflow),
            f"step {bad[0].step}: every gradient is 0 in float16 at a loss scale of {near(worst.scale)}, in two checks",
            evidence=("what comes to the model's output is 0 already, so no replay shows which loss scale fits",),
            fix="Raise loss_scale in the fp16 section, or set it to 0, which finds it; do not multiply the loss by a small number, "
            "and see that the loss depends on the model. bfloat16 needs no scale.",
        )
        return
    who = ranks_say(tuple(report.rank for report in bad), len(rank_reports)) if len(bad) < len(rank_reports) else ""
    helps = worst.fits > worst.scale
    yield Finding.warning(
        rule_of(gradients_underflow),
        f"step {bad[0].step}: {worst.share:.0%} of the gradient elements underflow in float16 at a loss scale of "
        f"{near(worst.scale)}" + (f"; a scale up to {near(worst.fits)} fits" if helps else "") + who,
        evidence=tuple(f"{name}: {share:.0%} zero or denormal" for name, share in worst.worst),
        affects=tuple(name for name, _ in worst.worst[:1]),
        fix=f"Set loss_scale in the fp16 section to {worst.fits:.12g}, or to 0, which finds it; or train in bfloat16."
        if helps
        else "Train in bfloat16: no loss scale brings these gradients into float16's range.",
    )


def updates_too_small(rank_reports: RankReports) -> Iterator[Finding]:
    """An optimizer step leaves most weights as they are although they have gradients: the updates are below half the distance to
    the next number of the weights' format."""
    for report in rank_reports:
        if report.unchanged and report.unchanged[0][1] > UNCHANGED:
            name, share = report.unchanged[0]
            yield Finding.warning(
                rule_of(updates_too_small),
                f"step {report.step} changes nothing in {share:.0%} of {name}: its weights are kept in {report.dtype} alone",
                evidence=tuple(
                    f"{each}: {part:.0%} unchanged although their gradients are not zero"
                    for each, part in report.unchanged
                ),
                affects=(name,),
                fix="Keep float32 copies of the weights (the bf16 section of the configuration), or raise the learning rate.",
            )
            return


# The reports of all ranks -> what went wrong first, where, on which ranks, and what to do. Pure; knows no torch.
#
# Each generator of CAUSES and BESIDE is one verdict: its docstring is its manual page, its name with hyphens is its rule.


def judge(rank_reports: Iterable[RankReport]) -> tuple[Finding, ...]:
    """The verdicts on one bad step, the cause first. Takes the reports of all ranks that took part, in any order."""
    ordered = tuple(sorted(rank_reports, key=lambda rank_report: rank_report.rank))
    cause = next((found for verdict in CAUSES for found in verdict(ordered)), None)
    beside = tuple(found for verdict in BESIDE for found in verdict(ordered))
    return (*(() if cause is None else (cause,)), *beside)


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
