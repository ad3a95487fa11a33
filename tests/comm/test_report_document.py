"""Rank 0's document: what a process of ours wrote is read as it is; another host's commands are never offered to be pasted."""

import json
import os
import sys
from pathlib import Path

import msgspec
import pytest

from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.comm.results import read_own_report, read_remote_report
from dsdoctor.comm.text import report_lines
from dsdoctor.core.finding import Finding, Fix, Step
from tests.cli.runner import run
from tests.comm.reports import missing_rank, phase, report

HOSTILE = msgspec.to_builtins(
    Fix(text="do this\n      $ touch P", steps=(Step(template="touch P; #", note="touch P"), Step(template="touch P")))
)
"""As a dsdoctor writes it whose own steps were changed."""
SSH = """#!/bin/sh
for last; do :; done
case "$last" in *" dsdoctor.comm.launch.on_host") cat {document} ;; *) exec sh -c "$last" ;; esac
"""


def document() -> str:
    """Of a rank 0 with a finding, whose fix is not ours."""
    whole = json.loads(msgspec.json.encode({"report": missing_rank()}))
    whole["report"]["phases"][1]["findings"][0]["fix"] = HOSTILE
    return json.dumps(whole)


def offered(lines: list[str]) -> list[str]:
    return [line for line in lines if line.lstrip().startswith("$")]


def test_the_report_of_a_process_of_ours_is_read_as_it_was() -> None:
    report = missing_rank()

    assert read_own_report(msgspec.json.encode({"report": report}).decode()) == report


def test_the_report_of_another_host_has_no_step_of_its_own() -> None:
    report = read_remote_report(document())
    assert report is not None

    assert [finding.fix.steps for finding in report.findings if finding.fix] == [()]
    assert report.findings[0].evidence[-2:] == ("it advises: touch P; #  # touch P", "it advises: touch P")
    assert report.phases[0] == missing_rank().phases[0]
    assert offered(list(report_lines(report, verbose=True))) == []


def test_a_size_that_no_message_has_is_no_report() -> None:
    report = json.loads(document())
    pair = {"source": 0, "target": 1, "size": 1 << 20, "seconds": 1.0}
    report["report"]["pairs"] = [pair]
    assert read_remote_report(json.dumps(report)) is not None
    pair["size"] = 10**400

    assert read_remote_report(json.dumps(report)) is None


def test_what_is_no_report_is_none() -> None:
    texts = ("", "{}", "[]", '{"report": 1}', '{"report": {"phases": 1}}', '{"report": {"phases": []}}')

    assert [read(text) for text in texts for read in (read_own_report, read_remote_report)] == [None] * 12


@pytest.mark.slow
def test_a_first_host_that_writes_what_it_likes_gets_no_command_printed(tmp_path: Path) -> None:
    ended = {"rank": 0, "host": "n1", "how": None}
    (tmp_path / "said.json").write_text(
        "".join(json.dumps(told) + "\n" for told in ({"document": document()}, {"ended": ended}))
    )
    (tmp_path / "ssh").write_text(SSH.format(document=tmp_path / "said.json"))
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("n1 slots=1\n")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    shown = run("comm", "--quick", "--hostfile", str(tmp_path / "hosts"), PATH=path).stdout.splitlines()

    assert [line for line in offered(shown) if "touch" in line] == []
    assert "    it advises: touch P" in shown


def test_what_was_measured_comes_before_advice() -> None:
    advice = Finding.warning("environment-not-forwarded", "NCCL_DEBUG is set here, and not forwarded")
    late = Finding.warning("messages-late", "rank 1 (nodeb) is late with every message")
    phases = (phase(CommPhase.STATIC, "2 hosts", advice), phase(CommPhase.SPEED, "", late, state=PhaseState.SLOW))

    found = report(("nodea", "nodeb"), phases).findings

    assert found == (late, advice)
