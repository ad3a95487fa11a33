"""The accounts of all ranks -> what went wrong first, where, on whom, and what to do. Pure; knows no torch.

Each generator is one verdict: its docstring is its manual page, its name with hyphens is its rule.
"""

import inspect
from collections.abc import Iterable, Iterator

from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.overflow.frames.dtypes import LIMITS, limit_of
from dsdoctor.overflow.frames.first_bad import BadKind, RankReport
from dsdoctor.overflow.frames.masks import is_minus_inf_mask
from dsdoctor.overflow.verdict.evidence import (
    RankReports,
    Verdict,
    amount,
    bad_gradient,
    earliest_bad,
    evidence,
    finding,
    gradient_names,
    moment,
    near,
    ranks_say,
    remedy,
    rule_of,
    stays_bad,
    where,
)

SQUARES_END = LIMITS["float32"] ** 0.5
"""A float32 whose square is beyond float32."""

NORMAL_SKIPS = 30
"""Steps in a row that a dynamic loss scale may skip while it is searched: from 2**24 down to 1, and a few."""


def judge(rank_reports: Iterable[RankReport]) -> tuple[Finding, ...]:
    """The verdicts on one bad step, the cause first. Accounts of all ranks that took part, in any order."""
    ordered = tuple(sorted(rank_reports, key=lambda rank_report: rank_report.rank))
    cause = next((found for verdict in CAUSES for found in verdict(ordered)), None)
    beside = tuple(found for verdict in BESIDE for found in verdict(ordered))
    return (*(() if cause is None else (cause,)), *beside)


# -- causes: the first that speaks is the verdict


def nan_in_the_batch(rank_reports: RankReports) -> Iterator[Finding]:
    """The batch itself holds nan or inf: an input of the whole model is bad before any module has run.

    On one rank only it is that rank's data: the sample, its preprocessing, or the memory it lies in. On all ranks look at
    what all samples go through.
    """
    if found := earliest_bad(rank_reports, BadKind.DATA):
        rank_report, first_bad = found
        yield finding(
            nan_in_the_batch,
            f"the batch holds {amount(first_bad.tensor)} in {first_bad.tensor.name} of {where(first_bad.frame)}",
            rank_reports,
            found,
            Fix(
                text=f"Look at the samples of rank {rank_report.rank}, {moment(rank_report)}, and skip or repair them."
            ),
        )


def weight_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """A parameter holds nan or inf, so every batch will.

    A step that should not have been taken was taken, or the checkpoint was saved after one. What comes after it cannot be
    mended: go back to a checkpoint from before the step that is named.
    """
    if found := earliest_bad(rank_reports, BadKind.WEIGHT):
        rank_report, first_bad = found
        name = ".".join(part for part in (first_bad.frame.module, first_bad.tensor.name) if part)
        since = rank_report.weight_bad_since
        title = f"the weight {name} holds {amount(first_bad.tensor)}" + (
            "" if since is None else f", since step {since}"
        )
        text = "Load a checkpoint from before that step, and lower the learning rate or clip gradients before going on."
        yield finding(weight_not_finite, title, rank_reports, found, Fix(text=text))


def overflow_in_module(rank_reports: RankReports) -> Iterator[Finding]:
    """A module's inputs and weights were finite and its output is not: this operation overflowed.

    In float16 the limit is 65504; values that come near it in the frames before tell where the growth began. Run the
    module (or the one where the growth began) in float32, or train in bfloat16, which reaches as far as float32.
    nan from finite values comes from 0/0, inf-inf, the logarithm or root of a negative number, or a fully masked row.
    """
    if found := earliest_bad(rank_reports, BadKind.MODULE):
        _, first_bad = found
        biggest = max((tensor.absmax or 0.0 for tensor in first_bad.frame.inputs), default=0.0)
        title = f"{where(first_bad.frame)} made {amount(first_bad.tensor)} in {first_bad.tensor.name}"
        if any(is_minus_inf_mask(tensor) for tensor in first_bad.frame.inputs):
            title += " of inputs that hold -inf"
        else:
            dtype = first_bad.tensor.dtype
            title += f" of finite inputs (largest {biggest:.3g}, {dtype} ends at {limit_of(dtype):.3g})"
        yield finding(overflow_in_module, title, rank_reports, found, remedy(first_bad))


def overflow_between_modules(rank_reports: RankReports) -> Iterator[Finding]:
    """A module was given nan or inf that no module had made: a function between them did.

    The replay names the line, if it could see it. Without a replay the culprit lies after the module that is named as the
    last finite one, in the forward of a module that holds both.
    """
    if found := earliest_bad(rank_reports, BadKind.BETWEEN):
        rank_report, first_bad = found
        after = f"after {where(first_bad.before)}" if first_bad.before is not None else "before the first module"
        made = f"{amount(first_bad.tensor)} made {after} and before {where(first_bad.frame)}"
        line = "" if rank_report.origin is None else f", by {rank_report.origin.op} in {rank_report.origin.line}"
        yield finding(overflow_between_modules, made + line, rank_reports, found, remedy(first_bad))


