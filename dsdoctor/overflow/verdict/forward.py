"""Verdicts on a step whose forward went wrong, up to the loss: reports of all ranks -> a Finding. Pure; knows no torch."""

from collections.abc import Iterator
from dataclasses import replace
from math import isfinite

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Held, RankReport
from dsdoctor.overflow.frames.frame import TensorStats, is_minus_inf_mask, limit_of
from dsdoctor.overflow.verdict.evidence import (
    RankReports,
    amount,
    earliest_bad,
    evidence,
    finding,
    moment,
    ranks_say,
    remedy,
    rule_of,
    what_was_tried,
    where,
    where_it_began,
)

# A weight that holds nan or inf, and what is known of the steps before -> what can have written it, and what to do. Pure.


BESIDE = "a callback, a projection or clamp of weights, an average, a copy from another model"


def what_wrote_it(rank_reports: RankReports, rank_report: RankReport, weight: TensorStats) -> str:
    """What to do about a bad weight, from what can have written it: the first that the evidence decides."""
    return next(_what_wrote_it(rank_reports, rank_report, weight))


def _what_wrote_it(rank_reports: RankReports, rank_report: RankReport, weight: TensorStats) -> Iterator[str]:
    since, applied = rank_report.weight_bad_since, rank_report.bad_applied
    if rank_report.evaluation:
        yield "Load a checkpoint in which it is finite; this forward only reads it: look at what wrote it before."
    for step, _, rate in rank_report.rates[-1:]:
        # a rate that became nan later was made so by the weights
        if not isfinite(rate) and since is not None and step <= since:
            yield f"Mend what made the learning rate {rate} in step {step}, and load a checkpoint from before that step."
    if any(report.zero_over_zero for report in rank_reports):
        yield (
            "Give the optimizer an eps above 0: with 0 its step is 0 / 0 where a weight's gradients were all 0, and that is so of "
            f"each bad element of its own weights. {_load(since)}"
        )
    if rank_report.frozen and since is not None:
        yield (
            "Look for what writes it beside the optimizer, which does not write a frozen weight (requires_grad is False): "
            f"{BESIDE}. {_load(since)}"
        )
    # a step that was clean later acquits it, and a step that is still to come is of before a checkpoint was loaded
    if applied is not None and (since or 0) <= applied < rank_report.step:
        yield (
            f"Step {applied} was applied with gradients that were not finite: mend what made them so, and load a checkpoint from "
            "before that step."
        )
    if since is None:
        yield (
            "It was so before the first step that was watched: look at how it was made (torch.empty without an initialisation), "
            "at what wrote it since, and at the file that it was loaded from."
        )
    if weight.nan and not weight.posinf and not weight.neginf:
        yield (
            f"The gradients of step {(since or 0) - 1} were finite, so the optimizer's own step made it (see its learning rate and "
            f"its eps), or code beside it: {BESIDE}. {_load(since)}"
        )
    yield "Load a checkpoint from before that step, and lower the learning rate or clip gradients before going on."


def _load(since: int | None) -> str:
    return "Then load a checkpoint in which it is finite" + (
        "." if not since else f", from before the end of step {since - 1}."
    )


def nan_in_the_batch(rank_reports: RankReports) -> Iterator[Finding]:
    """The batch itself holds nan or inf: an input of the whole model is bad before any module has run."""
    if found := earliest_bad(rank_reports, BadKind.DATA):
        rank_report, first_bad = found
        yield finding(
            nan_in_the_batch,
            f"the batch holds {amount(first_bad.tensor)} in {first_bad.tensor.name} of {where(first_bad.frame)}",
            rank_reports,
            found,
            f"Look at the samples of rank {rank_report.rank}, {moment(rank_report)}, and skip or repair them.",
        )


def weight_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """A parameter or a buffer holds nan or inf: a bad step was applied, a batch left its nan in an average, or the checkpoint
    was saved after that."""
    if found := earliest_bad(rank_reports, BadKind.WEIGHT):
        rank_report, first_bad = found
        if rank_report.held is not None:
            yield _held_by_the_model(rank_reports, found, rank_report.held)
            return
        name = ".".join(part for part in (first_bad.frame.module, first_bad.tensor.name) if part)
        since = rank_report.weight_bad_since
        title = f"the weight {name} holds {amount(first_bad.tensor)}" + (
            "" if since is None else f", since step {since}"
        )
        yield finding(
            weight_not_finite, title, rank_reports, found, what_wrote_it(rank_reports, rank_report, first_bad.tensor)
        )


def _held_by_the_model(rank_reports: RankReports, found: tuple[RankReport, FirstBad], held: Held) -> Finding:
    """A buffer, or a weight that another module than its own was given."""
    text = "Load a checkpoint in which it is finite, or fill it anew; this batch only reads it: look at what wrote it before."
    if held.written is not None:
        text = "Each batch writes it, and one that was nan or inf stays in it: keep those out there, and fill it anew."
    if held.kind == "weight":
        text = what_wrote_it(rank_reports, found[0], held.tensor)
    title = f"the {held.kind} {held.name} holds {amount(held.tensor)}"
    told = finding(weight_not_finite, title, rank_reports, found, text)
    return replace(told, affects=(held.name.rpartition(".")[0] or "the model",))


