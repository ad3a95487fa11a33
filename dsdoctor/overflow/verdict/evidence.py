"""What the reports of all ranks show about the first bad value, and what it says to do: why it became bad, what helped, what grew.

Pure; knows no torch. What was not tried is not called a remedy that works.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more
from dsdoctor.overflow.frames.first_bad import BadKind, Cure, FirstBad, Growth, RankReport
from dsdoctor.overflow.frames.frame import Frame, TensorStats, headroom_bits, item_line
from dsdoctor.rules import book

RankReports = tuple[RankReport, ...]
MIN_GROWTH = 1.5
"""A weight that is less than this many times as large as at first has not grown."""
EXTREME_WEIGHT = 1e4
"""No weight of an ordinary model is so large, and no training makes it so in a step."""
MAX_WEIGHTS = 2
MAX_NAMES = 3
ELSEWHERE = "memory of torch.empty that was never written, numpy's, or a value from before the batch"
Verdict = Callable[[RankReports], Iterator[Finding]]
LARGE_GROWTH = 10.0
"""A weight that is so many times as large as at first has grown too much."""


def what_is_known(rank_reports: RankReports, rank_report: RankReport) -> Iterator[str]:
    """Lines of evidence beside the values themselves."""
    if rank_report.origin is not None and rank_report.origin.how:
        yield f"why: {rank_report.origin.how}"
    yield from _sum_over_ranks(rank_reports)
    if rank_report.rows:
        yield rank_report.rows
    if rank_report.ignored:
        yield rank_report.ignored
    for growth in joined(rank_reports)[:MAX_WEIGHTS]:
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
        yield f"every rank gave finite values to {received.op} in {received.line}, and got this result: their sum does not fit"


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
    if times < MIN_GROWTH:
        yield f"{growth.name} has not grown: its largest value is {now:.3g}, and was {before:.3g} in step {first}"
        return
    how = f"{times ** (1 / (last - first)):.2g} times a step"
    if len(growth.points) > 2:
        step, value = growth.points[-2]
        if value and now / value > times**0.75:
            how = f"most of it from step {step} on"
    yield f"{growth.name} grew {times:.3g} times from step {first} (largest {before:.3g}) to step {last} ({now:.3g}), {how}"


def where(frame: Frame | None) -> str:
    """A module by name and class.

    >>> where(Frame(batch=0, order=0, module="blocks.1.up", kind="Linear", tensors=(), call=1))
    'blocks.1.up (Linear, call 2)'
    """
    if frame is None:
        return "the model"
    again = f", call {frame.call + 1}" if frame.call else ""
    return f"{frame.module or 'the model'} ({frame.kind}{again})"


def amount(tensor: TensorStats) -> str:
    """How many of a tensor's elements are bad, and in which way.

    >>> amount(TensorStats(name="output", dtype="float16", shape=(4,), count=4, nan=1, neginf=2))
    '1 nan and 2 -inf of 4'
    """
    kinds = ((tensor.nan, "nan"), (tensor.posinf, "inf"), (tensor.neginf, "-inf"))
    return " and ".join(f"{many} {name}" for many, name in kinds if many) + f" of {tensor.count}"


def moment(rank_report: RankReport) -> str:
    """Which batch: optimizer step, micro-batch in it, and the guide's number. A step of one micro-batch may have more forwards."""
    frame = rank_report.first_bad.frame if rank_report.first_bad is not None else None
    micro, batch = (frame.micro, frame.batch) if frame is not None else (rank_report.micro, rank_report.batch)
    if rank_report.evaluation:
        return f"{rank_report.evaluation} after {rank_report.step} steps, batch_number={batch}"
    more = 0 < rank_report.accumulation <= micro
    return f"step {rank_report.step}, {'forward' if more else 'micro-batch'} {micro}, batch_number={batch}"


def what_is_bad(first_bad: FirstBad) -> list[str]:
    """The call that went wrong first, in the guide's columns."""
    return [item_line(item) for item in first_bad.frame.tensors]


def ranks_say(ranks: tuple[int, ...], world: int) -> str:
    """Which ranks have it, and what that means.

    >>> ranks_say((1,), 4), ranks_say((0, 1), 2), ranks_say((0,), 1)
    (', on rank 1 of 4 only: its data, a branch that only it takes, or its hardware', ', on all 2 ranks: the model or the data', '')
    """
    if not (on := on_ranks(ranks, world)):
        return ""
    if len(ranks) == 1:
        return book.phrase("overflow", "on-one-rank", on=on)
    return book.phrase("overflow", "on-all-ranks", on=on) if len(ranks) == world else on


