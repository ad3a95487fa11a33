"""comm --prolog: a node is tested before a job gets it, in one line."""

import socket
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from dsdoctor.comm.command import CommRequest, run_all
from dsdoctor.comm.models import Mode, PhaseState
from dsdoctor.comm.results import Report
from dsdoctor.core.errors import DoctorError
from dsdoctor.core.finding import Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.text import encode

SCHEMA = "dsdoctor-node/1"


@dataclass(frozen=True, kw_only=True)
class NodeTest:
    """One test of one node. ``time`` is UTC, such as "2026-11-22T21:05:09Z"; ``state`` a PhaseState's value, or "unknown" where
    dsdoctor itself failed; ``files`` is the folder of what was kept."""

    schema: str = SCHEMA
    node: str
    time: str
    state: str
    verdict: str
    rules: tuple[str, ...] = ()
    seconds: float = 0.0
    job: str | None = None
    files: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the node did not pass."""
        return self.state == PhaseState.BROKEN.value


def test_of(report: Report, *, node: str, time: str, job: str | None) -> NodeTest:
    """A report of this node's ranks as one line."""
    worth = (Severity.ERROR, Severity.WARNING)
    return NodeTest(
        node=node,
        time=time,
        state=report.state.value,
        verdict=report.verdict,
        rules=tuple(dict.fromkeys(finding.rule for finding in report.findings if finding.severity in worth)),
        seconds=round(report.seconds, 1),
        job=job,
        files=report.out,
    )


MAX_SECONDS = 55.0
"""The deadline: with the start of Python the line is there within a minute."""


def test_node(request: CommRequest) -> NodeTest:
    """Test this node."""
    host, node = LocalHost(), socket.gethostname()
    time, job = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), host.variable("SLURM_JOB_ID")
    settings = replace(request.settings, mode=Mode.QUICK, deadline=min(request.settings.deadline, MAX_SECONDS))
    try:
        report = run_all(replace(request, settings=settings), on_phase=lambda _: None)
    except DoctorError as error:
        return NodeTest(node=node, time=time, state="unknown", verdict=f"· not tested: {error.message}", job=job)
    return test_of(report, node=node, time=time, job=job)


def line_of(test: NodeTest) -> str:
    """A test as its line."""
    return encode(test).decode()
