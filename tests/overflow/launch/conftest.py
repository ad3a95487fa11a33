"""Runs a worker script under two ranks and collects what each of them wrote."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 300


def launch(
    script: str,
    cases: Mapping[str, Mapping[str, Any]],
    folder: Path,
    ranks: int = 2,
    seconds: int = SECONDS,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Each rank's results by case name. A rank that fails or hangs fails the test with the end of its output. On ``cuda`` all
    ranks have one GPU."""
    (folder / "cases.json").write_text(json.dumps(cases))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [_start(script, folder, rank, ranks, port, device) for rank in range(ranks)]
    try:
        codes = [process.wait(timeout=seconds) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes) or None in codes:
        tails = "\n".join(_last_lines(folder / f"{rank}.log") for rank in range(ranks))
        raise AssertionError(f"{script} ended with {codes}\n{tails}")
    return [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(ranks)]


def _start(script: str, folder: Path, rank: int, ranks: int, port: int, device: str) -> "subprocess.Popen[bytes]":
    environment = {
        **os.environ,
        "DS_ACCELERATOR": device,
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # NCCL refuses two ranks on one GPU unless this is set
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank) if device == "cpu" else "0",
        "WORLD_SIZE": str(ranks),
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2])]),
    }
    argv = [sys.executable, str(HERE / script), str(folder / "cases.json"), str(folder / "out.json")]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(argv, env=environment, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])
