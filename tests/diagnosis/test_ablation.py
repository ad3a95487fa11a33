"""Each relation of the log engine changes an answer: one that changes none is removed."""

import inspect
from itertools import chain

import pytest

from dsdoctor.diagnosis import diagnose, relations
from tests.diagnosis.ablation import NAMES, changed, corpus, stories


def test_every_relation_is_in_the_table() -> None:
    functions = [one for one in vars(relations).values() if inspect.isfunction(one)]
    known = {one.__dict__["relation"] for one in functions if "relation" in one.__dict__}

    assert known == set(NAMES) - set(diagnose.SIGNS)
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.slow
def test_every_relation_changes_an_answer() -> None:
    counts = changed(chain(corpus(), stories()))

    print(*(f"{name:28}{counts[name]:8}" for name in NAMES), sep="\n")
    assert [name for name in NAMES if not counts[name]] == []
