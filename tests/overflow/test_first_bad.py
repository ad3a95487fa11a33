"""The first bad call among frames that are written out."""

import itertools

import pytest

from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, first_bad, has_mask
from dsdoctor.overflow.frames.frame import Frame, is_minus_inf_mask
from tests.each import each
from tests.overflow.written import backward, frame, good, tensor

BAD_OUTPUT = tensor("output", posinf=1)
BAD_INPUT = tensor("input[0]", nan=1)
MASK = tensor("input[mask]", absmax=0.0, neginf=3)


def found(*frames: Frame) -> tuple[BadKind, str, str] | None:
    """The kind, the module and the tensor."""
    found = first_bad(frames)
    return None if found is None else (found.kind, found.frame.module, found.tensor.name)


def test_a_healthy_batch_has_none() -> None:
    assert first_bad([good(0, "a"), good(1, "b"), good(2, "")]) is None


def test_finite_inputs_and_weights_and_a_bad_output_are_the_module() -> None:
    bad = frame(1, "b", tensor("weight"), tensor("input[0]"), BAD_OUTPUT)

    assert first_bad([good(0, "a"), bad, good(2, "")]) == FirstBad(
        kind=BadKind.MODULE, frame=bad, tensor=BAD_OUTPUT, before=good(0, "a")
    )


def test_a_bad_input_that_no_module_made_is_between_them() -> None:
    assert found(good(0, "a"), frame(1, "b", BAD_INPUT, BAD_OUTPUT)) == (BadKind.BETWEEN, "b", "input[0]")


def test_a_bad_weight_comes_before_the_output_that_it_spoils() -> None:
    bad = frame(1, "b", tensor("weight", nan=2), tensor("input[0]"), BAD_OUTPUT)

    assert found(good(0, "a"), bad) == (BadKind.WEIGHT, "b", "weight")


def test_a_bad_input_of_the_whole_model_is_the_data() -> None:
    root = frame(2, "", BAD_INPUT, BAD_OUTPUT)

    assert found(frame(0, "a", BAD_INPUT, BAD_OUTPUT), frame(1, "b", BAD_INPUT, BAD_OUTPUT), root)[0] is BadKind.DATA  # type: ignore[index]


def test_a_module_that_overflows_after_its_last_child_is_named_itself() -> None:
    parent = frame(1, "block", tensor("input[0]"), BAD_OUTPUT, leaf=False)

    assert found(good(0, "block.a"), parent, good(2, "")) == (BadKind.MODULE, "block", "output")


def test_a_mask_on_a_module_that_bears_it_is_no_alarm() -> None:
    assert first_bad([frame(0, "attention", tensor("input[0]"), MASK, tensor("output")), good(1, "")]) is None


def test_a_mask_that_a_module_makes_is_no_alarm() -> None:
    maker = frame(0, "mask", tensor("input[0]"), tensor("output", absmax=0.0, neginf=6))

    assert first_bad([maker, frame(1, "softmax", tensor("input[0]", neginf=6), tensor("output"))]) is None


def test_a_row_that_is_masked_entirely_is_the_softmax() -> None:
    masked = tensor("input[0]", absmax=0.0, neginf=4)
    softmax = frame(0, "softmax", masked, tensor("output", nan=4), kind="Softmax")

    assert found(softmax)[:2] == (BadKind.MODULE, "softmax")  # type: ignore[index]


@each("kind", ["Linear", "LlamaRMSNorm", "Conv1D", "BatchNorm3d", "ItsOwn"])
@each("passed", [{"nan": 16}, {"neginf": 2}, {"posinf": 2}, {"neginf": 1, "posinf": 1}])
def test_nobody_hands_a_module_with_weights_a_mask_in_place_of_its_input(kind: str, passed: dict[str, int]) -> None:
    """A pipeline's layers may be functions: torch.log of 0 stands between two modules, and is seen by none."""
    minus_inf = tensor("input[0]", absmax=2.0, neginf=28)
    given = frame(1, "6", tensor("weight"), minus_inf, tensor("output", **passed), kind=kind)

    assert found(good(0, "3"), given) == (BadKind.BETWEEN, "6", "input[0]")
    assert not has_mask(given)


def test_a_module_without_weights_computes_with_what_spreads() -> None:
    """A norm without weights makes nan of a whole row that holds one -inf, a softmax of no more than was masked."""
    norm, softmax = (frame(1, "b", tensor("input[0]", neginf=2), tensor("output", nan=nan)) for nan in (8, 2))

    assert found(good(0, "a"), norm) == (BadKind.BETWEEN, "b", "input[0]")
    assert found(good(0, "a"), softmax) == (BadKind.MODULE, "b", "output")
    assert [has_mask(each_one) for each_one in (norm, softmax)] == [False, True]


