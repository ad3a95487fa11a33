"""An exception's line that a terminal cut every 80 characters, in the middle of words, is read as the whole line is."""

import pytest

from dsdoctor.diagnosis.catalogue import RULES
from dsdoctor.diagnosis.scan import MAX_JOINED, WrappedLine
from tests.diagnosis.reading import diagnose

LONG = sorted(
    {
        signature.sample
        for rule in RULES.values()
        for signature in rule.signatures
        if 81 < len(signature.sample) < 400 and "\n" not in signature.sample and "Error: " in signature.sample[:60]
    }
)


def cut(text: str, width: int) -> list[str]:
    return [text[start : start + width] for start in range(0, len(text), width)]


def first(lines: list[str]) -> str:
    return next((finding.rule for finding in diagnose(lines).findings), "")


@pytest.mark.slow
def test_a_line_cut_at_80_columns_gets_the_verdict_of_the_whole_line() -> None:
    others = [sample for sample in LONG if first(cut(sample, 80)) != first([sample])]

    # an exception that is known by its rule alone is not known by its half, and is then an error that nothing explains
    assert len(LONG) > 300
    assert len(others) <= 8, others


def test_lines_are_joined_with_a_blank_unless_they_were_full() -> None:
    line = WrappedLine()
    line.begin("Error: a" + "b" * 72, b"Error: a" + b"b" * 72, 1)
    assert line.joined("cd", b"cd", 2)[0].endswith("bcd")

    line.begin("Error: short", b"Error: short", 1)
    assert line.joined("and more", b"and more", 2) == ("Error: short and more",)
    assert line.joined("x" * 500, b"x" * 500, 3) == ()


def test_what_stands_far_below_does_not_belong_to_it() -> None:
    line = WrappedLine()
    line.begin("Error: a", b"Error: a", 1)
    assert not line.cut
    for number in range(2, 2 + MAX_JOINED):
        line.joined("b", b"b", number)

    assert line.text == ""


def test_what_another_program_says_is_no_part_of_it() -> None:
    for other in (
        "slurmstepd: error: *** JOB 7 CANCELLED ***",
        "srun: error: a: tasks 0-3: Killed",
        "mpirun: b",
        "orted[7]: c",
    ):
        line = WrappedLine()
        line.begin("Error: a worker is gone.", b"Error: a worker is gone.", 1)
        assert line.joined(other, other.encode(), 2) == ()
        assert line.text == ""
