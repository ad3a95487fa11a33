"""The reports of all ranks -> what went wrong first, where, on which ranks, and what to do.

Pure; knows no torch. Each generator of CAUSES and ADDITIONAL is one verdict, named like its rule.
"""

from collections.abc import Iterable, Iterator
from math import isfinite

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.overflow.frames.first_bad import BadKind, Cure, FirstBad, RankReport, has_mask
from dsdoctor.overflow.frames.frame import LIMITS, limit_of
from dsdoctor.overflow.verdict.evidence import (
    RankReports,
    Verdict,
    affected,
    amount,
    as_call,
    bad_gradient,
    cure_text,
    earliest_bad,
    evidence,
    extent,
    gradient_names,
    moment,
    near,
    of_growth,
    ranks_say,
    remedy,
    stays_bad,
    what_was_tried,
    where,
    where_it_began,
)
from dsdoctor.rules import book

MAX_SQUARABLE = LIMITS["float32"] ** 0.5
"""The square of a larger number is inf in float32."""
MAX_NORMAL_SKIPS = 30
"""Steps in a row that a dynamic loss scale may skip while it is searched: from 2**24 down to 1, and a few."""
MAX_FLUSHED_SHARE = 0.3
"""The share of gradient elements that must be flushed, and would not be at a larger scale: healthy fp16 runs have under a tenth."""
MAX_UNCHANGED_SHARE = 0.75
"""The share of weights with a gradient that a step leaves as they are, in two checks one after the other."""


def nan_in_the_batch(rank_reports: RankReports) -> Iterator[Finding]:
    """The batch itself holds nan or inf: an input of the whole model is bad before any module has run."""
    if found := earliest_bad(rank_reports, BadKind.DATA):
        rank_report, first_bad = found
        yield book.finding(
            "nan-in-the-batch",
            Severity.ERROR,
            evidence=evidence(rank_reports, rank_report),
            affects=affected(first_bad),
            bad=amount(first_bad.tensor),
            tensor=first_bad.tensor.name,
            module=where(first_bad.frame),
            extent=extent(rank_reports, rank_report, first_bad),
            rank=rank_report.rank,
            moment=moment(rank_report),
        )


def weight_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """A parameter or a buffer holds nan or inf: a bad step was applied, a batch left its nan in an average, or the checkpoint
    was saved after that."""
    if not (found := earliest_bad(rank_reports, BadKind.WEIGHT)):
        return
    rank_report, first_bad = found
    held = rank_report.held
    name = ".".join(part for part in (first_bad.frame.module, first_bad.tensor.name) if part)
    tensor = first_bad.tensor if held is None or held.kind != "weight" else held.tensor
    since, applied = rank_report.weight_bad_since, rank_report.bad_applied
    # a rate that became nan later was made so by the weights
    rates = [
        (step, rate)
        for step, _, rate in rank_report.rates[-1:]
        if not isfinite(rate) and since is not None and step <= since
    ]
    yield book.finding(
        "weight-not-finite",
        Severity.ERROR,
        case="buffer-written"
        if held is not None and held.kind != "weight" and held.written is not None
        else "buffer"
        if held is not None and held.kind != "weight"
        else "evaluation"
        if rank_report.evaluation
        else "learning-rate"
        if rates
        else "eps"
        if any(report.zero_over_zero for report in rank_reports)
        else "frozen"
        if rank_report.frozen and since is not None
        # a step that was clean later acquits it, and a step that is still to come is of before a checkpoint was loaded
        else "bad-step"
        if applied is not None and (since or 0) <= applied < rank_report.step
        else "before-the-watch"
        if since is None
        else "optimizer"
        if tensor.nan and not tensor.posinf and not tensor.neginf
        else "",
        evidence=evidence(rank_reports, rank_report),
        affects=affected(first_bad) if held is None else (held.name.rpartition(".")[0] or "the model",),
        kind="weight" if held is None else held.kind,
        name=name if held is None else held.name,
        bad=amount(first_bad.tensor if held is None else held.tensor),
        since=f", since step {since}" if held is None and since is not None else "",
        extent=extent(rank_reports, rank_report, first_bad),
        step=rates[0][0] if rates else applied,
        rate=str(rates[0][1]) if rates else "",
        step_before=(since or 0) - 1,
        until=f", from before the end of step {since - 1}" if since else "",
    )


