"""Who ended first, under real launchers: each kind of end, in the main thread, in another one, in a hook, at exit."""

import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from tests.hang.test_launchers import free_port

pytestmark = pytest.mark.launch
SCRIPT = """
import atexit, os, signal, sys, threading, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
kind, bad = sys.argv[1], dist.get_rank() == 1
def later(act):
    threading.Thread(target=lambda: (time.sleep(0.5), act()), daemon=True).start()
def hook(gradient):
    raise ValueError("in a hook")
def ends(step):
    if kind == "thread_os_exit" and step == 0:
        later(lambda: os._exit(3))
    if kind == "thread_signal" and step == 0:
        later(lambda: os.kill(os.getpid(), signal.SIGTERM))
    if step != 40:
        return
    if kind == "raises":
        raise KeyError("label")
    if kind == "sys_exit":
        sys.exit(5)
    if kind == "leaves":
        sys.exit(0)
    if kind == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if kind == "abort":
        os.abort()
    if kind == "at_exit":
        atexit.register(lambda: os._exit(7))
        sys.exit(0)
    if kind == "hook":
        weight = torch.ones(2, requires_grad=True)
        weight.register_hook(hook)
        weight.sum().backward()
for step in range(2000):
    if bad:
        ends(step)
    dist.all_reduce(torch.ones(3))
    time.sleep(0.02)
"""
SAID = {
    "thread_os_exit": "(exit status 3)",
    "thread_signal": "(killed by SIGTERM)",
    "raises": "after KeyError: 'label'",
    "sys_exit": "(exit status 5)",
    "leaves": "exited normally (exit status 0)",
    "interrupt": "after KeyboardInterrupt",
    "abort": "(killed by SIGABRT)",
    "at_exit": "(exit status 7)",
    "hook": "after ValueError: in a hook",
}
TOLD_BY_RANKS = {
    "raises": "rank 1 raised KeyError: 'label'",
    "hook": "rank 1 raised ValueError: in a hook",
    "interrupt": "rank 1 raised KeyboardInterrupt",
}


def started(folder: Path, launcher: str, kind: str) -> list["subprocess.Popen[str]"]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    port = str(free_port())
    run = ["-m", "dsdoctor.run", "train.py", kind]
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    alone = {"OMP_NUM_THREADS": "1", "HOME": str(folder)}
    each: list[tuple[list[str], dict[str, str]]] = [([*torchrun, *run], {})]
    if launcher == "none":
        each = [(run, {**told, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    made = []
    for number, (command, more) in enumerate(each):
        with (folder / f"{number}.txt").open("w") as said:
            environment = {**os.environ, **alone, **more}
            command = [sys.executable, *command]
            made.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, text=True))
    return made


def output(folder: Path, kind: str) -> str:
    """What all ranks and the supervisor printed: that one may end after the ranks."""
    text = ""
    for _ in range(100):
        text = "".join(path.read_text() for path in folder.glob("*.txt"))
        if SAID[kind] in text or TOLD_BY_RANKS.get(kind, SAID[kind]) in text:
            break
        time.sleep(0.1)
    return text


def told(ranks: list["subprocess.Popen[str]"], folder: Path, kind: str) -> tuple[int, bool, list[str]]:
    """How often the rank that ended first was told when all have ended, whether the other one was accused, and what was said."""
    for rank in ranks:
        rank.wait(timeout=120)
    lines = output(folder, kind).splitlines()
    by_watch = [line for line in lines if SAID[kind] in line and "rank 1 (" in line]
    by_ranks = [line for line in lines if line.endswith(tuple("0123456789")) and "rank 1 raised" in line]
    return (
        len(by_watch) + len(by_ranks),
        any("rank 0 (" in line for line in lines),
        [x for x in lines if "dsdoctor" in x],
    )


def test_the_rank_that_ended_first_is_told_once_with_how_under_each_launcher(tmp_path: Path) -> None:
    wrong, silent = [], []
    cases = list(product(("torchrun", "none"), SAID))
    for few in (cases[start : start + 6] for start in range(0, len(cases), 6)):
        running = {case: started(tmp_path / "-".join(case), *case) for case in few}
        for (launcher, kind), ranks in running.items():
            times, accused, said = told(ranks, tmp_path / f"{launcher}-{kind}", kind)
            if times == 0 and not accused:
                silent.append((launcher, kind))
            elif times != 1 or accused:
                wrong.append((launcher, kind, said))
    # six launches on few processors: both ends may be seen by one look, and then nobody is accused
    for launcher, kind in silent:
        folder = tmp_path / f"{launcher}-{kind}-again"
        times, accused, said = told(started(folder, launcher, kind), folder, kind)
        if times != 1 or accused:
            wrong.append((launcher, kind, said))
    assert not wrong
    assert len(silent) <= len(cases) // 4
