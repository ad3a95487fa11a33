"""The lines just above a line, and whether a pattern is in them. No line is searched twice for one pattern."""

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

ABOVE, CONTEXT = 40, 300
"""How many lines above a line are remembered, and how much of each."""


@dataclass
class Above:
    """The last lines of a log that are not blank."""

    lines: deque[bytes] = field(default_factory=lambda: deque(maxlen=ABOVE))
    count: int = 0
    searched: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each pattern: up to which line it was searched, and the last line that has it; counted from 1."""

    def remember(self, raws: Iterable[bytes]) -> None:
        """Take the next lines."""
        for raw in raws:
            self.lines.append(raw[:CONTEXT])
            self.count += 1

    def has(self, pattern: str) -> bool:
        """Whether one of the lines has the pattern.

        >>> above = Above()
        >>> above.remember([b'File "setup.py"', b"  import torch"])
        >>> above.has(r"setup\\.py"), above.has("metadata")
        (True, False)
        """
        until, last = self.searched.get(pattern, (0, 0))
        new = islice(reversed(self.lines), min(self.count - until, len(self.lines)))
        found = (self.count - age for age, raw in enumerate(new) if re.search(pattern, raw.decode("utf-8", "replace")))
        last = next(found, last)
        self.searched[pattern] = self.count, last
        return last > self.count - ABOVE and last > 0
