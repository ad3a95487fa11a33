"""Verdicts on what became too small to count, in steps that nothing else is wrong with: reports of ranks -> a Finding. Pure."""

from collections.abc import Iterator

from dsdoctor.core.finding import Finding
from dsdoctor.overflow.verdict.advice import RankReports
from dsdoctor.overflow.verdict.evidence import near, ranks_say, rule_of, where

ALARM = 0.3
"""The share of gradient elements that must be flushed, and would not be at a larger scale: healthy fp16 runs have under a tenth."""
UNCHANGED = 0.75
"""The share of weights with a gradient that a step leaves as they are, in two checks one after the other."""


def activations_underflow(rank_reports: RankReports) -> Iterator[Finding]:
    """What a module was given or gave is zero in float16, and would not be in float32.

    Below 6e-8 float16 has nothing but zero. Level guard looks where whole gradients of a step are nothing, level frames at what
    the modules gave, both in steps 1, 2, 4, 8 and so on, then every 100. The step's forward is replayed as it was and with every
    module in float32: the tensor that is named is the first, in order, that is something there and nothing here.

    Why it matters: the layers behind it compute with nothing, and those before it get no gradient. No value is nan, no step is
    skipped, and no loss scale helps: it multiplies gradients, not activations.

    How to fix it: train in bfloat16, which has the range of float32; or look before that module for a factor or a norm that
    makes its values so small, and run what is around it in float32 up to where they are large again.

    Since: 0.1
    """
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
    """Gradients are flushed to zero in float16, or are denormal there, and would not be at a larger loss scale.

    Below 6e-8 float16 has nothing but zero, and below 6.1e-5 it loses precision. The step was replayed with its gradients
    multiplied by a power of two: the elements that are nothing at first and something then have underflowed.

    Why it matters: those weights do not learn. Nothing is nan, no step is skipped, and the loss merely falls more slowly or
    not at all.

    How to fix it: set the loss scale that the finding names, or let it be found: "loss_scale": 0 in the fp16 section of the
    DeepSpeed configuration makes it dynamic. bfloat16 has the range of float32 and needs none. Do not multiply the loss by a
    small number.

    Since: 0.1
    """
    bad = [report for report in rank_reports if report.flushed is not None and report.flushed.share > ALARM]
    worst = max(
        (report.flushed for report in bad if report.flushed is not None), key=lambda each: each.share, default=None
    )
    if worst is None:
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
    the next number of the weights' format.

    Weights that are kept in bfloat16 alone, without a float32 copy, have 8 bits: a weight of 0.02 changes by 6e-5 at least or
    not at all.

    Why it matters: the training costs what it costs and those weights do not move, whatever the number of steps.

    How to fix it: keep float32 copies of the weights (the bf16 section of DeepSpeed's configuration does so), or use an
    optimizer with stochastic rounding, or a higher learning rate.

    Since: 0.1
    """
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
