"""What to do about the first bad value, from the evidence: why it became bad, what the replay tried, how its weights grew.

Pure; knows no torch. What was not tried is not called a remedy that works.
"""

from collections.abc import Iterator

from dsdoctor.overflow.frames.first_bad import BadKind, Cure, FirstBad, RankReport
from dsdoctor.overflow.verdict.evidence import EXTREME_WEIGHT, RankReports, joined
from dsdoctor.rules import book

LARGE_GROWTH = 10.0
"""A weight that is so many times as large as at first has grown too much."""


def remedy(rank_reports: RankReports, rank_report: RankReport, first_bad: FirstBad) -> str:
    """What the evidence says to do about values that do not fit their dtype, or that are nan; "" where it says nothing."""
    origin = rank_report.origin
    cure = origin.cure if origin is not None else Cure("tensor-from-outside") if rank_report.held is not None else None
    tried = what_was_tried(rank_reports, first_bad)
    return " ".join(part for part in (cure_text(cure), tried, *of_growth(rank_reports)) if part)


def cure_text(cure: Cure | None) -> str:
    """A cure in the book's words; "" where there is none."""
    return book.remedy("overflow", cure.remedy, about=cure.about).text if cure else ""


def of_growth(rank_reports: RankReports) -> Iterator[str]:
    """What to do about the largest weight that is known, where it grew or was extreme from the start."""
    for growth in joined(rank_reports)[:1]:
        (first, before), (_, now) = growth.points[0], growth.points[-1]
        if before and now / before >= LARGE_GROWTH:
            yield book.remedy("overflow", "weight-grown", name=growth.name, step=first).text
        elif now >= EXTREME_WEIGHT:
            since = f"since step {first}" if len(growth.points) > 1 else ""
            yield book.remedy("overflow", "weight-extreme", name=growth.name, largest=f"{now:.3g}", since=since).text


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
            backward = all(attempt.backward for attempt in attempts)
            name = "float32-helps" if backward else "float32-helps-the-forward"
            module = attempts[0].module
            return book.remedy("overflow", name, call=as_call(module), module=module).text
    tried = [attempts for attempts in tried if not any(attempt.why_not for attempt in attempts)]
    if not tried or tried[-1][0].module:  # the whole model may help yet
        return ""
    inner = tried[0][0].module
    between = len(tried) - 2
    more = f", in {between} module{'s' if between > 1 else ''} around it and in " if between > 0 else " and in "
    return book.remedy("overflow", "float32-does-not-help", around=f"{inner}{more}" if inner else "").text
