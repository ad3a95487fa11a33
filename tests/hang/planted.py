"""Planted hangs under the real watch: forks of one process that has imported torch and DeepSpeed become the ranks of case
after case.

Every case is a few gloo ranks of ``train.py``, a script that knows nothing of dsdoctor, under ``python -m dsdoctor.run
--hang-after 6``."""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
AFTER = 6.0
LONGEST = AFTER + 14
AT_ONCE = 4
CAUSES = {
    "loader": (("hang-rank-behind",), "data"),
    "worker": (("hang-rank-behind",), "data loader"),
    "skipped_step": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
    "save_alone": (("hang-other-operation", "hang-other-sizes"), "save_checkpoint"),
    "other_collective": (("hang-other-operation",), ""),
    "other_shape": (("hang-other-sizes", "hang-rank-gone"), "SIGABRT"),
    "swallowed": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
    "exit_0": (("hang-rank-gone",), "exit status 0"),
    "exit_early": (("hang-rank-gone",), "exit status 0"),
    "stopped": (("hang-rank-stopped",), "stopped by a signal"),
    "killed": (("hang-rank-gone",), "SIGKILL"),
    "interpreter": (("hang-interpreter-held",), "pthread_mutex_lock"),
    "lock": (("hang-rank-behind",), "lock"),
    "sleeps": (("hang-rank-behind",), "sleeps"),
    "pipe": (("hang-rank-behind",), "pipe"),
    "stale_lock": (("hang-stale-lock",), "rm "),
    "full_disk_swallowed": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
}
QUIET = {
    "none": [],
    "evaluate_on_one": ["--seconds", "12"],
    "slow_step": ["--seconds", "4"],
    "slow_save": ["--seconds", "12"],
    "long_compilation": ["--seconds", "12"],
    "long_first_step": ["--seconds", "12", "--at", "0"],
    "compiler": ["--seconds", "12"],
    "long_accumulation": ["--seconds", "0.2", "--accumulate", "64"],
    "slow_worker": ["--seconds", "12"],
    "turns": ["--seconds", "0.1", "--steps", "200"],
    "late_data": ["--seconds", "0.1", "--steps", "240"],
    "late_compute": ["--seconds", "0.1", "--steps", "240"],
}
LATE = {"late_data": "waits for its data|sleeps in its data loader", "late_compute": "in compute"}
"""Those of them in which one rank keeps the others waiting again and again, with what is to be said."""
"""Kinds in which nothing hangs, though nothing moves for twice as long as --hang-after or a step takes so long; their words."""


def child(cases: list[dict[str, Any]]) -> None:
    """In the process under dsdoctor.run: fork the ranks of each case, wait for its verdict or its end."""
    sys.path.insert(0, str(SCRIPTS))
    import deepspeed.comm.torch  # noqa: F401
    import train

    # DeepSpeed's own transport on a CPU would be compiled first, which takes minutes; gloo carries everything instead
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

    running: list[int] = []
    for case in cases:
        if len(running) == AT_ONCE:
            os.waitpid(running.pop(0), 0)
        pid = os.fork()
        if not pid:
            fork_case(train, case)
        running.append(pid)
    for pid in running:
        os.waitpid(pid, 0)


def end_with_parent() -> None:
    """Have the kernel end this process when the one that forked it ends, however that is."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def fork_case(train: Any, case: dict[str, Any]) -> None:
    """In a process of its own, because cases run beside each other: most of one is waiting."""
    atexit._clear()
    end_with_parent()
    try:
        result = run_case(train, case)
    except BaseException as error:
        result = {"told": None, "ends": [], "verdict": "", "text": "", "tail": f"the test itself failed: {error!r}"}
    os.write(1, f"CASE {json.dumps({**case, **result})}\n".encode())
    os._exit(0)


def run_case(train: Any, case: dict[str, Any]) -> dict[str, Any]:
    words = case["words"]
    pids = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out = Path(folder) / "out.txt"
        for rank in range(case["ranks"]):
            pid = os.fork()
            if not pid:
                fork_main(train, rank, case, port, out, [*words, "--folder", case.get("folder") or folder])
            pids.append(pid)
        return followed(pids, out, case)


def fork_main(train: Any, rank: int, case: dict[str, Any], port: int, out: Path, words: list[str]) -> None:
    status = 1
    # what the parent does at its end is not this process's to do
    atexit._clear()
    # with its data loader's workers it is ended as one
    os.setpgid(0, 0)
    end_with_parent()
    try:
        number = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(number, 1)
        os.dup2(number, 2)
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(case["ranks"])}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        train.train(train.arguments(words))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        import traceback

        traceback.print_exc()
        sys.last_value = error
    finally:
        # as the interpreter does at its end
        atexit._run_exitfuncs()
        os._exit(status)


def followed(pids: list[int], out: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Wait for a verdict (a hang) or for all ranks (none), then end what is left."""
    ends: dict[int, int] = {}
    planted, told = None, None
    limit = time.monotonic() + 300
    while time.monotonic() < limit and told is None:
        for pid in set(pids) - set(ends):
            done, status = os.waitpid(pid, os.WNOHANG)
            ends |= {pid: os.waitstatus_to_exitcode(status)} if done else {}
        text = out.read_text(errors="replace") if out.exists() else ""
        if planted is None and (found := re.search(r"^AT ([\d.]+)", text, re.MULTILINE)):
            planted = float(found[1])
            limit = planted + (LONGEST if case["hangs"] else 60)
        if "dsdoctor: the files of all ranks" in text:
            told = time.monotonic() - (planted or 0.0)
        elif len(ends) == len(pids):
            # the supervisor outlives the last rank by a moment
            limit = min(limit, time.monotonic() + 5)
        time.sleep(0.1)
    for pid in set(pids) - set(ends):
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    text = out.read_text(errors="replace")
    said = "".join(line for line in text.splitlines(keepends=True) if line.startswith(("dsdoctor", "SUM")))
    # what was told before the mistake was made took no seconds from it
    return {
        "told": told if planted else None,
        "ends": sorted(ends.values()),
        "verdict": verdict(text),
        "text": said,
        "tail": text[-600:],
    }


