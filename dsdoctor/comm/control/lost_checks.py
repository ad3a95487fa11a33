"""A rank that got no verdict -> what happened to rank 0, or to its own control process. Judges, never looks."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.mesh.connect import ConnectResult
from dsdoctor.comm.models import Rank
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding, step


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank that has no verdict: where its control process was last, how that ended, and how a connection to the master ended.
    ``cause``: the limit that ended it, where one is known to; ``perhaps``: what else may have."""

    rank: Rank
    host: str
    at: str
    seconds: float
    master: ConnectResult | None
    died: str | None
    stopped: bool = False
    log: str = ""
    cause: str = ""
    perhaps: str = ""
    tail: tuple[str, ...] = ()

    @property
    def because(self) -> str:
        """What is known of the cause, as the end of a sentence."""
        return f": {self.cause}" if self.cause else f"; {self.perhaps}" if self.perhaps else ""


def rank_zero_lost(lost: Lost) -> Iterator[Finding]:
    """A rank got no further order from rank 0.

    This rank had met rank 0, and waited for its next order.

    Why it matters: rank 0 died, its host or the link to it is down, or it hangs. How a plain connection to its port
    ends tells which, and the title says it.

    How to fix it: look at the output of rank 0 and at its host.

        $ ping -c 3 MASTER

    Since: 0.1
    """
    if lost.rank.rank == 0 or lost.died is not None or lost.stopped or lost.master is None:
        return
    ends = {
        ConnectOutcome.REFUSED: "its host answers and refuses the port: rank 0 has died",
        ConnectOutcome.TIMED_OUT: "its host does not answer: the link is cut, or the host is down",
        ConnectOutcome.NO_ROUTE: "there is no route to it any more: the link is cut, or the host is down",
        ConnectOutcome.NO_NAME: "its name is not found any more",
    }
    how = ends.get(lost.master.outcome, "its port accepts connections: rank 0 hangs or was stopped")
    yield Finding.error(
        "rank-zero-lost",
        f"rank {lost.rank.rank} ({lost.host}): no order from rank 0 ({lost.rank.master}:{lost.rank.port}) since "
        f"{lost.at!r}; {how}",
        evidence=(f"waited {lost.seconds:.0f} s in all",),
        fix="see the output of rank 0 and its host",
        steps=(step("ping -c 3 {master}", master=lost.rank.master),),
    )


def control_lost(lost: Lost) -> Iterator[Finding]:
    """The part of this rank that talks to the others ended or hung without a verdict.

    Why it matters: a library brought the process down, or waits without any limit. Training with that library would do
    the same.

    How to fix it: read its last lines: they are in the evidence, the whole log is in the folder of this rank (--out).

        $ tail -n 40 rank-00000.log

    Since: 0.1
    """
    if lost.rank.rank != 0 and lost.died is None and not lost.stopped:
        return
    still = "was stopped by a signal" if lost.stopped else f"did not come to an end in {lost.seconds:.0f} s"
    how = f"ended without a verdict ({lost.died})" if lost.died else still
    yield Finding.error(
        "control-lost",
        f"rank {lost.rank.rank} ({lost.host}) {how}, in {lost.at!r}{lost.because}",
        evidence=lost.tail,
        fix="raise that limit" if lost.cause else "see the end of its log",
        steps=(step("tail -n 40 {log}", log=lost.log),),
    )


CHECKS = (rank_zero_lost, control_lost)
