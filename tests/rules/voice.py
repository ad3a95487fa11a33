"""The worst habits of our text, found in what users read: the book, help, docs. ``python -m tests.rules.voice [PART]``."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dsdoctor.core.finding import FIELD
from dsdoctor.rules.book import room_rules, tables
from dsdoctor.rules.store import FOLDER, LOGS, Table, log_topics

ROOT = FOLDER.parents[1]
MAX_WORDS = 30
"""Words in a sentence."""
HABITS = re.compile(
    r"\b(?:Say (?:what|which|whether|why|how)|told|beside|stands|standing|the most that|as it is|that is meant|is gone)\b"
)
CODE = re.compile(r"`+[^`]*`+|\[([^\]]*)\]\([^)]*\)|https?://\S+|<[^>]+>")
SENTENCE = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?=[-*|#>]|\d+\.)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
COMMAND_LINE = re.compile(r"^ {4,}\S.*$", re.MULTILINE)


def texts() -> Iterator[tuple[str, str]]:
    """Every text that users read, with the place where it is written."""
    for file in sorted(FOLDER.glob("*.toml")):
        if file.stem != "order":
            yield from _of_rules(file.stem, room_rules(file.stem).values())
            yield from _of_rules(file.stem, (*tables(file.stem, "remedy"), *tables(file.stem, "phrase")))
    for topic, table in log_topics().items():
        yield from _of_rules(f"{LOGS}/{topic}", (*table.get("rule", ()), *table.get("regression", ())))
    for path in sorted((ROOT / "dsdoctor" / "cli").glob("*.py")):
        yield from _of_commands(path)
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield str(path.relative_to(ROOT)), FENCE.sub("", path.read_text(encoding="utf-8"))


def habits(text: str) -> Iterator[str]:
    """What a technical writer would change: words that are no field's, and sentences that nobody reads to the end."""
    plain = FIELD.sub("NAME", CODE.sub(lambda found: found[1] or "NAME", text))
    for found in HABITS.finditer(plain):
        yield f"{found[0]!r} in: {' '.join(plain[max(0, found.start() - 40) : found.end() + 40].split())}"
    for sentence in SENTENCE.split(COMMAND_LINE.sub("", plain)):
        count = len(re.findall(r"[\w'’-]*\w[\w'’-]*", sentence))
        if count > MAX_WORDS and not sentence.lstrip().startswith("|"):
            yield f"{count} words: {' '.join(sentence.split())}"


def _of_rules(place: str, tables: object) -> Iterator[tuple[str, str]]:
    for table in tables:  # type: ignore[attr-defined]
        name = table.get("id") or table.get("what", "")[:40]
        for part in (table, *table.get("case", ()), *table.get("wording", ())):
            yield from ((f"{place} {name}", text) for text in _words(part))


def _words(part: Table) -> Iterator[str]:
    yield from (part[key] for key in ("title", "means", "matters", "when", "fix", "what", "cure") if part.get(key))


def _of_commands(path: Path) -> Iterator[tuple[str, str]]:
    """The help of a command's module: docstrings of its commands, and the help of their options."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        place = f"cli/{path.stem}"
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_command"):
            yield place, ast.get_docstring(node) or ""
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield place, str(node.value.value)


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    found = [f"{place}: {habit}" for place, text in texts() if place.startswith(part) for habit in habits(text)]
    print(*found, f"{len(found)} habits", sep="\n")
