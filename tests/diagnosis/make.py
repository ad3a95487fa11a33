"""Make the logs of `real/`: `python tests/diagnosis/make.py [NAME ...]` runs `real_cases/` with the installed DeepSpeed.

The CPU and gloo are enough; root is needed for the cases with a small tmpfs. What a run prints is kept as it is, but for the
places of this machine (`neutral`). Only `srun` is imitated: its label (`0: `) and its last lines are written by `as_srun`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from real_cases.case import BEGINNING, Case  # noqa: E402
from real_cases.checkpoint import CHECKPOINT  # noqa: E402
from real_cases.configuration import CONFIGURATION  # noqa: E402
from real_cases.engine import ENGINE  # noqa: E402
from real_cases.healthy import HEALTHY  # noqa: E402
from real_cases.ranks import RANKS  # noqa: E402
from real_cases.surroundings import SURROUNDINGS  # noqa: E402

CASES = CONFIGURATION + ENGINE + CHECKPOINT + RANKS + SURROUNDINGS + HEALTHY
PYTHON = sys.executable
TORCHRUN = ("-m", "torch.distributed.run")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def command(case: Case, folder: Path) -> list[str]:
    """What starts the case; `plain` and `srun` need no launcher."""
    script = [*case.launcher_arguments, "train.py", *case.arguments]
    torchrun = [PYTHON, *TORCHRUN, "--nproc-per-node", str(case.ranks), "--master-port", str(free_port())]
    accelerate = [
        *(PYTHON, "-m", "accelerate.commands.launch", "--num_machines", "1", "--num_processes", str(case.ranks)),
        *("--mixed_precision", "bf16", "--dynamo_backend", "no"),
    ]
    ways = {
        "plain": [PYTHON, *script],
        "torchrun": [*torchrun, *script],
        "tee": [*torchrun, "--tee", "3", "--log-dir", str(folder / "logs"), *script],
        "log-dir": [*torchrun, "--redirects", "3", "--log-dir", str(folder / "logs"), *script],
        "deepspeed": [
            *(PYTHON, "-m", "deepspeed.launcher.runner", "--num_gpus", str(case.ranks)),
            *("--master_port", str(free_port()), *script),
        ],
        "accelerate": [
            *accelerate,
            "--use_deepspeed",
            "--zero_stage",
            "2",
            "--main_process_port",
            str(free_port()),
            *script,
        ],
        "accelerate-cpu": [*accelerate, "--cpu", *script],
    }
    return ways[case.launch]


def surroundings(case: Case, folder: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TORCH_EXTENSIONS_DIR") if name in os.environ}
    mine = {
        "PYTHON": PYTHON,
        "DS_ACCELERATOR": "cpu",
        "TMPDIR": str(folder / "tmp"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**kept, **mine, **case.environment}


def run(
    arguments: list[str], environment: dict[str, str], folder: Path, limit: int, prepare: str = ""
) -> tuple[str, int]:
    """Output and status; a run past its limit is interrupted as its user would do it."""
    if prepare:
        arguments = ["unshare", "-m", "bash", "-c", f"{prepare}\nexec {shlex.join(arguments)}"]
    process = subprocess.Popen(
        arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    watch = threading.Timer(limit, os.killpg, (process.pid, signal.SIGINT))
    strict = threading.Timer(limit + 40, os.killpg, (process.pid, signal.SIGKILL))
    watch.start(), strict.start()
    assert process.stdout is not None
    text = process.stdout.read().decode(errors="replace")
    status = process.wait()
    watch.cancel(), strict.cancel()
    return text, status


def as_srun(case: Case, folder: Path) -> tuple[str, int]:
    """One process a rank, each line with its rank in front as `srun --label` puts it; the first that fails ends the others."""
    base = surroundings(case, folder) | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(case.ranks),
    }
    started = [
        subprocess.Popen(
            [PYTHON, "train.py", *case.arguments],
            cwd=folder,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank), "SLURM_PROCID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(case.ranks)
    ]
    lines: list[str] = []

    def follow(rank: int) -> None:
        pipe = started[rank].stdout
        assert pipe is not None
        lines.extend(f"{rank}: {line.decode(errors='replace')}" for line in pipe)

    readers = [threading.Thread(target=follow, args=(rank,)) for rank in range(case.ranks)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(case.limit)
    for process in started:
        process.kill()
    endings = [process.wait() for process in started]
    for rank, status in enumerate(endings):
        if status > 0:
            lines.append(f"srun: error: node1: task {rank}: Exited with exit code {status}\n")
        elif status < 0:
            lines.append(f"srun: error: node1: task {rank}: {signal.strsignal(-status)}\n")
    return "".join(lines), max(abs(status) for status in endings)


def neutral(text: str, folder: Path) -> str:
    """The log without the places of this machine, and without what its editable installation makes setuptools warn of."""
    text, taken = re.subn(r"(?m)^.*_distutils_hack/__init__\.py:\d+: UserWarning: .*\n", "", text)
    text = re.sub(r"(?m)^(\[default\d+\]:|\d+: )?  warnings\.warn\(\n", "", text, count=taken) if taken else text
    packages = re.escape(str(Path(PYTHON).parent.parent))
    text = re.sub(
        rf"({packages}|/opt/venv)/lib/python3\.\d+/site-packages", "/opt/conda/lib/python3.11/site-packages", text
    )
    text = re.sub(rf"({packages}|/opt/venv)/bin", "/opt/conda/bin", text)
    text = text.replace(sysconfig.get_path("stdlib"), "/opt/conda/lib/python3.11")
    text = text.replace(str(folder), "/workspace")
    text = re.sub(r"/(tmp|root/\.cache)/[A-Za-z0-9_.-]+", "/workspace/tmp", text)
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b(?=[:\s\]'\",.]|$)", "node1", text)


def with_rank_logs(text: str, folder: Path) -> str:
    """What `tail -n +1` shows of the files that torchrun's --log-dir wrote, behind torchrun's own output."""
    files = sorted((folder / "logs").rglob("*.log"))
    return text + "".join(
        f"==> {file} <==\n{file.read_text(errors='replace')}\n" for file in files if file.stat().st_size
    )


def log_name(case: Case) -> str:
    return f"{case.category}-{case.name}.log"


def make(case: Case) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="run-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        (folder / "train.py").write_text(case.code if case.whole else BEGINNING + case.code)
        if case.launch == "srun":
            how = (
                f"srun --label -n {case.ranks} python train.py (one process a rank; the labels are written by make.py)"
            )
            text, status = as_srun(case, folder)
        else:
            arguments = command(case, folder)
            text, status = run(arguments, surroundings(case, folder), folder, case.limit, case.prepare)
            how = neutral(shlex.join(arguments), folder)
        if case.launch == "log-dir":
            text = with_rank_logs(text, folder)
        log = neutral(text, folder)
    file = log_name(case)
    (HERE / "real" / file).write_text(log)
    print(f"{file}: status {status}, {len(log)} bytes", flush=True)
    answer: dict[str, object] = {"file": file, "category": case.category, "cause": case.cause, "where": case.where}
    return {**answer, "must_mention": list(case.words), "how": how, "status": status}


def main(names: list[str]) -> None:
    """The named cases, or all; the answers of the others stay."""
    (HERE / "real").mkdir(exist_ok=True)
    answers_file = HERE / "real" / "answers.json"
    answers = {entry["file"]: entry for entry in json.loads(answers_file.read_text())} if answers_file.exists() else {}
    for gone in set(answers) - {log_name(case) for case in CASES}:
        del answers[gone]
        (HERE / "real" / gone).unlink(missing_ok=True)
    for case in CASES:
        if not names or case.name in names or case.category in names:
            entry = make(case)
            answers[str(entry["file"])] = entry
            answers_file.write_text(json.dumps([answers[file] for file in sorted(answers)], indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
