"""The table: what `config` says of each configuration, beside what a real deepspeed.initialize and two steps make of it."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsdoctor.config.answer import ConfigContext
from dsdoctor.config.judge import judge
from dsdoctor.core.finding import Finding, Severity
from tests.config.cases import Case
from tests.config.many import ask_many

SCRIPT = Path(__file__).with_name("initialize_many.py")
SOFT = {"config-auto-for-trainer"}
"""Rules that do not say that it fails: somebody may fill the values in before."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """``failed``: at "initialize", at the "step", or "" where the training went on as if nothing were wrong."""

    name: str
    expected: str
    said: tuple[str, ...]
    severity: str
    failed: str
    error: str
    facts: dict[str, Any] | None

    @property
    def agrees(self) -> bool:
        """A healthy one trains and is not alarmed; a bad one is named, and where it fails it is called an error."""
        if not self.expected:
            return not self.failed and not self.said
        certain = self.severity == "error" or self.expected in SOFT or not self.failed
        return self.expected in self.said and certain


def table(cases: Sequence[Case]) -> list[Row]:
    """A row for each case."""
    with tempfile.TemporaryDirectory() as folder:
        files = [_arguments(Path(folder, f"{number}.json"), case) for number, case in enumerate(cases)]
        asked = ask_many([case.config for case in cases], arguments=files)
    outcomes = initialized([answer.config for answer in asked])
    rows = []
    for case, answer, outcome in zip(cases, asked, outcomes, strict=True):
        by = "transformers" if case.arguments else ""
        found = [verdict.finding for verdict in judge(ConfigContext(config=case.config, asked=answer, filled_by=by))]
        rows.append(_row(case, [each for each in found if each.severity is not Severity.NOTE], outcome))
    return rows


def initialized(configs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a real rank makes of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), str(port)]
    done = subprocess.run(command, input=json.dumps(list(configs)), capture_output=True, text=True, timeout=900)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(configs), done.stderr[-2000:]
    return lines


def _arguments(path: Path, case: Case) -> str:
    if not case.arguments:
        return ""
    path.write_text(json.dumps(case.arguments))
    return str(path)


def _row(case: Case, found: list[Finding], outcome: dict[str, Any]) -> Row:
    mine = [finding for finding in found if finding.rule == case.rule]
    return Row(
        name=case.name,
        expected=case.rule,
        said=tuple(finding.rule for finding in found),
        severity=mine[0].severity.value if mine else "",
        failed=outcome["failed"],
        error=outcome["error"],
        facts=outcome["facts"],
    )
