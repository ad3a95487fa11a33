"""Which line of the user's or a model library's code an operation was called from. Never torch's, DeepSpeed's runtime's or ours."""

import functools
import linecache
import sys
from pathlib import Path
from types import FrameType

import torch

from dsdoctor.overflow.frames.first_bad import Origin

CodeLine = tuple[str, int, str]
"""File, line and function."""

PACKAGES = tuple(f"{Path(module.__file__).parent}/" for module in (torch,) if module.__file__)
MACHINERY = ("/deepspeed/runtime/", "/deepspeed/utils/", "/deepspeed/comm/")
"""Files that move the model about, or stand in for torch's functions: what is looked for is the line that called them."""
OURS = f"{Path(__file__).parents[1]}/"
BACKWARD = "_engine_run_backward"
"""torch's function around a backward: who called that did not call the operation."""
HERE = (f"{Path(__file__).parent / 'operations.py'}", __file__)


def caller() -> CodeLine | None:
    """The innermost line that is a model's. None: nothing but machinery stands between the operation and the replay, or the
    backward that it is part of; activations that a backward computes again have their lines."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_a_models(file):
            return file, frame.f_lineno, frame.f_code.co_name
        if (file.startswith(OURS) and file not in HERE) or frame.f_code.co_name == BACKWARD:
            return None
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=4096)
def is_a_models(file: str) -> bool:
    """Whether code in a file is the user's or a model library's.

    >>> is_a_models("/home/me/train.py"), is_a_models("/x/deepspeed/runtime/zero/linear.py"), is_a_models("<string>")
    (True, False, False)
    """
    return not file.startswith((OURS, *PACKAGES, "<")) and not any(part in file for part in MACHINERY)


def origin(op: str, line: CodeLine | None, made: list[str] | None) -> Origin | None:
    """An operation with its line: the one that called it, or for a backward the one that made its node. None: not known."""
    text = _written(line) if line is not None else made_at(made or [])
    return None if text is None else Origin(op=op, line=text)


def _written(line: CodeLine) -> str:
    """As ``model.py:12 in forward: h = torch.log(x)``."""
    file, number, function = line
    return f"{Path(file).name}:{number} in {function}: {linecache.getline(file, number).strip()}"


def made_at(traceback: list[str]) -> str | None:
    """The innermost model's line of a traceback, as autograd kept it.

    >>> made_at(['  File "/m/model.py", line 12, in forward\\n    h = x.sqrt()\\n'])
    'model.py:12 in forward: h = x.sqrt()'
    >>> made_at([])
    """
    for entry in reversed(traceback):
        head, _, code = entry.strip().partition("\n")
        parts = head.split('"')
        if len(parts) == 3 and is_a_models(parts[1]):
            number, _, function = parts[2].removeprefix(", line ").partition(", in ")
            return f"{Path(parts[1]).name}:{number} in {function}: {code.strip().splitlines()[0] if code else ''}"
        if len(parts) == 3 and parts[1].startswith(OURS) and parts[1] not in HERE:
            return None
    return None
