"""What a script computes between the model and its loss -> the operation that made the loss, or its gradient, nan or inf.

The graph that autograd keeps is read only of a loss that is known to be bad. Says no more than the kept tensors prove: an
operation all of whose operands are finite has made it; one that was given a bad operand without gradient has not.
"""

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dsdoctor.overflow.frames.first_bad import Cure, Origin
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.hooks.module_hooks import Hook
from dsdoctor.overflow.measure.readings import leaves, stats_of_tensor
from dsdoctor.overflow.replay.operations import made_at
from dsdoctor.overflow.replay.provenance import OverflowCause, cause_of
from dsdoctor.overflow.verdict.evidence import amount
from dsdoctor.overflow.watch.graph_nodes import (
    AGAIN,
    CHOOSES,
    MAX_TENSOR_BYTES,
    SELECTS,
    adds_nothing,
    bytes_again,
    kind_of,
    passes_all,
    readable,
    saved,
    second_operand,
    snake,
    taken_of,
    words,
)

MAX_DEPTH = 12
"""Operations that are computed again, one out of the other."""
MAX_STEPS = 64
"""Operations from the loss back to the one that made it."""
MAX_COMPUTED_BYTES = 512 << 20
"""Bytes of results that are computed again for one loss, in all."""
MAX_SECONDS = 2.0
"""For one loss. It is read in the script's backward, where other ranks may wait."""
VIEWS = words("View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Expand Clone Alias T Transpose Permute Neg")
"""They hold the same elements, but for their sign."""
PARTS = words("Select Slice Index Gather IndexSelect MaskedSelect Mean Sum Rsub ToCopy Abs Split Narrow")
"""What is nan in their result was nan or inf in their operand, or came of none at all."""
ARITHMETIC = frozenset(("Add", "Sub", "Mul"))
"""Of finite operands they make inf at most, never nan; of those that one of them is given and that is finite nothing came."""
OF_NAN = frozenset(
    ("Exp", "Expm1", "Sigmoid", "LogSigmoid", "Tanh", "Relu", "Clamp", "ClampMin", "ClampMax", "Softplus")
)
"""Their result is nan of nan alone."""
SUMS = frozenset(("Sum", "Mean"))
NAMES = {
    "Addmm": ("self", "mat1", "mat2"),
    "Baddbmm": ("self", "batch1", "batch2"),
    "Mm": ("self", "mat2"),
    "Bmm": ("self", "mat2"),
    "Where": ("self", "other"),
}
"""The operands with a gradient in their order, where they are not one or two."""
MADE = ("result", "total_weight", "result1", "result2")
FORWARD = {
    "NllLoss": "nll_loss_forward",
    "NllLoss2D": "nll_loss2d_forward",
    "Softmax": "_softmax",
    "LogSoftmax": "_log_softmax",
}
OF_INF = {
    "Sub": "inf minus inf is nan",
    "Add": "inf and -inf together are nan",
    "Mul": "0 times inf is nan",
    "Div": "inf divided by inf is nan",
}
OUTSIDE = "which needs no gradient (a target, a constant, what another model gave)"
MAX_OPERATIONS, MAX_OUTPUTS = 256, 16


@dataclass(frozen=True, kw_only=True)
class Operand:
    """What an operation was given. ``node``: what made it, None for what has no gradient; ``bad``: None where it is not known."""

    name: str
    node: Any
    value: Tensor | None
    bad: bool | None


class _CostsTooMuchError(Exception):
    """Reading a graph would take more than ``MAX_COMPUTED_BYTES`` bytes, or has taken ``MAX_SECONDS``."""


def made_the_loss(loss: Tensor) -> Origin | None:
    """The operation that made a loss bad, as far as its graph shows. None: it shows nothing, or not in the time and memory."""
    if loss.grad_fn is None:
        return None
    with torch.no_grad():
        try:
            return _Graph().back_from(loss.grad_fn, loss.detach())
        except _CostsTooMuchError:
            return None