def overflow_in_module(rank_reports: RankReports) -> Iterator[Finding]:
    """A module's inputs and weights were finite and its output is not: the overflow happened in this module."""
    if found := earliest_bad(rank_reports, BadKind.MODULE):
        rank_report, first_bad = found
        biggest = max((tensor.absmax or 0.0 for tensor in first_bad.frame.inputs), default=0.0)
        title = f"{where(first_bad.frame)} made {amount(first_bad.tensor)} in {first_bad.tensor.name}"
        held = rank_report.held
        if any(is_minus_inf_mask(tensor) for tensor in first_bad.frame.inputs):
            title += " of inputs that hold -inf"
        elif held is not None and rank_report.origin is not None and held.kind:
            title += f" of the {held.kind} {held.name}, which holds -inf"
        elif held is not None and rank_report.origin is None:
            title += " of a tensor that was bad already"
        elif first_bad.frame.buffers:
            title += ", and " + " and ".join(
                f"its {each.name} holds {amount(each)}" for each in first_bad.frame.buffers
            )
        elif first_bad.frame.unmeasured:
            title += f" ({', '.join(first_bad.frame.unmeasured)} could not be measured)"
        else:
            dtype = first_bad.tensor.dtype
            title += f" of finite inputs (largest {biggest:.3g}, {dtype} ends at {limit_of(dtype):.3g})"
        yield finding(overflow_in_module, title, rank_reports, found, remedy(rank_reports, rank_report, first_bad))


def overflow_between_modules(rank_reports: RankReports) -> Iterator[Finding]:
    """A module was given nan or inf that no module had made: a function between the modules made it."""
    if found := earliest_bad(rank_reports, BadKind.BETWEEN):
        rank_report, first_bad = found
        after = f"after {where(first_bad.before)}" if first_bad.before is not None else "before the first module"
        made = f"{amount(first_bad.tensor)} made {after} and before {where(first_bad.frame)}"
        line = "" if rank_report.origin is None else f", by {rank_report.origin.op} in {rank_report.origin.line}"
        yield finding(
            overflow_between_modules, made + line, rank_reports, found, remedy(rank_reports, rank_report, first_bad)
        )


def loss_not_finite(rank_reports: RankReports) -> Iterator[Finding]:
    """All modules are finite and the loss is not: it became nan or inf after the model."""
    bad = [rank_report for rank_report in where_it_began(rank_reports) if _has_bad_loss(rank_report)]
    if not bad or any(_is_bad_before_the_loss(rank_report) or rank_report.other_loss for rank_report in rank_reports):
        return  # where the replay gives another loss, it says nothing of where the live one came from
    ranks = ranks_say(tuple(rank_report.rank for rank_report in bad), len(rank_reports))
    losses = ", ".join(f"{loss:g}" for loss in bad[0].losses) or _measured(bad[0])
    origin = _made_the_loss(bad[0])
    outputs = "every module's output" + (" that could be measured" if bad[0].unmeasured else "")
    # without an engine the modules' outputs are measured, and gradients are not
    finite = f"{outputs} is finite" if bad[0].replayed or not bad[0].losses else "the gradients are finite"
    if not bad[0].replayed and any(rank_report.named for rank_report in rank_reports):
        finite = "so are gradients (not replayed this time)"
    yield Finding.error(
        rule_of(loss_not_finite),
        f"the loss is {losses} and {finite}{origin}{ranks}",
        evidence=(
            *evidence(rank_reports, bad[0]),
            *_of_its_graph(bad[0]),
            *(f"the {each.name} holds {amount(each)}" for each in bad[0].bad_tensors),
        ),
        affects=_place(bad[0]),
        fix=_what_to_do(rank_reports, bad[0]),
    )


NO_TARGET = "Leave out micro-batches without a target, or take the sum and divide it by max(1, targets)."


def _what_to_do(rank_reports: RankReports, rank_report: RankReport) -> str:
    found, made = rank_report.first_bad, rank_report.origin
    cure = made.cure if made is not None and found is not None and found.kind is BadKind.LOSS else ""
    if not cure and rank_report.loss_made is not None and not rank_report.again:
        cure = rank_report.loss_made.cure or "Look at that operation, and at what it is given."
    if rank_report.ignored:
        cure = NO_TARGET
    known = " ".join(part for part in (cure, what_was_tried(rank_reports, found)) if part)
    if not known and (bad := " or the ".join(each.name for each in rank_report.bad_tensors)):
        return (
            f"See whether the forward reads the {bad}: if so, fill it anew, or load a checkpoint in which it is "
            "finite; if not, look at the labels of this batch."
        )
    if not known and rank_report.again:
        return "See what was found in the steps before, which were replayed: this one was not."
    inside = found is not None and found.kind is BadKind.LOSS
    after = "" if inside else ", and at what the script computes between the model and backward"
    return known or f"Look at the labels of this batch (a loss over no valid target is nan){after}."


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
        yield "read from the graph of the loss: its line is told if it happens again"


def _place(rank_report: RankReport) -> tuple[str, ...]:
    """Said where the line is known: then it is told in full, although the loss was bad before."""
    made = rank_report.loss_made
    return () if made is None or not made.line else ("the loss",)
