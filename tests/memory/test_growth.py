"""What grows with every call is told; a start-up, a plateau, a saw-tooth and noise are not. Generated over shapes and rates."""

import mmap
import random
from itertools import count
from pathlib import Path

from dsdoctor.memory.calls import MAX_READINGS, Grown, Growth, resident, steady
from tests.each import each

MIB = 1 << 20
CALLS = range(1, 200)


def shapes(seed: int) -> dict[str, list[int]]:
    """Bytes at each call, by what the run does."""
    chance = random.Random(seed)
    base, rate = chance.randint(200, 4000) * MIB, chance.randint(2, 40) * MIB
    warm = chance.randint(3, 30)
    return {
        "grows": [base + rate * call for call in CALLS],
        "grows with noise": [base + rate * call + chance.randint(0, 5 * MIB) for call in CALLS],
        "still": [base for _ in CALLS],
        "noise": [base + chance.randint(0, 200 * MIB) for _ in CALLS],
        "start-up": [base + rate * min(call, warm) for call in CALLS],
        "one jump": [base + (rate * 50 if call > 120 else 0) for call in CALLS],
        "saw-tooth": [base + rate * (call % 20) for call in CALLS],
        "falls": [base + rate * (300 - call) for call in CALLS],
        "little": [base + call * 1024 for call in CALLS],
        "by leaps": [base + rate * 10 * (call // 70) for call in CALLS],
    }


@each("shape", shapes(0))
def test_only_what_never_stops_growing_is_told(shape: str) -> None:
    for seed in range(40):
        held = iter(shapes(seed)[shape])
        growth = Growth(lambda held=held: next(held))
        for _ in CALLS[:-1]:
            growth.note()
            if growth.readings[-1][0] != growth.calls:
                next(held)
        assert (growth.grown() is not None) is shape.startswith("grows"), seed


def test_the_rate_is_bytes_a_call() -> None:
    grown = steady(tuple((call, (500 + 8 * call) * MIB) for call in CALLS))

    assert isinstance(grown, Grown)
    assert grown.each == 8 * MIB
    assert (grown.last_call, grown.last) == (199, (500 + 8 * 199) * MIB)


def test_readings_stay_few_and_spread_over_all_calls() -> None:
    ticks = count()
    growth = Growth(lambda: next(ticks))
    for _ in range(100_000):
        growth.note()

    assert len(growth.readings) <= MAX_READINGS
    assert growth.readings[0][0] < 100_000 / 16
    assert growth.readings[-1][0] > 90_000
    assert next(ticks) < 1000


def test_few_calls_decide_nothing() -> None:
    assert steady(tuple((call, call << 30) for call in range(8))) is None


def test_this_process_is_resident_and_another_machine_is_not() -> None:
    assert resident() > MIB
    assert resident("no such process") == 0


def test_a_file_that_is_mapped_is_no_growth(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(64 * MIB))
    before = resident()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[place] for place in range(0, len(mapped), 4096)) == 0
        assert resident() - before < 16 * MIB
