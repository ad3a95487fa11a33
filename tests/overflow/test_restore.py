"""The generators that a replay puts back, read the quick way and the exact one."""

import random
from collections.abc import Callable

import pytest

from dsdoctor.overflow.replay.restore import Randomness, _pythons_place


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), random.gauss(0, 1), float(random.getrandbits(40))]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "before",
    [
        lambda: random.seed(5),
        lambda: [random.random() for _ in range(1000)],
        # the second of a pair is kept
        lambda: random.gauss(0, 1),
        lambda: random.setstate((3, (*range(1, 625), 7), None)),
    ],
)
def test_pythons_generator_goes_on_as_it_would_have(before: Callable[[], object], *, exact: bool) -> None:
    before()
    kept = Randomness(exact=exact)
    state, first = random.getstate(), drawn()
    random.seed(9)

    kept.restore()

    assert random.getstate() == state
    assert drawn() == first


def test_this_pythons_generator_is_read_from_its_memory() -> None:
    assert _pythons_place() is not None