def verdict(text: str) -> str:
    found = re.search(r"dsdoctor: ([✗!] .*)", text)
    return found[1] if found else ""


def judged(case: dict[str, Any]) -> str:
    """Whether a case came out as it should: "ok", or what is wrong."""
    rule = (re.findall(r"\[(hang-[a-z-]+)\]", case["verdict"]) or [""])[0]
    if not case["hangs"]:
        told = re.findall(r"dsdoctor: ! (.*)  \[rank-late-again\]", case["text"])
        if case["kind"] in LATE:
            right = (
                len(told) == 1 and told[0].startswith(f"rank {case['on']} ") and re.search(LATE[case["kind"]], told[0])
            )
            right = right and f"waited for rank {case['on']} " in case["text"]
            return "ok" if right and case["ends"] == [0] * case["ranks"] else f"told {told}"
        whole = not told and case["ends"] == [0] * case["ranks"]
        return "ok" if not rule and whole else f"alarm {rule}" if rule else f"ends {case['ends']}"
    rules, word = CAUSES[case["kind"]]
    if not case["verdict"]:
        return "nothing told"
    wrong = [f"rule {rule}"] if rule not in rules else []
    wrong += [] if re.search(rf"\brank {case['on']}\b", case["verdict"]) else ["rank not named"]
    wrong += [] if word in case["text"] else [f"{word!r} not said"]
    return ", ".join(wrong) or "ok"


def all_cases(
    kinds: list[str], stages: list[int], ranks: list[int], steps: list[int], on: list[int]
) -> Iterator[dict[str, Any]]:
    for kind, stage, world, step, rank in itertools.product(kinds, stages, ranks, steps, on):
        words = ["--kind", kind, "--on", str(rank), "--at", str(step), "--stage", str(stage)]
        words += QUIET.get(kind, [])
        hangs = kind in CAUSES
        yield {
            "kind": kind, "stage": stage, "ranks": world, "step": step, "on": rank, "hangs": hangs, "words": words
        }  # fmt: skip


@contextlib.contextmanager
def full_folder() -> Iterator[str]:
    """A tmpfs that is full after 1 MiB, where this user may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False)
        try:
            yield folder if done.returncode == 0 else ""
        finally:
            if done.returncode == 0:
                subprocess.run(["umount", "-l", folder], check=False)


def run_all(cases: list[dict[str, Any]], *, show: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "cases.json"
        listed.write_text(json.dumps(cases))
        command = [sys.executable, "-m", "dsdoctor.run", "--overflow", "off", "--hang-after", str(AFTER), "--hang-dir"]
        command += [f"{folder}/hang", __file__, "--cases", str(listed)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            for line in process.stdout or ():
                if line.startswith("CASE "):
                    result = json.loads(line[5:])
                    result["judged"] = judged(result)
                    told = f"{result['told']:5.1f} s" if result["told"] else "      -"
                    print(
                        f"{result['judged']:24} {result['kind']:20} stage {result['stage']} step {result['step']} "
                        f"rank {result['on']} of {result['ranks']} {told}  {result['verdict'][:230]}",
                        flush=True,
                    )
                    if show and result["judged"] != "ok":
                        print(result["text"] or result["tail"], flush=True)
                    yield result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cases"]:
        child(json.loads(Path(sys.argv[2]).read_text()))
