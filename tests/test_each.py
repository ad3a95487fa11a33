"""A table of cases as one test: all are tried, and those that are wrong are told with their values."""

from pathlib import Path

import pytest

from tests.each import each


def test_every_wrong_case_is_told_and_the_others_are_not(tmp_path: Path) -> None:
    tried = []

    @each("folder", ["a", "b"])
    @each(("number", "word"), [(1, "one"), (2, "two"), (3, "three")])
    def check(number: int, word: str, folder: str, place: Path) -> None:
        tried.append((number, folder, place))
        assert (number, folder) not in {(2, "b"), (3, "b")}, word

    with pytest.raises(
        AssertionError, match=r"(?s)1 of 2 cases.*'folder': 'b'.*2 of 3 cases.*'word': 'two'.*'word': 'three'"
    ):
        check(place=tmp_path)

    assert len(tried) == 6


@each("case", [])
def test_a_table_may_be_empty(case: int) -> None:
    raise ValueError(case)
