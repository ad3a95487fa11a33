"""Ends what we started: whole sessions, whatever process groups their members have moved into."""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

SWEEPS = 20
"""How often to look again: a process may fork while it is being ended."""


def end_session(session: int) -> None:
    """Kill every process of a session that we started: a member may have a process group of its own."""
    for _ in range(SWEEPS):
        members = [pid for pid in _pids() if _session_of(pid) == session]
        if not members:
            break
        for pid in members:
            _kill(os.kill, pid)
    _kill(os.killpg, session)


def _pids() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _kill(kill: Callable[[int, int], None], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(number, signal.SIGKILL)
