"""An operation that made nan or inf of finite values, with the figures of what it was given -> why, and what to do about it.

Pure. Says only what the figures prove: nan out of a division whose divisor holds zeros is 0/0, and nothing else can be.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dsdoctor.overflow.frames.dtypes import LIMITS
from dsdoctor.overflow.frames.frame import TensorStats

Operand = TensorStats | float | None
"""An argument of an operation: a tensor's figures, a number, or something else."""


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why an operation made a bad value, and what to do about that. Both are empty where the figures do not decide."""

    how: str = ""
    cure: str = ""


Explain = Callable[[list[Operand], TensorStats], Why]


def why(name: str, node: str, operands: list[Operand], outputs: list[TensorStats]) -> Why:
    """``name``: such as ``aten.div_``; ``node``: the autograd node whose backward it is part of, or empty."""
    bad = next((output for output in outputs if output.is_bad), None)
    explain = EXPLAINED.get(name.removeprefix("aten.").removesuffix("_"))
    given = [operand for operand in operands if isinstance(operand, TensorStats)]
    masked = any(operand.is_bad for operand in given)
    if bad is None or explain is None or (masked and explain is not _softmax):
        return Why()
    for number in operands:
        if explain in (_beyond, _division) and isinstance(number, float) and not math.isfinite(number):
            return Why(
                how=f"it was given the number {number:g}", cure="Look at what made that number: no tensor holds it."
            )
    return _of_derivative(node, explain(operands, bad))


def _of_derivative(node: str, found: Why) -> Why:
    """In a backward it is the derivative that has no value there."""
    function = DERIVATIVES.get(node.removesuffix("0").removesuffix("Backward"))
    if function is None or not found.how.startswith(("a division by 0", "0 / 0", "1 / 0")):
        return found
    return Why(
        how=f"the derivative of {function} at 0 is not finite",
        cure=f"Add an epsilon to what {function} is taken of, inside of it: its derivative at 0 is infinite.",
    )


def _zeros(operand: Operand) -> int:
    """How many zeros an operand holds; a number that is 0 counts as one."""
    if isinstance(operand, TensorStats):
        return operand.zeros
    return int(operand == 0) if isinstance(operand, float) else 0


def _largest(operands: list[Operand]) -> float:
    values = [operand.absmax if isinstance(operand, TensorStats) else operand for operand in operands]
    return max((abs(value) for value in values if value is not None), default=0.0)


def _count(zeros: int) -> str:
    return "1 zero" if zeros == 1 else f"{zeros} zeros"


def _beyond(operands: list[Operand], bad: TensorStats) -> Why:
    """A result beyond the largest number of its format, out of finite values."""
    limit = LIMITS.get(bad.dtype)
    if limit is None or bad.nan:
        return Why()
    return Why(how=f"a result beyond {limit:.3g}, where {bad.dtype} ends, of values up to {_largest(operands):.3g}")


def _division(operands: list[Operand], bad: TensorStats) -> Why:
    divisor = operands[1] if len(operands) > 1 else None
    zeros = _zeros(divisor)
    if not zeros:
        return Why() if bad.nan else _beyond(operands, bad)
    what = f"its divisor holds {_count(zeros)}" if isinstance(divisor, TensorStats) else "its divisor is 0"
    cure = "Keep the divisor away from zero: add an epsilon, or clamp it."
    return Why(how=f"0 / 0: {what}" if bad.nan else f"a division by 0: {what}", cure=cure)


def _reciprocal(operands: list[Operand], bad: TensorStats) -> Why:
    zeros = _zeros(operands[0] if operands else None)
    if zeros and not bad.nan:
        cure = "Keep what it is taken of away from zero: add an epsilon, or clamp it."
        return Why(how=f"1 / 0: it was given {_count(zeros)}", cure=cure)
    return _of_negative(bad, "the inverse root of a negative number") if bad.nan and not zeros else Why()


def _of_negative(bad: TensorStats, how: str) -> Why:
    return Why(how=how, cure="Clamp what it is taken of to what it is defined for.") if bad.nan else Why()


def _logarithm(operands: list[Operand], bad: TensorStats) -> Why:
    zeros = _zeros(operands[0] if operands else None)
    if zeros and bad.neginf and not bad.nan:
        cure = "Use log_softmax in place of the logarithm of a softmax, or clamp what the logarithm is taken of."
        return Why(how=f"the logarithm of 0: it was given {_count(zeros)}", cure=cure)
    return _of_negative(bad, "the logarithm of a negative number")


def _root(_: list[Operand], bad: TensorStats) -> Why:
    return _of_negative(bad, "the root of a negative number")


def _exponential(operands: list[Operand], bad: TensorStats) -> Why:
    limit = LIMITS.get(bad.dtype)
    if limit is None or bad.nan:
        return Why()
    return Why(
        how=f"an exponential beyond {limit:.3g}, where {bad.dtype} ends: it was given values up to "
        f"{_largest(operands[:1]):.3g}, and {math.log(limit):.3g} is the last that fits",
        cure="Subtract the largest value before the exponential, as logsumexp and softmax do, or clamp what it is taken of.",
    )


def _power(operands: list[Operand], bad: TensorStats) -> Why:
    exponent = operands[1] if len(operands) > 1 else None
    if isinstance(exponent, float) and exponent < 0 and _zeros(operands[0]) and not bad.nan:
        cure = "Keep what it is taken of away from zero: add an epsilon, or clamp it."
        return Why(how=f"0 to the power of {exponent:g}: it was given {_count(_zeros(operands[0]))}", cure=cure)
    return _of_negative(bad, "a negative number to a fractional power") if bad.nan else _beyond(operands[:1], bad)


def _norm(operands: list[Operand], bad: TensorStats) -> Why:
    return Why() if bad.nan else _beyond(operands[:1], bad)


def _softmax(operands: list[Operand], bad: TensorStats) -> Why:
    given = operands[0] if operands else None
    if bad.nan and isinstance(given, TensorStats) and given.only_minus_inf:
        cure = "Leave one place of each row open, or use the dtype's minimum for -inf in the mask."
        return Why(how="a softmax over a row that is masked entirely", cure=cure)
    return Why()


def _mean_of_targets(operands: list[Operand], bad: TensorStats) -> Why:
    """The mean over the targets that count is nan of finite values only where no target does."""
    if not bad.nan or bad.count != 1 or any(isinstance(each, TensorStats) and each.is_bad for each in operands):
        return Why()
    return Why(
        how="a mean over no target: every label is ignored, or its class has no weight",
        cure="Leave out micro-batches without a target, or take the sum and divide it by max(1, targets).",
    )


EXPLAINED: dict[str, Explain] = {
    **dict.fromkeys(("div", "true_divide", "divide"), _division),
    **dict.fromkeys(("reciprocal", "rsqrt"), _reciprocal),
    **dict.fromkeys(("log", "log2", "log10"), _logarithm),
    "sqrt": _root,
    "exp": _exponential,
    "pow": _power,
    **dict.fromkeys(("linalg_vector_norm", "norm"), _norm),
    **dict.fromkeys(("_softmax", "_log_softmax"), _softmax),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _mean_of_targets),
    **dict.fromkeys(("mul", "add", "sub", "mm", "addmm", "bmm", "baddbmm", "sum", "convolution", "_to_copy"), _beyond),
}
DERIVATIVES = {"Sqrt": "the square root", "LinalgVectorNorm": "a norm", "Norm": "a norm", "Std": "a standard deviation"}
