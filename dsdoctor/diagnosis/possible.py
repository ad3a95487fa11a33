"""Entries whose words a line has, and a text -> those whose pattern can match it; patterns are compiled when first asked for."""

import re
from dataclasses import dataclass, field

from dsdoctor.diagnosis.index import Index, Wording
from dsdoctor.diagnosis.needles import needles

MOST = 1000
"""For how many different sets of entries it is remembered what to look for."""


@dataclass
class Possible:
    """What is looked for, by the set of entries that a line's words ask for. Several logs may share it."""

    index: Index
    known: dict[int, tuple[str, ...]] = field(default_factory=dict)
    plans: dict[frozenset[int], list[tuple[int, tuple[str, ...]]]] = field(default_factory=dict)
    patterns: dict[int, re.Pattern[str]] = field(default_factory=dict)

    def search(self, number: int, pattern: str, text: str) -> re.Match[str] | None:
        """Like re.search, without its look into the cache at every call."""
        if (compiled := self.patterns.get(number)) is None:
            compiled = self.patterns[number] = re.compile(pattern)
        return compiled.search(text)

    def among(self, numbers: set[int], text: str) -> list[int]:
        """The entries that can match a text: it has something that each match of the pattern has."""
        asked = frozenset(numbers)
        if (plan := self.plans.get(asked)) is None:
            if len(self.plans) >= MOST:
                self.plans.clear()
            plan = self.plans[asked] = [(number, self._needles(number)) for number in sorted(numbers)]
        possible = []
        for number, texts in plan:  # why loops: a generator for each of them costs as much as the search
            for one in texts:
                if one in text:
                    possible.append(number)
                    break
        return possible

    def _needles(self, number: int) -> tuple[str, ...]:
        """Texts of which each match of an entry has one; the empty one, which all texts have, where none is known."""
        if (found := self.known.get(number)) is None:
            entry = self.index.entries[number]
            pattern = entry.signature.pattern if isinstance(entry, Wording) else entry.pattern
            found = self.known[number] = needles(pattern) or ("",)
        return found
