"""The limits that keep a hostile log cheap lose nothing of a real one."""

import io
import re
import subprocess
from pathlib import Path

import pytest

from dsdoctor.core.finding import Severity
from dsdoctor.diagnosis.lines import LONGEST, raw_lines
from dsdoctor.diagnosis.models import Diagnosis
from dsdoctor.diagnosis.scan import A_COMPILE, ABOVE, INDEX, RecentLines, searched_by
from tests.cli.runner import run
from tests.diagnosis.reading import diagnose
from tests.each import each

NEEDED = [
    text
    for entry, parts in zip(INDEX.entries, INDEX.parts, strict=True)
    for by in [searched_by(entry)]
    for text in [f"{by.words.split()[0].replace('+', ' ')} {''.join(part.decode() for part in parts[:1])}"]
    if parts and not re.search(by.pattern, text)
]
"""What a line has that is searched for an entry, and is no match of it."""
ALL_WORDS = " ".join([*sorted(NEEDED, key=len), *(word.decode() for word in sorted(INDEX.words) if word != A_COMPILE)])
CAUSE = "x.h:6:10: fatal error: cusparse.h: No such file or directory"


def test_a_line_above_is_found_as_long_as_it_is_one_of_the_last() -> None:
    above = RecentLines()
    above.remember([b"setup.py"])
    found = []
    for _ in range(ABOVE + 1):
        found.append(above.has(r"setup\.py"))
        above.remember([b"other"])

    assert found == [True] * ABOVE + [False]


def test_a_line_above_is_found_again_after_it_was_lost() -> None:
    above = RecentLines()
    above.remember([b"other"] * 100)
    assert not above.has("setup")

    above.remember([b"setup", *[b"other"] * 10])

    assert above.has("setup")


@pytest.mark.slow
def test_lines_above_are_still_searched_after_very_many_in_vain() -> None:
    log = [line for _ in range(2500) for line in ("IndexError: list index out of range", *["training"] * 15)]

    last = [*log, "    arch_list[-1] += '+PTX'", "IndexError: list index out of range"]

    assert [finding.rule for finding in diagnose(last).findings] == ["arch-list-empty"]


def test_the_head_and_the_tail_of_a_line_with_the_words_of_everything_are_read() -> None:
    for line in (f"{CAUSE} {ALL_WORDS}", f"{ALL_WORDS} {CAUSE}"):
        assert "cuda-header-missing" in {finding.rule for finding in diagnose([line]).findings}


def partly(diagnosis: Diagnosis) -> list[tuple[Severity, str, tuple[str, ...]]]:
    return [
        (f.severity, f.title.split(":")[0], f.evidence) for f in diagnosis.findings if f.rule == "line-partly-searched"
    ]


def test_a_cause_in_the_middle_of_a_crowded_line_is_not_missed_in_silence() -> None:
    hidden = f"{ALL_WORDS} {CAUSE} {ALL_WORDS}"

    log = diagnose(["fine", hidden[: LONGEST // 2] + CAUSE + hidden[-LONGEST // 2 + len(CAUSE) :], "fine"])

    assert "cuda-header-missing" not in {finding.rule for finding in log.findings}
    assert partly(log) == [(Severity.WARNING, "line 2 is too long", ())]


def test_every_line_that_was_searched_in_part_counts_also_one_that_comes_again() -> None:
    crowded = ALL_WORDS[:LONGEST]

    assert partly(diagnose(["fine", *[crowded] * 3])) == [
        (Severity.WARNING, "line 2 is too long", ("and 2 more lines",))
    ]


def test_beside_a_cause_it_is_a_note() -> None:
    assert partly(diagnose([CAUSE, ALL_WORDS])) == [(Severity.NOTE, "line 2 is too long", ())]


@each("length", [5_000, 200_000])
def test_a_cause_in_the_middle_of_a_very_long_line_is_told_as_not_searched_on_the_terminal(
    length: int, tmp_path: Path
) -> None:
    """Both where the line is cut when it is read, and before."""
    log = tmp_path / "build.log"
    log.write_text(f"fine\n{'x ' * length}{CAUSE}{' x' * length}\n")

    shown = run("diagnose", str(log))
    folded = subprocess.run(["fold", "-s", "-w", "1000", log], capture_output=True, check=True).stdout

    assert "! line 2 is too long: only its start and end were searched" in shown.stdout
    assert "[cuda-header-missing]" in run("diagnose", "-", stdin=folded).stdout, "what the fix says helps"


def test_long_lines_that_hold_nothing_long_commands_and_progress_bars_are_told_of_by_nobody() -> None:
    bar = "".join(f"\r{done}%|###| error=0.1 fatal {done}/1000" for done in range(20_000))
    command = f"c++ -DTORCH_EXTENSION_NAME=x {'-I/a/error/include ' * 400} -c x.cpp"

    assert partly(diagnose(["x " * 10_000, command, f"{bar}\r\n"])) == []
    assert partly(diagnose(raw_lines(io.BytesIO(bar.encode())))) == []


def test_a_wrapped_exception_is_read_to_its_end() -> None:
    log = [
        "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile",
        "PyTorch (12.1). Please",
    ]

    assert [finding.rule for finding in diagnose(log).findings] == ["cuda-torch-mismatch"]
