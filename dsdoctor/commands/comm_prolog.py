"""comm --prolog: this node is tested before a job gets it; one line, which a history keeps. And what a history says."""

import contextlib
import socket
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from dsdoctor.comm.history import NodeTest, node_fails_again, parse_history, test_of
from dsdoctor.comm.models import Mode
from dsdoctor.commands.comm import run_all
from dsdoctor.commands.comm_on_hosts import CommRequest
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.files import append_text, read_limited
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import LocalHost
from dsdoctor.core.text import encode

MOST_SECONDS = 55.0
"""The deadline: with the start of Python the line is there within a minute."""


@dataclass(frozen=True, kw_only=True)
class History:
    """What a history says of all its nodes."""

    nodes: int
    tests: int
    failed: int
    findings: tuple[Finding, ...]


def test_node(request: CommRequest, history: Path | None) -> tuple[NodeTest, str]:
    """Test this node, and add the line to the history; the test, and why the history could not be written ("" where it was)."""
    host, node = LocalHost(), socket.gethostname()
    time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    job, before = host.variable("SLURM_JOB_ID"), _failed_before(history, node)
    settings = replace(request.settings, mode=Mode.QUICK, deadline=min(request.settings.deadline, MOST_SECONDS))
    try:
        report = run_all(replace(request, settings=settings), on_phase=lambda _: None)
        test = test_of(report, node=node, time=time, job=job, failed_before=before)
    except DoctorError as error:
        said = f"· not tested: {error.message}"
        test = NodeTest(node=node, time=time, state="unknown", verdict=said, job=job, failed_before=before)
    return test, _added(test, history)


def _added(test: NodeTest, history: Path | None) -> str:
    try:
        if history is not None:
            append_text(history, line_of(test) + "\n")
    except (OSError, DoctorError) as error:
        return f"{history} was not written: {error}"
    return ""


def line_of(test: NodeTest) -> str:
    """A test as its line."""
    return encode(test).decode()


def _failed_before(history: Path | None, node: str) -> int | None:
    """How often this node failed; None where no history can be read: a node is not held up for that."""
    with contextlib.suppress(OSError):
        if history is not None:
            tests = parse_history(read_limited(history).decode(errors="replace"))
            return sum(test.failed for test in tests if test.node == node)
    return None


def judge_history(path: Path) -> History:
    """What a history says. Raises UsageError for one that cannot be read, or holds no test."""
    hint = "dsdoctor comm --prolog --history FILE on each node writes one"
    try:
        tests = parse_history(read_limited(path).decode(errors="replace"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    if not tests:
        raise UsageError(f"{path} holds no test of a node", hint=hint)
    return History(
        nodes=len({test.node for test in tests}),
        tests=len(tests),
        failed=sum(test.failed for test in tests),
        findings=tuple(node_fails_again(tests)),
    )
