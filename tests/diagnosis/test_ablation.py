"""Each relation of the log engine changes an answer: one that changes none is removed."""

from itertools import chain

import pytest

from tests.diagnosis.ablation import NAMES, changed, corpus, stories


def test_every_relation_has_a_name_of_its_own() -> None:
    assert len(NAMES) > 30
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.slow
def test_every_relation_changes_an_answer() -> None:
    counts = changed(chain(corpus(), stories()))

    print(*(f"{name:28}{counts[name]:8}" for name in NAMES), sep="\n")
    assert [name for name in NAMES if not counts[name]] == []