class _Graph:
    """The operations of a loss, whose values are computed once."""

    def __init__(self) -> None:
        self._values: dict[Any, Tensor | None] = {}
        self._bytes, self._until = MAX_COMPUTED_BYTES, time.monotonic() + MAX_SECONDS

    def _spend(self, count: int = 0) -> None:
        self._bytes -= count
        if self._bytes < 0 or time.monotonic() > self._until:
            raise _CostsTooMuchError

    def back_from(self, node: Any, value: Tensor) -> Origin | None:
        """From the loss to the first operation with a bad result."""
        is_nan: bool | None = bool(value.isnan().any())
        half, partly = value.dtype is torch.float16, False
        for _ in range(MAX_STEPS):
            kind, operands = kind_of(node), list(self.operands(node))
            chosen = _carrier(operands, is_nan)
            unknown = [each for each in operands if each.bad is None]
            if kind in SUMS and 0 in getattr(node, "_saved_self_sym_sizes", ()):
                return _origin(node, f"a {kind.lower()} over no value", Cure("empty")) if kind == "Mean" else None
            if chosen is None and kind in SUMS:
                chosen = next((each for each in operands if each.bad), None)
            if chosen is not None and (partly or not self._passes_all(node, chosen, is_nan)):
                partly = True
                if not self._is_all(node, chosen, operands):
                    return _in_part(node)
            if chosen is None and any(each.bad for each in operands):
                return _in_part(node) if partly or kind in SELECTS | CHOOSES else self._of_inf(node, operands)
            if partly and chosen is None:
                result = self.value(node)
                # nan and inf have reasons of their own
                if unknown or result is None or (bool(result.isnan().any()) and bool(result.isinf().any())):
                    return _in_part(node)
            if chosen is None and not unknown:
                return self._made(node, operands, self.value(node), is_nan)
            if chosen is None and kind == "Div" and (by_zero := _by_zero(node, operands, is_nan)) is not None:
                return by_zero
            if chosen is None:
                divided = (
                    kind == "Div" and operands[0].bad is None and is_nan is not False
                )  # by what is finite and not 0
                if len(unknown) > 1 or kind in SELECTS or not (divided or _passes(kind, is_nan, half)):
                    how = "its result is the first that is known to be bad, and its input was not kept"
                    return _origin(node, how, None, "{} or an operation before it")
                chosen = unknown[0]
            if chosen.node is None:
                return _given(node, chosen)
            node = chosen.node
            is_nan = is_nan if chosen.value is None and kind in VIEWS | OF_NAN else _is_nan(chosen.value)
        return None

    def operands(self, node: Any) -> Iterator[Operand]:
        """What autograd can tell of an operation's operands: those with a gradient, and what it keeps of others."""
        names = NAMES.get(kind_of(node), ("self", second_operand(node)))
        for number, (before, _) in enumerate(node.next_functions):
            self._spend()
            name = names[number] if number < len(names) else ""
            value = saved(node, name) if name else None
            if not isinstance(value, Tensor):
                value = None if before is None else self.value(before)
            bad = _is_bad(value) if value is not None else None if before is None else self._is_bad_behind(before)
            if bad and value is not None and kind_of(node) in CHOOSES and _is_left_out(node, name, value):
                bad = False
            yield Operand(name=name, node=before, value=value, bad=bad)
        for name in dir(node):
            name = name.removeprefix("_saved_") if name.startswith("_saved_") else ""
            value = saved(node, name) if name not in ("", *names, *MADE) else None
            if isinstance(value, Tensor) and _is_bad(value):
                yield Operand(name=name, node=None, value=value, bad=True)

    def _passes_all(self, node: Any, operand: Operand, is_nan: bool | None) -> bool:
        self._spend()
        try:
            return passes_all(node, operand.name, operand.value, self.value(node), is_nan=is_nan)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False

    def _is_all(self, node: Any, operand: Operand, operands: list[Operand]) -> bool:
        """Whether all that is bad in a result came of this operand, whichever part of it is in the loss."""
        others = any(each is not operand and each.bad is not False for each in operands)
        if others or operand.value is None:
            return False
        try:
            return adds_nothing(node, operand.value, self.value(node))
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            return False

    def _is_bad_behind(self, node: Any, depth: int = 0) -> bool | None:
        """Whether a result that is not kept is bad, by what it is a view of."""
        if (
            kind_of(node) not in VIEWS
            or depth > MAX_DEPTH
            or not node.next_functions
            or node.next_functions[0][0] is None
        ):
            return None
        value = self.value(node.next_functions[0][0])
        return _is_bad(value) if value is not None else self._is_bad_behind(node.next_functions[0][0], depth + 1)

    def value(self, node: Any, depth: int = 0) -> Tensor | None:
        """An operation's result: kept, or computed again out of what is kept."""
        if node not in self._values:
            self._values[node] = None
            try:
                self._values[node] = self._value(node, depth)
            except (
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
            ):  # written in place since, or shapes that do not fit
                self._values[node] = None
        return self._values[node]

    def _value(self, node: Any, depth: int) -> Tensor | None:
        kept = saved(node, "result")
        if isinstance(kept, Tensor):
            return kept
        if type(node).__name__ == "AccumulateGrad":
            return readable(node.variable)
        again = AGAIN.get(kind_of(node))
        if again is None or depth > MAX_DEPTH:
            return None
        given = []
        for name, (before, _) in zip(("self", second_operand(node)), node.next_functions, strict=False):
            here = saved(node, name)
            given.append(here if here is not None or before is None else self.value(before, depth + 1))
        if any(each is None for each in given) or (count := bytes_again(node, given)) > MAX_TENSOR_BYTES:
            return None
        self._spend(count)
        computed: Tensor = again(node, *given)
        return computed

    def _made(self, node: Any, operands: list[Operand], value: Tensor | None, is_nan: bool | None) -> Origin | None:
        """Its operands are finite."""
        kind = kind_of(node)
        if kind in (VIEWS | PARTS | {"Where"}) - SUMS - {"ToCopy"} or (value is None and is_nan is None):
            return None
        if value is not None and not _is_bad(value):
            return None
        known = [each.value for each in operands if each.value is not None]
        given: list[TensorStats | float | None] = [_figures(each) for each in known]
        result = _figures(value) if value is not None else None
        if result is None:
            dtype = str(known[0].dtype if known else torch.float32).removeprefix("torch.")
            result = TensorStats(
                name="result", dtype=dtype, shape=(), count=1, nan=int(bool(is_nan)), posinf=int(not is_nan)
            )
        number = saved(node, "exponent")
        found = cause_of(
            f"aten.{FORWARD.get(kind, snake(kind))}",
            "",
            given if number is None else [*given[:1], float(number)],
            [result],
        )
        if kind == "NllLoss" and not found.how and result.nan:
            found = cause_of("aten.nll_loss_forward", "", [], [result])
        if not found.how and kind in ("Std", "Var") and result.nan:
            found = OverflowCause(how="a statistic over too few values", cure=Cure("few-values"))
        return _origin(node, found.how or "its operands are finite, as far as they were kept", found.cure)

    def _of_inf(self, node: Any, operands: list[Operand]) -> Origin:
        """It was given inf and made nan of that."""
        given = next(each for each in operands if each.bad)
        if given.node is None:
            return _given(node, given)
        held = "an inf" if given.value is None else _amount(given.value)
        why_nan = OF_INF.get(kind_of(node), "it turned that into nan")
        first = self.back_from(given.node, given.value) if given.node is not None and given.value is not None else None
        came = ""
        if first is not None:
            came = f", out of {first.op}" + (f" ({first.how})" if first.cure else "")
        cure = (first.cure if first is not None else None) or Cure("masked-elements")
        if all(each.bad is not None for each in operands):
            return _origin(node, f"it was given {held}{came}: {why_nan}", cure)
        how = f"it was given {held}{came}: {why_nan} (its other operand was not kept)"
        return _origin(node, how, cure, "{} or what it was given")


