"""Host -> NCCL's old segments in /dev/shm that no process uses, and whose processes could not be seen. Looks, never judges."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.core.host import LARGEST_READ, Host

STALE_AFTER = 60.0
"""Seconds: a younger segment may belong to a job that is just starting."""
FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own name (PROC_PID_INIT_INO) of the namespace in which every process of a machine is seen."""
HIDDEN_BY_NAMESPACE = "processes outside of this container"
HIDDEN_BY_OWNER = "processes of other users"


@dataclass(frozen=True, kw_only=True)
class StaleSegments:
    """Old segments that no process has mapped or open, as far as this one sees. ``unseen``: the processes that it does not
    see, "" where it saw all of them."""

    files: tuple[str, ...] = ()
    unseen: str = ""


def look_stale_segments(host: Host, folder: str = "/dev/shm") -> StaleSegments:
    """The segments in ``folder``. Without any, no process is looked at."""
    files = [path for path in host.glob(f"{folder}/nccl-*") if (host.age(path) or 0.0) > STALE_AFTER]
    if not files:
        return StaleSegments()
    used: set[str] = set()
    whole = os.geteuid() == 0  # others' processes may be hidden altogether (hidepid)
    for process in host.glob("/proc/[0-9]*"):
        maps = host.read(f"{process}/maps")
        whole = whole and (len(maps) < LARGEST_READ if maps is not None else _has_no_memory(host, process))
        used.update(_names(host, process, maps or ""))
    # by name alone, which is random: where the same folder is mounted in another place its path is another
    stale = tuple(path for path in files if path.rpartition("/")[2] not in used)
    ours = host.resolve("/proc/self/ns/pid").endswith(FIRST_PID_NAMESPACE)
    unseen = (HIDDEN_BY_NAMESPACE,) * (not ours) + (HIDDEN_BY_OWNER,) * (not whole)
    return StaleSegments(files=stale, unseen=" and ".join(unseen))


def _has_no_memory(host: Host, process: str) -> bool:
    """Whether nothing can be mapped there: it has ended, or is a thread of the kernel."""
    sizes = host.read(f"{process}/statm")
    return sizes is None or sizes.startswith("0 ")


def _names(host: Host, process: str, maps: str) -> Iterator[str]:
    """The names of the segments that a process has mapped or open."""
    yield from re.findall(r"/(nccl-[^/\n]+)$", maps, re.MULTILINE)
    for descriptor in host.glob(f"{process}/fd/*"):
        name = host.resolve(descriptor).rpartition("/")[2]
        if name.startswith("nccl-"):
            yield name
