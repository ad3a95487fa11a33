"""A loss that the script computed, and that is nan or inf -> the statement in which it became so, by the script's own values.

Follows names from the call of ``backward`` back through the assignments that surely ran, as long as their values, which are still
in the calling function, are bad. Reads source and variables, and says nothing where that does not decide. That autograd notes the
lines of operations is a switch of torch, on only while a bad loss is expected again: it costs some fifty microseconds an
operation.
"""

import ast
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dsdoctor.core.script import is_machinery
from dsdoctor.overflow.measure.readings import leaves

Block = tuple[ast.stmt, ...]
RUNS_THE_MODEL = ", which runs the model too"
NOT_KNOWN: tuple[str, dict[str, Any]] = "", {}
MAX_FORWARDS = 100
"""Forwards after a bad loss in which its line is looked for."""


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """Where a script called ``engine.backward(loss)``. Keeps no variable alive."""

    code: CodeType
    line: int


def backward_call() -> BackwardCall | None:
    """The script's line that is now calling ``backward``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (is_machinery(frame.f_code.co_filename) or "/deepspeed/" in frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else BackwardCall(frame.f_code, frame.f_lineno)


def loss_line(call: BackwardCall, engine: Any) -> tuple[str, dict[str, Any]]:
    """The statement in which the loss became bad, and the tensors that it names; empty: it cannot be told. Asked below the function
    that called ``backward``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not call.code:
        frame = frame.f_back
    if frame is None:
        return NOT_KNOWN
    try:
        tree = ast.parse("".join(linecache.getlines(call.code.co_filename)))
    except (SyntaxError, ValueError):
        return NOT_KNOWN
    function = _function(tree, call)
    given = None if function is None else _given(function, call.line)
    if function is None or given is None:
        return NOT_KNOWN
    walk = _Walk(function, frame.f_locals, (engine, engine.module))
    found = walk.back_from(given)
    if found is None:
        return NOT_KNOWN
    source = linecache.getline(call.code.co_filename, found.lineno).strip()
    names = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}
    used = {name: value for name in sorted(names) if isinstance(value := frame.f_locals.get(name), Tensor)}
    more = RUNS_THE_MODEL if walk.runs_the_model(found) else ""
    return f"{Path(call.code.co_filename).name}:{found.lineno} in {call.code.co_name}: {source}{more}", used


def _function(tree: ast.Module, call: BackwardCall) -> ast.AST | None:
    if call.code.co_name == "<module>":
        return tree
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    around = [each for each in functions if each.name == call.code.co_name and each.lineno <= call.line]
    around = [each for each in around if call.line <= (each.end_lineno or 0)]
    return max(around, key=lambda each: each.lineno, default=None)