def _carrier(operands: list[Operand], is_nan: bool | None) -> Operand | None:
    """The operand out of which a bad result came as it is: nan out of nan, inf out of inf."""
    bad = [each for each in operands if each.bad]
    if is_nan:
        return next((each for each in bad if each.value is None or _is_nan(each.value)), None)
    return next(iter(bad), None)


def _is_left_out(node: Any, name: str, value: Tensor) -> bool:
    """Whether nothing bad of an operand is in the result of an operation that chooses by a mask."""
    taken = taken_of(node, name, value)
    try:
        return taken is not None and not bool((~torch.isfinite(value) & taken).any())
    except RuntimeError:  # shapes that do not fit
        return False


def _passes(kind: str, is_nan: bool | None, half: bool) -> bool:
    """Whether a bad result, all other operands being finite, came out of the operand that is not kept."""
    if is_nan:
        return kind in VIEWS | PARTS | ARITHMETIC | OF_NAN
    # nan or inf, it is not known which: sums, products and casts of finite float16 make inf too
    may_be_inf = SUMS | ARITHMETIC if half else frozenset()
    return kind in VIEWS or (is_nan is None and kind in (PARTS | ARITHMETIC) - may_be_inf - {"ToCopy"})


def _by_zero(node: Any, operands: list[Operand], is_nan: bool | None) -> Origin | None:
    """A division whose divisor is kept, and holds zeros."""
    divisor = operands[1].value if len(operands) > 1 else None
    zeros = 0 if divisor is None else int((divisor == 0).sum())
    if not zeros:
        return None
    what = "0 / 0 is nan" if is_nan else "a division by 0"
    how = f"its divisor holds {zeros} zero{'s' if zeros > 1 else ''}: {what} (its dividend was not kept)"
    return _origin(node, how, Cure("divisor"))


def _given(node: Any, operand: Operand) -> Origin:
    """The bad value was there before: an operand without gradient had it."""
    op = "what {} was given"
    if operand.value is None:
        how = f"an operand, {OUTSIDE}, was nan, inf or near its format's limit"
        return _origin(node, how, Cure("operand"), op)
    name = "operand" if operand.name in ("self", "other", "") else operand.name
    return _origin(node, f"its {name}, {OUTSIDE}, holds {_amount(operand.value)}", Cure("named-operand", name), op)