def overflow_in_module(rank_reports: RankReports) -> Iterator[Finding]:
    """A module's inputs and weights were finite and its output is not: the overflow happened in this module."""
    if found := earliest_bad(rank_reports, BadKind.MODULE):
        rank_report, first_bad = found
        frame, dtype = first_bad.frame, first_bad.tensor.dtype
        known = remedy(rank_reports, rank_report, first_bad)
        yield book.finding(
            "overflow-in-module",
            Severity.ERROR,
            case="known"
            if known
            else "masked"
            if has_mask(frame)
            else ""
            if dtype == "float16"
            else "evaluation"
            if rank_report.evaluation
            else "wide",
            evidence=evidence(rank_reports, rank_report),
            affects=affected(first_bad),
            module=where(frame),
            bad=amount(first_bad.tensor),
            tensor=first_bad.tensor.name,
            inputs=_inputs(rank_report, first_bad),
            extent=extent(rank_reports, rank_report, first_bad),
            remedy=known,
            inner=f", with what is around {frame.module}" if frame.module else "",
            # the module around it: what does not fit where it was made does not fit when it is cast back there
            call=as_call(frame.module.rpartition(".")[0]),
        )


def _inputs(rank_report: RankReport, first_bad: FirstBad) -> str:
    """What a module that made bad values was given, as the end of a sentence."""
    held, frame, dtype = rank_report.held, first_bad.frame, first_bad.tensor.dtype
    if has_mask(frame):
        return book.phrase("overflow", "from-masked-inputs")
    if held is not None and rank_report.origin is not None and held.kind:
        return book.phrase("overflow", "from-held", kind=held.kind, name=held.name)
    if held is not None and rank_report.origin is None:
        return book.phrase("overflow", "from-bad-tensor")
    if frame.buffers:
        return ", and " + " and ".join(f"its {each.name} holds {amount(each)}" for each in frame.buffers)
    if frame.unmeasured:
        return f" ({', '.join(frame.unmeasured)} could not be measured)"
    largest = max((tensor.absmax or 0.0 for tensor in frame.inputs), default=0.0)
    limit = f"{limit_of(dtype):.3g}"
    return book.phrase("overflow", "from-finite-inputs", largest=f"{largest:.3g}", dtype=dtype, limit=limit)


def overflow_between_modules(rank_reports: RankReports) -> Iterator[Finding]:
    """A module was given nan or inf that no module had made: a function between the modules made it."""
    if found := earliest_bad(rank_reports, BadKind.BETWEEN):
        rank_report, first_bad = found
        frame, origin = first_bad.frame, rank_report.origin
        known = remedy(rank_reports, rank_report, first_bad)
        yield book.finding(
            "overflow-between-modules",
            Severity.ERROR,
            case="known"
            if known
            else "masked"
            if has_mask(frame)
            else ""
            if first_bad.tensor.dtype == "float16"
            else "evaluation"
            if rank_report.evaluation
            else "wide",
            evidence=evidence(rank_reports, rank_report),
            affects=affected(first_bad),
            bad=amount(first_bad.tensor),
            place=f"before {where(frame)}, the first module"
            if first_bad.before is None
            else f"between {where(first_bad.before)} and {where(frame)}",
            line="" if origin is None else f", by {origin.op} in {origin.line}",
            extent=extent(rank_reports, rank_report, first_bad),
            remedy=known,
            call=as_call(frame.module.rpartition(".")[0]),
        )


def loss_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """All modules are finite and the loss is not: it became nan or inf after the model."""
    bad = [rank_report for rank_report in where_it_began(rank_reports) if _has_bad_loss(rank_report)]
    kinds = {rank_report.first_bad.kind for rank_report in rank_reports if rank_report.first_bad is not None}
    is_bad_before = not kinds <= {BadKind.LOSS, BadKind.GRADIENT}
    # where the replay gives another loss, it says nothing of where the live one came from
    if not bad or is_bad_before or any(rank_report.other_loss for rank_report in rank_reports):
        return
    first = bad[0]
    found = first.first_bad
    known = _loss_remedy(rank_reports, first)
    yield book.finding(
        "loss-not-finite",
        Severity.ERROR,
        case="known"
        if known
        else "bad-buffers"
        if first.bad_tensors
        else "again"
        if first.again
        else "inside"
        if found is not None and found.kind is BadKind.LOSS
        else "",
        evidence=(
            *evidence(rank_reports, first),
            *_of_its_graph(first),
            *(f"the {each.name} holds {amount(each)}" for each in first.bad_tensors),
        ),
        # with its line it is shown in full, although the loss was bad before
        affects=("the loss",) if first.loss_made is not None and first.loss_made.line else (),
        loss=", ".join(f"{loss:g}" for loss in first.losses) or _measured_loss(first),
        finite=_what_is_finite(rank_reports, first),
        origin=_made_the_loss(first),
        ranks=ranks_say(tuple(rank_report.rank for rank_report in bad), len(rank_reports)),
        remedy=known,
        buffers=" or the ".join(each.name for each in first.bad_tensors),
    )


