"""The same faults under launchers that start all ranks of this machine by one command: torchrun, dsdoctor itself, a hostfile."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.comm.launch.start import free_port
from tests.comm import faults
from tests.comm.generated_faults import Misdeed
from tests.comm.left_over import left_in, left_over
from tests.comm.rig import wait_until

ALONE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && >net && exec "$0" "$@"')
"""A network of its own: what others do on this machine's ports is no fault of the case, and what is left in it is the case's."""
RANKS = 3
LAUNCHERS = ("torchrun", "dsdoctor", "hostfile")
ONLY_RANK = (
    "import os\nif os.environ.get('RANK') == '{rank}':\n    exec(compile(open({path!r}).read(), {path!r}, 'exec'))\n"
)
SSH = """#!/bin/sh
for last; do host=$word word=$last; done
NAME=$host exec sh -c "$last"
"""
NAMES = """#!/bin/sh
# hostname -I and uname -n of three hosts that are one
case "$1,$NAME" in -I,n1) echo 127.0.0.1 ;; -I,*) echo 127.0.0.2 ;; *) echo "$NAME" ;; esac
"""


@dataclass(frozen=True, kw_only=True)
class Played:
    """How a case ended: the first error, the exit status, the seconds, and what was left behind."""

    rule: str
    title: str
    status: int
    seconds: float
    left: tuple[str, ...]


def command(launcher: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """The command of a launcher for three ranks here."""
    if launcher == "torchrun":
        port = str(free_port())
        run = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(RANKS)]
        return [*run, "--master_port", port, "-m", "dsdoctor.comm", *arguments]
    if launcher == "dsdoctor":
        return [sys.executable, "-m", "dsdoctor", "comm", "--nproc", str(RANKS), *arguments]
    for name, text in (("ssh", SSH), ("hostname", NAMES), ("uname", NAMES)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "hosts").write_text("".join(f"n{number} slots=1\n" for number in range(1, RANKS + 1)))
    return [sys.executable, "-m", "dsdoctor", "comm", "--hostfile", str(folder / "hosts"), *arguments]


def play(misdeed: Misdeed, rank: int, call: int, launcher: str, mode: str, deadline: float, folder: Path) -> Played:
    """One case, in a folder of its own."""
    act = folder / "act"
    faults.customized(act, misdeed.change_at(call))
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(ONLY_RANK.format(rank=rank, path=str(act / "sitecustomize.py")))
    marker = f"comm-case-{os.getpid()}-{time.monotonic_ns()}"
    around = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "MASTER_ADDR"}}
    around |= {"PYTHONPATH": f"{folder / 'site'}:{os.environ.get('PYTHONPATH', '')}", "MARK": marker}
    around |= {"TMPDIR": str(folder), "TORCH_EXTENSIONS_DIR": str(folder / "ext"), "OMP_NUM_THREADS": "1"}
    around |= {"PATH": f"{folder}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu"}
    arguments = [*([mode] if mode != "--default" else []), "--backend", "gloo", "--deadline", f"{deadline:g}", "--json"]
    began = time.monotonic()
    argv = [*ALONE, *command(launcher, folder, arguments)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (
        subprocess.Popen(argv, env=around, text=True, cwd=folder, **pipes) as running,
        held(folder, running) as network,
    ):
        out, err = running.communicate(timeout=deadline + 60)
        seconds = time.monotonic() - began
        until = time.monotonic() + 3
        while (left := [*left_over(marker), *left_in(network)]) and time.monotonic() < until:
            time.sleep(0.1)
    locks = [str(path) for path in (folder / "ext").rglob("*lock*")] if (folder / "ext").exists() else []
    try:
        errors = [one for one in json.loads(out)["findings"] if one["severity"] != "note"]
    except (ValueError, KeyError):
        errors = [{"rule": "no document", "title": err[-300:]}]
    first = errors[0] if errors else {"rule": "nothing", "title": ""}
    return Played(
        rule=first["rule"], title=first["title"], status=running.returncode, seconds=seconds, left=(*left, *locks)
    )


@contextlib.contextmanager
def held(folder: Path, running: "subprocess.Popen[str]") -> Iterator[str]:
    """The network of a case by its number, which no other network is given as long as this is held."""
    wait_until((folder / "net").exists, 20, "the case has no network")
    with Path(f"/proc/{running.pid}/ns/net").open():
        yield str(Path(f"/proc/{running.pid}/ns/net").readlink())


def complaint(found: Played, misdeed: Misdeed, rank: int, limit: float, launcher: str) -> str:
    """What is wrong with the outcome, "" where nothing is. ``limit`` holds the seconds of the launcher too."""
    if found.rule not in misdeed.rules or not all(word in found.title for word in (f"rank {rank} (", *misdeed.says)):
        return "another cause"
    # torchrun has one status for every rank that ended with another than 0
    if found.status != misdeed.status and not (launcher == "torchrun" and found.status == 1 and misdeed.status):
        return f"exit status {found.status}"
    if found.seconds > limit:
        return f"{found.seconds:.1f} s"
    return f"left behind: {found.left}" if found.left else ""
