"""This node's ranks together: which there are, since when none has moved, and a view of each. Looks, judges nothing."""

import os
import time
from pathlib import Path

from dsdoctor.hang import processes
from dsdoctor.hang.local_rank import NAME, LocalRank
from dsdoctor.hang.models import RankView

ASLEEP = 5.0
"""Seconds between two looks after which this process itself was not let run: nothing may be concluded from that time."""


class Node:
    """The ranks whose rings lie in a folder."""

    def __init__(self, folder: Path, host: str) -> None:
        self.folder, self.host = folder, host
        self.ranks: dict[int, LocalRank] = {}
        self._looked = time.monotonic()

    def look(self) -> None:
        """Look at every rank, and for new ones."""
        now = time.monotonic()
        slept, self._looked = now - self._looked > ASLEEP, now
        self._find()
        for rank in self.ranks.values():
            rank.look()
            if slept:
                rank.moved = now
        if self.unwatched:
            for rank in self.ranks.values():
                rank.moved = now

    @property
    def unwatched(self) -> bool:
        """Whether no rank asks for the watch just now, as between two parts of a script that do."""
        return bool(self.ranks) and all(rank.unwatched for rank in self.ranks.values())

    def was_busy(self) -> None:
        """This process did something that takes time since the last look: it was not kept from running."""
        self._looked = time.monotonic()

    def look_at_children(self) -> None:
        """Look at what the ranks' child processes take."""
        parents = processes.all_parents()
        for rank in self.living():
            rank.look_at_children(parents)

    def seen_enough(self) -> bool:
        """Whether all living ranks were looked at often enough to tell which of them are still."""
        return all(rank.seen_enough for rank in self.living())

    def living(self) -> list[LocalRank]:
        """The ranks whose process has not ended."""
        return [rank for rank in self.ranks.values() if rank.alive]

    def still(self) -> float:
        """Seconds since any rank moved."""
        last = max((rank.moved for rank in self.ranks.values()), default=self._looked)
        return time.monotonic() - last

    def views(self) -> tuple[RankView, ...]:
        """All ranks of this node, those that ended too."""
        return tuple(self.ranks[number].view() for number in sorted(self.ranks))

    def world(self) -> int:
        """How many ranks the run has, as its ranks say; 0 while none has said anything."""
        return max((rank.world() for rank in self.ranks.values()), default=0)

    def remove(self) -> None:
        """Take the rings away: the run is over on this node."""
        for rank in self.ranks.values():
            rank.close()
        for name in os.listdir(self.folder):  # noqa: PTH208
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rmdir()

    def _find(self) -> None:
        for name in os.listdir(self.folder):  # noqa: PTH208
            found = NAME.fullmatch(name)
            if found is None:
                continue
            known = self.ranks.get(int(found[1]))
            if known is not None and known.pid == int(found[2]):
                continue
            try:
                new = LocalRank(self.folder / name, self.host)
            except (OSError, ValueError):
                continue
            if known is None or (new.alive and not known.alive) or (new.alive and new.first > known.first):
                self.ranks[new.rank] = new