def _what_is_finite(rank_reports: RankReports, rank_report: RankReport) -> str:
    """What was seen to be finite beside a loss that is not."""
    if not rank_report.replayed and any(each.named for each in rank_reports):
        return book.phrase("overflow", "gradients-not-replayed")
    # without an engine the modules' outputs are measured, and gradients are not
    if not rank_report.replayed and rank_report.losses:
        return book.phrase("overflow", "gradients-finite")
    return book.phrase("overflow", "measured-outputs-finite" if rank_report.unmeasured else "outputs-finite")


def _loss_remedy(rank_reports: RankReports, rank_report: RankReport) -> str:
    """What the evidence says to do about a loss that is not finite; "" where it says nothing."""
    found, made = rank_report.first_bad, rank_report.origin
    cure = made.cure if made is not None and found is not None and found.kind is BadKind.LOSS else None
    if not cure and rank_report.loss_made is not None and not rank_report.again:
        cure = rank_report.loss_made.cure or Cure("operation")
    if rank_report.ignored:
        cure = Cure("no-target")
    return " ".join(part for part in (cure_text(cure), what_was_tried(rank_reports, found)) if part)


def _measured_loss(rank_report: RankReport) -> str:
    """What was measured of a loss that only the model's output shows."""
    found = rank_report.first_bad
    return f"not finite, {amount(found.tensor)} in {found.tensor.name}," if found is not None else "not finite"


def _has_bad_loss(rank_report: RankReport) -> bool:
    found = rank_report.first_bad
    return (found is not None and found.kind is BadKind.LOSS) or any(not isfinite(loss) for loss in rank_report.losses)


def _made_the_loss(rank_report: RankReport) -> str:
    """The operation of the model that made the loss, or the line of the script where it became bad."""
    found, made = rank_report.first_bad, rank_report.origin
    if found is not None and found.kind is BadKind.LOSS and made is not None:
        return f", by {made.op} in {made.line}"
    made, line = rank_report.loss_made, rank_report.loss_line
    computed = f", computed in {line}" if line else ""
    if made is None or rank_report.again:
        return computed
    return f", by {made.op} in {made.line}" if made.line else f", by {made.op}{computed}"


def _of_its_graph(rank_report: RankReport) -> Iterator[str]:
    made = rank_report.loss_made
    if made is None or rank_report.again or rank_report.origin is not None:
        return
    yield f"why: {made.how}"
    if not made.line:
        yield "read from the graph of the loss; if it happens again, its line is reported"


def gradient_stays_at_scale_one(rank_reports: RankReports) -> Iterator[Finding]:
    """A gradient is not finite even with a loss scale of 1, while the forward is finite."""
    bad = [rank_report for rank_report in rank_reports if stays_bad(rank_report)]
    if bad and any(rank_report.named or rank_report.local or rank_report.first_bad for rank_report in rank_reports):
        earliest = earliest_bad(rank_reports, BadKind.GRADIENT)
        first = bad[0] if earliest is None else earliest[0]
        scaled = first.dtype == "float16" or first.scale.value > 1
        scale = "even at a loss scale of 1" if scaled else "without a loss scale"
        known = _gradient_remedy(rank_reports, first)
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


def _gradient_remedy(rank_reports: RankReports, rank_report: RankReport) -> str:
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
    """The highest scale at which the gradients are finite, if they were replayed at scale 1; they may be at this one, too, and
    overflow on their way."""
    largest = max((tensor.absmax or 0.0 for tensor in rank_report.at_scale_one or ()), default=0.0)
    if not largest:
        return ""
    fitting = LIMITS["float16"] / largest
    if fitting >= rank_report.scale.value:
        return book.phrase("overflow", "fits-by-itself", largest=f"{largest:.3g}")
    return book.phrase("overflow", "fits-up-to", largest=f"{largest:.3g}", scale=near(fitting))


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
    additional = tuple(found for verdict in ADDITIONAL for found in verdict(ordered))
    return (*(() if cause is None else (cause,)), *additional)


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
