"""Planted hangs under the real watch: which kinds there are, what is to be said of each, and whether it was.

Every case is a few gloo ranks of ``train.py``, a script that knows nothing of dsdoctor, under ``python -m dsdoctor.run
--hang-after 6``; forked_ranks.py runs them."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hang.forked_ranks import AFTER, TIMEOUT

SCRIPT = Path(__file__).with_name("forked_ranks.py")
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
    "frozen_disk": (("hang-disk-sleep",), "in open of /"),
    "handled": (("hang-rank-behind",), "is handling ValueError: a bad sample"),
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
PARTED = ("hang-other-operation", "hang-rank-behind", "hang-other-sizes")
UNPLANNED = {
    "forked_lock": (("hang-rank-behind",), "data loader"),
    "stopped_worker": (("hang-rank-behind",), "data loader"),
    "asks": (("hang-rank-behind",), "waits for a terminal"),
    "prints": (("hang-rank-behind",), "waits for a pipe"),
    "in_handler": (("hang-rank-behind",), "waits for a lock"),
    "file_lock": (("hang-rank-behind",), "waits for the lock of a file"),
    "flock": (("hang-rank-behind",), "waits for the lock of a file"),
    "debugger": (("hang-rank-behind",), "debugger"),
    "runs": (("hang-rank-behind",), "waits for another process"),
    "fifo": (("hang-rank-behind",), "waits for a pipe"),
    "some_make_group": (("hang-other-operation",), "new_group"),
    "objects_alone": ((*PARTED, "hang-rank-gone"), "all_gather_object"),
    "sends": (("hang-rank-behind", "hang-other-operation"), "send"),
    "dead_thread": (("hang-rank-behind",), "has no other thread that runs Python"),
    "progress_bar": (("hang-rank-behind",), "waits for a lock"),
    "event_loop": (("hang-rank-behind",), "asyncio"),
    "polls": (("hang-rank-behind",), "sleeps"),
    "killed_worker": (("hang-rank-behind",), "waits for another process"),
    "at_exit": (("hang-rank-behind",), "sleeps"),
    "never_ends": (("hang-rank-behind",), "its script has ended"),
    "signal_wait": (("hang-rank-behind",), "waits for a signal"),
    "page": (("hang-rank-behind",), "waits for the network"),
    "hook": (("hang-rank-behind", "hang-rank-outside"), "sleeps"),
}
"""Kinds of own_waits.py, which the watch was not made for, with what an engineer would have it say."""
UNPLANNED_AGAIN = {
    "database": (("hang-rank-behind",), "waits for a database"),
    "future": (("hang-rank-behind",), "is in more_waits.py"),
    "thread_barrier": (("hang-rank-behind",), "has no other thread that runs Python"),
    "unix_socket": (("hang-rank-behind",), "waits for a service of this host"),
    "other_dtype": (("hang-other-sizes", "hang-other-operation", "hang-rank-gone"), "ouble"),
    "other_root": (("hang-other-operation", "hang-rank-behind", "hang-transport"), "broadcast"),
    "saves_to_pipe": (("hang-rank-behind",), "checkpoint"),
    "manager": (("hang-rank-behind",), "waits for another process"),
    "later_receive": ((*PARTED, "hang-rank-outside"), "work.wait()"),
    "later_reduce": ((*PARTED, "hang-rank-outside"), "work.wait()"),
    "two_pipes": (("hang-rank-behind",), "waits for a pipe"),
    "destroys": (("hang-rank-behind", "hang-rank-outside"), "sleeps"),
    "logs": (("hang-rank-behind",), "waits for a lock"),
    "selects": (("hang-rank-behind",), "waits for"),
}
"""Kinds of more_waits.py, thought of after those were right."""
UNPLANNED_QUIET = {"collects": ["--seconds", "12"], "compiles": []}
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
ON_TIME = {"none", "turns"}
"""Those in which none does."""


def judged(case: dict[str, Any]) -> str:
    """Whether a case came out as it should: "ok", "no hang" where the mistake made none, or what is wrong."""
    if case.get("alone"):
        return "alone"
    rule = (re.findall(r"\[(hang-[a-z-]+)\]", case["verdict"]) or [""])[0]
    if not case["hangs"]:
        return judged_quiet(case, rule)
    rules, word = {**CAUSES, **UNPLANNED, **UNPLANNED_AGAIN}[case["kind"]]
    if not case["verdict"]:
        # gloo may carry what does not belong together, and the run ends with wrong numbers
        return "no hang" if case["ends"] == [0] * case["ranks"] else "nothing told"
    wrong = [f"rule {rule}"] if rule not in rules else []
    wrong += [] if re.search(rf"\branks? ([\d-]+, )*{case['on']}\b", case["verdict"]) else ["rank not named"]
    wrong += [] if word in case["text"] else [f"{word!r} not said"]
    named = re.search(r"\w\.py:\d+ in [\w<]", case["verdict"]) or case["kind"] in AFTER_THE_END
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
    # on a machine that others use a rank may well be late; that ranks which take turns are not so is what "turns" is for
    whole = (case["kind"] not in ON_TIME or not told) and case["ends"] == [0] * case["ranks"]
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


def unplanned_cases(kinds: list[str]) -> Iterator[dict[str, Any]]:
    """One case of each kind on three ranks, in the middle of an accumulation of gradients."""
    for number, kind in enumerate(kinds):
        case = one_case(kind, number % 4, 3, 5, number // 4 % 3)
        yield {**case, "words": [*case["words"], "--accumulate", "2"]}


def one_case(kind: str, stage: int, world: int, step: int, rank: int) -> dict[str, Any]:
    words = [
        "--kind",
        kind,
        "--on",
        str(rank),
        "--at",
        str(step),
        "--stage",
        str(stage),
        *(QUIET | UNPLANNED_QUIET).get(kind, []),
    ]
    hangs = kind in CAUSES | UNPLANNED | UNPLANNED_AGAIN
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
    cases: list[dict[str, Any]], *, show: bool, alone: bool = False, until: float = float("inf"), at_once: int = 5
) -> Iterator[dict[str, Any]]:
    """The results of some cases, each when it is there. ``alone``: without dsdoctor, and with a short timeout of torch's own.
    ``until``: on the clock of ``time.monotonic``, no case is begun after it. ``at_once``: most of a case is waiting."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "cases.json"
        extra = ["--timeout", str(TIMEOUT)] if alone else []
        listed.write_text(json.dumps([{**case, "alone": alone, "words": case["words"] + extra} for case in cases]))
        ours = ["-m", "dsdoctor.run", "--overflow", "off", "--hang-after", str(AFTER), "--hang-dir", f"{folder}/hang"]
        command = [sys.executable, *([] if alone else ours), str(SCRIPT), str(listed), str(until), str(at_once)]
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
