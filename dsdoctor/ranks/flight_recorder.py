"""torch's flight recorder: what makes it remember, and the last collective that a data process's dump has of a rank.

It tells a hang's first different call, and older releases must be told to keep it before they start. Judges nothing.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.core.files import read_limited
from dsdoctor.core.text import decode

MAX_DUMP_BYTES = 8 << 20
RECORDERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
"""torch's variables for how many collectives are remembered: the name of older releases first."""
ENTRIES, REMEMBERS_SINCE = "2000", (2, 7)
"""From this torch on as many are remembered without a word."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The last collective that a rank began: its number in the group, its name, and its first input's size."""

    sequence: int
    operation: str
    size: str


def flight_file(folder: str, pid: int) -> Path:
    """Where a data process writes what torch recorded."""
    return Path(folder) / f"flight-{pid}.json"


def read_recorded(path: Path) -> Recorded | None:
    """What a dump says, None where there is none that can be read."""
    try:
        dump = decode(read_limited(path, MAX_DUMP_BYTES), dict[str, Any])
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    entries = dump.get("entries")
    return last_begun(entries) if isinstance(entries, list) else None


def last_begun(entries: list[Any]) -> Recorded | None:
    """The collective with the highest number of the group in which most was done last.

    >>> last_begun([{"collective_seq_id": 4, "profiling_name": "gloo:all_reduce", "input_sizes": [[8, 2]], "state": "scheduled"}])
    Recorded(sequence=4, operation='all_reduce', size='8x2')
    >>> last_begun([{"is_p2p": True}, "no entry"]) is None
    True
    """
    collectives = [entry for entry in entries if isinstance(entry, dict) and not entry.get("is_p2p")]
    numbered = [entry for entry in collectives if isinstance(entry.get("collective_seq_id"), int)]
    if not numbered:
        return None
    group = str(numbered[-1].get("process_group"))
    last = max(
        (entry for entry in numbered if str(entry.get("process_group")) == group),
        key=lambda entry: int(entry["collective_seq_id"]),
    )
    sizes = last.get("input_sizes")
    first = sizes[0] if isinstance(sizes, list) and sizes and isinstance(sizes[0], list) else []
    return Recorded(
        sequence=int(last["collective_seq_id"]),
        operation=str(last.get("profiling_name", "")).rpartition(":")[2][:40],
        size="x".join(str(number) for number in first[:4]),
    )


def recorder_variables(watched: bool, environment: Mapping[str, str], torch: str) -> dict[str, str]:
    """What torch must be told before it starts to remember its last collectives. ``torch``: its version, "" where there is none.

    >>> recorder_variables(True, {}, "2.5.1"), recorder_variables(True, {}, "2.13.0+cpu"), recorder_variables(False, {}, "2.5.1")
    ({'TORCH_NCCL_TRACE_BUFFER_SIZE': '2000'}, {}, {})
    """
    version = tuple(int(number) for number in re.findall(r"\d+", torch)[:2])
    wanted = watched and version and version < REMEMBERS_SINCE
    return {RECORDERS[0]: ENTRIES} if wanted and not any(name in environment for name in RECORDERS) else {}
