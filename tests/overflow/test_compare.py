"""Where two runs part."""

import math
from pathlib import Path

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.frames.frame import CallPhase, Frame, Other
from dsdoctor.overflow.trace.compare import (
    ChosenBatch,
    Comparison,
    DifferenceKind,
    FormChange,
    Pair,
    Side,
    TensorDifference,
    TensorPlace,
    compare,
    pairs,
)
from dsdoctor.overflow.trace.trace_file import Selection, sources
from tests.overflow.on_disk import chain, trace
from tests.overflow.written import backward, frame, tensor

HERE = Side(rank=0, batch=0)
TRACES = Path(__file__).parent / "traces"


def compared(
    a: tuple[Frame, ...], b: tuple[Frame, ...], other: Side = HERE, tolerance: float | None = None
) -> Comparison:
    return compare([Pair(a=HERE, b=other, frames_a=a, frames_b=b)], tolerance=tolerance)


def single(**changes: object) -> tuple[Frame, ...]:
    """One frame with one output."""
    return (frame(0, "h.0", tensor("output", **changes)),)  # type: ignore[arg-type]


def test_what_is_alike_agrees() -> None:
    frames = chain(0, 2.0, 3.0)

    assert compared(frames, frames) == Comparison(
        pairs=1,
        tensors=6,
        agreed=6,
        diverging=0,
        bad_in_both=0,
        first=None,
        first_bad=None,
        largest=(),
        shapes=(),
        dtypes=(),
        only_a=(),
        only_b=(),
    )


def test_the_first_tensor_that_differs_by_more_than_rounding_is_named() -> None:
    found = compared(chain(0, 2.0, 3.0, 5.0), chain(0, 2.002, 30.0, 50.0))

    assert found.first == TensorDifference(
        place=TensorPlace(
            a=HERE, b=HERE, phase=CallPhase.FORWARD, module="h.1", kind="Linear", call=0, tensor="output"
        ),
        what=DifferenceKind.ABSMAX,
        ratio=10.0,
        tolerance=1.015625,
        diverges=True,
        a=tensor("output", absmax=3.0),
        b=tensor("output", absmax=30.0),
    )
    assert (found.agreed, found.diverging, found.first_bad) == (5, 3, None)
    assert [(each.place.module, each.ratio) for each in found.largest] == [
        ("h.1", 10.0),
        ("h.2", 10.0),
        ("h.0", pytest.approx(1.001)),
    ]


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [("float32", 1.0009, 1.0011), ("float16", 1.015, 1.016), ("bfloat16", 1.12, 1.13), ("float8_e4m3fn", 1.99, 2.01)],
)
def test_rounding_is_as_coarse_as_the_dtype(dtype: str, within: float, beyond: float) -> None:
    assert compared(single(dtype=dtype, absmax=1.0), single(dtype=dtype, absmax=within)).first is None
    assert compared(single(dtype=dtype, absmax=1.0), single(dtype=dtype, absmax=beyond)).first is not None


def test_rounding_errors_are_carried_into_finer_dtypes() -> None:
    coarse = frame(0, "h.0", tensor("output", "bfloat16"))
    fine, other = (frame(1, "loss", tensor("output", "float32", absmax=value)) for value in (3.0, 3.2))

    assert compared((coarse, fine), (coarse, other)).first is None
    assert compared((fine,), (other,)).first is not None


def test_other_data_may_differ_by_a_factor_of_four() -> None:
    other = Side(rank=0, batch=1)

    assert compared(single(absmax=1.0), single(absmax=3.9), other).first is None
    assert compared(single(absmax=1.0), single(absmax=4.1), other).first is not None
    assert compared(single(absmax=1.0), single(absmax=3.9), other, tolerance=1.5).first is not None


def test_a_nan_on_one_side_is_found_even_after_a_smaller_divergence() -> None:
    found = compared(
        (*single(absmax=1.0), frame(1, "h.1", tensor("output"))),
        (*single(absmax=3.0), frame(1, "h.1", tensor("output", nan=2))),
    )

    assert found.first is not None and found.first.place.module == "h.0"
    assert found.first_bad is not None
    assert (found.first_bad.what, found.first_bad.ratio, found.first_bad.place.module) == (
        DifferenceKind.NOT_FINITE,
        math.inf,
        "h.1",
    )


