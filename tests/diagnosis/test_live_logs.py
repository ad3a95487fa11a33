"""A log that is still being written: a failure is told when the writer pauses, and at Ctrl-C what is known so far."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from dsdoctor.diagnosis.files import diagnose_live
from dsdoctor.diagnosis.models import Diagnosis, LogVerdict
from tests.cli.runner import run
from tests.diagnosis.reading import PATTERNS, diagnose

STEP = "step 1 loss 2.25\n"
FAILURE = (
    "Traceback (most recent call last):\n"
    '  File "/w/train.py", line 7, in main\n'
    "    y = row['labels']\n"
    "KeyError: 'labels'\n"
)


def nothing(_: object) -> None:
    """No log is refused."""


def live(pieces: list[bytes]) -> tuple[Diagnosis, list[Diagnosis]]:
    """A pipe into which the pieces are written, each after the one before has been judged."""
    reader, writer = os.pipe()
    told: list[Diagnosis] = []
    left = iter(pieces)

    def tell(diagnosis: Diagnosis) -> None:
        told.append(diagnosis)
        write()

    def write() -> None:
        piece = next(left, None)
        os.write(writer, piece) if piece is not None else os.close(writer)

    write()
    try:
        return diagnose_live(reader, name="-", tell=tell, check=nothing, patterns=PATTERNS), told
    finally:
        os.close(reader)


def test_a_failure_is_told_while_the_pipe_is_open_and_once() -> None:
    diagnosis, told = live([(STEP + FAILURE).encode()])

    assert [one.findings[0].rule for one in told] == ["key-missing"]
    assert (diagnosis.findings[0].rule, diagnosis.lines) == ("key-missing", 5)


def test_what_is_read_live_comes_to_the_same_as_the_whole_file() -> None:
    log = (STEP * 40 + FAILURE + "Killed\n").encode()
    diagnosis, _ = live([log])

    assert diagnosis.findings == diagnose(log.splitlines(keepends=True), name="-").findings


def test_the_file_of_a_log_is_read_to_its_end_unless_it_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(STEP + FAILURE + "no newline")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        diagnosis = diagnose_live(descriptor, name="x", tell=nothing, check=nothing, patterns=PATTERNS)
    finally:
        os.close(descriptor)

    assert (diagnosis.lines, diagnosis.verdict) == (6, LogVerdict.FAILED)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    path = tmp_path / "train.log"
    path.write_text(STEP)
    process = subprocess.Popen(
        [sys.executable, "-m", "dsdoctor", "diagnose", "--follow", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    yield path, process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_followed_file_tells_a_failure_when_it_happens_and_ctrl_c_the_verdict(
    following: tuple[Path, subprocess.Popen[str]],
) -> None:
    path, process = following
    with path.open("a") as stream:
        stream.write(FAILURE)
    told = line_of(process.stderr)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)

    assert "KeyError: 'labels'" in told
    assert "[key-missing]" in out
    assert process.returncode == 1


@pytest.mark.slow
def test_a_followed_file_that_is_truncated_is_read_from_its_start(
    following: tuple[Path, subprocess.Popen[str]],
) -> None:
    path, process = following
    with path.open("a") as stream:
        stream.write("a line that is not whole when the file is written anew")
    time.sleep(1)
    path.write_text("")
    time.sleep(1)
    path.write_text(FAILURE.partition("\n")[2].partition("\n")[2].partition("\n")[2])

    assert "KeyError: 'labels'" in line_of(process.stderr)


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


def test_one_log_is_followed_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(STEP)

    assert run("diagnose", "--follow", str(tmp_path)).returncode == 2
    assert run("diagnose", "--follow", str(tmp_path / "a.log"), str(tmp_path / "a.log")).returncode == 2


def test_what_is_no_text_is_refused_at_a_pipe_too() -> None:
    done = run("diagnose", "-", stdin=b"\x80\x02" + bytes(range(256)))

    assert (done.returncode, "is no text" in done.stderr) == (2, True)
