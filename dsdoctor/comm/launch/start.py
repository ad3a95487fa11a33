"""Starts ranks, and waits until rank 0 has written its report or the time is up. Acts; judges nothing."""

import contextlib
import os
import random
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.comm.launch.commands import Started
from dsdoctor.core.files import PRIVATE, open_new, write_text
from dsdoctor.core.processes import end_session, ending_of

RUN = "DSDOCTOR_COMM_RUN"
PARENT = "DSDOCTOR_COMM_PARENT"
"""The process at whose end a local rank ends too."""
PORTS = range(20_000, 29_000)
"""Below the ports that the kernel gives away by itself (ip_local_port_range begins at 32768)."""
AFTER = 3.0
"""Seconds in which the other ranks must follow rank 0."""
LOOK = 0.05
LOGINS, LOGIN = 8, 1.0
"""So many connections to one sshd at once, then a pause: it drops those above its MaxStartups that have not logged in."""


@dataclass(frozen=True, kw_only=True)
class RankEnded:
    """A rank's process that has ended: how, None for success, and its verdict, or the last line it wrote."""

    rank: int
    host: str
    how: str | None
    last_line: str = ""


@dataclass(frozen=True, kw_only=True)
class RankTold:
    """The outcome of all ranks: rank 0's stdout, and which ranks ended by themselves and how."""

    document: str
    ended: tuple[RankEnded, ...]


def free_port() -> int:
    """A port of this host on which nothing listens now."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                tried.bind(("", port))
                return port
    return PORTS[0]


def start_all(ranks: Sequence[Started], environment: Mapping[str, str], folder: Path, *, seconds: float) -> RankTold:
    """Run all ranks, for at most ``seconds``. Whatever happens, no rank is left running."""
    until = time.monotonic() + seconds
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, RankEnded] = {}
    try:
        for started in ranks:
            if (
                started.open_stdin
                and [other.host for other in ranks[: started.rank]].count(started.host) % LOGINS == LOGINS - 1
            ):
                time.sleep(LOGIN)
            processes.append(_start(started, environment, folder))
        while processes[0].poll() is None and time.monotonic() < until:
            _reap(ranks, processes, ended, folder)
            time.sleep(LOOK)
        after = min(time.monotonic() + AFTER, until)
        while any(process.poll() is None for process in processes) and time.monotonic() < after:
            time.sleep(LOOK)
        _reap(ranks, processes, ended, folder)
    finally:
        for process in processes:
            _end(process)
    return RankTold(document=_output(folder, 0, "out").read_text(errors="replace"), ended=tuple(ended.values()))


def _start(started: Started, environment: Mapping[str, str], folder: Path) -> "subprocess.Popen[bytes]":
    """Rank 0 writes to our own stderr; the output of every other rank goes to its own files."""
    out_path, err_path = (_output(folder, started.rank, kind) for kind in ("out", "err"))
    with open_new(out_path, mode=PRIVATE) as out, open_new(err_path, mode=PRIVATE) as err:
        return subprocess.Popen(
            list(started.argv),
            env={**environment, **started.environment, PARENT: str(os.getpid())},
            stdin=subprocess.PIPE if started.open_stdin else subprocess.DEVNULL,
            stdout=out,
            stderr=err if started.rank else None,
            start_new_session=True,
        )


def _reap(
    ranks: Sequence[Started], processes: Sequence["subprocess.Popen[bytes]"], ended: dict[int, RankEnded], folder: Path
) -> None:
    """Note which ranks ended, also in a file that rank 0 can read while it waits."""
    for started, process in zip(ranks, processes, strict=False):
        code = process.poll()
        if code is None or started.rank in ended:
            continue
        how = ending_of(-code if code < 0 else code << 8)
        lines = _output(folder, started.rank, "err").read_text(errors="replace").split("\n") if started.rank else []
        verdicts = [line.removeprefix("✗ ") for line in lines if line.startswith("✗ ")]
        last = next((line.strip() for line in (*verdicts, *reversed(lines)) if line.strip()), "")
        ended[started.rank] = RankEnded(rank=started.rank, host=started.host, how=how, last_line=last[:300])
        if how and started.rank:
            made = gone_file(folder, started.environment.get(RUN, ""), started.rank)
            write_text(made, f"{how}{': ' if last else ''}{last[:300]}", errors="replace")


def gone_file(folder: Path, run: str, rank: int) -> Path:
    """The file that says that a rank of this run has ended."""
    return folder / f"gone-{run[:8]}-{rank:05d}.txt"


def _output(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"started-{rank:05d}.{kind}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        end_session(process.pid)
    if process.stdin:
        process.stdin.close()
    process.wait()
