"""A folder of logs is one job: each log is read, those that say nothing are spoken for by the others."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.diagnosis.files import logs_in
from tests.cli.runner import run

FRAME = ["Traceback (most recent call last):", '  File "/w/train.py", line 7, in main', "    y = row['labels']"]
FAILED = "\n".join([*FRAME, "KeyError: 'labels'"])
LOST = "\n".join([*FRAME, "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1883"])


def log_dir(folder: Path, **errors: str) -> Path:
    """What torchrun's --log-dir holds after an attempt of six ranks."""
    for rank in range(6):
        place = folder / "run_1" / "attempt_0" / str(rank)
        place.mkdir(parents=True)
        (place / "stdout.log").write_text("hello\n")
        (place / "stderr.log").write_text(errors.get(f"rank{rank}", LOST))
        (place / "error.json").write_text("{}")
    return folder


def document(*arguments: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(run("diagnose", "--json", *arguments).stdout)
    return loaded


def test_of_a_job_the_rank_that_failed_by_itself_is_the_cause(tmp_path: Path) -> None:
    told = document(str(log_dir(tmp_path, rank3=FAILED)))

    errors = [finding for finding in told["findings"] if finding["severity"] == "error"]
    assert [finding["rule"] for finding in errors] == ["key-missing"]
    assert [log["name"] for log in told["logs"] if log["findings"][0]["rule"] == "key-missing"] == [
        str(tmp_path / "run_1/attempt_0/3/stderr.log")
    ]
    assert (len(told["logs"]), told["verdict"]) == (12, "failed")


def test_logs_that_come_to_the_same_share_a_line(tmp_path: Path) -> None:
    lines = run("diagnose", str(log_dir(tmp_path, rank3=FAILED))).stdout.splitlines()

    assert [line for line in lines if line.startswith("· 5 logs")] == [
        line for line in lines if "only consequences of a failure in another log" in line
    ]
    assert lines[-1].startswith("  next: ")
    assert len(lines) < 16


@pytest.mark.parametrize(
    ("spoken", "verdict", "status"),
    [
        ("train_runtime = 12.1\n", "healthy", 0),
        ("hello\n", "undecided", 6),
        ("FAILED: x.cuda.o\n", "failed", 1),
    ],
)
def test_a_log_that_says_nothing_is_spoken_for_by_the_others(
    spoken: str, verdict: str, status: int, tmp_path: Path
) -> None:
    (tmp_path / "slurm-7_0.out").write_text(spoken)
    (tmp_path / "slurm-7_1.out").write_text("hello\n")
    done = run("diagnose", "--json", str(tmp_path))

    assert (json.loads(done.stdout)["verdict"], done.returncode) == (verdict, status)


def test_files_that_are_named_have_to_show_each_that_they_are_well(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("train_runtime = 12.1\n")
    (tmp_path / "b.log").write_text("hello\n")

    assert document(str(tmp_path / "a.log"), str(tmp_path / "b.log"))["verdict"] == "undecided"


def test_only_logs_are_taken_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("rank10.log", "rank2.log", "requirements.txt", "weights.bin", ".hidden.log", "stderr", "old.out.1"):
        (tmp_path / name).write_text("x\n")
    (tmp_path / "empty.log").touch()
    (tmp_path / "a.out").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(200))
    (tmp_path / "pod.log.gz").write_bytes(gzip.compress(b"x\n"))
    (tmp_path / "link.log").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.log")

    assert [Path(name).name for name in logs_in(tmp_path)] == [
        "old.out.1",
        "pod.log.gz",
        "rank2.log",
        "rank10.log",
        "stderr",
    ]


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no logs"):
        logs_in(tmp_path)
    assert run("diagnose", str(tmp_path)).returncode == 2
