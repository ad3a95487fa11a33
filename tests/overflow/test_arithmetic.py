"""Why an operation made a bad value: real operations on values that fail in one way each, and values that prove nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsdoctor.overflow.frames.first_bad import Cure, Origin
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.operations import Operations, PlacedReadings
from dsdoctor.overflow.replay.provenance import History

LARGE, ZERO, MINUS, ONES = (torch.full((2, 4), value) for value in (3e38, 0.0, -1.0, 1.0))
MASK = torch.tensor([[float("-inf")] * 4, [0.0] * 4])
NOTHING, HALVES = torch.full((2, 4), float("nan")), torch.full((2, 4), float("nan"), dtype=torch.float16)
"""What memory may hold that nobody has written yet."""
IGNORED = torch.full((2,), -100)

MADE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "0 / 0": (lambda: ZERO / ZERO, "0 / 0: its divisor holds 8 zeros"),
    "x / 0": (lambda: ONES / 0, "a division by 0: its divisor is 0"),
    "x /= 0": (lambda: ONES.clone().div_(ZERO), "a division by 0: its divisor holds 8 zeros"),
    "quotient": (lambda: LARGE / 0.1, "a result beyond 3.4e+38, where float32 ends, of values up to 3e+38"),
    "1 / 0": (lambda: 1 / ZERO, "1 / 0: it was given 8 zeros"),
    "rsqrt": (lambda: ZERO.rsqrt(), "1 / 0: it was given 8 zeros"),
    "rsqrt of negative": (lambda: MINUS.rsqrt(), "the inverse root of a negative number"),
    "log": (lambda: ZERO.log(), "the logarithm of 0: it was given 8 zeros"),
    "log of negative": (lambda: MINUS.log(), "the logarithm of a negative number"),
    "sqrt": (lambda: MINUS.sqrt(), "the root of a negative number"),
    "exp": (lambda: (ONES * 100).exp(), "an exponential beyond 3.4e+38"),
    "square": (lambda: LARGE**2, "a result beyond 3.4e+38"),
    "power": (lambda: ZERO**-2, "0 to the power of -2: it was given 8 zeros"),
    "power of negative": (lambda: MINUS**0.3, "a negative number to a fractional power"),
    "product": (lambda: LARGE * 2, "a result beyond 3.4e+38"),
    "matrix": (lambda: LARGE @ ONES.T, "a result beyond 3.4e+38"),
    "sum": (lambda: LARGE.sum(), "a result beyond 3.4e+38"),
    "norm": (lambda: (LARGE * 1).norm(), "a result beyond 3.4e+38"),
    "cast": (lambda: (ONES * 1e6).half(), "a result beyond 6.55e+04, where float16 ends, of values up to 1e+06"),
    "a number": (lambda: ONES * float("inf"), "it was given the number inf"),
    "into a tensor": (lambda: torch.div(ONES, 0, out=NOTHING), "a division by 0: its divisor is 0"),
    "copied into a tensor": (lambda: HALVES.copy_(ONES * 1e6), ""),
    "masked softmax": (lambda: (ONES + MASK).softmax(-1), "a softmax over a row that is masked entirely"),
    "no target": (
        lambda: torch.nn.functional.cross_entropy(ONES * 1, IGNORED),
        "a mean over no target: every label is ignored",
    ),
    "of no table": (lambda: (ONES * 2).acos(), ""),
}


def told(make: Callable[[], Tensor]) -> Origin | None:
    readings = PlacedReadings(Meters())
    operations = readings.operations = Operations(readings)
    with operations:
        end = make() + 0
    place = readings.places[int(readings.look(end))]
    readings.settle()
    return History(operations.done, readings.stats).provenance(*place).made


@pytest.mark.parametrize("name", MADE)
def test_why_is_told_where_the_figures_prove_it(name: str) -> None:
    make, how = MADE[name]

    found = told(make)

    assert found is not None
    assert found.how.startswith(how)
    assert bool(found.how) is bool(how)


def test_the_derivative_of_a_root_at_zero_is_called_so() -> None:
    x = torch.zeros(3, requires_grad=True)

    def backward() -> Tensor:
        return torch.autograd.grad((x * 0).sqrt().sum(), x)[0]

    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        found = told(backward)

    assert found is not None
    assert found.how == "the derivative of the square root at 0 is not finite"
    assert found.cure == Cure("derivative-at-zero", "the square root")
