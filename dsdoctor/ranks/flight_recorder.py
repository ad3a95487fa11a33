"""torch's flight recorder: what makes it remember, what it holds in this process, and the last collective in a data process's
dump.

It tells a hang's first different call, and older releases must be told to keep it before they start. In a rank a thread that
watches asks for what it holds (``recorder_texts``, ``recorded_operations`` and what they use), only when nothing moves or the
rank ends: it imports nothing, and takes torch from sys.modules. Judges nothing.
"""

import array
import base64
import json
import pickle
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.core.files import read_limited
from dsdoctor.core.script import is_user_file
from dsdoctor.core.text import decode

VARIABLES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
"""torch's variables for how many collectives are remembered: the name of older releases first."""
ENTRIES, REMEMBERS_SINCE = "2000", (2, 7)
"""From this torch on as many are remembered without a word."""
MAX_DUMP_BYTES = 8 << 20
JSON_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
STACK_DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
MAX_HISTORY_CALLS, MAX_HISTORY_KINDS, MAX_FRAMES = 1200, 120, 40
NOT_RECORDED = 0xFFFF
"""In place of a kind of call, in a history."""


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
    return {VARIABLES[0]: ENTRIES} if wanted and not any(name in environment for name in VARIABLES) else {}


def recorder_texts() -> list[str]:
    """What torch's flight recorders hold, as they write it: NCCL has one of its own. None where there is none."""
    texts = [dump() for dump in _dumps(JSON_DUMPS)]
    return [text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in texts if text]


def recorded_operations(*, stacks: bool = False) -> dict[str, Any]:
    """For each group's name its last operations, the timeout of the last one, all calls as ``history``, and when each thread made
    some of them, in nanoseconds of the wall clock. ``stacks``: with the lines that called them where that imports nothing, which
    takes torch a second."""
    groups: dict[str, Any] = {}
    seen = set()
    for entry in _entries_with_stacks() if stacks else _entries():
        # newer torches have one recorder behind both names
        key = (entry["process_group"][0], entry["collective_seq_id"], entry["profiling_name"], entry["time_created_ns"])
        # point to point: not all of the group take part
        if entry.get("is_p2p") or key in seen:
            continue
        seen.add(key)
        group = groups.setdefault(str(entry["process_group"][0]), {"operations": [], "timeout": None, "calls": {}})
        if (thread := str(entry.get("thread_id", ""))).isdigit():
            group["calls"].setdefault(int(thread), []).append(int(entry["time_created_ns"]))
        group["operations"].append(_operation(entry))
        group["timeout"] = entry.get("timeout_ms", 0) / 1000 or None
    for group in groups.values():
        group["history"] = history(group["operations"], MAX_HISTORY_CALLS)
    return groups


def history(operations: Iterable[dict[str, Any]], max_calls: int) -> dict[str, Any] | None:
    """The calls of a group in little room: ``kinds`` of calls, and for each number from ``first`` on two bytes, in base64,
    which kind it was.

    >>> calls = [{"sequence": 7, "name": "a", "sizes": [[3]]}, {"sequence": 9, "name": "a", "sizes": [[3]]}]
    >>> history(calls, 9)
    {'first': 7, 'kinds': [{'sequence': 0, 'name': 'a', 'sizes': [[3]], 'place': []}], 'calls': 'AAD//wAA'}
    """
    numbered = {each["sequence"]: each for each in operations}
    if not numbered:
        return None
    first = max(min(numbered), max(numbered) - max_calls + 1)
    kinds: dict[str, int] = {}
    told: list[dict[str, Any]] = []
    calls = array.array("H", [NOT_RECORDED] * (max(numbered) - first + 1))
    for sequence, each in sorted(numbered.items()):
        if sequence < first:
            continue
        kind = {"sequence": 0, "name": each["name"], "sizes": each["sizes"], "place": each.get("place", [])}
        number = kinds.setdefault(repr(kind), len(told))
        if number == len(told):
            told.append(kind)
        if number < MAX_HISTORY_KINDS:
            calls[sequence - first] = number
    return {"first": first, "kinds": told[:MAX_HISTORY_KINDS], "calls": base64.b64encode(calls.tobytes()).decode()}


def _dumps(names: Iterable[str]) -> list[Any]:
    c10d = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    return [dump for name in names if (dump := getattr(c10d, name, None)) is not None]


def _entries() -> list[dict[str, Any]]:
    return [entry for text in recorder_texts() for entry in json.loads(text).get("entries", ())]


def _entries_with_stacks() -> list[dict[str, Any]]:
    """The entries with their stacks; those without where this torch tells none.

    To name lines torch looks into its compiler, which it imports where the script has not: 800 modules, in a thread
    that must import none. A script that imports them at that moment would die of it.
    """
    if "_inductor" not in vars(sys.modules.get("torch", sys)):
        return _entries()
    try:
        # what torch has written in this process a moment ago
        found = [entry for dump in _dumps(STACK_DUMPS) for entry in pickle.loads(dump()).get("entries", ())]  # noqa: S301
    except Exception:  # a torch of another release
        found = []
    return found or _entries()


def _operation(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "sequence": int(entry["collective_seq_id"]),
        "name": str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
        "sizes": [list(map(int, sizes)) for sizes in entry.get("input_sizes", ())][:8],
        "types": [str(name)[:20] for name in entry.get("input_dtypes", ())][:8],
        "state": "done" if entry.get("retired") or entry.get("state") == "completed" else str(entry.get("state", "")),
        "called": round(int(entry["time_created_ns"]) / 1e9, 4),
        "place": _place(entry.get("frames") or ()),
    }


def _place(frames: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The user's own line of a call: of the frames, innermost first, the first that is no library's; empty for none."""
    for frame in list(frames)[:MAX_FRAMES]:
        file = str(frame.get("filename", ""))
        if file and is_user_file(file):
            return [{"file": file, "line": int(frame.get("line") or 0), "function": str(frame.get("name", ""))}]
    return []
