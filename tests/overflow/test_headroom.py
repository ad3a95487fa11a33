"""Would it fit? And which modules would not."""

import math
from pathlib import Path

import pytest
import torch

from dsdoctor.overflow.frames.frame import Frame, StepEnd
from dsdoctor.overflow.trace.headroom import Gradients, Growth, Headroom, Peak, Room, Trend, headroom
from dsdoctor.overflow.trace.trace_file import Selection, selected, sources
from tests.each import each
from tests.overflow.on_disk import chain, step
from tests.overflow.written import backward, frame, tensor


def judged(*lines: Frame | StepEnd, dtype: str = "float16", margin: float = 1.0) -> Headroom:
    return headroom(((0, line) for line in lines), dtype=dtype, margin=margin)


def wide(order: int, module: str, least: float = 1.0, most: float = 1.0, **more: object) -> Frame:
    """A bf16 call whose input and output are that large."""
    items = tensor("input[0]", "bfloat16", least), tensor("output", "bfloat16", most)
    return frame(order, module, *items, **more)


def test_a_module_that_fits() -> None:
    found = judged(frame(0, "h.0", tensor("output", "bfloat16", 1023.5, absmin_nonzero=1e-7), batch=4))

    assert found == Headroom(
        dtype="float16",
        limit=65504.0,
        margin=1.0,
        batches=1,
        modules=(
            Room(
                module="h.0",
                kind="Linear",
                peak=Peak(value=1023.5, tensor="output", dtype="bfloat16", batch=4, rank=0),
                bits=6.0,
                least=1e-7,
                fades=False,
                bad=False,
                trend=None,
            ),
        ),
        keep=(),
        keep_under_autocast=(),
        gradients=None,
        masks=0,
    )


def test_modules_are_ordered_by_their_room() -> None:
    found = judged(*chain(0, 100.0, 60000.0, 10.0))

    assert [room.module for room in found.modules] == ["h.1", "h.2", "h.0"]


def test_the_margin_is_part_of_the_question() -> None:
    frames = wide(0, "h.0", 1.0, 40000.0), wide(1, "h.1", 1.0, 1.0), wide(2, "", 1.0, 1.0, leaf=False)

    assert judged(*frames).keep_under_autocast == ("h.0",)
    assert judged(*frames, margin=0).keep_under_autocast == ()


def test_an_output_that_exceeds_must_not_leave_in_fp16() -> None:
    """A linear's output exceeds and passes through its block; the norm that comes next is the first whose output fits."""
    found = judged(
        wide(0, "enc.h.0.wo", 1.0, 1e5),
        wide(1, "enc.h.0", 1.0, 1e5, leaf=False),
        wide(2, "enc.norm", 1e5, 4.0),
        wide(3, "enc", 1.0, 4.0, leaf=False),
        wide(4, "head", 4.0, 8.0),
    )

    assert found.keep_under_autocast == ("enc.h.0.wo", "enc.norm")
    assert found.keep == ("enc",)


def test_a_sum_that_no_child_made_is_its_modules_own() -> None:
    found = judged(
        wide(0, "h.0.mlp", 1.0, 3e4),
        wide(1, "h.0", 1.0, 8e4, leaf=False),
        wide(2, "", 1.0, 1.0, leaf=False),
        margin=0,
    )

    assert found.keep_under_autocast == ("h.0",)


def test_what_lies_inside_of_a_kept_module_is_not_named_again() -> None:
    found = judged(
        wide(0, "h.1.mlp", 1.0, 1e5),
        wide(1, "h.1", 1.0, 2e5, leaf=False),
        wide(2, "h.10.mlp", 1.0, 3e5),
    )

    assert found.keep_under_autocast == ("h.1", "h.10.mlp")


def test_what_was_not_traced_is_not_named() -> None:
    assert judged(wide(0, "enc.h.0.wo", 1.0, 1e5), wide(1, "enc.h.0", 1.0, 1e5, leaf=False)).keep == ("enc.h.0",)