def loss_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """All modules are finite and the loss is not: it was made bad after the model.

    Cross entropy over no target at all (all labels ignored) is nan; so is the logarithm of a zero.
    """
    bad = [
        rank_report
        for rank_report in rank_reports
        if any(loss != loss or abs(loss) == float("inf") for loss in rank_report.losses)
    ]
    if bad and not any(
        rank_report.first_bad and rank_report.first_bad.kind is not BadKind.GRADIENT for rank_report in rank_reports
    ):
        ranks = ranks_say(tuple(rank_report.rank for rank_report in bad), len(rank_reports))
        losses = ", ".join(f"{loss:g}" for loss in bad[0].losses)
        origin = f", by {bad[0].origin.op} in {bad[0].origin.line}" if bad[0].origin else ""
        finite = "every module's output is finite" if bad[0].replayed else "the gradients are finite"
        if not bad[0].replayed and any(rank_report.named for rank_report in rank_reports):
            finite = "so are gradients (not replayed this time)"
        yield Finding(
            rule=rule_of(loss_not_finite),
            severity=Severity.ERROR,
            title=f"the loss is {losses} and {finite}{origin}{ranks}",
            evidence=evidence(rank_reports, bad[0]),
            fix=Fix(text="Look at the labels of this batch: a loss over no valid target is nan."),
        )


def gradient_stays_at_scale_one(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient is not finite even with a loss scale of 1, while the forward is: lowering the scale will not help.

    DeepSpeed lowers the scale step by step to its floor and then gives up ("already at minimum"). The operation whose
    backward is named divides by zero, takes the root of zero, or makes values beyond the limit of its dtype.
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
            Fix(
                text="Keep the operation that is named away from zero (an epsilon), run it in float32 "
                "(dsdoctor.fp32_forward), or clip what comes into it."
            ),
        )


