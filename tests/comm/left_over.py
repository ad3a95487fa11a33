"""The processes of a test: how far one has come, and which are still there after it."""

import os
import signal
from collections.abc import Collection
from pathlib import Path

from dsdoctor.core.processes import state_of


def hears(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal: before that, Python's own words would be its end."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def acts(pid: int) -> bool:
    """Whether the process that imports torch, a child of the rank's control process, which is one of ``pid``, has begun to."""
    importers = [importer for child in children(pid) for importer in children(child)]
    return any("libtorch" in Path(f"/proc/{importer}/maps").read_text() for importer in importers)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def left_over(marker: str) -> list[str]:
    """Processes that carry a variable of a test."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (place / "environ").read_bytes() and str(os.getpid()) != place.name:
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def left_in(space: str, kind: str = "net", but: Collection[int] = ()) -> list[str]:
    """Processes in a namespace, as the link /proc/PID/ns/<kind> names it; the dead that nobody reaped are none."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            here = (place / "ns" / kind).readlink() == Path(space) and int(place.name) not in but
            if here and state_of(int(place.name)) != "Z":
                found.append((place / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found
