"""What each relation of the log engine changes: ``python -m tests.diagnosis.ablation`` prints the table.

Each one is left out in turn, and the answers that differ are counted: on the logs of the corpora, and on the stories that other
tests make. One that changes nothing says nothing, and is to be removed.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dsdoctor.diagnosis import relations
from dsdoctor.diagnosis.diagnose import SIGNS, diagnosis_of
from dsdoctor.diagnosis.lines import raw_lines
from tests.diagnosis import (
    innocents,
    test_diagnose,
    test_endings,
    test_left_behind,
    test_schedulers,
    test_survived_incidents,
    test_what_follows,
)
from tests.diagnosis.reading import collected, diagnose, scan

HERE = Path(__file__).parent
RELATIONS = [one.__dict__["relation"] for one in vars(relations).values() if "relation" in getattr(one, "__dict__", {})]
NAMES = (*RELATIONS, *SIGNS)
A_CRASH_LONG_BEFORE_THE_END = [
    "terminate called after throwing an instance of 'std::out_of_range'",
    *(f"[rank1]: waiting for the store, try {number}" for number in range(90)),
]


def corpus() -> Iterator[list[bytes]]:
    """The logs of all corpora."""
    for log in sorted(HERE.rglob("*.log")):
        with log.open("rb") as stream:
            yield list(raw_lines(stream))


def stories() -> list[list[bytes | str]]:
    """The logs that other tests make of templates."""
    with collected() as logs:
        list(innocents.wrong(every=600))
        list(innocents.missed(every=480))
        list(innocents.alarms(every=240))
        test_endings.test_what_was_survived_is_no_error_in_a_sample()
        test_diagnose.test_an_error_of_the_compiler_that_no_rule_knows_is_shown_instead_of_its_echoes()
        diagnose(A_CRASH_LONG_BEFORE_THE_END)
        test_left_behind.test_only_what_shows_that_a_program_went_on_takes_a_cause_away()
        test_left_behind.test_a_run_that_says_that_it_goes_on_and_does_is_well()
        test_survived_incidents.test_what_was_survived_is_no_failure()
        test_schedulers.test_what_a_scheduler_cancels_behind_a_failed_rank_is_no_cause()
        for warned, end in test_what_follows.OTHER_SERVERS[::4]:
            test_what_follows.told_without_the_certificate(warned, end, test_what_follows.PROBLEMS[0])
    return logs


def answer(read: Any, without: Iterable[str] = ()) -> tuple[object, ...]:
    """What a log comes to, reasons aside."""
    told = diagnosis_of(copy.copy(read), without=without)
    findings = [(one.severity, one.rule, one.title) for one in told.findings if one.rule != "passed-over"]
    return (told.outcome, told.where, told.activity, *findings)


def changed(logs: Iterable[Iterable[bytes | str]], names: Iterable[str] = NAMES) -> Counter[str]:
    """How many answers each relation changes."""
    counts: Counter[str] = Counter()
    asked = list(names)
    for log in logs:
        read = scan(log)
        whole = answer(read)
        counts.update(name for name in asked if answer(read, [name]) != whole)
    return counts


def main() -> None:
    """Print the table."""
    logs, made = changed(corpus()), changed(stories())
    print(f"{'relation':28}{'corpora':>10}{'stories':>10}")
    for name in NAMES:
        print(f"{name:28}{logs[name]:10}{made[name]:10}")


if __name__ == "__main__":
    main()
