"""Starts ranks of this machine, and waits until rank 0 has written its report or the time is up. Acts; judges nothing."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dsdoctor.comm.launch.commands import HostOrder, variables_of
from dsdoctor.comm.rendezvous.notices import Notice, send_notice
from dsdoctor.core.files import PRIVATE, open_new
from dsdoctor.core.processes import end_session, ending_of

MODULE = "dsdoctor.comm"
PARENT = "DSDOCTOR_COMM_PARENT"
"""The process at whose end a local rank ends too."""
PORTS = range(20_000, 29_000)
"""Below the ports that the kernel gives away by itself (ip_local_port_range begins at 32768)."""
AFTER = 3.0
"""Seconds in which the other ranks must follow rank 0."""
LOOK = 0.05
AGAIN = 0.5
"""Seconds between two attempts to tell rank 0 of a rank that has ended."""


@dataclass(frozen=True, kw_only=True)
class RankEnded:
    """A rank's process that has ended: how, None for success, and its verdict, or the last line it wrote."""

    rank: int
    host: str
    how: str | None
    last_line: str = ""


@dataclass(frozen=True, kw_only=True)
class RankTold:
    """The outcome of all ranks: rank 0's stdout, and which ranks ended by themselves and how; the ends of files by their names."""

    document: str
    ended: tuple[RankEnded, ...]
    files: dict[str, str] = field(default_factory=dict)


def free_port() -> int:
    """A port of this host on which nothing listens now."""
    for port in random.sample(PORTS, 100):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                tried.bind(("", port))
                return port
    return PORTS[0]


def start_here(order: HostOrder, environment: Mapping[str, str], folder: Path) -> RankTold:
    """Run all ranks here. Whatever happens, no rank is left running."""
    endings, started = Endings(order), LocalRanks(order, environment, folder)
    try:
        started.follow(endings.add, endings.over)
    finally:
        started.end()
    return RankTold(document=started.document(), ended=tuple(endings.told.values()))


class LocalRanks:
    """The ranks of an order as processes of this machine, each in a session of its own. Rank 0 writes to our own stderr; the output
    of every other rank goes to its own files in ``folder``."""

    def __init__(self, order: HostOrder, environment: Mapping[str, str], folder: Path) -> None:
        self._order, self._environment, self._folder = order, environment, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        try:
            for rank in order.ranks:
                self._processes[rank] = self._start(rank)
        except BaseException:
            self.end()
            raise

    def follow(self, hear: Callable[[RankEnded], None], over: Callable[[], bool]) -> None:
        """Say of each rank that it has ended, until all have, the time is up, or it is ``over``."""
        until = time.monotonic() + self._order.seconds
        while len(self._ended) < len(self._processes) and time.monotonic() < until and not over():
            time.sleep(LOOK)
            self._hear_all(hear)
        self._hear_all(hear)

    def _hear_all(self, hear: Callable[[RankEnded], None]) -> None:
        for rank, process in self._processes.items():
            if rank not in self._ended and process.poll() is not None:
                self._ended.add(rank)
                hear(self._ending(rank))

    def document(self) -> str:
        """What rank 0 has written to stdout."""
        return self._output(0, "out").read_text(errors="replace")

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                end_session(process.pid)
            process.wait()

    def _start(self, rank: int) -> "subprocess.Popen[bytes]":
        out_path, err_path = (self._output(rank, kind) for kind in ("out", "err"))
        with open_new(out_path, mode=PRIVATE) as out, open_new(err_path, mode=PRIVATE) as err:
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, *self._order.arguments],
                env={**self._environment, **variables_of(self._order, rank), PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if rank else None,
                start_new_session=True,
            )

    def _ending(self, rank: int) -> RankEnded:
        code = self._processes[rank].returncode
        lines = self._output(rank, "err").read_text(errors="replace").split("\n") if rank else []
        verdicts = [line.removeprefix("✗ ") for line in lines if line.startswith("✗ ")]
        last = next((line.strip() for line in (*verdicts, *reversed(lines)) if line.strip()), "")
        how = ending_of(-code if code < 0 else code << 8)
        return RankEnded(rank=rank, host=socket.gethostname(), how=how, last_line=last[:300])

    def _output(self, rank: int, kind: str) -> Path:
        return self._folder / f"started-{rank:05d}.{kind}"


class Endings:
    """The ranks that have ended. Rank 0 is told of them: of one that never came to it this is the reason. Tried again until it
    is heard."""

    def __init__(self, order: HostOrder) -> None:
        self._order = order
        self.told: dict[int, RankEnded] = {}
        self._waiting: list[RankEnded] = []
        self._next = 0.0
        self._rank_0_ended: float | None = None

    def add(self, ended: RankEnded, *, knows: bool = False) -> None:
        """A rank that ended. ``knows``: rank 0 has been told; of one that ended well it need not be."""
        self.told[ended.rank] = ended
        if ended.rank == 0:
            self._rank_0_ended = time.monotonic()
        elif ended.how and not knows:
            self._waiting.append(ended)

    def over(self) -> bool:
        """Whether rank 0 has ended, and the others had their time to follow. Called again and again; tells rank 0 meanwhile."""
        if self._rank_0_ended is not None:
            return time.monotonic() > self._rank_0_ended + AFTER
        self._tell_one()
        return False

    def _tell_one(self) -> None:
        """One of what was not heard yet: a port that does not answer takes time, and the ranks are looked after meanwhile."""
        if not self._waiting or time.monotonic() < self._next:
            return
        ended = self._waiting.pop(0)
        why = f"its process ended ({ended.how})" + (f": {ended.last_line}" if ended.last_line else "")
        notice = Notice(run=self._order.token, rank=ended.rank, host=ended.host, why=why)
        heard = send_notice(self._order.master, self._order.port, notice, seconds=0.0)
        self._waiting += [] if heard else [ended]
        self._next = time.monotonic() + (0.0 if heard else AGAIN)
