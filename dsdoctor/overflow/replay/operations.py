"""Which operation made the first nan or inf, and in which line: every operation of a replayed batch is measured.

Expensive, so only for a replay: each result is read once more, and the caller's line is noted.
"""

import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsdoctor.overflow.frames.first_bad import Origin
from dsdoctor.overflow.frames.frame import TensorStats
from dsdoctor.overflow.frames.masks import is_minus_inf_mask
from dsdoctor.overflow.measure.readings import Readings
from dsdoctor.overflow.measure.tensor_paths import tensors_of

FOREIGN = ("c10d", "_c10d_functional", "prim", "profiler", "dsdoctor")
"""Namespaces of operations that compute nothing of the model: communication above all."""
UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"})
"""Operations whose result holds whatever the memory held."""
PACKAGES = tuple(f"{Path(module.__file__).parent}/" for module in (torch,) if module.__file__)
MACHINERY = ("/deepspeed/runtime/", "/deepspeed/utils/", "/deepspeed/comm/")
"""Files whose operations move the model about and compute nothing of it."""
OURS = f"{Path(__file__).parents[1]}/"


@dataclass(slots=True)
class OperationResult:
    """One result: its reading, how many calls had ended before it, the operation's name, the line that called
    it, the autograd node and where that was made."""

    reading: int
    calls: int
    op: str
    line: tuple[str, int, str] | None
    node: str
    made: list[str] | None


class Operations(TorchDispatchMode):
    """Measures the results of all operations while it is entered. ``calls`` returns how many module calls have ended."""

    def __init__(self, readings: Readings, calls: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._readings, self._calls = readings, calls
        self._results: list[OperationResult] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note its results."""
        result = func(*args, **(kwargs or {}))
        if self._computes(func):
            self._note(func, result)
        return result

    def first_bad(self, order: int, *, backward: bool) -> Origin | None:
        """The first operation that made a nan or an inf for the call of that order: since the call before it ended.

        Only after the readings settled.
        """
        found = [
            result for result, stats in self._bad() if bool(result.node) is backward and not is_minus_inf_mask(stats)
        ]
        # a bad result of an earlier call counts only if this call has none: it may have had another use (a -inf to fill a mask
        # with), or, in the backward, have reached this call by another path
        near = [result for result in found if result.calls == order]
        return next(map(_origin, near or [result for result in found if result.calls < order]), None)

    def first_minus_inf(self) -> Origin | None:
        """The first operation of the forward that made a -inf beside finite values: a mask, or the logarithm of a zero."""
        found = (result for result, stats in self._bad() if not result.node and is_minus_inf_mask(stats))
        return next(map(_origin, found), None)

    def _bad(self) -> Iterator[tuple[OperationResult, TensorStats]]:
        for result in self._results:
            stats = self._readings.stats(result.reading, "output")
            if stats.is_bad:
                yield result, stats

    def _computes(self, func: Any) -> bool:
        """Whether the operation writes values of its own: no view, no bare memory, no communication."""
        if func.namespace in FOREIGN or func._schema.name.split("::")[-1] in UNWRITTEN:
            return False
        return not any(
            returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns
        )

    def _note(self, func: Any, result: Any) -> None:
        node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
        line = _caller() if node is None else None
        if node is None and line is not None and any(part in line[0] for part in MACHINERY):
            return
        for _, tensor in tensors_of("", result):
            self._add(tensor, func, line, node)

    def _add(self, tensor: Tensor, func: Any, line: tuple[str, int, str] | None, node: Any) -> None:
        reading = self._readings.look(tensor)
        if isinstance(reading, int):
            made = None if node is None else node.metadata.get("traceback_")
            name = "" if node is None else node.name()
            self._results.append(
                OperationResult(reading, self._calls(), str(func._schema.name).replace("::", "."), line, name, made)
            )


def _caller() -> tuple[str, int, str] | None:
    """File, line and function of the innermost frame that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((OURS, *PACKAGES, "<")):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return None


def _origin(result: OperationResult) -> Origin:
    return Origin(op=result.node or result.op, line=_calling_line(result))


def _calling_line(result: OperationResult) -> str:
    """The line that called the operation: ``model.py:12 in forward: h = torch.log(x)``."""
    if result.line is not None:
        file, number, function = result.line
        return f"{Path(file).name}:{number} in {function}: {linecache.getline(file, number).strip()}"
    return _made(result.made or [])


def _made(traceback: list[str]) -> str:
    """The innermost line of a traceback that is neither torch's nor ours, as autograd kept it.

    >>> _made(['  File "/m/model.py", line 12, in forward\\n    h = x.sqrt()\\n'])
    'model.py:12 in forward: h = x.sqrt()'
    >>> _made([])
    'a line that is not known'
    """
    for entry in reversed(traceback):
        head, _, code = entry.strip().partition("\n")
        parts = head.split('"')
        if (
            len(parts) == 3
            and not parts[1].startswith((OURS, *PACKAGES, "<"))
            and "/deepspeed/runtime/" not in parts[1]
        ):
            number, _, function = parts[2].removeprefix(", line ").partition(", in ")
            return f"{Path(parts[1]).name}:{number} in {function}: {code.strip().splitlines()[0] if code else ''}"
    return "a line that is not known"
