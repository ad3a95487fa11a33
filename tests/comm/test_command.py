"""The command by itself: real ranks on this machine, its document, its files, its end; and what it refuses."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.cli.comm import STATUS
from dsdoctor.comm.command import read_result, report_of
from dsdoctor.comm.launch.start import check_room, max_ranks
from dsdoctor.comm.models import CommSettings
from dsdoctor.comm.results import Report
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.ui.screen import document
from tests.cli.runner import run as run_inside
from tests.comm.left_over import acts, hears, left_over
from tests.comm.reports import healthy_4, missing_rank, slow_node
from tests.comm.rig import wait_until

COMM = (sys.executable, "-m", "dsdoctor", "comm")
CLEAN = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
AROUND = {**CLEAN, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMM, *arguments], env={**AROUND, **env}, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("arguments", "env", "said"),
    [
        (["--quick", "--full"], {}, "--quick and --full cannot be given together"),
        (["--backend", "smoke"], {}, "no backend 'smoke' here"),
        (["--deadline", "nan"], {}, "not a number of seconds"),
        (["--deadline", "1"], {}, "too short"),
        (["--html", "/nowhere/page.html"], {}, "cannot be written"),
        (["--out", "/dev/null/out"], {}, "/dev/null is no folder"),
        (["--nproc", "2"], {"RANK": "0", "WORLD_SIZE": "2"}, "--nproc starts ranks, and this is rank 0 already"),
        (["--quick"], {"RANK": "5", "WORLD_SIZE": "2"}, "RANK"),
        (["--quick"], {"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE"),
        (["--nproc", "1000001"], {}, "1000000"),
        (["--read", "nowhere.json"], {}, "nowhere.json"),
        (["--static"], {}, "--static looks at the hosts of a hostfile"),
        (["--hostfile", "/no/hosts"], {}, "--hostfile is /no/hosts, which cannot be read"),
        (["--quick"], {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "unset RANK WORLD_SIZE LOCAL_RANK"),
    ],
)
def test_what_makes_no_sense_is_refused_with_status_2(arguments: list[str], env: dict[str, str], said: str) -> None:
    around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", **env}
    done = run_inside("comm", *arguments, **around)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Fix:" in done.stderr


def test_a_rank_0_that_is_too_slow_for_its_deadline_is_no_defect() -> None:
    with pytest.raises(ImpossiblePlan, match="had not ended") as slow:
        report_of(None, (), CommSettings(deadline=40.0))

    assert "longer --deadline" in slow.value.hint


def test_more_ranks_than_the_machine_can_bear_are_refused_with_both_numbers() -> None:
    done = run_inside("comm", "--nproc", "1000000")

    assert (done.returncode, done.stdout) == (3, "")
    assert re.search(
        r"1,000,000 ranks were requested, but this machine supports [\d,]+ at most: .*[\d,]+ ", done.stderr
    )
    most = max_ranks(LocalHost())[0]
    assert 0 < most < 1_000_000
    check_room(most // 2, LocalHost())


def test_a_verdict_stands_in_torchruns_error_file(tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    (tmp_path / "comm.json").write_text(document("comm", missing_rank().findings, report=missing_rank()))
    file = tmp_path / "error.json"
    done = run_inside("comm", "--read", str(tmp_path / "comm.json"), TORCHELASTIC_ERROR_FILE=str(file))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))

    assert done.returncode == 1
    assert failure.message["message"] == missing_rank().verdict
    assert failure.message["extraInfo"]["py_callstack"].startswith(missing_rank().verdict)
    assert 0 < failure.timestamp <= time.time()


def test_what_a_machine_can_bear_follows_from_its_memory_and_its_tasks(disk: Callable[..., Host]) -> None:
    roomy = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 30720000 kB\nSwapFree: 0 kB\n",
        "/proc/loadavg": "0 0 0 1/500 7\n",
    }
    tasks = {"/proc/sys/kernel/pid_max": "32768\n", "/proc/sys/kernel/threads-max": "1000\n"}

    assert max_ranks(disk(roomy)) == (200, "30,000 MiB of memory are free, and a rank takes 150 MiB")
    most, because = max_ranks(disk({**roomy, **tasks}))
    assert (most, because.partition(" (")[0]) == (62, "500 more processes and threads may be started")


def test_ranks_on_more_hosts_than_one_head_carries_are_left_to_the_scheduler(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"gpu{number:04d} slots=8\n" for number in range(1001)))

    done = run_inside("comm", "--hostfile", str(tmp_path / "hosts"), TMPDIR=str(tmp_path))

    assert (done.returncode, "1001 hosts in" in done.stderr, "none was asked" in done.stderr) == (1, True, True)
    assert done.stdout.splitlines()[0].endswith("the limit over ssh is 1,000  [too-many-hosts]")


@pytest.mark.launch
def test_this_machine_is_tested_with_a_document_and_files(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    done = run(
        *("--nproc", "2", "--json", "--out", str(tmp_path / "out")),
        env={"HOME": str(tmp_path / "home"), "NCCL_SECRET_TOKEN": "hunter2", "DS_ACCELERATOR": "cpu"},
    )
    document: dict[str, Any] = json.loads(done.stdout)
    report = document["report"]

    assert done.returncode in {0, 6}, done.stdout + done.stderr
    assert (document["schema"], document["command"]) == ("dsdoctor/1", "comm")
    assert [phase["phase"] for phase in report["phases"]] == [
        *("rendezvous", "local", "same everywhere", "tcp mesh", "collectives", "speed", "deepspeed")
    ]
    assert {phase["state"] for phase in report["phases"][:5]} == {"ok"}
    assert report["exchanges"] > 100
    assert {speed["op"] for speed in report["speeds"]} == {"all_reduce", "all_gather", "reduce_scatter"}
    assert [json.loads((tmp_path / f"out/rank-0000{rank}.json").read_text())["claim"]["rank"] for rank in (0, 1)] == [
        0,
        1,
    ]
    assert not any("hunter2" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "out").glob("*.log"))


@pytest.mark.launch
@pytest.mark.parametrize(("after", "number"), [(0.5, signal.SIGINT), (3.0, signal.SIGINT), (3.0, signal.SIGTERM)])
def test_a_signal_leaves_no_process_and_no_folder(tmp_path: Path, after: float, number: signal.Signals) -> None:
    marker = f"DSDOCTOR_TEST_MARK={os.getpid()}-{after}-{number}"
    name, _, value = marker.partition("=")
    env = {**AROUND, name: value, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        [*COMM, "--full", "--nproc", "2"], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    # Python itself has a handler of SIGINT, and none of SIGTERM
    wait_until(lambda: hears(process.pid, signal.SIGTERM), 100, "no handler of SIGTERM")
    time.sleep(after)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)

    assert process.returncode == 128 + number
    assert "interrupted" in said.decode()
    deadline = time.monotonic() + 60
    while left_over(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_over(marker) == []
    assert list(tmp_path.glob("dsdoctor-comm-*")) == []


@pytest.mark.launch
@pytest.mark.parametrize(("rank", "documents"), [("0", 1), ("1", 0)])
def test_of_ranks_that_a_signal_ends_only_rank_0_writes_a_document(rank: str, documents: int) -> None:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29543"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dsdoctor.comm", "--quick", "--backend", "gloo", "--json"],
        env={**AROUND, **who},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: acts(process.pid), 100, "torch is not loaded")
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=120)

    assert process.returncode == 143
    assert f"rank {rank} was ended by a signal" in said.decode()
    assert len(out.decode().splitlines()) == documents


@pytest.mark.launch
def test_a_rank_whose_torch_is_broken_is_named_long_before_the_deadline(tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    raise ImportError('libcudart.so.12')\n"
                                        "import sys, importlib\nsys.path.remove(os.environ['BROKEN'])\ndel sys.modules['torch']\n"
                                        "importlib.import_module('torch')\n")  # fmt: skip
    began = time.monotonic()
    done = run(
        "--quick", "--nproc", "2", "--deadline", "60", env={"PYTHONPATH": str(tmp_path), "BROKEN": str(tmp_path)}
    )

    assert done.returncode == 1
    assert "rank 1" in done.stdout
    assert "libcudart.so.12" in done.stdout
    assert time.monotonic() - began < 50


@pytest.mark.parametrize("made", [healthy_4, slow_node, missing_rank], ids=lambda made: made.__name__)
def test_a_result_that_a_scheduler_wrote_is_told_as_if_it_were_made_here(
    made: Callable[[], Report], tmp_path: Path
) -> None:
    report = made()
    whole = document("comm", report.findings, report=report)
    (tmp_path / "comm.json").write_text(f'srun: job 7 queued\n0: {whole}\n{{"schema": 1}}\nsrun: error: gpu7\n')

    done = run_inside("comm", "--read", str(tmp_path / "comm.json"))

    assert done.returncode == STATUS[report.state], done.stderr
    assert report.verdict in done.stdout


def test_a_document_that_was_made_readable_is_read_alone_and_among_other_lines(tmp_path: Path) -> None:
    report = healthy_4()
    plain = json.loads(document("comm", report.findings, report=report))
    written = tmp_path / "comm.json"
    wrong = []
    for indent, end in itertools.product((None, 0, 2, "\t"), ("\n", "\r\n")):
        text = json.dumps(plain, indent=indent, sort_keys=indent == 2).replace("\n", end)
        for said in (text, f"\ufeff{text}{end}", f"srun: queued {{1}}{end}{text}{end}srun: done{end}"):
            written.write_text(said, newline="")
            if read_result(str(written)) != report:
                wrong.append((indent, end, said[:20]))

    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        'no brace, "schema"',
        '{"schema":"dsdoctor/1","report":{}}',
        '{"schema":' * 9999,
        '0: {"schema":"dsdoctor/1"}',
    ],
)
def test_a_file_without_a_report_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "comm.json").write_text(text)

    done = run_inside("comm", "--read", str(tmp_path / "comm.json"))

    assert (done.returncode, "is not a report" in done.stderr) == (2, True)


@pytest.mark.parametrize("world", [0, -1, 1 << 31])
def test_a_report_of_a_world_that_nobody_has_is_none(world: int, tmp_path: Path) -> None:
    """Its ranks would be counted one by one."""
    written = tmp_path / "comm.json"
    report = healthy_4()
    whole = document("comm", report.findings, report=report)
    written.write_text(whole)
    assert read_result(str(written)) == report
    plain = json.loads(whole)
    plain["report"]["world"] = world
    written.write_text(json.dumps(plain))

    with pytest.raises(UsageError, match="is not a report"):
        read_result(str(written))


@pytest.mark.parametrize(
    ("field", "value"), [("source", -(10**30)), ("target", 10**7), ("bandwidth", -1.0), ("bandwidth", 1e300)]
)
def test_a_report_with_what_no_test_finds_is_refused(field: str, value: float, tmp_path: Path) -> None:
    written = json.loads(document("comm", (), report=healthy_4()))
    written["report"]["reaches"][0][field] = value
    (tmp_path / "comm.json").write_text(json.dumps(written))

    assert run_inside("comm", "--read", str(tmp_path / "comm.json")).returncode == 2
