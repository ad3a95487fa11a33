"""No line makes a pattern slow: every quantifier of the catalogue is pumped."""

import io
import time
from collections.abc import Iterator
from random import Random

import pytest

from dsdoctor.diagnosis.catalogue import RULES
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
    return cost_of("\n".join(f"{line} {number}" for number in range(3)).encode())


def cost_of(data: bytes) -> float:
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


SAMPLES = [line for rule in RULES.values() for one in rule.signatures for line in one.sample.split("\n")]
PROMISED_SECONDS_A_MEGABYTE = 5.0
"""What SECURITY.md promises of any log."""


def hostile_line(kind: str, number: int, random: Random) -> str:
    """A line of a log that asks for as much as it can: of every rule, of thousands of failures, of as many processes."""
    sample = random.choice(SAMPLES)
    match kind:
        case "samples":
            return f"{sample} {random.randrange(10**9)}"
        case "halves":
            return f"{sample[: len(sample) * 2 // 3]} {number}"
        case "ranks":
            return f"[rank{random.randrange(2000)}]: {sample} {number}"
        case "short":
            return " ".join(random.choice(SAMPLES) for _ in range(20))[:300]
        case "failures":
            label = f"[rank{number % 512}]: "
            frame = f'Traceback (most recent call last):\n{label}  File "/x/{number}.py", line 3, in f\n{label}    a()'
            return f"{label}{frame}\n{label}RuntimeError: number {number}"
    raise AssertionError(kind)


@pytest.mark.slow
@each("kind", ["samples", "halves", "ranks", "short", "failures"])
def test_a_log_that_is_made_to_cost_much_is_read_and_judged_in_time(kind: str) -> None:
    random = Random(kind)
    data = "\n".join(hostile_line(kind, number, random) for number in range(2600)).encode()[:300_000]

    # why thrice: a busy machine counts caches that were lost
    assert any(cost_of(data) < PROMISED_SECONDS_A_MEGABYTE for _ in range(3))
