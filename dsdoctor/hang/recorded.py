"""In a rank: what torch's flight recorders hold of its collectives, the last ones in full and the older ones short. Read only when
nothing moves or the rank ends. Standard library alone; torch is taken from sys.modules."""

import array
import base64
import json
import pickle
import sys
from collections.abc import Iterable
from typing import Any

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
WITH_STACKS = ("_dump_fr_trace", "_dump_nccl_trace")
MOST_CALLS, MOST_KINDS, DEEPEST = 1200, 120, 40
NOT_RECORDED = 0xFFFF


def recorder_texts() -> list[str]:
    """What torch's flight recorders hold, as they write it: NCCL has one of its own. None where there is none."""
    texts = [dump() for dump in _dumps(RECORDERS)]
    return [text.decode(errors="replace") if isinstance(text, bytes) else str(text) for text in texts if text]


def recorded_operations(*, stacks: bool = False) -> dict[str, Any]:
    """For each group's name its last operations, the timeout of the last one, and all calls as ``history``. ``stacks``: with the
    lines that called them, which takes torch a second."""
    groups: dict[str, Any] = {}
    seen = set()
    for entry in _entries_with_stacks() if stacks else _entries():
        # newer torches have one recorder behind both names
        key = (entry["process_group"][0], entry["collective_seq_id"], entry["profiling_name"], entry["time_created_ns"])
        # point to point: not all of the group take part
        if entry.get("is_p2p") or key in seen:
            continue
        seen.add(key)
        group = groups.setdefault(str(entry["process_group"][0]), {"operations": [], "timeout": None})
        group["operations"].append(_operation(entry))
        group["timeout"] = entry.get("timeout_ms", 0) / 1000 or None
    for group in groups.values():
        group["history"] = history(group["operations"], MOST_CALLS)
    return groups


def history(operations: Iterable[dict[str, Any]], most: int) -> dict[str, Any] | None:
    """The calls of a group in little room: ``kinds`` of calls, and for each number from ``first`` on two bytes, in base64,
    which kind it was.

    >>> calls = [{"sequence": 7, "name": "a", "sizes": [[3]]}, {"sequence": 9, "name": "a", "sizes": [[3]]}]
    >>> history(calls, 9)
    {'first': 7, 'kinds': [{'sequence': 0, 'name': 'a', 'sizes': [[3]], 'place': []}], 'calls': 'AAD//wAA'}
    """
    numbered = {each["sequence"]: each for each in operations}
    if not numbered:
        return None
    first = max(min(numbered), max(numbered) - most + 1)
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
        if number < MOST_KINDS:
            calls[sequence - first] = number
    return {"first": first, "kinds": told[:MOST_KINDS], "calls": base64.b64encode(calls.tobytes()).decode()}


def shortened(groups: list[dict[str, Any]]) -> None:
    """Leave of a sample's groups only the last operations: it has no room for more."""
    for group in groups:
        group["history"] = None


def _dumps(names: Iterable[str]) -> list[Any]:
    c10d = getattr(sys.modules.get("torch._C"), "_distributed_c10d", None)
    return [dump for name in names if (dump := getattr(c10d, name, None)) is not None]


def _entries() -> list[dict[str, Any]]:
    return [entry for text in recorder_texts() for entry in json.loads(text).get("entries", ())]


def _entries_with_stacks() -> list[dict[str, Any]]:
    """The entries with their stacks; those without where this torch tells none."""
    try:
        # what torch has written in this process a moment ago
        found = [entry for dump in _dumps(WITH_STACKS) for entry in pickle.loads(dump()).get("entries", ())]  # noqa: S301
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
    from dsdoctor.hang.stacks import LIBRARY

    for frame in list(frames)[:DEEPEST]:
        file = str(frame.get("filename", ""))
        if file and LIBRARY.search(file) is None:
            return [{"file": file, "line": int(frame.get("line") or 0), "function": str(frame.get("name", ""))}]
    return []
