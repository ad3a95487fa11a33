"""What is printed of findings: in full once, one line later, one line for what is normal."""

import gc
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.watch.findings import Announcer
from dsdoctor.overflow.watch.tracer import Tracer
from tests.overflow.engine import Engine
from tests.overflow.written import frame, good, rank_report, tensor

ERROR = Finding(
    rule="overflow-in-module",
    severity=Severity.ERROR,
    title="b made an inf",
    evidence=("step 7",),
    affects=("b",),
    fix=Fix(text="Run it in float32."),
)
NOTE = Finding(rule="gradient-above-scale", severity=Severity.NOTE, title="step 1 skipped")
BAD = rank_report(0, good(0, "a"), frame(1, "b", tensor("output", posinf=1)))
HEAD = "dsdoctor: ✗ b made an inf  [overflow-in-module]"


def test_an_error_is_told_in_full_with_the_frames_that_led_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    Announcer().announce((ERROR,), [BAD])
    lines = capsys.readouterr().err.splitlines()

    assert lines[:5] == [
        HEAD,
        "      step 7",
        "      Fix: Run it in float32.",
        "Last 2 frames:",
        "abs min  abs max  metadata",
    ]
    assert lines[-1] == "5.00e-01      inf output"


def test_what_comes_again_is_one_line_and_ever_rarer(capsys: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer()
    announcer.announce((ERROR,), [BAD])
    capsys.readouterr()
    for _ in range(7):
        announcer.announce((ERROR,), [BAD])

    assert capsys.readouterr().err.splitlines() == [f"{HEAD}  ({times} time)" for times in ("2nd", "4th", "8th")]


def test_a_normal_overflow_is_one_quiet_line(capsys: pytest.CaptureFixture[str]) -> None:
    Announcer().announce((NOTE,), [BAD])

    assert capsys.readouterr().err == "dsdoctor: · step 1 skipped  [gradient-above-scale]\n"


def test_the_report_file_gets_each_finding_as_a_json_line(tmp_path: Path) -> None:
    announcer = Announcer(report_file=str(tmp_path / "report.jsonl"))
    announcer.announce((ERROR,), [BAD])
    announcer.announce((NOTE,), [BAD])

    assert [line[:52] for line in (tmp_path / "report.jsonl").read_text().splitlines()] == [
        '{"schema": "dsdoctor/1", "command": "run", "step": 7'
    ] * 2


def test_a_report_file_that_cannot_be_written_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer(report_file=str(tmp_path / "none" / "report.jsonl"))
    announcer.announce((NOTE,), [BAD])
    announcer.announce((NOTE,), [BAD])

    assert capsys.readouterr().err.count("cannot be written (No such file or directory)") == 1


def test_what_did_no_harm_is_noted_once_and_told_in_full_when_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    announcer = Announcer()
    harmless = Finding(rule=ERROR.rule, severity=Severity.NOTE, title="b made an inf; no harm", affects=("b",))
    for _ in range(5):
        announcer.announce((harmless,), [BAD], notes_once=True)
    assert capsys.readouterr().err.splitlines() == ["dsdoctor: · b made an inf; no harm  [overflow-in-module]"]

    announcer.announce((ERROR,), [BAD])

    assert capsys.readouterr().err.splitlines()[:3] == [HEAD, "      step 7", "      Fix: Run it in float32."]


def test_a_forked_process_that_lets_go_of_an_engine_writes_nothing_into_its_parents_trace(tmp_path: Path) -> None:
    """As the worker of a data loader does at its end, which was forked while a step was open."""
    settled: list[int] = []
    record = SimpleNamespace(
        calls=(),
        frames=lambda: (good(0, "a"),),
        position=SimpleNamespace(step=3),
        readings=SimpleNamespace(peek=lambda: None),
        settle=lambda: settled.append(os.getpid()),
    )
    tracer = Tracer(Engine(torch.nn.Linear(1, 1)), Options(level="trace", trace_dir=str(tmp_path)))
    tracer.forward(record)  # type: ignore[arg-type]
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: a process with threads forks
        child = os.fork()
    if child == 0:
        try:
            tracer.forward(record)  # type: ignore[arg-type]
            tracer.step_ends(True, [], 1, None)
            del tracer
            gc.collect()
        finally:
            os._exit(len(settled))
    status = os.waitpid(child, 0)[1]

    assert status == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == written
    tracer.step_ends(False, [], 1, None)
    tracer.close()
    assert settled == [os.getpid()]
    grown = {path.name for path in tmp_path.iterdir() if path.read_bytes() != written[path.name]}
    assert {Path(name).suffix for name in grown} == {".jsonl", ".txt"}