def test_a_model_whose_result_exceeds_is_kept_whole() -> None:
    assert judged(wide(0, "head", 1.0, 1e5), wide(1, "", 1.0, 1e5, leaf=False)).keep == ("",)


def test_a_weight_that_exceeds_keeps_its_module() -> None:
    large = frame(0, "h.0", tensor("weight", "float32", 7e4), tensor("output", "float32", 1.0))

    assert judged(large).keep == ("h.0",)


def test_masks_are_no_activations() -> None:
    mask = tensor("input[mask]", "bfloat16", 3.3895313892515355e38)

    found = judged(frame(0, "h.0", mask, tensor("output", "bfloat16", 2.0)))

    assert (found.keep, found.masks, found.modules[0].bits) == ((), 1, pytest.approx(14.999, abs=1e-3))


def test_the_module_that_made_the_first_inf_is_kept_and_not_all_that_got_it() -> None:
    found = judged(
        frame(0, "h.0", tensor("input[0]"), tensor("output", posinf=3)),
        frame(1, "h.1", tensor("input[0]", posinf=3), tensor("output", nan=8, absmax=None)),
    )

    assert [room.bad for room in found.modules] == [True, True]
    assert found.keep == ("h.0",)


def test_a_tensor_that_fades_is_told() -> None:
    small = frame(0, "aux", tensor("output", "bfloat16", 1e-6))

    assert [room.fades for room in judged(small).modules] == [True]
    assert [room.fades for room in judged(small, dtype="bfloat16").modules] == [False]


def test_all_ranks_count() -> None:
    found = headroom([(0, wide(0, "h.0", 1.0, 2.0)), (3, wide(0, "h.0", 1.0, 1e5))])

    assert found.modules[0].peak == Peak(value=1e5, tensor="output", dtype="bfloat16", batch=0, rank=3)


def test_gradients_say_which_loss_scale_fits() -> None:
    found = judged(
        wide(0, "h.0"),
        backward(1, "h.0", tensor("grad weight", absmax=100.0), loss_scale=4.0),
        backward(2, "h.1", tensor("grad weight", absmax=120.0), loss_scale=8.0),
        step(0, loss_scale=4.0),
    )

    assert found.gradients == Gradients(
        peak=Peak(value=100.0, tensor="grad weight", dtype="float16", batch=0, rank=0),
        module="h.0",
        fits_scale=2048.0,
        scale=4.0,
        smallest=15.0,
        smallest_at="h.1.weight",
        needs_scale=1.0,
    )


@each(
    "figures, scale",
    [((-0.0625,), 1.0), ((-1.0, 2.0), 1.0), ((5e-324,), 1.0), ((1.0,), -4.0), ((1e308,), 1e-308), ((1e-300,), 1e308)],
)
def test_figures_that_no_run_writes_end_in_no_traceback(figures: tuple[float, ...], scale: float) -> None:
    made = (
        backward(order, f"h.{order}", tensor("grad", absmax=value), loss_scale=scale)
        for order, value in enumerate(figures)
    )

    found = judged(*made).gradients

    assert found is None or (
        0 < found.fits_scale < math.inf and 0 < found.needs_scale < math.inf and found.smallest > 0
    )


def test_a_largest_value_that_no_run_writes_has_no_headroom() -> None:
    found = judged(frame(1, "a", tensor("output", absmax=-0.5)))

    assert [room.bits for room in found.modules] == [None]


def test_a_scale_that_no_run_has_leaves_no_gradient() -> None:
    found = judged(backward(1, "a", tensor("grad weight", absmax=1e-300), loss_scale=1e300))

    assert found.gradients is None