def _in_part(node: Any) -> Origin:
    how = (
        "its result is the first that is known to be bad, and not all that is bad in what it was given is in its result"
    )
    return _origin(node, how, None, "{} or an operation before it")


def _origin(node: Any, how: str, cure: Cure | None, op: str = "{}") -> Origin:
    line = made_at(node.metadata.get("traceback_") or [])
    name = snake(kind_of(node)) or type(node).__name__.removesuffix("Backward")
    return Origin(op=op.format(name), line=line or "", how=how, cure=cure)


def _is_bad(value: Tensor) -> bool:
    return not bool(torch.isfinite(value).all())


def _is_nan(value: Tensor | None) -> bool | None:
    return None if value is None else bool(value.isnan().any())


def _figures(value: Tensor) -> TensorStats:
    stats = stats_of_tensor(value if value.is_floating_point() else value.float(), "operand")
    if stats is None:
        raise ValueError(f"a {value.dtype} operand has no figures")
    return stats


def _amount(value: Tensor) -> str:
    return amount(_figures(value))


class LossBackward:
    """The hooks on one loss after the other. ``made``: the first operation whose backward made a bad gradient of finite ones.

    A value that a mask keeps out of the loss is finite there, and its gradient is not: `torch.where(p > 0, torch.log(p), 0)` gives
    0 times inf. Each operation gets a hook that reads its gradients, which waits for the device: so this is on only after a step
    whose loss was finite and whose backward came to the model with a bad gradient.
    """

    def __init__(self) -> None:
        self.made: Origin | None = None
        self._outputs: dict[Any, None] = {}
        self._handles: list[Any] = []

    def forward_ends(self, output: Any) -> None:
        """The model's output, where what the script computes begins."""
        self._outputs |= {tensor.grad_fn: None for tensor in leaves(output) if tensor.grad_fn is not None}
        # a script that evaluates without no_grad makes graphs that no backward ends: only the last are kept
        for old in list(self._outputs)[:-MAX_OUTPUTS]:
            del self._outputs[old]

    def begin(self, loss: Tensor) -> None:
        """The loss is known, and its backward is about to begin."""
        for node in self._between(loss.grad_fn):
            self._handles.append(node.register_hook(Hook(self._reader(node))))

    def forget(self) -> None:
        """The step is over."""
        for handle in self._handles:
            handle.remove()
        self.made, self._outputs, self._handles = None, {}, []

    def _between(self, last: Any) -> Iterable[Any]:
        """The operations behind the model's outputs; none where those are not known."""
        waiting = [last] if self._outputs and last is not None else []
        found: dict[Any, None] = {}
        while waiting and len(found) < MAX_OPERATIONS:
            node = waiting.pop()
            if node in found or node in self._outputs or type(node).__name__ == "AccumulateGrad":
                continue
            found[node] = None
            waiting += [before for before, _ in node.next_functions if before is not None]
        return found

    def _reader(self, node: Any) -> Any:
        held = weakref.ref(self)

        def read(below: tuple[Tensor | None, ...], above: tuple[Tensor | None, ...]) -> None:
            if (here := held()) is not None and here.made is None:
                # a sparse, nested or float8 gradient cannot be asked whether it is finite, and no backward may fail of that
                with contextlib.suppress(Exception), torch.no_grad():
                    here.made = made_by(node, below, above)

        return read


def made_by(node: Any, below: tuple[Tensor | None, ...], above: tuple[Tensor | None, ...]) -> Origin | None:
    """An operation whose backward was given finite gradients and gave a bad one; None where it is not that."""
    bad = next((each for each in below if each is not None and not _is_finite(each)), None)
    if bad is None or not all(_is_finite(each) for each in above if each is not None):
        return None
    name = snake(kind_of(node)) or type(node).__name__.removesuffix("Backward")
    how, cure = f"the derivative of {name} is not finite there", Cure("derivative", name)
    given = next((each for each in above if each is not None and each.shape == bad.shape), None)
    if given is not None and not bool(given[~torch.isfinite(bad)].any()):
        how = f"a gradient of 0, of what was masked behind it, times a derivative of {name} that is not finite"
        cure = Cure("mask-before", name)
    elif given is None and not any(bool(each.any()) for each in above if each is not None):
        how = "its incoming gradients were all 0, and its derivative is not finite"
    line = made_at(node.metadata.get("traceback_") or [])
    return Origin(op=f"the backward of {name}", line=line or "", how=how, cure=cure)


def _is_finite(gradient: Tensor) -> bool:
    return bool(torch.isfinite(gradient).all())
