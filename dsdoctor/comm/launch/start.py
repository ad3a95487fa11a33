"""Starts ranks of this machine, and waits until rank 0 has written its report or the time is up. Acts; judges nothing."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.comm.launch.commands import HostOrder, Started, local_ranks
from dsdoctor.comm.models import Rank
from dsdoctor.comm.rendezvous.notices import send_notice
from dsdoctor.core.files import PRIVATE, open_new
from dsdoctor.core.processes import end_session, ending_of

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
    until, ended = time.monotonic() + order.seconds, list[RankEnded]()
    absences = Absences(order)
    started = LocalRanks(local_ranks(order, python=sys.executable), environment, folder)
    try:
        while started.running(0) and time.monotonic() < until:
            for each in started.newly_ended():
                ended.append(each)
                absences.add(each, socket.gethostname())
            absences.send()
            time.sleep(LOOK)
        after = min(time.monotonic() + AFTER, until)
        while started.running() and time.monotonic() < after:
            time.sleep(LOOK)
        ended += started.newly_ended()
    finally:
        started.end()
    return RankTold(document=started.document(), ended=tuple(ended))


class LocalRanks:
    """Ranks as processes of this machine, each in a session of its own. Rank 0 writes to our own stderr; the output of every other
    rank goes to its own files in ``folder``."""

    def __init__(self, ranks: Sequence[Started], environment: Mapping[str, str], folder: Path) -> None:
        self._ranks, self._environment, self._folder = tuple(ranks), environment, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: set[int] = set()
        try:
            for started in self._ranks:
                self._processes[started.rank] = self._start(started)
        except BaseException:
            self.end()
            raise

    def running(self, rank: int | None = None) -> bool:
        """Whether that rank runs, or any."""
        wanted = self._processes.values() if rank is None else [self._processes[rank]]
        return any(process.poll() is None for process in wanted)

    def newly_ended(self) -> tuple[RankEnded, ...]:
        """The ranks that ended since the last call."""
        found = [
            started
            for started in self._ranks
            if started.rank not in self._ended and self._processes[started.rank].poll() is not None
        ]
        self._ended |= {started.rank for started in found}
        return tuple(self._ending(started) for started in found)

    def document(self) -> str:
        """What rank 0 has written to stdout."""
        return self._output(0, "out").read_text(errors="replace")

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes.values():
            if process.poll() is None:
                end_session(process.pid)
            process.wait()

    def _start(self, started: Started) -> "subprocess.Popen[bytes]":
        out_path, err_path = (self._output(started.rank, kind) for kind in ("out", "err"))
        with open_new(out_path, mode=PRIVATE) as out, open_new(err_path, mode=PRIVATE) as err:
            return subprocess.Popen(
                list(started.argv),
                env={**self._environment, **started.environment, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err if started.rank else None,
                start_new_session=True,
            )

    def _ending(self, started: Started) -> RankEnded:
        code = self._processes[started.rank].returncode
        lines = self._output(started.rank, "err").read_text(errors="replace").split("\n") if started.rank else []
        verdicts = [line.removeprefix("✗ ") for line in lines if line.startswith("✗ ")]
        last = next((line.strip() for line in (*verdicts, *reversed(lines)) if line.strip()), "")
        how = ending_of(-code if code < 0 else code << 8)
        return RankEnded(rank=started.rank, host=socket.gethostname(), how=how, last_line=last[:300])

    def _output(self, rank: int, kind: str) -> Path:
        return self._folder / f"started-{rank:05d}.{kind}"


class Absences:
    """Tells rank 0 which ranks ended, and how: of one that never came to it this is the reason. Tried again until it is heard."""

    def __init__(self, order: HostOrder) -> None:
        self._me = Rank(
            rank=0,
            world=order.world,
            local_rank=0,
            local_world=None,
            launcher="dsdoctor",
            master=order.master,
            port=order.port,
            run=order.token,
        )
        self._waiting: list[tuple[RankEnded, str]] = []
        self._next = 0.0

    def add(self, ended: RankEnded, host: str) -> None:
        """A rank that ended; one that ended well is none."""
        if ended.how and ended.rank:
            self._waiting.append((ended, host))

    def send(self) -> None:
        """Tell one of what was not heard yet: a port that does not answer takes time, and the ranks are looked after meanwhile."""
        if not self._waiting or time.monotonic() < self._next:
            return
        first, *rest = self._waiting
        heard = self._heard(*first)
        self._waiting = rest if heard else [*rest, first]
        self._next = time.monotonic() + (0.0 if heard else AGAIN)

    def _heard(self, ended: RankEnded, host: str) -> bool:
        why = f"its process ended ({ended.how})" + (f": {ended.last_line}" if ended.last_line else "")
        return send_notice(replace(self._me, rank=ended.rank), host, why, seconds=0.0)