@pytest.mark.parametrize(
    ("least", "dtype", "needs", "fits"),
    [
        (2.0**-15, "float16", 2.0, 2.0**13),
        (2.0**-16, "bfloat16", 1.0, 2.0**125),
        (2.0**-30, "float16", 2.0**16, 2.0**13),
        (2.0**-10, "float8_e5m2", 1.0, 2.0**13),
        (2.0**-10, "float8_e4m3fn", 2.0**4, 2.0**6),
    ],
)
def test_gradients_need_a_loss_scale_at_the_lower_end_too(least: float, dtype: str, needs: float, fits: float) -> None:
    found = judged(
        backward(1, "a", tensor("grad weight", "float32", absmax=4.0)),
        backward(2, "b", tensor("grad weight", "float32", absmax=least / 2)),
        backward(3, "b", tensor("grad weight", "float32", absmax=least), batch=1),
        backward(4, "dead", tensor("grad weight", "float32", absmax=0.0)),
        dtype=dtype,
    ).gradients

    assert found is not None
    assert (found.smallest_at, found.smallest, found.needs_scale, found.fits_scale) == ("b.weight", least, needs, fits)


@pytest.mark.parametrize(
    ("value", "dtype", "fades", "vanishes"),
    [
        (2.0**-25, "float16", True, True),
        (2.0**-24, "float16", True, False),
        (2.0**-14, "float16", False, False),
        (0.0, "float16", False, False),
        (2.0**-10, "float8_e4m3fn", True, True),
        (2.0**-16, "float8_e5m2", True, False),
        (2.0**-17, "float8_e5m2", True, True),
        (2.0**-25, "bfloat16", False, False),
    ],
)
def test_a_tensor_that_would_be_zero_as_a_whole_is_told(value: float, dtype: str, fades: bool, vanishes: bool) -> None:
    (room,) = judged(frame(0, "aux", tensor("output", "float32", value)), dtype=dtype).modules

    assert (room.fades, room.vanishes) == (fades, vanishes)
    assert bool(torch.tensor(value).to(getattr(torch, dtype)).float() == 0) is (vanishes or value == 0)


def test_growth_is_foretold() -> None:
    found = judged(*(wide(0, "h.0", 1.0, 2.0 ** (batch / 4), batch=batch) for batch in range(13)))

    trend = found.modules[0].trend
    assert trend is not None
    assert (trend.doubles_every, trend.reaches_in) == (pytest.approx(4.0), pytest.approx(51.997, abs=1e-2))


@pytest.mark.parametrize(
    "figures",
    [
        [2.0, 4.0],
        [2.0, 2.0, 2.0, 2.0, 2.0],
        [16.0, 8.0, 4.0, 2.0],
        [2.0, 9.0, 3.0, 7.0, 5.0, 2.5, 8.0, 6.0],
        [2.0, 3.0, 2.6],
        [0.0, 0.0, 0.0],
    ],
)
def test_noise_is_no_growth(figures: list[float]) -> None:
    growth = Growth()
    for batch, figure in enumerate(figures):
        growth.add(batch, figure)

    assert growth.trend(65504.0) is None


def test_what_lies_too_far_ahead_is_not_foretold() -> None:
    growth = Growth()
    for batch in range(4):
        growth.add(batch, 2.0 ** (batch / 10))

    assert growth.trend(65504.0) is None
    assert growth.trend(4.0) == Trend(doubles_every=pytest.approx(10.0), reaches_in=pytest.approx(17.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_each_dtype_has_its_own_limit(dtype: str) -> None:
    fits = judged(wide(0, "h.0", 1.0, 440.0), dtype=dtype, margin=0)

    assert fits.keep == ()
    assert bool(judged(wide(0, "h.0", 1.0, 450.0), dtype=dtype, margin=0).keep) is (dtype == "float8_e4m3fn")


def test_a_recorded_fp32_run_says_what_fp16_would_need() -> None:
    """The fp16 run of the same model overflows in just that place, and is finite when this list is kept in fp32."""
    run = sources([Path(__file__).parent / "traces" / "fp32"])

    found = headroom(selected(run, Selection()))

    assert found.modules[0].module == "transformer.h.0.mlp.c_proj"
    assert found.keep_under_autocast == ("transformer.h.0", "transformer.ln_f")
    assert found.keep == ("transformer",)
