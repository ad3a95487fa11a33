"""Rigs of nodes for the tests that need them; where none can be had they are skipped, in CI they fail."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsdoctor.comm.rendezvous.tcp_store import StoreClient
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


@pytest.fixture
def connected() -> Iterator[Callable[[int], StoreClient]]:
    """Clients of the store on a port of this machine, closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(contextlib.closing(StoreClient("127.0.0.1", port)))
