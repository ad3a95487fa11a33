"""How many of DeepSpeed's own error messages `diagnose` names: ``python -m tests.diagnosis.coverage [--unnamed]``.

Reads the installed DeepSpeed by its syntax tree: each ``raise X("...")``, and each ``assert`` with or without words, becomes
the end of a traceback. A message counts as named if a rule of the catalogue explains it; whether rightly, it does not say.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dsdoctor.diagnosis.catalogue import RULES
from tests.diagnosis.reading import diagnose

ROOMS = {
    "zero": "runtime/zero",
    "pipe": "runtime/pipe",
    "engine": "runtime/engine.py",
    "launcher": "launcher",
    "comm": "comm",
    "groups": "utils/groups.py",
    "moe": "moe",
    "sequence": "sequence",
}
VALUES = (
    (r"param_id|step|rank|idx|stage", "3"),
    (r"world|size|num|len\(|count", "8"),
    (r"dtype", "torch.bfloat16"),
    (r"param|summary", "{'id': 12, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 4096}"),
    (r"path|file|dir", "/data/x"),
    (r"host", "worker-1"),
)
"""What a place of a message is filled with, by what stands in it."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """An error that DeepSpeed can raise. ``text`` is empty for an assertion without words."""

    file: str
    line: int
    source: str
    error: str
    text: str

    def log(self) -> list[str]:
        """The end of the log of a run that fails with it."""
        frame = f'  File "/venv/lib/python3.11/site-packages/deepspeed/{self.file}", line {self.line}, in step'
        end = f"{self.error}: {self.text}" if self.text else self.error
        start = ["Traceback (most recent call last):", '  File "/home/u/train.py", line 41, in <module>', "    main()"]
        return [*start, frame, f"    {self.source}", *end.split("\n")]


def text_of(node: ast.expr | None) -> str:
    """The words of a message, its places filled.

    >>> text_of(ast.parse("f'rank {dist.rank}: ' + 'x'", mode="eval").body)
    'rank 3: x'
    """
    match node:
        case None:
            return ""
        case ast.Constant(value=str(words)):
            return words
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) for part in parts)
        case ast.FormattedValue(value=place):
            return value_of(place)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.Call(func=ast.Attribute(value=template, attr="format")):
            return re.sub(r"\{[^}]*\}", "3", text_of(template))
    return value_of(node)


def value_of(node: ast.expr) -> str:
    """A plausible value of an expression."""
    source = ast.unparse(node).lower()
    return next((value for pattern, value in VALUES if re.search(pattern, source)), "x1")


def messages(path: Path, root: Path) -> Iterator[Message]:
    """The errors of one file."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assert):
            error, words = "AssertionError", text_of(node.msg)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            error, words = ast.unparse(node.exc.func), text_of(node.exc.args[0])
        else:
            continue
        file = path.relative_to(root).as_posix()
        yield Message(file=file, line=node.lineno, source=lines[node.lineno - 1].strip(), error=error, text=words)


def files(place: Path) -> list[Path]:
    """The Python files of a room, without its tests."""
    found = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [path for path in found if not path.name.startswith("test")]


def main() -> None:
    """Print the coverage of each room."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--unnamed", action="store_true", help="the messages that no rule explains")
    options = parser.parse_args()
    spec = find_spec("deepspeed")
    if spec is None or spec.origin is None:
        raise SystemExit("DeepSpeed is not installed here")
    root = Path(spec.origin).parent
    for room, place in ROOMS.items():
        verdicts = [(one, diagnose(one.log()).findings) for path in files(root / place) for one in messages(path, root)]
        unnamed = [one for one, findings in verdicts if not findings or findings[0].rule not in RULES]
        worded = Counter(bool(one.text) for one, _ in verdicts)[True]
        print(f"{room:<10}{len(verdicts) - len(unnamed):>4} of {len(verdicts)} ({worded} with words)")
        for one in unnamed if options.unnamed else ():
            print(f"    {one.file}:{one.line}: {(one.text or one.source)[:120]!r}")


if __name__ == "__main__":
    main()
