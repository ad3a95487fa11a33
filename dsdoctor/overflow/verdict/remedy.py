"""What to do about the first bad value, from the evidence: why it became bad, what the replay tried, how its weights grew.

Pure; knows no torch. What was not tried is not called a remedy that works.
"""

from collections.abc import Iterator

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, RankReport
from dsdoctor.overflow.verdict.evidence import EXTREME_WEIGHT, RankReports, joined

LARGE_GROWTH = 10.0
"""A weight that is so many times as large as at first has grown too much."""


def remedy(rank_reports: RankReports, rank_report: RankReport, first_bad: FirstBad) -> str:
    """What the evidence says to do about values that do not fit their dtype, or that are nan; "" where it says nothing."""
    cure = rank_report.origin.cure if rank_report.origin is not None else ""
    if rank_report.held is not None and rank_report.origin is None:
        cure = "Check what made that tensor: no torch operation did in this batch."
    return " ".join(part for part in (cure, what_was_tried(rank_reports, first_bad), *of_growth(rank_reports)) if part)


def of_growth(rank_reports: RankReports) -> Iterator[str]:
    """What to do about the largest weight that is known, where it grew or was extreme from the start."""
    for growth in joined(rank_reports)[:1]:
        (first, before), (_, now) = growth.points[0], growth.points[-1]
        if before and now / before >= LARGE_GROWTH:
            yield f"{growth.name} has grown since step {first}: lower the learning rate, or clip gradients."
        elif now >= EXTREME_WEIGHT:
            since = f"since step {first}" if len(growth.points) > 1 else "in the first sampled step"
            yield (
                f"{growth.name} holds values up to {now:.3g} {since}: check its initialization, and the file that it was loaded "
                "from."
            )


def as_call(module: str) -> str:
    """The call that runs a module in float32.

    >>> as_call("encoder.block.1"), as_call("")
    ('dsdoctor.fp32_forward(model.get_submodule("encoder.block.1"))', 'dsdoctor.fp32_forward(model)')
    """
    return f'dsdoctor.fp32_forward(model.get_submodule("{module}"))' if module else "dsdoctor.fp32_forward(model)"


def what_was_tried(rank_reports: RankReports, first_bad: FirstBad | None) -> str:
    """What float32 in one module after the other came to, on all ranks together; empty: nothing was tried, or it failed.

    Where the forward was finite as it is (``first_bad`` is a gradient, or nothing), a finite forward shows nothing, and a backward
    that could not be tried leaves it open.
    """
    forward_was_bad = first_bad is not None and first_bad.kind is not BadKind.GRADIENT
    tried = [attempts for attempts in zip(*(report.tried for report in rank_reports), strict=False) if attempts]
    for attempts in tried:
        if all(attempt.forward and attempt.backward is not False for attempt in attempts):
            if not (forward_was_bad or all(attempt.backward for attempt in attempts)):
                return ""
            finite = "is finite" if all(attempt.backward for attempt in attempts) else "has a finite forward"
            where = attempts[0].module or "the whole model"
            return f"Run it in float32: {as_call(attempts[0].module)} (checked: with float32 in {where} this batch {finite})."
    tried = [attempts for attempts in tried if not any(attempt.why_not for attempt in attempts)]
    if not tried or tried[-1][0].module:  # the whole model may help yet
        return ""
    inner = tried[0][0].module
    between = len(tried) - 2
    more = f", in {between} module{'s' if between > 1 else ''} around it and in " if between > 0 else " and in "
    around = f"{inner}{more}"
    return f"Float32 does not help (checked in {around if inner else ''}the whole model): this batch is not finite there either."
