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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
AFTER = 6.0
LONGEST = AFTER + 14
AT_ONCE = 5
TIMEOUT = 20
"""Seconds of torch's own timeout where torch is alone: DeepSpeed's is 600, torch's 1800 (gloo)."""
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
    "handled": (("hang-rank-behind",), "handles ValueError: a bad sample"),
    "uneven": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
    "joins": (("hang-rank-behind",), "another thread"),
    "server": (("hang-rank-behind",), "network"),
    "waits_for_child": (("hang-rank-behind",), "process"),
    "group_alone": (("hang-other-operation", "hang-rank-behind"), "new_group"),
    "other_order": (("hang-other-operation", "hang-rank-behind"), ""),
    "receives": (("hang-rank-behind", "hang-other-operation"), "recv"),
    "unused": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
    "experts": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
    "evaluates_alone": (("hang-other-operation", "hang-rank-behind", "hang-other-sizes"), ""),
}
"""Kinds of mistakes, with the rules that may name each and what is to be said."""
STAGES = {"experts": [3], "evaluates_alone": [3], "unused": [0, 1]}
"""Where a kind hangs at all: a forward of other stages calls no collective."""
AFTER_THE_END = {"killed", "exit_0", "exit_early", "other_shape", "stale_lock"}
"""Kinds in which the process is gone, or a file is named and not a line."""
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
"""Kinds in which nothing hangs, though nothing moves for twice as long as --hang-after or a step takes so long; their words."""
LATE = {"late_data": "waits for its data|sleeps in its data loader", "late_compute": "in compute"}
"""Those of them in which one rank keeps the others waiting again and again, with what is to be said."""


def child(cases: list[dict[str, Any]], until: float) -> None:
    """In the process under dsdoctor.run: fork the ranks of each case, wait for its verdict or its end. No case is begun after
    ``until``."""
    sys.path.insert(0, str(SCRIPTS))
    import deepspeed.comm.torch  # noqa: F401
    import train

    # DeepSpeed's own transport on a CPU would be compiled first, which takes minutes; gloo carries everything instead
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

    running = 0
    for case in cases:
        if running == AT_ONCE:
            os.wait()
            running -= 1
        if time.monotonic() > until:
            break
        running += 1
        if not os.fork():
            fork_case(train, case)
    for _ in range(running):
        os.wait()


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
        return followed_alone(pids, out) if case.get("alone") else followed(pids, out, case)


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
        if case.get("unwatched"):
            unwatch()
        train.train(train.arguments(words))
        watched = any(thread.name == "dsdoctor-hang" for thread in threading.enumerate())
        os.write(1, f"WATCHED {watched}\n".encode())
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


def unwatch() -> None:
    """As it is without us: torch's own way to make a process group."""
    import torch.distributed as dist

    original = dist.init_process_group.__wrapped__
    dist.init_process_group = dist.distributed_c10d.init_process_group = original


