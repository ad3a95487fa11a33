"""No line makes a pattern slow: every quantifier of the catalogue is pumped."""

import io
import time
from collections.abc import Iterator

import pytest

from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.scan import INDEX, Entry, Wording
from tests.diagnosis.pumped import example_of, lines, pumps
from tests.diagnosis.reading import diagnose
from tests.each import each

SECONDS_A_MEGABYTE = 40.0
"""A net for what grows with the square of a line; the worst line costs a hundredth of it."""


def patterns(entry: Entry) -> list[str]:
    if not isinstance(entry, Wording):
        return [entry.pattern]
    signature = entry.signature
    return [text for text in (signature.pattern, signature.unless, signature.after, signature.not_after) if text]


def words(entry: Entry) -> str:
    alternatives = (entry.signature.words if isinstance(entry, Wording) else entry.words).split()
    return min(alternatives, key=lambda word: (not word.isascii(), len(word))).replace("+", " ")


def pumped_lines(entry: Entry) -> Iterator[str]:
    first, *others = patterns(entry)
    for pattern in (first, *others):
        matching = f"{example_of(first)} " if pattern is not first else ""
        for pump in pumps(pattern):
            yield from (matching + line for line in lines(pump, words(entry)))


def seconds_a_megabyte(line: str) -> float:
    data = "\n".join(f"{line} {number}" for number in range(3)).encode()
    began = time.process_time()
    diagnose(raw_lines(io.BytesIO(data)))
    return (time.process_time() - began) / len(data) * 1_000_000


def is_quadratic(pattern: str) -> bool:
    """Whether a quantifier of a pattern runs to the end of a line from each place of it."""
    return any(pump.free and (pump.endless or not pump.before) for pump in pumps(pattern))


@each(
    "pattern",
    [
        r"(?P<op>\w+) is only supported on POSIX",
        r"\S{0,160}torch_extensions: Permission denied",
        r"(?:(?P<user>[\w.-]+)@)?Permission denied",
        r"\d+ Killed",
        r"libcudnn\w*\.so",
        r"(?:[\w.+-]{1,120}\.so: )?undefined symbol",
    ],
)
def test_a_pattern_that_runs_from_everywhere_is_noticed(pattern: str) -> None:
    assert is_quadratic(pattern)


@each(
    "pattern", [r"\b(?P<op>\w{1,100}) is only", r"(?<!\S)\S{0,160}torch", r"^\S+:", r"torch==\w+", r"libcudnn\w{0,40}"]
)
def test_a_pattern_that_is_held_is_fine(pattern: str) -> None:
    assert not is_quadratic(pattern)


@pytest.mark.slow
def test_no_pattern_runs_from_everywhere() -> None:
    found = [pattern for entry in INDEX.entries for pattern in patterns(entry) if is_quadratic(pattern)]

    assert not found


@pytest.mark.slow
def test_every_pattern_with_quantifiers_is_pumped() -> None:
    made = sum(1 for entry in INDEX.entries for pattern in patterns(entry) for pump in pumps(pattern) if pump.units)

    assert made > 300


@pytest.mark.slow
@each("number", range(len(INDEX.entries)))
def test_pumped_lines_are_read_in_time(number: int) -> None:
    for line in pumped_lines(INDEX.entries[number]):
        # why thrice: a busy machine counts caches that were lost
        costs = (seconds_a_megabyte(line) for _ in range(3))

        assert any(cost < SECONDS_A_MEGABYTE for cost in costs), line[:60] + " ... " + line[-60:]