def gradient_above_scale(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient overflowed because the loss scale is too high; the forward is finite. Lowering it is normal.

    Dynamic loss scaling finds the highest scale that fits by going too high now and then; the step is skipped and training
    goes on. Only when it happens in most steps is something growing.
    """
    scaled = [rank_report for rank_report in rank_reports if rank_report.scale.value > 1 and rank_report.named]
    if scaled and not any(stays_bad(rank_report) for rank_report in rank_reports):
        first = scaled[0]
        names = gradient_names(rank_reports)
        largest = max((tensor.absmax or 0.0 for tensor in first.at_scale_one or ()), default=0.0)
        fits = (
            f"; the largest at scale 1 is {largest:.3g}, so it fits up to {near(LIMITS['float16'] / largest)}"
            if largest
            else ""
        )
        floor = first.scale.floor
        at_floor = floor is not None and first.scale.value <= floor
        scale = near(first.scale.value)
        yield Finding(
            rule=rule_of(gradient_above_scale),
            severity=Severity.WARNING if at_floor or first.skipped > NORMAL_SKIPS else Severity.NOTE,
            title=f"step {first.step} skipped: the gradient of {names} overflows at a loss scale of {scale}{fits}",
            evidence=evidence(rank_reports, first),
            fix=Fix(text="Lower min_loss_scale in the fp16 section: the scale is at its floor.")
            if at_floor
            else Fix(text="Nothing: the scale is lowered, and training goes on."),
        )


def gradient_norm_overflows(rank_reports: RankReports) -> Iterator[Finding]:
    """Every gradient is finite and their norm is not: squares beyond float32's range were added up.

    The gradients have exploded; clipping them by their norm cannot work any more. DeepSpeed skips the step.
    """
    local = [(tensor, rank_report) for rank_report in rank_reports for tensor in rank_report.local]
    if local and not any(rank_report.first_bad or rank_report.named for rank_report in rank_reports):
        largest, rank_report = max(local, key=lambda pair: pair[0].absmax or 0.0)
        if (largest.absmax or 0.0) > SQUARES_END:
            yield Finding(
                rule=rule_of(gradient_norm_overflows),
                severity=Severity.ERROR,
                title=f"step {rank_report.step}: every gradient is finite and their norm is not: "
                f"{largest.name} has {largest.absmax:.3g}",
                evidence=evidence(rank_reports, rank_report),
                affects=(largest.name,),
                fix=Fix(
                    text="Lower the learning rate, or look for a weight or an activation that has grown before it."
                ),
            )


def overflow_not_reproduced(rank_reports: RankReports) -> Iterator[Finding]:
    """DeepSpeed found an overflow, and the replay of the same batch with the same random numbers is finite.

    What differs between the two is what to look at: an operation that is not deterministic, inputs that were changed in
    place after the forward, or a GPU that computes wrongly now and then (run its memory test, look at its ECC counters).
    """
    if all(rank_report.first_bad is None for rank_report in rank_reports) and any(
        rank_report.replayed for rank_report in rank_reports
    ):
        named = next((rank_report for rank_report in rank_reports if rank_report.named), rank_reports[0])
        names = gradient_names(rank_reports) or "some gradient"
        yield Finding(
            rule=rule_of(overflow_not_reproduced),
            severity=Severity.WARNING,
            title=f"step {named.step}: {names} overflowed, and the replay of the batch ({named.replayed}) shows nothing bad",
            evidence=evidence(rank_reports, named),
            fix=Fix(
                text="If it comes back on one rank only, suspect its GPU; else use --overflow frames to see it live."
            ),
        )


def gradient_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """Gradients are not finite, and the batch could not be replayed: the names are all that is known.

    The frames level (`--overflow frames`) shows the batch live the next time.
    """
    named = [rank_report for rank_report in rank_reports if rank_report.named]
    if named:
        yield Finding(
            rule=rule_of(gradient_not_finite),
            severity=Severity.ERROR,
            title=f"step {named[0].step}: the gradient of {gradient_names(rank_reports)} is not finite",
            evidence=evidence(rank_reports, named[0]),
            fix=Fix(text="Watch with --overflow frames to see where it comes from."),
        )


# -- beside the cause


def bad_step_applied(rank_reports: RankReports) -> Iterator[Finding]:
    """The gradients are not finite and nothing in DeepSpeed stops the step: the weights become nan.

    ZeRO stage 0 in float32 has no check at all, and bf16 has none with check_grad_overflow set to false.
    """
    if any(rank_report.applied for rank_report in rank_reports):
        yield Finding(
            rule=rule_of(bad_step_applied),
            severity=Severity.ERROR,
            title=f"DeepSpeed applies step {rank_reports[0].step} although its gradients are not finite: the weights become nan",
            evidence=(f"ZeRO stage {rank_reports[0].zero_stage}, {rank_reports[0].dtype}: no overflow check",),
            fix=Fix(
                text="Stop before the weights are written with --on-overflow raise, or use ZeRO stage 1, which checks."
            ),
        )


def loss_not_scaled(rank_reports: RankReports) -> Iterator[Finding]:
    """The loss scale is divided out of the gradients in the step, and was never multiplied in.

    DeepSpeed 0.19.8 scales the loss in engine.backward only for ZeRO stages 1 to 3. In stage 0 with fp16 the gradients
    underflow and every update is too small by the loss scale; Adam hides most of it, and nothing is said.
    """
    for rank_report in rank_reports:
        seen, due = rank_report.loss_gradient, rank_report.loss_gradient_due
        if seen is not None and due is not None and due > 1 and abs(seen) < due / 2:
            yield Finding(
                rule=rule_of(loss_not_scaled),
                severity=Severity.WARNING,
                title=f"the loss is not scaled: its gradient is {seen:g}, and the step divides as if it were {due:g}",
                evidence=(
                    f"ZeRO stage {rank_report.zero_stage}, {rank_report.dtype}, step {rank_report.step}, rank {rank_report.rank}",
                ),
                fix=Fix(text="Use ZeRO stage 1, or bf16; or scale the loss yourself with engine.optimizer.loss_scale."),
            )
            return


def steps_skipped_in_a_row(rank_reports: RankReports) -> Iterator[Finding]:
    """Step after step is skipped: the training stands still while it looks alive.

    A dynamic loss scale may need some thirty steps to come down from its start; more is no search any more. Without a loss
    scale (bfloat16, float32) each skipped step is a failure of its own.
    """
    most = max((rank_report.skipped for rank_report in rank_reports), default=0)
    if most > (NORMAL_SKIPS if rank_reports[0].dtype == "float16" else 2):
        yield Finding(
            rule=rule_of(steps_skipped_in_a_row),
            severity=Severity.ERROR,
            title=f"{most} steps in a row were skipped: no weight has changed since step {rank_reports[0].step - most}",
            fix=Fix(text="Stop the run: it does not learn."),
        )


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
BESIDE: tuple[Verdict, ...] = (bad_step_applied, loss_not_scaled, steps_skipped_in_a_row)


def manual_pages() -> dict[str, str]:
    """The manual page of each verdict by its rule."""
    return {rule_of(verdict): inspect.getdoc(verdict) or "" for verdict in (*CAUSES, *BESIDE)}
