"""What the supervisors of a run's nodes know of each other: each tells the one on rank 0's host now and then that it is there, and
what it saw when nothing moves. Talks and waits, judges nothing."""

import time
from collections.abc import Callable
from dataclasses import replace

from dsdoctor.hang.channel import Answer, Listener, NodeReport, send_report
from dsdoctor.hang.models import Incident, RankView
from dsdoctor.hang.run_identity import RunIdentity

LONGEST_BEAT, BEATS_LOST = 15.0, 3
"""Seconds between two words of a node while all is well, and how many may be missed."""
TOGETHER, OLD = 4.0, 30.0
"""Seconds to wait for the other nodes' reports, and after which one is of the past."""


class Nodes:
    """The other nodes of a run, as this one sees them. ``answer``: what rank 0's node told last, on any other."""

    def __init__(self, run: RunIdentity, host: str) -> None:
        self._run, self._host = run, host
        self._listener: Listener | None = None
        self._heard: dict[str, float] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._still: dict[str, float] = {}
        self._reports: dict[str, tuple[float, NodeReport]] = {}
        self._sent = 0.0
        self._lost_since: float | None = None
        self._unreachable = False
        self.answer: Answer | None = None

    def take(self, answer: Answer, seconds: float = 0.0, *, enough: int = 1 << 20) -> None:
        """On rank 0's node: take what the others have sent."""
        self._listener = self._listener or Listener(self._run)
        for report in self._listener.reports(seconds, answer, enough=enough):
            now = time.monotonic()
            self._heard[report.host], self._still[report.host] = now, report.still
            if report.ranks:
                self._ranks[report.host] = report.ranks
            if report.views:
                self._reports[report.host] = (now, report)

    def is_due(self, limit: float) -> bool:
        """Whether it is time for the next word to rank 0's node."""
        return time.monotonic() - self._sent >= beat_of(limit)

    def send(self, report: NodeReport) -> bool:
        """On any other node: tell rank 0's node something. Whether it took that."""
        self._sent = time.monotonic()
        sent = send_report(self._run, replace(report, host=self._host))
        if sent.answer is not None:
            self.answer, self._lost_since = sent.answer, None
        elif self._lost_since is None or sent.unreachable != self._unreachable:
            self._lost_since = self._sent
        self._unreachable = sent.unreachable
        return sent.answer is not None

    def joined(self, incident: Incident, limit: float, answer: Answer, *, together: float = TOGETHER) -> Incident:
        """On rank 0's node: the incident with what the others say, who notice it in the same seconds, and with those that are
        not heard any more."""
        last = time.monotonic() + together
        views = self._with_reports(incident)
        while len(views) < incident.world and time.monotonic() < last:
            self.take(answer, 1.0, enough=incident.world - len(views))
            views = self._with_reports(incident)
        seen = {view.rank for view in views}
        lost = time.monotonic() - BEATS_LOST * beat_of(limit) - together
        silent = {
            host: ranks
            for host, ranks in self._ranks.items()
            if self._heard[host] < lost and not seen.issuperset(ranks)
        }
        return replace(incident, ranks=tuple(sorted(views, key=lambda view: view.rank)), silent_hosts=silent)

    def _with_reports(self, incident: Incident) -> tuple[RankView, ...]:
        own = {view.rank for view in incident.ranks}
        fresh = [report for when, report in self._reports.values() if time.monotonic() - when < OLD]
        return (*incident.ranks, *(view for each in fresh for view in each.views if view.rank not in own))

    def is_elsewhere_alive(self, incident: Incident) -> bool:
        """On rank 0's node: whether a node is heard of that has not said yet that nothing moves there."""
        seen = {view.rank for view in incident.ranks}
        lost = incident.silent_hosts
        return any(host not in lost and not seen.issuperset(ranks) for host, ranks in self._ranks.items())

    def without_leader(self, incident: Incident, limit: float) -> Incident:
        """On any other node: the incident with rank 0's node lost, as far as that is known."""
        # once is not enough: a machine may be slow for a moment, and a watch that failed is begun anew
        enough = self._lost_since is not None and time.monotonic() - self._lost_since >= 2 * beat_of(limit)
        if self.answer is None or not enough:
            return incident
        lost = {self.answer.host: self.answer.ranks}
        return replace(incident, silent_hosts=lost) if self._unreachable else replace(incident, left_hosts=lost)

    def tell_all(self, answer: Answer, seconds: float, *, still_waiting: Callable[[], bool]) -> None:
        """On rank 0's node: have the answer heard by every node that is known, or wait so long."""
        asked = time.monotonic()
        while still_waiting() and time.monotonic() - asked < seconds:
            if all(heard > asked for heard in self._heard.values()):
                return
            self.take(answer, 0.5, enough=1)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()


def beat_of(limit: float) -> float:
    """Seconds between two words of a node, where that many without a movement are a hang.

    >>> beat_of(60.0), beat_of(4.0)
    (15.0, 1.0)
    """
    return min(LONGEST_BEAT, limit / 4)
