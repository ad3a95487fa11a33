"""Real logs, changed in ways that leave their cause as it is: the labels, the order, the width, what stands before and after.

``python -m tests.diagnosis.variations [--corpus real|blind|fresh] [KIND ...]`` prints each log whose verdict another form changes.
Of the judging corpora only the open half is read.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dsdoctor.core.finding import Severity
from tests.diagnosis.reading import diagnose
from tests.diagnosis.stories import CONSEQUENCES

HERE = Path(__file__).parent
WIDTH = 100
LABELLED = re.compile(r"\[(?:rank ?|Rank |default)\d+\]|^\d+: |^\S*\d: |pid=\d|\bRank \d")
LAUNCHER = re.compile(r"torch[./]distributed[./](?:elastic|run)|launch\.py|srun: |slurmstepd|sigkill_handler|exitcode")
BLAMED = re.compile(r"local_rank(?:: |=)(\d+)")
TROUBLE = re.compile(r"Traceback \(|rror[: ]|WARN|Assertion|terminate called|version=|nan\b")
HANDLED = (
    "[WARNING] metrics could not be sent: Traceback (most recent call last):",
    '  File "/w/metrics.py", line 12, in send',
    "    connection.request()",
    "ConnectionRefusedError: [Errno 111] Connection refused",
    "Exception ignored in: <function Reader.__del__ at 0x7f00>",
    "Traceback (most recent call last):",
    '  File "/w/reader.py", line 90, in __del__',
    "    self.close()",
    "AttributeError: 'Reader' object has no attribute 'handle'",
    *(f"step {number}/900 loss 1.{number}" for number in range(1, 9)),
)
"""What a run bore before it failed of something else."""

Lines = list[str]


def is_labelled(lines: Lines) -> bool:
    """Whether the lines say already of which rank they are, and another label would contradict them."""
    return any(LABELLED.search(line) for line in lines)


def labels(lines: Lines, label: Callable[[str], list[str]]) -> Lines:
    """The lines of the training with labels; what a launcher or a scheduler says has none."""
    first = next((number for number, line in enumerate(lines) if LAUNCHER.search(line)), len(lines))
    return [part for line in lines[:first] for part in label(line)] + lines[first:]


def labelled(prefix: str) -> Callable[[Lines], Lines]:
    """The rank's lines with its label, which is that of the rank that the launcher blames."""

    def change(lines: Lines) -> Lines:
        if is_labelled(lines):
            return lines
        blamed = next((found[1] for line in lines if (found := BLAMED.search(line))), "0")
        return labels(lines, lambda line: [f"{prefix.format(rank=blamed)}{line}"])

    return change


def prefixed(prefix: str) -> Callable[[Lines], Lines]:
    """Every line with the same prefix."""
    return lambda lines: [f"{prefix}{line}" for line in lines]


def clocked(lines: Lines) -> Lines:
    """Every line with a clock, as CI and containers write."""
    return [f"2026-11-22T10:{number // 60 % 60:02}:{number % 60:02}.123Z {line}" for number, line in enumerate(lines)]


def narrow(lines: Lines) -> Lines:
    """Lines cut by a terminal."""
    return [line[start : start + WIDTH] for line in lines for start in range(0, max(1, len(line)), WIDTH)]


def with_consequences(lines: Lines) -> Lines:
    """Two other ranks say what follows, behind it."""
    return [*lines, *(f"[rank{rank}]: {line}" for rank in (6, 8) for line in CONSEQUENCES[rank % 3])]


def behind_consequences(lines: Lines) -> Lines:
    """Another rank's consequences stand before it: a pipe was slow."""
    return [*(f"[rank7]: {line}" for line in CONSEQUENCES[0]), *lines]


def twice(lines: Lines) -> Lines:
    """A launcher that starts the run again, and it fails again."""
    return [*lines, *lines]


def of_two_ranks(lines: Lines) -> Lines:
    """Two ranks fail alike, their lines in turns."""
    return lines if is_labelled(lines) else labels(lines, lambda line: [f"[rank{rank}]: {line}" for rank in (0, 1)])


def headless(lines: Lines) -> Lines:
    """The first third is lost, if nothing went wrong in it."""
    first = next((number for number, line in enumerate(lines) if TROUBLE.search(line)), 0)
    return lines[min(first, len(lines) // 3) :]


VARIATIONS: dict[str, Callable[[Lines], Lines]] = {
    "rank": labelled("[rank{rank}]: "),
    "default": labelled("[default{rank}]:"),
    "srun": labelled("{rank}: "),
    "host": prefixed("node3: "),
    "ray": prefixed("(TrainWorker pid=4711, ip=10.0.0.3) "),
    "clock": clocked,
    "colour": lambda lines: [f"\x1b[31m{line}\x1b[0m" for line in lines],
    "narrow": narrow,
    "handled": lambda lines: [*HANDLED, *lines],
    "follows": with_consequences,
    "behind": behind_consequences,
    "twice": twice,
    "two ranks": of_two_ranks,
    "headless": headless,
}


def verdict(lines: Lines) -> str:
    """The rule of the first error; "" where there is none."""
    errors = [finding.rule for finding in diagnose(lines).findings if finding.severity is Severity.ERROR]
    return errors[0] if errors else ""


def logs(corpus: str) -> Iterator[tuple[str, Lines]]:
    """The logs of a corpus that may be read."""
    answers = json.loads((HERE / corpus / "answers.json").read_text(encoding="utf-8"))
    for answer in answers:
        if answer.get("half") != "closed":
            yield answer["file"], (HERE / corpus / answer["file"]).read_text("utf-8", "replace").split("\n")


def flips(corpus: str, kinds: list[str], part: slice = slice(None)) -> Iterator[tuple[str, str, str, str]]:
    """Log, kind of variation, verdict on the log as it is, verdict on the changed one: where they differ."""
    for name, lines in list(logs(corpus))[part]:
        right = verdict(lines)
        for kind in kinds:
            changed = verdict(VARIATIONS[kind](lines))
            if changed != right:
                yield name, kind, right, changed


def main() -> None:
    """Print what flips."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(VARIATIONS))
    parser.add_argument("--corpus", choices=["real", "blind", "fresh"], default="real")
    options = parser.parse_args()
    found = list(flips(options.corpus, options.kinds or list(VARIATIONS)))
    for name, kind, right, changed in found:
        print(f"{name:<40}{kind:<11}{right or '-'} -> {changed or '-'}")
    print(
        f"{len(found)} flips in {len(list(logs(options.corpus)))} logs x {len(options.kinds or VARIATIONS)} variations"
    )


if __name__ == "__main__":
    main()
