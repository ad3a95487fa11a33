"""The command that says where two batches, ranks or runs part."""

from typing import Annotated

from dsdoctor.cli.ending import FOUND, OK, print_result
from dsdoctor.cli.options import Json
from dsdoctor.cli.trace.options import Modules, One, Other, PhaseName, selection_of, talk
from dsdoctor.core.errors import UsageError
from dsdoctor.core.options import option
from dsdoctor.overflow.trace.compare import ChosenBatch, compare, pairs
from dsdoctor.overflow.trace.text import comparison_lines, source_parts
from dsdoctor.overflow.trace.trace_file import sources

BatchA = Annotated[int | None, option(name="--batch-a", metavar="N", help="The batch of A.")]
BatchB = Annotated[int | None, option(name="--batch-b", metavar="N", help="The batch of B.")]
RankA = Annotated[int | None, option(name="--rank-a", metavar="N", help="The rank of A.")]
RankB = Annotated[int | None, option(name="--rank-b", metavar="N", help="The rank of B.")]
Ratio = Annotated[
    float | None,
    option(name="--tolerance", metavar="RATIO", help="Allowed ratio of two abs maxima: 1.5 is 50% more."),
]


def compare_command(
    first: One,
    other: Other = None,
    /,
    *,
    batch_a: BatchA = None,
    batch_b: BatchB = None,
    rank_a: RankA = None,
    rank_b: RankB = None,
    modules: Modules = (),
    phase: PhaseName = "all",
    tolerance: Ratio = None,
    as_json: Json = False,
) -> int:
    """Find where two batches, ranks or runs diverge: the first tensor whose figures differ by more than rounding.

    Batch 149 against 150: compare TRACE --batch-a 149 --batch-b 150. Rank 0 against 3: compare FOLDER --rank-a 0 --rank-b 3.
    A bf16 run against an fp32 one, all that both have: compare bf16/ fp32/

    Allowed for the same batch of the same rank: a ratio of 1 + 32 roundings of
    the coarsest dtype so far (bfloat16 1.125, float16 1.016, float32 1.001);
    for other data: 4. Shapes and dtypes that differ are told, and are no
    divergence.

    Example: dsdoctor trace compare dsdoctor-trace --batch-a 149 --batch-b 150
    """
    chosen_a, chosen_b = ChosenBatch(batch=batch_a, rank=rank_a), ChosenBatch(batch=batch_b, rank=rank_b)
    _check(tolerance, chosen_a, chosen_b, alone=other is None)
    a = sources([first])
    b = a if other is None else sources([other])
    found = compare(pairs(a, b, chosen_a, chosen_b, selection_of(modules, None, None, phase)), tolerance=tolerance)
    if not found.tensors and not found.bad_in_both:
        raise UsageError(
            "A and B have no tensor in common", hint="modules are matched by their names: dsdoctor trace show"
        )
    if not as_json:
        talk(a, "A: ")
        talk(b, "B: ")
    parts = {"a": source_parts(a), "b": source_parts(b)}
    print_result("trace compare", as_json, comparison_lines(found), (), comparison=found, **parts)
    return OK if found.first is None else FOUND


def _check(tolerance: float | None, a: ChosenBatch, b: ChosenBatch, *, alone: bool) -> None:
    """Raise UsageError for a question that makes no sense. ``alone``: there is no B."""
    if tolerance is not None and not tolerance >= 1:
        raise UsageError(f"--tolerance {tolerance:g} is less than 1", hint="it is a ratio: 1 allows no difference")
    if alone and _is_itself(a, b):
        raise UsageError("A would be compared with itself", hint="name B, or two batches: --batch-a 149 --batch-b 150")


def _is_itself(a: ChosenBatch, b: ChosenBatch) -> bool:
    """Whether both sides of one trace are the same: what one side leaves out is taken of the other."""
    return (a.batch == b.batch or None in (a.batch, b.batch)) and (a.rank == b.rank or None in (a.rank, b.rank))
