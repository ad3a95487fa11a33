"""The worst habits of our text, in what users read: book, help, docs, messages. ``python -m tests.rules.voice [PART]``."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dsdoctor.core.finding import FIELD
from dsdoctor.rules.book import room_rules, tables
from dsdoctor.rules.store import FOLDER, LOGS, Table, log_topics
from tests.source import PACKAGE, trees

ROOT = FOLDER.parents[1]
MAX_WORDS = 30
"""Words in a sentence."""
HABITS = re.compile(
    r"\b(?:Say (?:what|which|whether|why|how)|told|beside|stands|standing|stood|the most that|as it is|that is meant|is gone"
    # "a different X from Y", "a run", "no longer", "someone", "on its own", "again", "from the same time", "which was not found"
    r"|(?:an)?other (?:[\w'-]+ ){1,3}than|trainings|any ?more(?=[.,;:]|$)|(?:some|no|any)body|whoever|by (?:itself|themselves)"
    r"|anew|mend(?:s|ed)?|of (?:that|the same) time|(?:do|does|did|has|have) not come|seen to|looked at|is there already"
    r"|and (?:it|they) (?:is|was|are|were) not (?:found|installed|there)|put together by"
    r"|[Aa] (?:\w+ )?training(?! (?:run|script|loop|job|step|state|code|process|set|engine|framework|data)))\b"
    # "is not a file"
    r"|(?<!here )\b(?:is|are|was|were) (?:no|none)\b(?! (?:longer|more|larger|rank|GPU|progress))"
    # an empty subject, and two blanks, which a translation leaves behind
    r"|(?:^|(?<=[.;] ))(?:What|Whether) [^?.;:,]{3,80} (?:is|are|was|were|needs|counts) |(?<=[a-z][.:])  (?=\w)",
    re.MULTILINE,
)
MESSAGE = re.compile(r"(?:[a-z']{2,}\b.*?){4}", re.DOTALL)
"""A text of Python that is a message: at least four words."""
NO_MESSAGE = re.compile(r"(?:[A-Z]\w+ ){4}|\\[a-zA-Z.\[(]|\(\?|\|.*\||^\S*$|\n.*\n")
"""A pattern, a list of alternatives, a name, a template."""
NO_MESSAGES = {"child_scripts", "diagnosis"}
"""Rooms without messages of their own: their words stand in the book, and the child's answers are data."""
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
    for path, tree in trees().items():
        room = path.relative_to(PACKAGE).parts[0]
        if room not in NO_MESSAGES:
            yield from ((f"{room}/{path.stem}", text) for text in _messages(tree))
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
    yield from (
        part[key] for key in ("title", "means", "matters", "when", "fix", "text", "what", "cure") if part.get(key)
    )
    yield from (note for step in part.get("steps", ()) if (note := step.partition("  # ")[2]))


def _of_commands(path: Path) -> Iterator[tuple[str, str]]:
    """The help of a command's module: docstrings of its commands, and the help of their options."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        place = f"cli/{path.stem}"
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_command"):
            yield place, ast.get_docstring(node) or ""
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            yield place, str(node.value.value)


def _messages(tree: ast.Module) -> Iterator[str]:
    """What a module says itself: evidence, errors and their hints, lines of a report. No docstring is one."""
    every = list(ast.walk(tree))
    silent = {node.value for node in every if isinstance(node, ast.Expr)}
    silent |= {part for node in every if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in every:
        if node in silent or not isinstance(node, ast.Constant | ast.JoinedStr):
            continue
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "NAME" for part in parts)
        if isinstance(parts[0], ast.Constant) and not isinstance(parts[0].value, str):
            continue
        if MESSAGE.search(text) and not NO_MESSAGE.search(text):
            yield text


if __name__ == "__main__":
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    found = [f"{place}: {habit}" for place, text in texts() if place.startswith(part) for habit in habits(text)]
    print(*found, f"{len(found)} habits", sep="\n")