def on_ranks(ranks: tuple[int, ...], world: int) -> str:
    """Which ranks have it, as the end of a sentence; "" for a run of one rank.

    >>> on_ranks((1,), 4), on_ranks((0, 1), 2), on_ranks((0, 2), 4)
    (', on rank 1 of 4 only', ', on all 2 ranks', ', on ranks 0, 2 of 4')
    """
    if world < 2 or not ranks:
        return ""
    if len(ranks) == 1:
        return f", on rank {ranks[0]} of {world} only"
    return f", on all {world} ranks" if len(ranks) == world else f", on ranks {', '.join(map(str, ranks))} of {world}"


def gradient_names(rank_reports: Iterable[RankReport]) -> str:
    """The parameters whose gradients are bad, a few of them.

    >>> gradient_names([])
    ''
    """
    names = sorted({tensor.name for rank_report in rank_reports for tensor in rank_report.named if tensor.is_bad})
    return and_more(names, MAX_NAMES)


def near(value: float) -> str:
    """A scale as a power of two, rounded down.

    >>> near(65536.0), near(3000.0), near(0.5)
    ('2^16', '2^11', '2^-1')
    """
    return f"2^{math.floor(math.log2(value))}"


def earliest_bad(rank_reports: RankReports, *kinds: BadKind) -> tuple[RankReport, FirstBad] | None:
    """The first bad value that was first in time on any rank; None if it is of another kind than ``kinds``.

    In the forward the lowest pipeline stage is first, in the backward the highest; then micro-batch, order and rank count.
    """
    found = [(report, report.first_bad) for report in where_it_began(rank_reports) if report.first_bad is not None]
    forward = [pair for pair in found if pair[1].kind is not BadKind.GRADIENT]
    sign = 1 if forward else -1

    def moment_of(pair: tuple[RankReport, FirstBad]) -> tuple[int, int, int, int]:
        return sign * (pair[0].stage or 0), pair[1].frame.micro, pair[1].frame.order, pair[0].rank

    chosen = min(forward or found, key=moment_of, default=None)
    return chosen if chosen is not None and chosen[1].kind in kinds else None


def sharers(rank_reports: RankReports, rank_report: RankReport) -> tuple[tuple[int, ...], int]:
    """The ranks of its stage in which a bad value began, be it another one, and how many ranks there are in the stage."""
    peers = [peer for peer in rank_reports if peer.stage == rank_report.stage]
    began = where_it_began(tuple(peers))
    return tuple(peer.rank for peer in began if peer.first_bad is not None), len(peers)


def where_it_began(rank_reports: RankReports) -> RankReports:
    """Without the ranks that got their bad value from another one; all of them where no rank knows of its own."""
    own = tuple(report for report in rank_reports if report.received is None)
    return own if any(report.first_bad is not None for report in own) else rank_reports


def bad_gradient(rank_report: RankReport, rank_reports: RankReports) -> str:
    """What went bad first in the backward, and by which operation."""
    found, origin = rank_report.first_bad, rank_report.origin
    if found is None:
        return book.phrase("overflow", "gradient-bad", names=gradient_names(rank_reports))
    if rank_report.began_bad:
        return _of_the_loss(rank_report, found)
    by = f"{origin.op} of {origin.line}" if origin is not None else "the backward"
    after = f", out of the backward of {found.frame.after[-1]}" if found.frame.after else ""
    place = found.tensor.name.removeprefix("grad ")
    return f"{by} made {amount(found.tensor)} in the gradient of {where(found.frame)} {place}{after}"


def _of_the_loss(rank_report: RankReport, found: FirstBad) -> str:
    """A bad gradient that was so before it came to the model."""
    made = rank_report.loss_backward
    by = book.phrase("overflow", "backward-outside")
    if made is not None:
        by = f"{made.op} in {made.line}" if made.line else book.phrase("overflow", "operation-outside", op=made.op)
    return book.phrase("overflow", "gradient-of-output", by=by, bad=amount(found.tensor))


def stays_bad(rank_report: RankReport) -> bool:
    """Whether this rank's gradients are not finite for another reason than the loss scale."""
    if rank_report.first_bad is not None and rank_report.first_bad.kind is not BadKind.GRADIENT:
        return False
    if rank_report.at_scale_one is not None:
        return any(tensor.is_bad for tensor in rank_report.at_scale_one)
    return rank_report.scale.value <= 1 and (
        any(tensor.is_bad for tensor in rank_report.local) or rank_report.first_bad is not None
    )


