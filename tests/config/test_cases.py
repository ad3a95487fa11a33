"""Bad configurations are named and healthy ones are not alarmed; a part of them is trained with for real beside it."""

import pytest

from tests.config.cases import bad, healthy
from tests.config.table import table

pytestmark = pytest.mark.launch  # needs DeepSpeed
EVERY = 12
"""Each twelfth one is initialized for real here; ``benchmarks/config.py`` tries them all."""


def test_there_are_enough_of_both() -> None:
    assert len(list(bad())) >= 60
    assert len(list(healthy())) >= 30


def test_what_is_said_is_what_happens() -> None:
    rows = table([*list(bad())[::EVERY], *list(healthy())[::-EVERY]])

    assert [row for row in rows if not row.agrees] == []
