"""The ranks of a node -> when one of them is late again and again: said once, and once more at the end of the run."""

from dsdoctor.core.finding import Finding
from dsdoctor.hang.lateness import Lateness, rank_late_again, summary_line
from dsdoctor.hang.node import Node


class Comparison:
    """What was compared so far."""

    def __init__(self) -> None:
        self._lateness = Lateness()
        self._number = -1
        self._told = False

    def look(self, node: Node) -> Finding | None:
        """Compare what the ranks tell, when all of them do; a finding when one is seen to be late again and again."""
        ranks = node.living()
        told = {rank.rank: arrivals for rank in ranks if (arrivals := rank.arrivals()) is not None}
        numbers = {arrivals.number for arrivals in told.values()}
        if len(told) < max(2, len(ranks)) or len(numbers) > 1 or self._number in numbers:
            return None
        self._number = numbers.pop()
        self._lateness.add(told)
        late = self._lateness.straggler()
        if late is None or self._told:
            return None
        self._told = True
        return rank_late_again(self._lateness, late, node.ranks[late].view(), told[late])

    def summary(self) -> str:
        """A line for the end of a run that had a straggler to its end; "" for none."""
        late = self._lateness.straggler() if self._told else None
        return "" if late is None else summary_line(self._lateness, late)