def affected(first_bad: FirstBad | None) -> tuple[str, ...]:
    """The module of a first bad value."""
    return () if first_bad is None else (first_bad.frame.module or "the model",)


def extent(rank_reports: RankReports, rank_report: RankReport, first_bad: FirstBad | None) -> str:
    """In which kind of run, and on which ranks, as the end of a sentence."""
    evaluation = f", in {rank_report.evaluation}" if rank_report.evaluation else ""
    return evaluation + ("" if first_bad is None else _bad_ranks(rank_reports, rank_report, first_bad))


def _bad_ranks(rank_reports: RankReports, rank_report: RankReport, first_bad: FirstBad) -> str:
    """Which ranks have it. A weight that others gathered is bad in the parts that some ranks hold."""
    ranks, world = sharers(rank_reports, rank_report)
    gathered = rank_report.received is None and any(peer.received is not None for peer in rank_reports)
    if first_bad.kind is BadKind.WEIGHT and gathered:
        return book.phrase("overflow", "in-parts-of-ranks", ranks=map(str, ranks), world=world)
    return ranks_say(ranks, world)


def evidence(rank_reports: RankReports, rank_report: RankReport) -> tuple[str, ...]:
    """When it happened, what was seen, and what was replayed."""
    lines = [
        f"{moment(rank_report)}, rank {rank_report.rank}"
        + (f", stage {rank_report.stage}" if rank_report.stage is not None else "")
    ]
    if rank_report.engine:
        lines.append(f"engine: {rank_report.engine}")
    if rank_report.first_bad is not None:
        lines += what_is_bad(rank_report.first_bad)
        tight = [
            bits
            for tensor in rank_report.first_bad.frame.inputs
            if (bits := headroom_bits(tensor.absmax, tensor.dtype)) is not None
        ]
        lines += [f"its inputs had {min(tight):.1f} bits of headroom left"] if tight and min(tight) < 8 else []
    if rank_report.origin is not None:
        lines.append(f"first made by {rank_report.origin.op} in {rank_report.origin.line}")
    if rank_report.began_bad and rank_report.loss_backward is not None:
        lines.append(f"why: {rank_report.loss_backward.how}")
    lines += _what_was_there(rank_report)
    lines += [
        f"it reached rank {peer.rank} by {peer.received.op}"
        + (f" in {peer.received.line}" if peer.received.line else "")
        for peer in rank_reports
        if peer.received is not None and rank_report.received is None
    ]
    lines += what_is_known(rank_reports, rank_report)
    if rank_report.minus_inf is not None:
        lines.append(f"its -inf came from {rank_report.minus_inf.op} in {rank_report.minus_inf.line}")
    if names := gradient_names(rank_reports):
        lines.append(f"bad gradients after reduction: {names}")
    local = tuple(report.rank for report in rank_reports if any(stats.is_bad for stats in report.local))
    if local and len(rank_reports) > 1:
        # where it is bad is no cause: the title says on which ranks it began
        lines.append(f"bad before reduction{on_ranks(local, len(rank_reports))}")
    if rank_report.unmeasured:
        lines.append(f"not measured: {and_more(rank_report.unmeasured, MAX_NAMES)}")
    if rank_report.replayed:
        lines.append(f"replayed: {rank_report.replayed}")
    return tuple(lines)


def _what_was_there(rank_report: RankReport) -> Iterator[str]:
    """What is known of a tensor that was bad before the batch."""
    held, found = rank_report.held, rank_report.first_bad
    if held is None or found is None or (found.kind is BadKind.GRADIENT and not held.kind):
        return  # the gradient that the backward began with
    if rank_report.origin is not None:
        if held.kind:
            yield f"its -inf is in the {held.kind} {held.name}"
        return
    if not held.kind:
        yield f"it came from a tensor that no torch operation made bad in this batch: {ELSEWHERE}"
    elif found.kind is BadKind.GRADIENT:
        yield f"it came from the {held.kind} {held.name}, which holds {amount(held.tensor)}"
    if held.met is not None:
        yield f"first read by {held.met.op} in {held.met.line}"
    if held.written is not None:
        yield f"written in this batch by {held.written.op} in {held.written.line}"


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
