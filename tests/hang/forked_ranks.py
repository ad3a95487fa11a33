"""Ranks as forks of one process that has imported torch and DeepSpeed, case after case: a few gloo ranks of ``train.py`` each,
which are followed to a verdict or to their end. Run by planted.py, under ``python -m dsdoctor.run``."""

import atexit
import contextlib
import ctypes
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
TIMEOUT = 20
"""Seconds of torch's own timeout where torch is alone: DeepSpeed's is 600, torch's 1800 (gloo)."""


def child(cases: list[dict[str, Any]], until: float, at_once: int) -> None:
    """In the process under dsdoctor.run: fork the ranks of each case, wait for its verdict or its end. No case is begun after
    ``until``."""
    sys.path.insert(0, str(SCRIPTS))
    import deepspeed.comm.torch  # noqa: F401
    import train

    # DeepSpeed's own transport on a CPU would be compiled first, which takes minutes; gloo carries everything instead
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

    running = 0
    for case in cases:
        if running == at_once:
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
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        freezable_disk(case["kind"] == "frozen_disk") as disk,
    ):
        case = {**case, "disk": disk}
        out = Path(folder) / "out.txt"
        for rank in range(case["ranks"]):
            pid = os.fork()
            if not pid:
                fork_main(train, rank, case, port, out, [*words, "--folder", disk or case.get("folder") or folder])
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
        from dsdoctor.core.script import unlisted_idents

        train.train(train.arguments(words))
        watched = bool(unlisted_idents())
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
        threading._shutdown()
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
        if planted and "dsdoctor: files of all ranks" in after:
            told = time.monotonic() - planted
        elif len(ends) == len(pids):
            # the supervisor outlives the last rank by a moment
            limit = min(limit, time.monotonic() + 5)
        time.sleep(0.1)
    thaw(case["disk"])
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


@contextlib.contextmanager
def freezable_disk(wanted: bool) -> Iterator[str]:
    """A small file system of its own, where this user may mount one; "" else. Whatever becomes of this process, it is thawed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        image, place = f"{folder}/image", Path(folder, "disk")
        place.mkdir()
        if not wanted or not mounted(image, str(place)):
            yield ""
            return
        late = ["sh", "-c", 'sleep 120; fsfreeze --unfreeze "$0"; umount -l "$0"', str(place)]
        with subprocess.Popen(late, stderr=subprocess.DEVNULL, start_new_session=True) as watchman:
            try:
                yield str(place)
            finally:
                thaw(str(place))
                subprocess.run(["umount", "-l", place], check=False)
                os.killpg(watchman.pid, signal.SIGKILL)


def mounted(image: str, place: str) -> bool:
    """Whether a new file system in a file could be mounted there, and may be frozen."""
    commands = (
        ["truncate", "--size", "16M", image],
        ["mkfs.ext4", "-q", "-F", image],
        ["mount", "-o", "loop", image, place],
        ["fsfreeze", "--freeze", place],
        ["fsfreeze", "--unfreeze", place],
    )
    try:
        return not any(subprocess.run(words, capture_output=True, check=False).returncode for words in commands)
    except OSError:
        return False


def thaw(place: str) -> None:
    """What writes there cannot even be killed before that."""
    if place:
        subprocess.run(["fsfreeze", "--unfreeze", place], stderr=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    child(json.loads(Path(sys.argv[1]).read_text()), float(sys.argv[2]), int(sys.argv[3]))
