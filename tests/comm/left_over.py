"""The processes of a test that are still there after it."""

import os
from collections.abc import Collection
from pathlib import Path

from dsdoctor.core.processes import state_of


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
