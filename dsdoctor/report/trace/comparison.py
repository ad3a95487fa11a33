"""What two traces differ in -> lines for a terminal."""

from collections.abc import Iterator

from dsdoctor.core.text import and_more
from dsdoctor.overflow.frames.frame import CallPhase, TensorStats
from dsdoctor.overflow.trace.difference import (
    Comparison,
    DifferenceKind,
    FormChange,
    Side,
    TensorDifference,
    TensorPlace,
)
from dsdoctor.report.trace.lines import WHOLE, clean, counted

MOST_NAMES = 12
MOST_ALIKE = 5
"""Rows of a table in which nothing diverges."""


def comparison_lines(found: Comparison) -> Iterator[str]:
    """What differs: the first place, then the largest differences, then what only one side has."""
    yield from _first_lines(found)
    for change in found.shapes[:MOST_NAMES]:
        yield f"· shape {change.a} against {change.b}: {_times(change)}"
    for change in found.dtypes:
        yield f"· {change.a} against {change.b}: {_times(change)}"
    if found.bad_in_both:
        yield f"! nan or inf on both sides in {found.bad_in_both:,} tensors, which were not compared"
    for side, names in (("A", found.only_a), ("B", found.only_b)):
        if names:
            yield f"! only in {side}: {_some(names)}"
    shown = [difference for difference in found.largest if difference.diverges] or found.largest[:MOST_ALIKE]
    if shown:
        yield ""
        yield f"  {'ratio':>9}  {'A':>9}  {'B':>9}  {'of':<10} module, tensor"
        yield from map(_row, shown)


def _first_lines(found: Comparison) -> Iterator[str]:
    if found.first is None:
        yield f"✓ no divergence: {found.tensors:,} tensors in {counted(found.pairs, 'batch', 'batches')} agree"
        return
    first, bad = found.first, found.first_bad
    yield f"✗ first divergence: {name_of(first.place)}, {first.place.tensor}: {_in_words(first)}"
    yield f"    {_where(first.place)}; {found.agreed:,} of {found.tensors:,} tensors come before it and agree"
    yield f"    {_origin(first)}"
    if bad is not None and bad is not first:
        yield f"✗ first nan or inf on one side only: {name_of(bad.place)}, {bad.place.tensor}: {_in_words(bad)}"
        yield f"    {_where(bad.place)}"
    yield f"  {found.diverging:,} tensors diverge in all"


def name_of(place: TensorPlace) -> str:
    """The module, its class, and which call of a batch it was."""
    call = f", call {place.call}" if place.call else ""
    return clean(f"{place.module or WHOLE} {place.kind}{call}")


def _where(place: TensorPlace) -> str:
    if place.a == place.b:
        return f"{place.phase.value} of {_side(place.a)}"
    return f"{place.phase.value} of {_side(place.a)} against {_side(place.b)}"


def _side(side: Side) -> str:
    return f"batch {side.batch}, rank {side.rank}"


def _in_words(difference: TensorDifference) -> str:
    if difference.what is DifferenceKind.NOT_FINITE:
        return f"{_figure(difference.a, difference.what)} against {_figure(difference.b, difference.what)}"
    if difference.what is DifferenceKind.ZEROS:
        return (
            f"{_figure(difference.a, difference.what)} against {_figure(difference.b, difference.what)} of it are zero"
        )
    return (
        f"{difference.what.value} {_figure(difference.a, difference.what)} against {_figure(difference.b, difference.what)}, "
        f"a factor of {difference.ratio:.4g} (rounding: up to {difference.tolerance:.4g})"
    )


def _figure(tensor: TensorStats, what: DifferenceKind) -> str:
    """The figure in question of one side."""
    if what is DifferenceKind.NOT_FINITE and tensor.is_bad:
        inf = tensor.posinf + tensor.neginf
        return " and ".join([*([f"{tensor.nan:,} nan"] if tensor.nan else []), *([f"{inf:,} inf"] if inf else [])])
    if what is DifferenceKind.ZEROS:
        return f"{tensor.zeros / max(tensor.count, 1):.0%}"
    value = tensor.absmin if what is DifferenceKind.ABSMIN else tensor.absmax
    return "none" if value is None else f"{value:.2e}"


def _origin(first: TensorDifference) -> str:
    """What the kind of tensor says about the cause."""
    name = first.place.tensor
    if first.place.phase is CallPhase.BACKWARD:
        return "the forward agrees: it is the gradient that differs"
    if name.startswith("output"):
        return "its weights and inputs agree: it was made in this module"
    if name.startswith("input"):
        return "no module's output before it differs: it is the batch's own, or was made between modules"
    return "it is a weight or buffer: it differed before the batch began"


def _row(difference: TensorDifference) -> str:
    mark = "✗" if difference.diverges else "·"
    times = "inf" if difference.ratio == float("inf") else f"{difference.ratio:.4g}"
    backward = " (backward)" if difference.place.phase is CallPhase.BACKWARD else ""
    figures = [_figure(side, difference.what).replace(" and ", "+") for side in (difference.a, difference.b)]
    return (
        f"{mark} {times:>9}  {figures[0]:>9}  {figures[1]:>9}  {difference.what.value:<10} "
        f"{name_of(difference.place)}, {difference.place.tensor}{backward}, batch {difference.place.a.batch}"
    )


def _times(change: FormChange) -> str:
    return f"{counted(change.count, 'tensor', 'tensors')}, first {name_of(change.first)}, {change.first.tensor}"


def _some(names: tuple[str, ...]) -> str:
    return clean(and_more(names, MOST_NAMES))
