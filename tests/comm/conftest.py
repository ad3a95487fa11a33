"""Rigs of nodes for the tests that need them; where none can be had they are skipped, in CI they fail."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.rig import Rig, missing


def need(reason: str | None) -> None:
    """Skips the test for this reason; in CI, which installs everything, fails it."""
    if reason:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Two nodes, nodea and nodeb, joined by one link."""
    need(missing())
    with Rig(tmp_path / "rig") as rig:
        yield rig


@pytest.fixture
def wide_rig(tmp_path: Path) -> Iterator[Rig]:
    """Three nodes: a pair of them can have a problem while the third reaches both."""
    need(missing())
    with Rig(tmp_path / "rig", nodes=3) as rig:
        yield rig