def test_a_nan_on_both_sides_is_no_difference() -> None:
    found = compared(single(nan=1), single(posinf=4, absmax=9.0))

    assert (found.first, found.bad_in_both) == (None, 1)


def test_what_was_flushed_to_zero_diverges_though_its_maximum_agrees() -> None:
    found = compared(single(zeros=0), single(zeros=5))

    assert found.first is not None
    assert found.first.what is DifferenceKind.ZEROS


def test_all_zeros_against_something_is_an_infinite_ratio() -> None:
    found = compared(single(absmax=0.0), single(absmax=1e-7))

    assert found.first is not None
    assert (found.first.what, found.first.ratio) == (DifferenceKind.ABSMAX, math.inf)


def test_the_least_value_counts_where_all_values_are_of_one_size() -> None:
    narrow = compared(single(absmax=1.0), (frame(0, "h.0", tensor("output", absmax=1.0)),))
    moved = single(absmax=1.0)[0].tensors[0]
    lower = type(moved)(name="output", dtype="float16", shape=(2, 4), count=8, absmin=0.25, absmax=1.0)
    tiny = type(moved)(name="output", dtype="float16", shape=(2, 4), count=8, absmin=1e-5, absmax=1.0)

    assert narrow.first is None
    assert compared(single(absmax=1.0), (frame(0, "h.0", lower),)).first is not None
    assert compared(single(absmax=1.0), (frame(0, "h.0", tiny),)).first is None


def test_masks_of_two_dtypes_are_alike() -> None:
    wide = single(dtype="float32", absmax=3.4028234663852886e38)

    assert compared(wide, single(dtype="float16", absmax=65504.0)).first is None
    assert compared(wide, single(dtype="float16", absmax=0.0, neginf=6)).first is None


def test_whole_numbers_are_not_compared() -> None:
    assert compared(single(dtype="int64", absmax=7.0), single(dtype="int64", absmax=5000.0)).tensors == 0


def test_shapes_and_dtypes_that_differ_are_told_and_are_no_divergence() -> None:
    found = compared(single(dtype="bfloat16"), (frame(0, "h.0", tensor("output", "float32")),))
    place = TensorPlace(a=HERE, b=HERE, phase=CallPhase.FORWARD, module="h.0", kind="Linear", call=0, tensor="output")

    assert found.dtypes == (FormChange(a="bfloat16", b="float32", count=1, first=place),)
    assert found.first is None


def test_modules_that_only_one_side_has() -> None:
    found = compared(chain(0, 2.0, 2.0), (*chain(0, 2.0), backward(1, "lora", tensor("grad output"))))

    assert (found.only_a, found.only_b) == (("h.1",), ("lora (backward)",))


def test_calls_of_one_module_are_told_apart() -> None:
    first, second = (frame(call, "tied", tensor("output", absmax=1.0 + call), call=call) for call in (0, 1))
    off = frame(1, "tied", tensor("output", absmax=9.0), call=1)

    found = compared((first, second), (first, off))

    assert found.first is not None
    assert found.first.place.call == 1


def test_gradients_that_come_in_several_frames_are_matched_in_their_order() -> None:
    grads = tuple(backward(order, "tied", tensor("grad output", absmax=1.0 + order)) for order in range(3))

    assert compared(grads, grads).first is None
    assert compared(grads, grads).tensors == 3


def test_places_without_a_tensor_do_not_matter() -> None:
    empty = frame(0, "h.0", Other(name="output", what="None"))  # type: ignore[arg-type]

    assert compared((empty,), single()).tensors == 0


def paired(
    a: Path, b: Path, chosen_a: ChosenBatch = ChosenBatch(), chosen_b: ChosenBatch = ChosenBatch()
) -> list[tuple[int, int, int, int]]:
    found = pairs(sources([a]), sources([b]), chosen_a, chosen_b, Selection())
    return [(pair.a.rank, pair.a.batch, pair.b.rank, pair.b.batch) for pair in found]


def two_ranks(folder: Path, *batches: int) -> Path:
    for rank in (0, 1):
        trace(folder, *(each for batch in batches for each in chain(batch, 2.0)), rank=rank, world=2)
    return folder


