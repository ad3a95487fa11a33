"""The command as a user runs it: what stands on stdout, on stderr, and the exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsdoctor.cli import make_app


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DS_", "CUDA_"))}
    argv = [sys.executable, "-m", "dsdoctor", *arguments]
    return subprocess.run(argv, env={**clean, **env}, capture_output=True, text=True, timeout=120)


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter whose environment holds no torch."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_help_teaches() -> None:
    shown = run("build-wheel", "--help").stdout

    assert "Build a DeepSpeed wheel that fits this environment" in shown
    assert "--arch" in shown


def test_looking_works_without_torch(bare: str) -> None:
    done = run("look", "--python", bare, "--json")

    document = json.loads(done.stdout)
    assert (done.returncode, document["command"], document["machine"]["torch"]) == (0, "look", None)
    assert document["machine"]["system"]["cpus"] >= 1


def test_looking_shows_lines(bare: str) -> None:
    done = run("look", "--python", bare)

    assert done.returncode == 0
    assert "no torch" in done.stdout.splitlines()
    assert "\x1b" not in done.stdout


def test_no_torch_is_an_impossible_plan_with_the_next_command(bare: str, tmp_path: Path) -> None:
    done = run("build-wheel", "--python", bare, DSDOCTOR_CACHE=str(tmp_path / "cache"))

    assert (done.returncode, done.stdout) == (3, "")
    assert "✗ there is no torch in the environment of" in done.stderr
    assert "pip install torch" in done.stderr


def test_an_error_is_one_json_document_too(bare: str, tmp_path: Path) -> None:
    done = run("build-wheel", "--python", bare, "--json", DSDOCTOR_CACHE=str(tmp_path / "cache"))

    document = json.loads(done.stdout)
    assert done.returncode == 3
    assert (document["schema"], document["command"], document["wheel"]) == ("dsdoctor/1", "build-wheel", None)
    assert document["findings"][0]["severity"] == "error"
    assert document["findings"][0]["fix"]["text"].endswith("-m pip install torch")


@pytest.mark.parametrize(
    "arguments",
    [
        ("build-wheel", "--ops", "a", "--for", "x.json"),
        ("build-wheel", "--accelerator", "tpu"),
        ("build-wheel", "--jobs", "0"),
        ("build-wheel", "--ops", ","),
        ("plan", "--no-such-option"),
        ("no-such-command",),
    ],
)
def test_nonsense_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(make_app(), arguments).exit_code == 2


def test_nonsense_is_one_json_document_too() -> None:
    done = run("build-wheel", "--ops", "a", "--for", "x.json", "--json")

    assert (done.returncode, json.loads(done.stdout)["findings"][0]["rule"]) == (2, "usage")


def test_a_toolkit_that_cannot_be_had_leaves_stdout_empty(bare: str, tmp_path: Path) -> None:
    done = run("toolkit", "--python", bare, "--toolkit", "~nosuch/x", DSDOCTOR_CACHE=str(tmp_path))

    assert (done.returncode, done.stdout) == (3, "")


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    done = run("plan", "--python", "/no/such/python", DSDOCTOR_CACHE=str(tmp_path))

    assert done.returncode == 3
    assert "/no/such/python" in done.stderr or "No such file" in done.stderr


def test_ctrl_c_is_one_line_and_status_130(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nsleep 60\n")
    slow.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "dsdoctor", "look", "--python", str(slow)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(100):
        if (tmp_path / "started").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (130, "")
    assert err.startswith("✗ interrupted")
    assert "Traceback" not in err