def test_the_mask_of_a_module_with_weights_comes_behind_its_input() -> None:
    """Torch's MultiheadAttention has weights of its own."""
    attention = frame(1, "b", tensor("in_proj_weight"), tensor("input[0]"), MASK, tensor("output", nan=4))

    assert found(good(0, "a"), attention) == (BadKind.MODULE, "b", "output")
    assert has_mask(attention)


def test_minus_inf_that_a_module_without_weights_made_is_its_own_where_the_next_computes_with_it() -> None:
    log = frame(1, "log", tensor("input[0]"), tensor("output", neginf=2), kind="Log")
    head = frame(2, "head", tensor("weight"), tensor("input[0]", neginf=2), tensor("output", neginf=2))
    softmax = frame(2, "softmax", tensor("input[0]", neginf=2), tensor("output"))

    assert found(good(0, "a"), log, head) == (BadKind.MODULE, "log", "output")
    assert found(good(0, "a"), log, softmax) is None


def test_a_batch_of_minus_inf_is_the_data() -> None:
    minus_inf = tensor("input[0]", neginf=2)
    head = frame(0, "head", tensor("weight"), minus_inf, tensor("output", neginf=2))
    root = frame(1, "", minus_inf, tensor("output", neginf=2), leaf=False)

    assert found(head, root) == (BadKind.DATA, "", "input[0]")


BAD_COUNTS = ({"nan": 1}, {"posinf": 2}, {"nan": 1, "neginf": 3})


@each("dtype, counts", itertools.product(("float16", "bfloat16", "float32"), BAD_COUNTS))
def test_what_a_module_makes_finite_is_borne_and_what_it_passes_on_is_not(dtype: str, counts: dict[str, int]) -> None:
    marker, passed = tensor("input[0]", dtype, **counts), tensor("output", dtype, nan=4)
    fine = tensor("output", dtype)
    root = frame(3, "", marker, fine)
    imputes = frame(0, "impute", marker, fine)

    assert found(imputes, good(1, "b"), root) is None, "filled in by the first module"
    assert found(good(0, "a"), frame(1, "b", marker, fine)) is None, "between the modules, and borne"
    assert found(good(0, "a"), frame(1, "b", marker, passed)) == (BadKind.BETWEEN, "b", "input[0]")
    assert found(frame(0, "a", marker, passed), frame(3, "", marker, passed))[0] is BadKind.DATA  # type: ignore[index]


@each("counts", BAD_COUNTS)
def test_what_goes_wrong_behind_a_module_that_fills_in_is_not_the_batch(counts: dict[str, int]) -> None:
    marker, root = tensor("input[0]", **counts), frame(3, "", tensor("input[0]", **counts), tensor("output", nan=8))
    imputes = frame(0, "impute", marker, tensor("output"))
    other = frame(1, "b", tensor("input[0]", nan=4), tensor("output", nan=8))
    same = frame(1, "b", marker, tensor("output", nan=8))
    made = frame(1, "b", tensor("input[0]"), tensor("output", nan=8))

    assert found(imputes, other, root) == (BadKind.BETWEEN, "b", "input[0]")
    assert found(imputes, made, root) == (BadKind.MODULE, "b", "output")
    assert found(imputes, same, root)[0] is BadKind.DATA, "it reads the batch as well"  # type: ignore[index]


def test_a_weight_of_minus_inf_is_no_mask_and_a_linear_makes_none() -> None:
    weight = frame(1, "b", tensor("weight", neginf=1), tensor("output", nan=1))
    channel = frame(1, "b", tensor("weight"), tensor("input[0]"), tensor("output", neginf=2))

    assert found(good(0, "a"), weight)[0] is BadKind.WEIGHT  # type: ignore[index]
    assert found(good(0, "a"), channel)[0] is BadKind.MODULE  # type: ignore[index]


def test_minus_inf_beside_values_near_the_limit_is_an_overflow_and_no_mask() -> None:
    bad = frame(1, "b", tensor("input[0]"), tensor("output", absmax=60000.0, neginf=2))

    assert found(good(0, "a"), bad) == (BadKind.MODULE, "b", "output")


@pytest.mark.parametrize(("absmax", "mask"), [(0.0, True), (4000.0, True), (4200.0, False), (None, False)])
def test_what_a_mask_is_in_fp16(absmax: float | None, mask: bool) -> None:
    assert is_minus_inf_mask(tensor("output", absmax=absmax, neginf=1)) is mask


def test_the_forward_goes_before_the_backward() -> None:
    gradient = backward(3, "a", tensor("grad output", nan=1))

    assert found(good(0, "a"), good(1, ""), gradient) == (BadKind.GRADIENT, "a", "grad output")
    assert found(frame(0, "a", BAD_OUTPUT), gradient) == (BadKind.MODULE, "a", "output")


def test_an_empty_batch_and_a_call_without_tensors_are_borne() -> None:
    assert first_bad([]) is None
    assert first_bad([frame(0, "a")]) is None
