"""Tests of nodes before jobs: one line each, a file that keeps them, and the nodes that failed again."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dsdoctor.comm.prolog import NodeTest, line_of, node_fails_again, parse_history
from tests.cli.runner import run as run_inside
from tests.comm.test_command import AROUND

CHANCE = random.Random(6)


def told(node: str, state: str = "ok", day: int = 1) -> NodeTest:
    return NodeTest(node=node, time=f"2026-11-{day:02d}T00:00:00Z", state=state, verdict=f"{state} {day}")


def written(tests: list[NodeTest], folder: Path, *others: str) -> str:
    path = folder / "history.jsonl"
    path.write_text("".join(f"{line}\n" for line in (*map(line_of, tests), *others)))
    return str(path)


@pytest.mark.parametrize("failures", [0, 1, 2, 3])
def test_a_node_that_failed_twice_is_named_and_one_that_failed_once_is_not(failures: int) -> None:
    tests = [told(f"gpu{number:02d}", CHANCE.choice(["ok", "slow", "unknown"])) for number in range(50)]
    tests += [told("gpu07", "broken", 1), *(told("gpu31", "broken", 2 + number) for number in range(failures))]
    CHANCE.shuffle(tests)

    found = list(node_fails_again(tests))

    assert [finding.title for finding in found] == (
        ["gpu31: failed 2 times or more before jobs"] if failures > 1 else []
    )


def test_a_history_with_lines_that_are_none_is_read(tmp_path: Path) -> None:
    tests = [told("a"), told("b", "broken"), told("b", "broken", 2)]
    whole = written(
        tests,
        tmp_path,
        '{"node": "c", "ti',
        "",
        '{"schema":"other/1","node":"c","time":"","state":"broken","verdict":""}',
    )

    assert parse_history(Path(whole).read_text()) == tuple(tests)
    done = run_inside("comm", "--history", whole)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        6,
        "! b: failed 2 times or more before jobs  [node-fails-again]",
    )
    assert "sbatch --exclude b" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--history", "/no/history"], "cannot be read"),
        (["--history", "/dev/null"], "/dev/null"),
        (["--prolog", "--hostfile", "hosts"], "--prolog tests this node by itself within a minute, and --hostfile"),
        (["--prolog", "--full"], "and --full was given"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], said: str) -> None:
    done = run_inside("comm", *arguments)

    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


@pytest.mark.launch
def test_a_node_is_tested_in_one_line_and_its_failures_are_counted(tmp_path: Path) -> None:
    broken, history = tmp_path / "broken/torch", tmp_path / "history.jsonl"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    argv = [sys.executable, "-m", "dsdoctor", "comm", "--prolog", "--history", str(history)]

    lines = []
    for more in ({"PYTHONPATH": str(broken.parent)}, {}):
        done = subprocess.run(
            argv, env={**AROUND, "SLURM_JOB_ID": "7", **more}, capture_output=True, text=True, timeout=70
        )
        (line,) = map(json.loads, done.stdout.splitlines())
        lines.append((done.returncode, line["state"], line["failed_before"], line["job"]))

    assert lines == [(1, "broken", None, "7"), (0, "ok", 1, "7")]
    assert [line.state for line in parse_history(history.read_text())] == ["broken", "ok"]
