"""A node is tested before a job gets it: one line, and a history of the nodes that failed."""

import contextlib
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from dsdoctor.comm.command import CommRequest, run_all
from dsdoctor.comm.models import Mode, PhaseState
from dsdoctor.comm.results import Report
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.files import append_text, read_limited
from dsdoctor.core.finding import Finding, Severity, instead, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.text import and_more_lines, encode
from dsdoctor.ranks.nodelist import fold, in_words
from dsdoctor.ui.screen import first_step, next_line, screen_lines

# A file with a line for each test of a node before a job -> the nodes that failed again and again. Judges lines only.


SCHEMA = "dsdoctor-node/1"
TWICE = 2
MOST = 12


@dataclass(frozen=True, kw_only=True)
class NodeTest:
    """One test of one node. ``time`` is UTC, such as "2026-11-22T21:05:09Z"; ``state`` a PhaseState's value, or "unknown" where
    dsdoctor itself failed; ``failed_before`` counts its earlier failures in the history, None where there is none;
    ``files`` is the folder of what was kept."""

    schema: str = SCHEMA
    node: str
    time: str
    state: str
    verdict: str
    rules: tuple[str, ...] = ()
    seconds: float = 0.0
    job: str | None = None
    failed_before: int | None = None
    files: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the node did not pass."""
        return self.state == PhaseState.BROKEN.value


def test_of(report: Report, *, node: str, time: str, job: str | None, failed_before: int | None) -> NodeTest:
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
        failed_before=failed_before,
        files=report.out,
    )


def parse_history(text: str) -> tuple[NodeTest, ...]:
    """The tests of a history; a line that is none, such as one that was cut off, is passed over."""
    found = []
    for line in text.splitlines():
        try:
            test = msgspec.json.decode(line, type=NodeTest)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            continue
        if test.schema == SCHEMA:
            found.append(test)
    return tuple(found)


def node_fails_again(tests: Sequence[NodeTest]) -> Iterator[Finding]:
    """A node failed its test before a job twice or more, by the history that --prolog writes.

    Why it matters: a node that comes back from a restart and fails again has something that a restart does not mend,
    and each job that gets it is lost.

    How to fix it: keep it out of jobs until it was repaired, and give the history to whoever repairs it.

        $ scontrol update nodename=NODE state=drain reason=dsdoctor
        $ sbatch --exclude NODE ...

    Since: 0.1
    """
    failed: dict[str, list[NodeTest]] = defaultdict(list)
    for test in tests:
        if test.failed:
            failed[test.node].append(test)
    again = {node: those for node, those in failed.items() if len(those) >= TWICE}
    if not again:
        return
    worst = sorted(again, key=lambda node: (-len(again[node]), node))
    lines = [
        f"{node}: {len(again[node])} times, last {again[node][-1].time}: {again[node][-1].verdict}" for node in worst
    ]
    yield Finding.warning(
        "node-fails-again",
        f"{in_words(sorted(again))}: failed {TWICE} times or more before jobs",
        evidence=tuple(and_more_lines(lines, MOST, of="nodes")),
        fix="keep them out of jobs until they were repaired",
        steps=(
            step("scontrol update nodename={nodes} state=drain reason=dsdoctor", nodes=fold(sorted(again))),
            instead("sbatch --exclude {nodes} ...", nodes=fold(sorted(again))),
            instead("deepspeed --exclude {nodes} ...", nodes="@".join(worst[:MOST])),
        ),
    )


CHECKS = (node_fails_again,)


# comm --prolog: this node is tested before a job gets it; one line, which a history keeps. And what a history says.


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


# A history of nodes -> lines for a terminal: the nodes that failed again, or that none did.


def history_lines(history: History) -> Iterator[str]:
    """The verdict, with what to do."""
    counted = f"{history.nodes:,} node{'s' * (history.nodes != 1)} in {history.tests:,} tests, of which {history.failed:,} failed"
    if not history.findings:
        yield f"✓ no node failed twice ({counted})"
        return
    yield from screen_lines(history.findings)
    yield f"  {counted}"
    if command := first_step(history.findings):
        yield next_line(command)
