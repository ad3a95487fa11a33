"""Real ranks on this machine, for checkpoints that DeepSpeed saved and loads."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsdoctor.checkpoint.loading import Outcome, Verdict

RANKS = Path(__file__).parent / "ranks.py"
PATIENCE = 600
CLOSE = 2e-3
"""Relative: a bf16 run rounds the weights of an fp32 one."""


def start(world: int, *arguments: str, under: tuple[str, ...] = (), env: Mapping[str, str] | None = None) -> list[str]:
    """Run ``ranks.py`` on so many ranks and wait for them; what each said. ``under``: what stands before the script.

    Raises AssertionError with what a rank said that failed.
    """
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, *under, str(RANKS), *arguments],
            env={
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
                **(env or {}),
            },
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=PATIENCE)[1] for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(each[-2000:] for each in said)
    return said


def make(folder: Path, *kinds: str, env: Mapping[str, str] | None = None) -> dict[str, list[float]]:
    """Real checkpoints of two ranks; what each engine held when it saved."""
    start(2, "make", str(folder), *kinds, env=env)
    assert json.loads((folder / "failed.json").read_text()) == {}
    sums: dict[str, list[float]] = json.loads((folder / "sums.json").read_text())
    return sums


def make_two(saved: Path, other: Path, *kinds: str, env: Mapping[str, str] | None = None) -> None:
    """Real checkpoints of two trainings of two ranks, which differ in their weights alone."""
    start(2, "make-two", str(saved), str(other), *kinds, env=env)
    assert json.loads((saved / "failed.json").read_text()) == {}


def load(world: int, orders: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What became of each order on real ranks."""
    asked, told = folder / f"orders{world}.json", folder / f"answers{world}.json"
    asked.write_text(json.dumps(orders))
    start(world, "load", str(asked), str(told))
    answers: list[dict[str, Any]] = json.loads(told.read_text())
    return answers


def loaded(answer: dict[str, Any], saved: list[float]) -> bool:
    """Whether every rank loaded, and the engine then held what was saved: the weights, and Adam's first moments."""
    if any("error" in rank or not rank.get("path") for rank in answer["ranks"]):
        return False
    held: list[float] = answer["ranks"][0]["held"]
    return all(abs(now - then) <= CLOSE * abs(then) for now, then in zip(held, saved, strict=True))


def agrees(decided: Outcome, as_it_is: bool, converted: bool | None) -> bool | None:
    """Whether a verdict is what the ranks did; None where it says that it does not know. ``converted``: of a universal one."""
    if decided.verdict is Verdict.UNKNOWN:
        return None
    if decided.verdict is Verdict.LOADS:
        return as_it_is
    if decided.verdict is Verdict.UNIVERSAL:
        return not as_it_is and converted is not False
    return not as_it_is and not converted
