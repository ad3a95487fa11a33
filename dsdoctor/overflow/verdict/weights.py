"""A weight that holds nan or inf, and what is known of the steps before -> what can have written it, and what to do. Pure."""

from collections.abc import Iterator
from math import isfinite

from dsdoctor.overflow.frames.first_bad import RankReport
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.verdict.advice import RankReports

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
