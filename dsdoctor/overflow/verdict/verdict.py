"""The reports of all ranks -> what went wrong first, where, on which ranks, and what to do.

Pure; knows no torch. Each generator of CAUSES and ADDITIONAL is one verdict, named like its rule.
"""

from collections.abc import Iterable, Iterator

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.overflow.frames.first_bad import BadKind, RankReport
from dsdoctor.overflow.frames.frame import LIMITS
from dsdoctor.overflow.verdict.evidence import (
    RankReports,
    Verdict,
    affected,
    bad_gradient,
    earliest_bad,
    evidence,
    extent,
    gradient_names,
    near,
    ranks_say,
    stays_bad,
    where,
)
from dsdoctor.overflow.verdict.forward import (
    loss_not_finite,
    nan_in_the_batch,
    overflow_between_modules,
    overflow_in_module,
    weight_not_finite,
)
from dsdoctor.overflow.verdict.remedy import cure_text, of_growth, what_was_tried
from dsdoctor.rules import book

MAX_SQUARABLE = LIMITS["float32"] ** 0.5
"""The square of a larger number is inf in float32."""

MAX_NORMAL_SKIPS = 30
"""Steps in a row that a dynamic loss scale may skip while it is searched: from 2**24 down to 1, and a few."""
MAX_FLUSHED_SHARE = 0.3
"""The share of gradient elements that must be flushed, and would not be at a larger scale: healthy fp16 runs have under a tenth."""
MAX_UNCHANGED_SHARE = 0.75
"""The share of weights with a gradient that a step leaves as they are, in two checks one after the other."""


