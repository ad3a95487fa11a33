"""Our text reads as a technical writer would leave it: the worst habits are counted, and there are none."""

import pytest

from tests.each import each
from tests.rules.voice import MAX_WORDS, habits, texts

TEXTS = tuple(texts())


@each("place, text", TEXTS)
def test_no_text_has_a_habit_that_a_technical_writer_would_change(place: str, text: str) -> None:
    assert list(habits(text)) == []


def test_every_kind_of_text_is_read() -> None:
    places = {place.partition("/")[0].partition(" ")[0] for place, _ in TEXTS}

    assert {"logs", "cli", "checks", "comm", "checkpoint", "docs", "README.md"} <= places
    assert len(TEXTS) > 2000


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Say what is wrong.", 1),
        ("the rank is told, and stands there", 2),
        (f"{'word ' * MAX_WORDS}.", 0),
        (f"{'word ' * (MAX_WORDS + 1)}.", 1),
        ("a tool `told us` of {stands|it}", 0),
        (f"{'word ' * 20}. {'word ' * 20}.", 0),
    ],
)
def test_the_habits_are_seen(text: str, count: int) -> None:
    assert len(list(habits(text))) == count
