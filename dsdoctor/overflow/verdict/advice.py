"""What to do about the first bad value, from the evidence: why it became bad, what was tried in the replay, how its weights grew.

Pure; knows no torch. What was not tried is not called a remedy that works.
"""

from collections.abc import Iterator

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Growth, RankReport
from dsdoctor.overflow.frames.masks import is_minus_inf_mask

RankReports = tuple[RankReport, ...]
GROWN = 1.5
"""A weight that is less than this many times as large as at first has not grown."""
FAR = 10.0
"""And one that is so many times as large has grown too much."""
MOST_WEIGHTS = 2
IN_EVALUATION = (
    "No step trains on it: look in this module for a division by zero, a logarithm, or a statistic of too few values (the standard "
    "deviation of one row is nan), and at the size of this batch."
)


def remedy(rank_reports: RankReports, rank_report: RankReport, first_bad: FirstBad) -> str:
    """What to do about values that do not fit their dtype, or that are nan."""
    cure = rank_report.origin.cure if rank_report.origin is not None else ""
    if rank_report.held is not None and rank_report.origin is None:
        cure = "Look at what made that tensor: no operation of torch did in this batch."
    known = [part for part in (cure, what_was_tried(rank_reports, first_bad), *_of_growth(rank_reports)) if part]
    if known:
        return " ".join(known)
    if any(is_minus_inf_mask(tensor) for tensor in first_bad.frame.inputs):
        return "A row that is masked entirely gives nan: leave one place open, or use the dtype's minimum for -inf."
    if first_bad.tensor.dtype != "float16" and rank_report.evaluation:
        return IN_EVALUATION
    if first_bad.tensor.dtype != "float16":
        return "Lower the learning rate or clip gradients; look for a division by zero or a logarithm in this module."
    # the module around it: what does not fit where it was made does not fit when it is cast back there
    name = first_bad.frame.module.rpartition(".")[0]
    is_inner = first_bad.kind is BadKind.MODULE and first_bad.frame.module
    around = f", with what is around {first_bad.frame.module}" if is_inner else ""
    return f"Run it in float32{around}: {as_call(name)}; or train in bfloat16."


def _of_growth(rank_reports: RankReports) -> Iterator[str]:
    for growth in joined(rank_reports)[:1]:
        (first, before), (_, now) = growth.points[0], growth.points[-1]
        if before and now / before >= FAR:
            yield f"{growth.name} has grown since step {first}: lower the learning rate, or clip gradients."


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


def what_is_known(rank_reports: RankReports, rank_report: RankReport) -> Iterator[str]:
    """Lines of evidence beside the values themselves."""
    if rank_report.origin is not None and rank_report.origin.how:
        yield f"why: {rank_report.origin.how}"
    yield from _sum_over_ranks(rank_reports)
    if rank_report.rows:
        yield rank_report.rows
    if rank_report.ignored:
        yield rank_report.ignored
    for growth in joined(rank_reports)[:MOST_WEIGHTS]:
        yield from how_it_grew(growth)
    # what other ranks were given is of another batch
    for growth in sorted(rank_report.inputs, key=lambda each: -each.points[-1][1])[:1]:
        yield from how_it_grew(growth)
    for step, before, since in rank_report.rates[-1:]:
        yield f"the learning rate went from {before:.3g} to {since:.3g} in step {step}"


def _sum_over_ranks(rank_reports: RankReports) -> Iterator[str]:
    """Every rank got the bad value out of the same reduction, to which each of them gave finite values."""
    came = {report.received for report in rank_reports}
    received = came.pop() if len(came) == 1 and len(rank_reports) == rank_reports[0].world else None
    if received is not None and "reduce" in received.op and received.line:
        yield f"every rank gave finite values to {received.op} in {received.line}, and got this out of it: their sum does not fit"


def joined(rank_reports: RankReports) -> tuple[Growth, ...]:
    """The weights over all ranks, of which each may hold a part: the largest value of each step, the largest weight first."""
    found: dict[str, dict[int, float]] = {}
    for rank_report in rank_reports:
        for growth in rank_report.growth:
            steps = found.setdefault(growth.name, {})
            for step, value in growth.points:
                steps[step] = max(steps.get(step, 0.0), value)
    all_of_them = [Growth(name=name, points=tuple(sorted(steps.items()))) for name, steps in found.items()]
    return tuple(sorted(all_of_them, key=lambda growth: -growth.points[-1][1]))


def how_it_grew(growth: Growth) -> Iterator[str]:
    """Whether a weight is what it was when the watch began, or became so, and when.

    >>> next(how_it_grew(Growth(name="a.weight", points=((0, 2.0), (7, 2.1)))))
    'a.weight has not grown: its largest value is 2.1, and was 2 in step 0'
    >>> next(how_it_grew(Growth(name="a.weight", points=((0, 1.0), (3, 2.0), (7, 64.0)))))
    'a.weight grew 64 times from step 0 (largest 1) to step 7 (64), most of it from step 3 on'
    >>> next(how_it_grew(Growth(name="a.weight", points=((0, 1.0), (3, 4.0), (7, 64.0)))))
    'a.weight grew 64 times from step 0 (largest 1) to step 7 (64), 1.8 times a step'
    """
    (first, before), (last, now) = growth.points[0], growth.points[-1]
    if first == last or not before or not now:
        return
    times = now / before
    if times < GROWN:
        yield f"{growth.name} has not grown: its largest value is {now:.3g}, and was {before:.3g} in step {first}"
        return
    how = f"{times ** (1 / (last - first)):.2g} times a step"
    if len(growth.points) > 2:
        step, value = growth.points[-2]
        if value and now / value > times**0.75:
            how = f"most of it from step {step} on"
    yield f"{growth.name} grew {times:.3g} times from step {first} (largest {before:.3g}) to step {last} ({now:.3g}), {how}"
