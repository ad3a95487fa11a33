"""Judged logs with innocent lines put in: what a program caught, tried again, or went on after, at the head or amid the log.

``python -m tests.diagnosis.innocents_in_logs [--names N]`` prints how often the verdict changes, by surrounding.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from zlib import crc32

from dsdoctor.diagnosis.lines import raw_lines
from tests.diagnosis.innocents import INNOCENT, KINDS, first_error, wordings
from tests.diagnosis.mixtures import alone
from tests.diagnosis.score import CORPORA, HERE

EARLY, OTHERS = 20, 3
"""At which line, at most, something is put amid a log, and how many cases are made of each."""


def logs() -> Iterator[tuple[str, str, list[str]]]:
    """Corpus, name, lines."""
    for corpus in CORPORA:
        for answer in json.loads((HERE / corpus / "answers.json").read_text(encoding="utf-8")):
            with (HERE / corpus / answer["file"]).open("rb") as stream:
                yield corpus, answer["file"], [raw.decode("utf-8", "replace") for raw in raw_lines(stream)]


def cases() -> Iterator[tuple[str, str, str, str, str, str]]:
    """Surrounding, innocent rule, corpus, name, what is told of the log, what is told with the innocent in it."""
    lines = [(rule, text) for rule, _, text in wordings()]
    for corpus, name, log in logs():
        right, _ = first_error(log)
        for number in range(OTHERS):
            chosen = crc32(f"{name}{number}".encode())
            kind = list(KINDS)[chosen % len(KINDS)]
            rule, text = ("unknown", INNOCENT) if number == 0 else lines[(chosen >> 8) % len(lines)]
            at = min(len(log) // 3, EARLY) if number == OTHERS - 1 else 0
            told, _ = first_error([*log[:at], *alone(KINDS[kind](text)), *log[at:]])
            yield kind, rule, corpus, name, right, told


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", type=int, default=0)
    options = parser.parse_args()
    tried = list(cases())
    changed = [one for one in tried if one[4] != one[5]]
    print(f"{len(changed)} of {len(tried)} verdicts change")
    for kind, times in Counter(one[0] for one in changed).most_common():
        print(f"{times:>5} of {sum(1 for one in tried if one[0] == kind):>4} {kind}")
    for one in changed[: options.names]:
        print("   ", *one)


if __name__ == "__main__":
    main()
