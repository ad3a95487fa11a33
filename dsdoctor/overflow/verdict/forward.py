"""Verdicts on a step whose forward went wrong, up to the loss: reports of all ranks -> a Finding. Pure; knows no torch."""

from collections.abc import Iterator
from math import isfinite

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.overflow.frames.first_bad import BadKind, Cure, FirstBad, RankReport, holds_mask
from dsdoctor.overflow.frames.frame import limit_of
from dsdoctor.overflow.verdict.evidence import (
    RankReports,
    affected,
    amount,
    earliest_bad,
    evidence,
    extent,
    moment,
    ranks_say,
    where,
    where_it_began,
)
from dsdoctor.overflow.verdict.remedy import as_call, cure_text, remedy, what_was_tried
from dsdoctor.rules import book


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
            if holds_mask(frame)
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
    if holds_mask(frame):
        return " from inputs that hold -inf"
    if held is not None and rank_report.origin is not None and held.kind:
        return f" from the {held.kind} {held.name}, which holds -inf"
    if held is not None and rank_report.origin is None:
        return " from a tensor that was already bad"
    if frame.buffers:
        return ", and " + " and ".join(f"its {each.name} holds {amount(each)}" for each in frame.buffers)
    if frame.unmeasured:
        return f" ({', '.join(frame.unmeasured)} could not be measured)"
    largest = max((tensor.absmax or 0.0 for tensor in frame.inputs), default=0.0)
    return f" from finite inputs (largest {largest:.3g}; the {dtype} limit is {limit_of(dtype):.3g})"


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
            if holds_mask(frame)
            else ""
            if first_bad.tensor.dtype == "float16"
            else "evaluation"
            if rank_report.evaluation
            else "wide",
            evidence=evidence(rank_reports, rank_report),
            affects=affected(first_bad),
            bad=amount(first_bad.tensor),
            after=f"after {where(first_bad.before)}" if first_bad.before is not None else "",
            module=where(frame),
            line="" if origin is None else f", by {origin.op} in {origin.line}",
            extent=extent(rank_reports, rank_report, first_bad),
            remedy=known,
            call=as_call(frame.module.rpartition(".")[0]),
        )


def loss_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """All modules are finite and the loss is not: it became nan or inf after the model."""
    bad = [rank_report for rank_report in where_it_began(rank_reports) if _has_bad_loss(rank_report)]
    if not bad or any(_is_bad_before_the_loss(rank_report) or rank_report.other_loss for rank_report in rank_reports):
        return  # where the replay gives another loss, it says nothing of where the live one came from
    first = bad[0]
    found = first.first_bad
    known = _known_remedy(rank_reports, first)
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
        affects=_place(first),
        loss=", ".join(f"{loss:g}" for loss in first.losses) or _measured(first),
        finite=_what_is_finite(rank_reports, first),
        origin=_made_the_loss(first),
        ranks=ranks_say(tuple(rank_report.rank for rank_report in bad), len(rank_reports)),
        remedy=known,
        buffers=" or the ".join(each.name for each in first.bad_tensors),
    )


def _what_is_finite(rank_reports: RankReports, rank_report: RankReport) -> str:
    """What was seen to be finite beside a loss that is not."""
    if not rank_report.replayed and any(each.named for each in rank_reports):
        return "so are the gradients (not replayed this time)"
    # without an engine the modules' outputs are measured, and gradients are not
    if not rank_report.replayed and rank_report.losses:
        return "the gradients are finite"
    return f"every module's output{' that could be measured' if rank_report.unmeasured else ''} is finite"


def _known_remedy(rank_reports: RankReports, rank_report: RankReport) -> str:
    """What the evidence says to do about a loss that is not finite; "" where it says nothing."""
    found, made = rank_report.first_bad, rank_report.origin
    cure = made.cure if made is not None and found is not None and found.kind is BadKind.LOSS else None
    if not cure and rank_report.loss_made is not None and not rank_report.again:
        cure = rank_report.loss_made.cure or Cure("operation")
    if rank_report.ignored:
        cure = Cure("no-target")
    return " ".join(part for part in (cure_text(cure), what_was_tried(rank_reports, found)) if part)


def _measured(rank_report: RankReport) -> str:
    """What was measured of a loss that only the model's output shows."""
    found = rank_report.first_bad
    return f"not finite, {amount(found.tensor)} in {found.tensor.name}," if found is not None else "not finite"


def _has_bad_loss(rank_report: RankReport) -> bool:
    found = rank_report.first_bad
    return (found is not None and found.kind is BadKind.LOSS) or any(not isfinite(loss) for loss in rank_report.losses)


def _is_bad_before_the_loss(rank_report: RankReport) -> bool:
    found = rank_report.first_bad
    return found is not None and found.kind not in (BadKind.LOSS, BadKind.GRADIENT)


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


def _place(rank_report: RankReport) -> tuple[str, ...]:
    """Said where the line is known: then it is told in full, although the loss was bad before."""
    made = rank_report.loss_made
    return () if made is None or not made.line else ("the loss",)