def _given(function: ast.AST, line: int) -> ast.expr | None:
    """What the call of ``backward`` in that line is given."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
            values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "loss")]
            if node.lineno <= line <= (node.end_lineno or 0) and values:
                return values[0]
    return None


class _Walk:
    """From an expression back to the statement whose value is bad although what it uses is finite."""

    def __init__(self, function: ast.AST, values: Mapping[str, Any], engines: tuple[Any, ...]) -> None:
        self._values = values
        self._engines = engines
        self._blocks = list(_blocks(function))
        self._always = [tuple(node.body) for node in ast.walk(function) if isinstance(node, (ast.With, ast.AsyncWith))]

    def back_from(self, expression: ast.expr) -> ast.expr | ast.stmt | None:
        """None: it cannot be told. What runs the model too may have its bad value from there."""
        here: ast.expr | ast.stmt = expression
        for _ in range(32):  # a chain of assignments; a loop in it has no end
            used = expression if here is expression else _value_of(here)
            names = sorted({node.id for node in ast.walk(used) if isinstance(node, ast.Name)})
            bad = [name for name in names if is_bad(self._values.get(name))]
            if not bad:
                is_given_as_it_is = here is expression and not isinstance(used, (ast.Call, ast.BinOp, ast.UnaryOp))
                return None if is_given_as_it_is else here
            target = next(iter(_targets(here)), None) if isinstance(here, ast.stmt) else None
            if len(bad) > 1 or (target in bad and not _only_scales(used, bad[0])):
                return None
            following = self._surely_before(bad[0], here)
            if following is None:
                return None
            here = following
        return None

    def runs_the_model(self, used: ast.AST) -> bool:
        names = (node.id for node in ast.walk(used) if isinstance(node, ast.Name))
        return any(self._values.get(name) is engine for name in names for engine in self._engines)

    def _surely_before(self, name: str, here: ast.AST) -> ast.stmt | None:
        """The last assignment of a name before a line, if it runs whenever that line does."""
        found = [
            (statement, blocks)
            for blocks in self._blocks
            for statement in blocks[-1]
            if _before(statement, here) and name in _targets(statement)
        ]
        if not found:
            return None
        statement, blocks = max(found, key=lambda pair: (pair[0].lineno, pair[0].col_offset))
        line: int = getattr(here, "lineno", 0)
        holding = (
            each for each in self._blocks if any(one.lineno <= line <= (one.end_lineno or 0) for one in each[-1])
        )
        around = max(holding, key=len, default=())
        return statement if all(block in around or block in self._always for block in blocks) else None


def _blocks(node: ast.AST, above: tuple[Block, ...] = ()) -> Iterator[tuple[Block, ...]]:
    """Each list of statements, with the lists around it, outermost first; functions within functions are left out."""
    for _, value in ast.iter_fields(node):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            here = (*above, tuple(value))
            yield here
            for statement in value:
                if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    yield from _blocks(statement, here)
        elif isinstance(value, list):
            for part in value:  # the handlers of a try
                if isinstance(part, (ast.ExceptHandler, ast.match_case)):
                    yield from _blocks(part, above)


def _before(statement: ast.stmt, other: ast.AST) -> bool:
    """Whether it stands before the other, perhaps in the same line."""
    place: tuple[int, int] = getattr(other, "lineno", 0), getattr(other, "col_offset", 0)
    return (statement.end_lineno or 0, statement.end_col_offset or 0) <= place


def _targets(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value, itself and not in a block of its own."""
    if isinstance(statement, ast.Assign):
        targets: Iterable[ast.AST] = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        targets = [statement.target]
    elif isinstance(statement, (ast.With, ast.AsyncWith)):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        targets = []
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}


def _value_of(statement: ast.AST) -> ast.AST:
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.AugAssign):
        return statement  # the name itself is used too
    return value if isinstance(value, ast.AST) else statement


def _only_scales(used: ast.AST, name: str) -> bool:
    """``loss = loss / 4``: what is not finite was so before."""
    names = {node.id for node in ast.walk(used) if isinstance(node, ast.Name)}
    scales = isinstance(used, (ast.BinOp, ast.AugAssign)) and isinstance(used.op, (ast.Div, ast.Mult))
    return scales and name in names and not any(isinstance(node, ast.Call) for node in ast.walk(used))


@torch.no_grad()
def is_bad(value: Any) -> bool:
    """Whether a variable is, or holds, a tensor with a nan or an inf."""
    if isinstance(value, nn.Module) or not isinstance(value, (Tensor, Mapping, list, tuple)):
        return False
    floating = (tensor for tensor in leaves(value) if tensor.is_floating_point() and tensor.numel())
    return any(not bool(torch.isfinite(tensor).all()) for tensor in floating)


class LossLines:
    """The switch. One for the process, as torch's is. It stays ``is_on`` where the script has set its own meanwhile: torch's
    ``detect_anomaly`` puts back what it found, which is this one, and that is to be switched off at the next call of ``end``.
    """

    is_on = False
    left_to_script = False

    @classmethod
    def begin(cls) -> None:
        """The model's forward is over. Nothing where the script has switched it on by itself, now or at any time before."""
        if not cls.left_to_script and not torch.is_anomaly_enabled():
            torch.autograd.set_detect_anomaly(True, check_nan=False)
            cls.is_on = True

    @classmethod
    def end(cls) -> None:
        """The backward begins, or another forward, or the step is over. What looks for nan is the script's own, and stays."""
        if not cls.is_on:
            return
        if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
            cls.left_to_script = True
            return
        cls.is_on = False
        torch.autograd.set_detect_anomaly(False)