def gradient_stays_at_scale_one(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient is not finite even with a loss scale of 1, while the forward is finite."""
    bad = [rank_report for rank_report in rank_reports if stays_bad(rank_report)]
    if bad and any(rank_report.named or rank_report.local or rank_report.first_bad for rank_report in rank_reports):
        earliest = earliest_bad(rank_reports, BadKind.GRADIENT)
        first = bad[0] if earliest is None else earliest[0]
        scaled = first.dtype == "float16" or first.scale.value > 1
        scale = "even at a loss scale of 1" if scaled else "without a loss scale"
        known = _known_remedy(rank_reports, first)
        yield book.finding(
            "gradient-stays-at-scale-one",
            Severity.ERROR,
            case="known"
            if known or (first.began_bad and first.loss_backward is not None)
            else "masked-too-late"
            if first.began_bad
            else "float32"
            if first.dtype == "float32"
            else "",
            evidence=evidence(rank_reports, first),
            # with its operation it is shown in full, although the gradient was bad before
            affects=("the loss",) if first.began_bad and first.loss_backward is not None else affected(first.first_bad),
            gradient=bad_gradient(first, rank_reports),
            scale=scale,
            extent=extent(rank_reports, first, first.first_bad),
            remedy=known,
            operation="the named operation" if first.origin is not None else "",
        )


def _known_remedy(rank_reports: RankReports, rank_report: RankReport) -> str:
    """What the evidence says to do about a gradient that is not finite; "" where it says nothing."""
    if rank_report.began_bad:
        return cure_text(rank_report.loss_backward.cure) if rank_report.loss_backward is not None else ""
    cure = cure_text(rank_report.origin.cure) if rank_report.origin is not None else ""
    tried = what_was_tried(rank_reports, rank_report.first_bad)
    return " ".join(part for part in (cure, tried, *of_growth(rank_reports)) if part)


def gradient_above_scale(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient overflowed because the loss scale is too high, while the forward is finite."""
    scaled = [rank_report for rank_report in rank_reports if rank_report.scale.value > 1 and rank_report.named]
    if not scaled or any(stays_bad(rank_report) or rank_report.other_loss for rank_report in rank_reports):
        return
    first = scaled[0]
    floor = first.scale.floor
    at_floor = floor is not None and first.scale.value <= floor
    yield book.finding(
        "gradient-above-scale",
        Severity.WARNING if at_floor or first.skipped > MAX_NORMAL_SKIPS else Severity.NOTE,
        case="floor" if at_floor else "",
        evidence=evidence(rank_reports, first),
        step=first.step,
        names=gradient_names(rank_reports),
        scale=near(first.scale.value),
        fitting=_scale_that_fits(first),
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
        if (largest.absmax or 0.0) > MAX_SQUARABLE:
            yield book.finding(
                "gradient-norm-overflows",
                Severity.ERROR,
                evidence=evidence(rank_reports, rank_report),
                affects=(largest.name,),
                step=rank_report.step,
                name=largest.name,
                largest=f"{largest.absmax:.3g}",
            )


def overflow_not_reproduced(rank_reports: RankReports) -> Iterator[Finding]:
    """DeepSpeed found an overflow, and the replay of the same batch with the same random numbers is finite."""
    if all(rank_report.first_bad is None for rank_report in rank_reports) and any(
        rank_report.replayed for rank_report in rank_reports
    ):
        named = next((rank_report for rank_report in rank_reports if rank_report.named), rank_reports[0])
        yield book.finding(
            "overflow-not-reproduced",
            Severity.WARNING,
            evidence=evidence(rank_reports, named),
            steps=(),
            step=named.step,
            names=gradient_names(rank_reports),
            replayed=named.replayed or "",
        )


def gradient_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """Gradients are not finite, and the batch could not be replayed: the names of the parameters are all that is known."""
    named = [rank_report for rank_report in rank_reports if rank_report.named]
    if named:
        yield book.finding(
            "gradient-not-finite",
            Severity.ERROR,
            evidence=evidence(rank_reports, named[0]),
            steps=(),
            step=named[0].step,
            names=gradient_names(rank_reports),
        )


def bad_step_applied(rank_reports: RankReports) -> Iterator[Finding]:
    """The gradients are not finite and nothing in DeepSpeed stops the step."""
    if any(rank_report.applied for rank_report in rank_reports):
        first = rank_reports[0]
        yield book.finding(
            "bad-step-applied",
            Severity.ERROR,
            evidence=(f"ZeRO stage {first.zero_stage}, {first.dtype}: no overflow check",),
            steps=(),
            step=first.step,
        )


def loss_not_scaled(rank_reports: RankReports) -> Iterator[Finding]:
    """The step divides the gradients by the loss scale, and the loss was never multiplied by it."""
    for rank_report in rank_reports:
        seen, due = rank_report.loss_gradient, rank_report.loss_gradient_due
        if seen is not None and due is not None and due > 1 and abs(seen) < due / 2:
            place = f"step {rank_report.step}, rank {rank_report.rank}"
            yield book.finding(
                "loss-not-scaled",
                Severity.WARNING,
                evidence=(f"ZeRO stage {rank_report.zero_stage}, {rank_report.dtype}, {place}",),
                gradient=f"{seen:g}",
                divisor=f"{due:g}",
            )
            return


def checkpoint_not_loaded(rank_reports: RankReports) -> Iterator[Finding]:
    """engine.load_checkpoint found no checkpoint in its folder, returned (None, None), and raised nothing."""
    folder = next((rank_report.not_loaded for rank_report in rank_reports if rank_report.not_loaded), "")
    if folder:
        yield book.finding(
            "checkpoint-not-loaded",
            Severity.WARNING,
            evidence=(f"step {rank_reports[0].step}: it returned (None, None)",),
            folder=folder,
        )


def steps_skipped_in_a_row(rank_reports: RankReports) -> Iterator[Finding]:
    """Step after step is skipped, so no weight changes any more."""
    most = max((rank_report.skipped for rank_report in rank_reports), default=0)
    if most > (MAX_NORMAL_SKIPS if rank_reports[0].dtype == "float16" else 2):
        last = rank_reports[0].step - most
        yield book.finding(
            "steps-skipped-in-a-row",
            Severity.ERROR,
            case="" if last >= 0 else "from-the-start",
            count=most,
            step=last,
        )


def activations_underflow(rank_reports: RankReports) -> Iterator[Finding]:
    """What a module was given or gave is zero in float16, and would not be in float32."""
    seen = [(report, report.vanished) for report in rank_reports if report.vanished is not None]
    if not seen:
        return
    report, lost = min(seen, key=lambda pair: (pair[1].frame.micro, pair[1].frame.order, pair[0].rank))
    ranks = tuple(each.rank for each, _ in seen)
    who = ranks_say(ranks, len(rank_reports)) if len(ranks) < len(rank_reports) else ""
    yield book.finding(
        "activations-underflow",
        Severity.WARNING,
        evidence=(f"micro-batch {lost.frame.micro}, rank {report.rank}: replayed in float16 and in float32",),
        affects=(lost.frame.module or "the model",),
        step=report.step,
        share=f"{lost.share:.0%}",
        tensor=lost.name,
        module=where(lost.frame),
        largest=f"{lost.largest:.3g}",
        ranks=who,
    )


def gradients_underflow(rank_reports: RankReports) -> Iterator[Finding]:
    """Gradients are flushed to zero in float16, or are denormal there, and would not be at a larger loss scale."""
    bad = [report for report in rank_reports if report.flushed is not None and report.flushed.share > MAX_FLUSHED_SHARE]
    worst = max(
        (report.flushed for report in bad if report.flushed is not None), key=lambda each: each.share, default=None
    )
    if worst is None:
        return
    if not worst.fits:
        yield book.finding(
            "gradients-underflow",
            Severity.WARNING,
            case="all-zero",
            evidence=("the gradient at the model's output is already 0, so no replay can show which loss scale fits",),
            step=bad[0].step,
            scale=near(worst.scale),
        )
        return
    who = ranks_say(tuple(report.rank for report in bad), len(rank_reports)) if len(bad) < len(rank_reports) else ""
    helps = worst.fits > worst.scale
    yield book.finding(
        "gradients-underflow",
        Severity.WARNING,
        case="" if helps else "no-scale-fits",
        evidence=tuple(f"{name}: {share:.0%} zero or denormal" for name, share in worst.worst),
        affects=tuple(name for name, _ in worst.worst[:1]),
        step=bad[0].step,
        share=f"{worst.share:.0%}",
        scale=near(worst.scale),
        fitting=near(worst.fits),
        loss_scale=f"{worst.fits:.12g}",
        ranks=who,
    )


def updates_too_small(rank_reports: RankReports) -> Iterator[Finding]:
    """An optimizer step leaves most weights as they are although they have gradients: the updates are below half the distance to
    the next number of the weights' format."""
    for report in rank_reports:
        if report.unchanged and report.unchanged[0][1] > MAX_UNCHANGED_SHARE:
            name, share = report.unchanged[0]
            yield book.finding(
                "updates-too-small",
                Severity.WARNING,
                evidence=tuple(
                    f"{each}: {part:.0%} unchanged although their gradients are not zero"
                    for each, part in report.unchanged
                ),
                affects=(name,),
                step=report.step,
                share=f"{share:.0%}",
                name=name,
                dtype=report.dtype,
            )
            return


def judge(rank_reports: Iterable[RankReport]) -> tuple[Finding, ...]:
    """The verdicts on one bad step, the cause first. Takes the reports of all ranks that took part, in any order."""
    ordered = tuple(sorted(rank_reports, key=lambda rank_report: rank_report.rank))
    cause = next((found for verdict in CAUSES for found in verdict(ordered)), None)
    beside = tuple(found for verdict in ADDITIONAL for found in verdict(ordered))
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
ADDITIONAL: tuple[Verdict, ...] = (
    bad_step_applied,
    loss_not_scaled,
    steps_skipped_in_a_row,
    checkpoint_not_loaded,
    activations_underflow,
    gradients_underflow,
    updates_too_small,
)