def followed(pids: list[int], out: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Wait for a verdict (a hang) or for all ranks (none), then end what is left."""
    ends: dict[int, int] = {}
    told = None
    limit = time.monotonic() + 300
    before, planted, after = "", None, ""
    while time.monotonic() < limit and told is None:
        ends |= ended(set(pids) - set(ends))
        was_planted = planted
        before, planted, after = parts_of(out)
        if planted is not None and was_planted is None:
            limit = planted + (LONGEST if case["hangs"] else 60)
        if planted and "dsdoctor: the files of all ranks" in after:
            told = time.monotonic() - planted
        elif len(ends) == len(pids):
            # the supervisor outlives the last rank by a moment
            limit = min(limit, time.monotonic() + 5)
        time.sleep(0.1)
    end_all(set(pids) - set(ends))
    before, _, after = parts_of(out)
    text = after if case["hangs"] else before + after
    said = "".join(line for line in text.splitlines(keepends=True) if line.startswith(("dsdoctor", "SUM", "WATCHED")))
    return {
        "told": told,
        "ends": sorted(ends.values()),
        "early": verdict(before) if case["hangs"] else "",
        "verdict": verdict(text),
        "text": said,
        "tail": (before + after)[-2000:],
    }


def followed_alone(pids: list[int], out: Path) -> dict[str, Any]:
    """What becomes of the ranks without dsdoctor: when the first of them ends other than well, and with which words."""
    ends: dict[int, int] = {}
    limit, planted, told = time.monotonic() + 300, None, None
    while time.monotonic() < limit and told is None and len(ends) < len(pids):
        new = ended(set(pids) - set(ends))
        ends |= new
        if planted is None and (planted := parts_of(out)[1]) is not None:
            limit = planted + TIMEOUT + 15
        if planted is not None and any(new.values()):
            told = time.monotonic() - planted
        time.sleep(0.1)
    # the others of a job say theirs in the same moment
    time.sleep(1.0 if told else 0.0)
    end_all(set(pids) - set(ends))
    said = re.findall(
        r"^(?:\w+\.)*\w*(?:Error|Exception|terminate called).*$|^\s+what\(\):.*$", parts_of(out)[2], re.MULTILINE
    )
    return {
        "told": told,
        "ends": sorted(ends.values()),
        "verdict": said[0][:200] if said else "",
        "text": "",
        "tail": "",
    }


def parts_of(out: Path) -> tuple[str, float | None, str]:
    """What was printed before the mistake, when that was made, and what was printed after it."""
    text = out.read_text(errors="replace") if out.exists() else ""
    found = re.search(r"^AT ([\d.]+)\n", text, re.MULTILINE)
    return (text[: found.start()], float(found[1]), text[found.end() :]) if found else (text, None, "")


def ended(pids: set[int]) -> dict[int, int]:
    """Those of some processes that have ended, with their status."""
    found = {pid: os.waitpid(pid, os.WNOHANG) for pid in pids}
    return {pid: os.waitstatus_to_exitcode(status) for pid, (done, status) in found.items() if done}


def end_all(pids: set[int]) -> None:
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def verdict(text: str) -> str:
    found = re.search(r"dsdoctor: ([✗!] .*)", text)
    return found[1] if found else ""


def judged(case: dict[str, Any]) -> str:
    """Whether a case came out as it should: "ok", "no hang" where the mistake made none, or what is wrong."""
    if case.get("alone"):
        return "alone"
    rule = (re.findall(r"\[(hang-[a-z-]+)\]", case["verdict"]) or [""])[0]
    if not case["hangs"]:
        return judged_quiet(case, rule)
    rules, word = CAUSES[case["kind"]]
    if not case["verdict"]:
        # gloo may carry what does not belong together, and the run ends with wrong numbers
        return "no hang" if case["ends"] == [0] * case["ranks"] else "nothing told"
    wrong = [f"rule {rule}"] if rule not in rules else []
    wrong += [] if re.search(rf"\branks? ([\d-]+, )*{case['on']}\b", case["verdict"]) else ["rank not named"]
    wrong += [] if word in case["text"] else [f"{word!r} not said"]
    named = re.search(r"\w\.py:\d+ in \w", case["verdict"]) or case["kind"] in AFTER_THE_END
    wrong += [] if named or case["kind"] == "stopped" else ["line not named"]
    wrong += [f"alarm before: {case['early'][:60]}"] if case["early"].startswith("✗") else []
    return ", ".join(wrong) or "ok"


def judged_quiet(case: dict[str, Any], rule: str) -> str:
    """Whether nothing was told of a run in which nothing hangs, or only of the rank that is late."""
    told = re.findall(r"dsdoctor: ! (.*)  \[rank-late-again\]", case["text"])
    if case["kind"] in LATE:
        right = len(told) == 1 and told[0].startswith(f"rank {case['on']} ") and re.search(LATE[case["kind"]], told[0])
        right = right and f"waited for rank {case['on']} " in case["text"]
        return "ok" if right and case["ends"] == [0] * case["ranks"] else f"told {told}"
    whole = not told and case["ends"] == [0] * case["ranks"]
    return "ok" if not rule and whole else f"alarm {rule}" if rule else f"ends {case['ends']}"


def all_cases(
    kinds: list[str], stages: list[int], ranks: list[int], steps: list[int], on: list[int]
) -> Iterator[dict[str, Any]]:
    """Every kind with everything else."""
    for kind, world, step, rank in itertools.product(kinds, ranks, steps, on):
        for stage in sorted(set(stages) & set(STAGES.get(kind, stages))):
            if rank < world:
                yield one_case(kind, stage, world, step, rank)


def spread_cases(kinds: list[str], stages: list[int], ranks: list[int], steps: list[int]) -> Iterator[dict[str, Any]]:
    """Every kind at every stage, over which numbers of ranks, the rank and the step are spread evenly; a stage after the other."""
    for place, stage in enumerate(stages):
        for number, kind in enumerate(kinds):
            if stage in STAGES.get(kind, stages):
                world = ranks[(number + place) % len(ranks)]
                step = steps[(number + place // 2) % len(steps)]
                yield one_case(kind, stage, world, step, (number + 2 * place) % world)


def one_case(kind: str, stage: int, world: int, step: int, rank: int) -> dict[str, Any]:
    words = ["--kind", kind, "--on", str(rank), "--at", str(step), "--stage", str(stage), *QUIET.get(kind, [])]
    hangs = kind in CAUSES
    return {"kind": kind, "stage": stage, "ranks": world, "step": step, "on": rank, "hangs": hangs, "words": words}


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


def run_all(
    cases: list[dict[str, Any]], *, show: bool, alone: bool = False, until: float = float("inf")
) -> Iterator[dict[str, Any]]:
    """The results of some cases, each when it is there. ``alone``: without dsdoctor, and with a short timeout of torch's own.
    ``until``: on the clock of ``time.monotonic``, no case is begun after it."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "cases.json"
        extra = ["--timeout", str(TIMEOUT)] if alone else []
        listed.write_text(json.dumps([{**case, "alone": alone, "words": case["words"] + extra} for case in cases]))
        ours = ["-m", "dsdoctor.run", "--overflow", "off", "--hang-after", str(AFTER), "--hang-dir", f"{folder}/hang"]
        command = [sys.executable, *([] if alone else ours), __file__, "--cases", str(listed), str(until)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            for line in process.stdout or ():
                if line.startswith("CASE "):
                    result = json.loads(line[5:])
                    result["judged"] = judged(result)
                    print(line_of(result), flush=True)
                    if show and result["judged"] not in {"ok", "alone", "no hang"}:
                        print(result["text"] or result["tail"], flush=True)
                    yield result


def line_of(result: dict[str, Any]) -> str:
    told = f"{result['told']:5.1f} s" if result["told"] else "      -"
    where = f"stage {result['stage']} step {result['step']} rank {result['on']} of {result['ranks']}"
    return f"{result['judged']:24} {result['kind']:20} {where} {told}  {result['verdict'][:230]}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--cases"]:
        child(json.loads(Path(sys.argv[2]).read_text()), float(sys.argv[3]))