def test_runs_are_paired_by_the_batches_and_ranks_that_both_have(tmp_path: Path) -> None:
    a, b = two_ranks(tmp_path / "a", 0, 1, 2), two_ranks(tmp_path / "b", 1, 2, 3)

    assert paired(a, b) == [(0, 1, 0, 1), (1, 1, 1, 1), (0, 2, 0, 2), (1, 2, 1, 2)]


def test_two_batches_of_one_run(tmp_path: Path) -> None:
    a = two_ranks(tmp_path, 149, 150)

    assert paired(a, a, ChosenBatch(batch=149), ChosenBatch(batch=150)) == [(0, 149, 0, 150), (1, 149, 1, 150)]


def test_two_ranks_of_one_run(tmp_path: Path) -> None:
    a = two_ranks(tmp_path, 4, 5)

    assert paired(a, a, ChosenBatch(rank=0), ChosenBatch(rank=1)) == [(0, 4, 1, 4), (0, 5, 1, 5)]


def test_single_traces_of_different_ranks_are_paired(tmp_path: Path) -> None:
    two_ranks(tmp_path, 7)

    assert paired(tmp_path / "trace-rank00000.jsonl", tmp_path / "trace-rank00001.jsonl") == [(0, 7, 1, 7)]


@pytest.mark.parametrize(
    ("chosen_a", "chosen_b", "said"),
    [
        (ChosenBatch(batch=9), ChosenBatch(batch=0), "A has no batch 9"),
        (ChosenBatch(rank=9), ChosenBatch(), "no trace of rank 9|which one"),
        (ChosenBatch(batch=0), ChosenBatch(batch=8), "B has no batch 8"),
    ],
)
def test_what_is_not_there_cannot_be_compared(
    tmp_path: Path, chosen_a: ChosenBatch, chosen_b: ChosenBatch, said: str
) -> None:
    a = two_ranks(tmp_path, 0, 1)

    with pytest.raises(UsageError, match=said):
        paired(a, a, chosen_a, chosen_b)


def test_runs_without_a_common_batch(tmp_path: Path) -> None:
    a, b = two_ranks(tmp_path / "a", 0), two_ranks(tmp_path / "b", 1)

    with pytest.raises(UsageError, match="A has batches 0, B has batches 1"):
        paired(a, b)


def test_what_is_negligible_beside_the_rest_of_its_call_is_not_judged() -> None:
    small, flushed = (
        (frame(0, "h.0", tensor("bias", absmax=value), tensor("output", absmax=3.0)),) for value in (2e-3, 0.0)
    )

    assert compared(small, flushed).first is None
    assert (
        compared(small, (frame(0, "h.0", tensor("bias", absmax=2.0), tensor("output", absmax=3.0)),)).first is not None
    )


def test_subnormal_numbers_are_coarse_and_zero_is_not_one_of_them() -> None:
    assert compared(single(absmax=1e-6), single(absmax=3e-6)).first is None
    assert compared(single(absmax=1e-6), single(absmax=0.0)).first is not None


def test_gradients_may_differ_more() -> None:
    a, b = ((backward(0, "h.0", tensor("grad weight", absmax=value)),) for value in (1.0, 1.1))

    assert compared(a, b).first is None
    assert compared(single(absmax=1.0), single(absmax=1.1)).first is not None


def test_the_zeros_of_a_weight_go_away_in_time() -> None:
    start, later = ((frame(0, "h.0", tensor("bias", zeros=zeros)),) for zeros in (8, 0))

    assert compared(start, later).first is None


def test_a_recorded_gpt2_in_fp16_parts_from_fp32_where_its_projection_overflows() -> None:
    """Real traces of a GPT-2 of one block with large weights; what diverges before it would be a false alarm."""
    a, b = (sources([TRACES / dtype]) for dtype in ("fp16", "fp32"))

    first = compare(pairs(a, b, ChosenBatch(batch=0), ChosenBatch(), Selection())).first

    assert first is not None
    assert (first.place.module, first.place.tensor, first.what) == (
        "transformer.h.0.mlp.c_proj",
        "output",
        DifferenceKind.NOT_FINITE,
    )


def test_two_batches_of_a_healthy_recorded_run_agree() -> None:
    run = sources([TRACES / "fp32"])

    found = compare(pairs(run, run, ChosenBatch(batch=0), ChosenBatch(batch=1), Selection(phase=CallPhase.FORWARD)))

    assert (found.first, found.only_a, found.only_b) == (None, (), ())
