"""The corpora read with rules taken away, whole and in pieces: a verdict comes out, whatever no rule knows any more.

``python -m tests.diagnosis.without_rules [--seeds N] [--pieces N]`` prints each log or piece that cannot be read.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.scan import Patterns, index
from tests.diagnosis.score import CORPORA

HERE = Path(__file__).parent
SHARES = (0.0, 0.1, 0.5, 0.9)
"""What share of the rules is left."""

LENGTHS = (1, 1, 1, 2, 3, 5, 10, 30)
SHAPE = re.compile(rb"\d+|0x[0-9a-f]+|/[\w./-]+")
Lines = list[bytes]


@cache
def corpus() -> tuple[tuple[str, Lines], ...]:
    """Every log of every corpus."""
    files = (file for name in (*CORPORA, "logs") for file in sorted((HERE / name).rglob("*.log")))
    return tuple((str(file.relative_to(HERE)), file.read_bytes().split(b"\n")) for file in files)


@cache
def shapes() -> tuple[bytes, ...]:
    """One line of each form that is in the corpora, numbers and paths aside."""
    return tuple({SHAPE.sub(b"#", line): line for _, lines in corpus() for line in lines if line.strip()}.values())


def some_rules(share: float, seed: int) -> Patterns:
    """The catalogue with this share of its rules."""
    chance = random.Random(f"{share} {seed}")
    return Patterns(index([rule for rule in RULES.values() if chance.random() < share]))


def pieces(count: int, seed: int) -> Iterator[tuple[str, Lines]]:
    """A few lines from anywhere in a log."""
    chance = random.Random(seed)
    for _ in range(count):
        name, lines = chance.choice(corpus())
        first = chance.randrange(len(lines))
        last = first + chance.choice(LENGTHS)
        yield f"{name}:{first + 1}-{last}", lines[first:last]


def broken(logs: Iterator[tuple[str, Lines]], patterns: Patterns) -> Iterator[tuple[str, str]]:
    """The logs of which something could not be read, with what was raised."""
    for name, lines in logs:
        findings = diagnose(lines, patterns=patterns).findings
        yield from ((name, one.evidence[0]) for one in findings if one.rule == "reader-failed")


def main() -> None:
    """Print what cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pieces", type=int, default=10_000)
    options = parser.parse_args()
    count = 0
    for seed in range(options.seeds):
        for share in SHARES:
            patterns = some_rules(share, seed)
            for name, error in broken(iter([*corpus(), *pieces(options.pieces, seed)]), patterns):
                count += 1
                print(f"{name} with {share:.0%} of the rules, seed {seed}:\n{error}")
    read = options.seeds * len(SHARES) * (len(corpus()) + options.pieces)
    print(f"{count} of {read} readings failed")


if __name__ == "__main__":
    main()
