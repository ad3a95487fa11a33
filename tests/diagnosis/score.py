"""How many judging logs `diagnose` answers rightly: ``python -m tests.diagnosis.score [--half open|closed] [--json]``.

Counts as ``blind/README.md`` says. Of the closed half it prints numbers only: no name, no answer, no line of a log.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome
from tests.diagnosis.reading import diagnose

HERE = Path(__file__).parent
CORPORA = (
    "blind",
    "fresh",
    "later",
    "threads",
    "unseen",
    "unseen_second",
    "unseen_third",
    "unseen_fourth",
    "unseen_fifth",
    "unseen_sixth",
    "unseen_seventh",
    "real",
)
COLUMNS = ("right", "wrong", "unsure", "none", "quoted", "alarm")
"""``quoted``: those of the unsure whose verdict only repeats the log's words, and the right ones are among them."""

UNSURE = {LogOutcome.ONLY_ECHOES, LogOutcome.UNEXPLAINED}


def read(log: Path) -> Diagnosis:
    """The diagnosis of one log."""
    with log.open("rb") as stream:
        return diagnose(raw_lines(stream), name=log.name)


def verdict_text(finding: Finding) -> str:
    """Title and fix of a verdict, with its steps, in small letters."""
    fix = [finding.fix.text, *(step.line for step in finding.fix.steps)] if finding.fix else []
    return " ".join([finding.title, *fix]).lower()


def holds(text: str, accept: list[list[str]]) -> bool:
    """Whether all words of one set are in the text.

    >>> holds("rank 3: the gpu is out of memory", [["host", "memory"], ["gpu", "memory"]])
    True
    """
    return any(all(word.lower() in text for word in words) for words in accept)


def says(text: str, say: list[list[str]]) -> bool:
    """Whether of every list one word at least is in the text.

    >>> says("rank 3: the gpu is out of memory", [["host", "gpu"], ["memory", "oom"]])
    True
    """
    return all(any(word.lower() in text for word in words) for words in say)


def marks_of(diagnosis: Diagnosis, answer: dict[str, Any]) -> list[str]:
    """The columns in which a log counts."""
    if answer["cause"] is None:
        well = diagnosis.verdict.value == answer.get("verdict", diagnosis.verdict.value)
        return ["alarm" if has_error(diagnosis.findings) or not well else "right"]
    verdicts = [finding for finding in diagnosis.findings if finding.severity is not Severity.NOTE]
    if not verdicts:
        return ["none"]
    if "rule" in answer:
        line = f"line {answer['line']}: "
        named = verdicts[0].rule == answer["rule"] and any(one.startswith(line) for one in verdicts[0].evidence[:1])
        return ["right"] if named else ["wrong"]
    if "say" in answer:
        named = says(" ".join([verdict_text(verdicts[0]), *verdicts[0].evidence]).lower(), answer["say"])
    elif "accept" in answer:
        named = holds(verdict_text(verdicts[0]), answer["accept"])
    else:
        named = holds(" ".join([verdict_text(verdicts[0]), *verdicts[0].evidence]).lower(), [answer["must_mention"]])
    if diagnosis.outcome in UNSURE:
        return ["unsure", "quoted"] if named else ["unsure"]
    return ["right"] if named else ["wrong"]


def score(folder: Path, half: str) -> tuple[dict[str, Counter[str]], dict[str, list[str]]]:
    """The counts of each category, and the names of the logs in each column (of an open corpus only)."""
    counts: dict[str, Counter[str]] = {}
    names: dict[str, list[str]] = {}
    answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    for answer in (answer for answer in answers if answer.get("half", half) == half):
        marks = marks_of(read(folder / answer["file"]), answer)
        counts.setdefault(answer["category"], Counter()).update(["logs", *marks])
        if half == "open":
            names.setdefault(marks[0], []).append(answer["file"])
    return counts, names


def table(counts: dict[str, Counter[str]]) -> list[str]:
    """The counts as lines."""
    total: Counter[str] = sum(counts.values(), Counter())
    rows = [*sorted(counts.items()), ("all", total)]
    lines = [f"{'category':<16}{'logs':>6}" + "".join(f"{column:>8}" for column in COLUMNS)]
    lines += [
        f"{name:<16}{count['logs']:>6}" + "".join(f"{count[column]:>8}" for column in COLUMNS) for name, count in rows
    ]
    return lines


def main() -> None:
    """Print the score of one half of a judging corpus, or of ``real/``, whose answers are a hint and no score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--half", choices=["open", "closed"], default="open")
    parser.add_argument("--corpus", choices=CORPORA, default="blind")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--names", action="store_true", help="the logs of each column; never those of the closed half")
    options = parser.parse_args()
    counts, names = score(HERE / options.corpus, options.half)
    if options.json:
        print(json.dumps({"half": options.half, "corpus": options.corpus, "counts": counts}, indent=1))
        return
    print("\n".join(table(counts)))
    if options.names:
        print("\n".join(f"{column}: {' '.join(files)}" for column, files in sorted(names.items())))


if __name__ == "__main__":
    main()
