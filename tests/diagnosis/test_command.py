"""``dsdoctor diagnose`` as a user runs it: files, packed files, several ranks, standard input, exit status."""

import gzip
import json
from pathlib import Path

import pytest

from tests.cli.runner import run

HEADER = "x.h:6:10: fatal error: cusparse.h: No such file or directory\n"
ECHO = "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'\n"


@pytest.fixture
def sick(tmp_path: Path) -> str:
    path = tmp_path / "rank0.log"
    path.write_text(HEADER)
    return str(path)


def test_an_error_is_shown_with_its_fix_and_is_status_1(sick: str) -> None:
    done = run("diagnose", sick)

    assert done.returncode == 1
    assert "✗ the toolkit in CUDA_HOME has no cusparse.h  [cuda-header-missing]" in done.stdout
    assert "    line 1: x.h:6:10: fatal error: cusparse.h" in done.stdout
    assert '      $ eval "$(python -m dsdoctor env)"' in done.stdout


def test_a_healthy_log_is_status_0(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("step 1\nProcess 12 exits successfully.\n")

    done = run("diagnose", str(tmp_path / "a.log"))

    assert (done.returncode, done.stdout) == (0, f"✓ {tmp_path}/a.log (2 lines): no failure in this log\n")


def test_standard_input_is_read_where_no_file_is_named() -> None:
    assert run("diagnose", stdin=HEADER.encode()).returncode == 1
    assert run("diagnose", "-", stdin=b"step 7 loss 1.25\n").returncode == 0


def test_a_packed_log_is_unpacked(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(HEADER.encode()))

    assert "cusparse.h" in run("diagnose", str(tmp_path / "a.log.gz")).stdout


def test_a_broken_packed_log_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(HEADER.encode() * 99)[:-20])

    assert run("diagnose", str(tmp_path / "a.log.gz")).returncode == 2


def test_a_packed_log_with_other_bytes_in_it_is_a_usage_error(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(HEADER.encode() * 99 + bytes(range(256))))
    packed[12:14] = b"\xff\xff"
    (tmp_path / "a.log.gz").write_bytes(packed)

    assert run("diagnose", str(tmp_path / "a.log.gz")).returncode == 2


def test_a_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path) -> None:
    assert run("diagnose", str(tmp_path / "none.log")).returncode == 2
    assert run("diagnose", str(tmp_path)).returncode == 2


def test_the_logs_of_several_ranks_are_summed_up_and_the_same_problem_is_reported_once(
    sick: str, tmp_path: Path
) -> None:
    (tmp_path / "rank1.log").write_text(HEADER)
    (tmp_path / "rank2.log").write_text(ECHO)

    done = run("diagnose", sick, str(tmp_path / "rank1.log"), str(tmp_path / "rank2.log"))

    lines = done.stdout.splitlines()
    assert lines[1] == f"✗ {tmp_path}/rank1.log (1 lines): the toolkit in CUDA_HOME has no cusparse.h"
    assert sum("[cuda-header-missing]" in line for line in lines) == 1


def test_the_same_problem_on_another_rank_is_reported_once(tmp_path: Path) -> None:
    raised = 'Traceback (most recent call last):\n  File "/w/train.py", line 7, in <module>\n    main()\n'
    raised += '  File "/w/train.py", line 5, in main\n    raise ValueError(3)\nValueError: the data are empty\n'
    for rank in range(2):
        lines = (f"[rank{rank}]: {line}\n" for line in raised.splitlines())
        (tmp_path / f"rank{rank}.log").write_text("".join(lines))

    done = run("diagnose", "--json", str(tmp_path / "rank0.log"), str(tmp_path / "rank1.log"))

    document = json.loads(done.stdout)
    titles = [log["findings"][0]["title"] for log in document["logs"]]
    assert [title.partition(": ")[0] for title in titles] == ["rank 0", "rank 1"]
    assert [finding["title"] for finding in document["findings"]] == titles[:1]


def test_the_document_names_each_log_with_its_facts(sick: str) -> None:
    done = run("diagnose", "--json", sick)

    document = json.loads(done.stdout)
    assert (done.returncode, document["command"], document["verdict"]) == (1, "diagnose", "failed")
    assert [(log["name"], log["lines"], log["outcome"]) for log in document["logs"]] == [(sick, 1, "cause")]
    assert [log["verdict"] for log in document["logs"]] == ["failed"]
    assert document["logs"][0]["facts"]["cuda_home"] is None
    assert document["findings"][0]["rule"] == "cuda-header-missing"


def test_harmless_lines_are_shown_on_demand(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("[WARNING]  async_io requires the dev libaio .so object and headers\n")

    assert "libaio-missing" not in run("diagnose", str(tmp_path / "a.log")).stdout
    assert "libaio-missing" in run("diagnose", "-v", str(tmp_path / "a.log")).stdout


def test_commands_that_somebody_shows_are_no_failures(tmp_path: Path) -> None:
    typed = [
        'export CUDA_HOME="$(python -m dsdoctor toolkit)"',
        "grep 'CUDA out of memory' run.log",
        "dmesg | grep 'Killed process'",
    ]
    typed += [
        "export CUDA_HOME=:/usr/local/cuda",
        "echo 'nvcc fatal   : Unsupported gpu architecture'",
        "cat 'No module named torch'",
    ]
    prompts = ["$ ", "(venv) $ ", "me@node1:~/run$ ", "(base) [me@node1 run]$ ", "root@pod-7:/w# ", "C:\\w> ", "    $ "]
    page = ["# How to build", "", "```", *(f"{prompt}{line}" for prompt in prompts for line in typed), "```"]
    (tmp_path / "README.md").write_text(
        "\n".join([*page, 'CUDA_HOME="$(python -m dsdoctor toolkit)" is what the build takes.'])
    )

    done = run("diagnose", str(tmp_path / "README.md"))

    assert done.returncode == 6, done.stdout
    assert [line.split("[")[-1] for line in done.stdout.splitlines() if line[:1] in "✗!✓"] == ["log-undecided]"]


def test_a_log_that_shows_neither_a_failure_nor_health_is_status_6(tmp_path: Path) -> None:
    logs = {
        "neither": "loading\n",
        "nothing": "",
        "well": "step 1 loss 2.5\n",
        "failed": "RayTaskError(ActorDiedError)\n",
    }
    for name, text in logs.items():
        (tmp_path / name).write_text(text)

    def verdict(*names: str) -> tuple[int, str]:
        done = run("diagnose", "--json", *(str(tmp_path / name) for name in names))
        return done.returncode, json.loads(done.stdout)["verdict"]

    assert [verdict(name) for name in logs] == [(6, "undecided"), (6, "undecided"), (0, "healthy"), (1, "failed")]
    assert verdict("well", "neither") == (6, "undecided")
    assert verdict("neither", "failed", "well") == (1, "failed")
