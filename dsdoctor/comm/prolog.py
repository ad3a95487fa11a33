"""A file with a line for each test of a node before a job -> the nodes that failed again and again. Judges lines only."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.results import Report
from dsdoctor.core.finding import Finding, Severity, instead, step
from dsdoctor.core.text import and_more_lines
from dsdoctor.ranks.nodelist import fold, in_words

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
