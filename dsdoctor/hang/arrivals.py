"""In a rank: now and then, when it called its last collectives and where it was seen, for the supervisor to compare with the other
ranks of the node. Nothing is done per collective: torch's flight recorder is read. Standard library alone."""

import array
import base64
import re
from collections import Counter, deque
from typing import Any

PERIOD, LEAST_PERIOD = 60.0, 5.0
"""Seconds between two readings: one takes some ten milliseconds, and all ranks do it at the same time."""
SHOWN = 5
"""Looks for which a reading stays in the samples: the supervisor may miss one."""
MOST_CALLS, MOST_STACKS, DEEPEST, LOOKS = 1000, 4, 10, 60
UNIT = 100_000
"""Nanoseconds in which arrivals are told."""
ENTRY = re.compile(
    r'"collective_seq_id":\s?(\d+),.*?"is_p2p":\s?false,.*?"process_group":\s?\["([^"]*)".*?"time_created_ns":\s?(\d+)'
)
Stack = tuple[tuple[str, int, str], ...]


class Arrivals:
    """What one rank tells of itself. ``after``: what the user asked for, which shortens the period."""

    def __init__(self, after: float | None) -> None:
        self._period = PERIOD if after is None else min(max(after, LEAST_PERIOD), PERIOD)
        self._number = -1
        self._shown = 0
        self._seen: deque[Stack] = deque(maxlen=LOOKS)
        self._message: dict[str, Any] | None = None

    def note(self, stack: Stack) -> None:
        """The rank was seen there."""
        self._seen.append(stack[-DEEPEST:])

    def is_due(self, now: float) -> bool:
        """Whether a new period has begun, by the clock that all ranks of a node have in common."""
        number = int(now // self._period)
        new, self._number = number != self._number and self._number >= 0, number
        return new

    def read(self, recorded: str) -> None:
        """Take over what the flight recorder holds."""
        calls: dict[str, list[tuple[int, int]]] = {}
        for entry in ENTRY.finditer(recorded):
            calls.setdefault(entry[2], []).append((int(entry[1]), int(entry[3])))
        self._shown = SHOWN
        self._message = {
            "number": self._number,
            "groups": [packed(name, calls[name]) for name in sorted(calls, key=lambda each: -len(calls[each]))],
            "stacks": [
                {
                    "looks": looks,
                    "frames": [{"file": file, "line": line, "function": name} for file, line, name in stack],
                }
                for stack, looks in Counter(self._seen).most_common(MOST_STACKS)
            ],
        }
        left = MOST_CALLS
        for group in self._message["groups"]:
            group["calls"], left = group["calls"][-left:] if left else [], max(0, left - len(group["calls"]))
        self._message["groups"] = [encoded(group) for group in self._message["groups"] if group["calls"]]
        self._seen.clear()

    def message(self) -> dict[str, Any] | None:
        """What is to stand in this look's sample."""
        self._shown -= 1
        return self._message if self._shown >= 0 else None


def packed(name: str, calls: list[tuple[int, int]]) -> dict[str, Any]:
    """The calls of one group, by their number: of several parts of one the first counts."""
    first: dict[int, int] = {}
    for sequence, created in calls:
        first.setdefault(sequence, created)
    return {"name": name, "calls": sorted(first.items())}


def encoded(group: dict[str, Any]) -> dict[str, Any]:
    """As text, four bytes for a call's number and four for its time.

    >>> encoded({"name": "0", "calls": [(7, 5_000_000_000), (8, 5_000_300_000)]})
    {'name': '0', 'sequence': 7, 'created': 5000000000, 'calls': 'AAAAAAAAAAABAAAAAwAAAA=='}
    """
    calls = group["calls"]
    sequence, created = calls[0][0], min(when for _, when in calls)
    numbers = array.array("I")
    for number, when in calls:
        numbers.extend((number - sequence, min((when - created) // UNIT, 0xFFFFFFFF)))
    text = base64.b64encode(numbers.tobytes()).decode()
    return {"name": group["name"], "sequence": sequence, "created": created, "calls": text}
