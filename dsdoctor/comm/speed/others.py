"""A figure of all ranks -> that of all but some. It is sorted once, so that each of thousands of ranks can be compared with its
others."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping


class Figure:
    """One figure of each rank; the questions leave some ranks out, in the time of those. At least one rank must be left.

    >>> Figure({0: 5.0, 1: 1.0, 2: 3.0, 3: 9.0}).median({3}), Figure({0: 5.0, 1: 1.0, 2: 3.0}).median({1, 7})
    (3.0, 4.0)
    """

    def __init__(self, by_rank: Mapping[int, float]) -> None:
        self._by_rank = by_rank
        self._sorted = sorted((figure, rank) for rank, figure in by_rank.items())

    def least(self, without: Iterable[int]) -> float:
        """The smallest of the others."""
        return self._at(0, self._places(without))

    def most(self, without: Iterable[int]) -> float:
        """The largest of the others."""
        places = self._places(without)
        return self._at(len(self._sorted) - len(places) - 1, places)

    def median(self, without: Iterable[int]) -> float:
        """The median of the others."""
        places = self._places(without)
        left = len(self._sorted) - len(places)
        return (self._at((left - 1) // 2, places) + self._at(left // 2, places)) / 2

    def _places(self, without: Iterable[int]) -> list[int]:
        """Where the ranks that are left out stand in the order."""
        those = {rank for rank in without if rank in self._by_rank}
        return sorted(bisect_left(self._sorted, (self._by_rank[rank], rank)) for rank in those)

    def _at(self, index: int, left_out: list[int]) -> float:
        for place in left_out:
            if place > index:
                break
            index += 1
        return self._sorted[index][0]
