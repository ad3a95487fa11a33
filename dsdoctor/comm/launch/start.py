"""Starts ranks of this machine, and waits until rank 0 has written its report or the time is up. Acts; judges nothing."""

import contextlib
import os
import random
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.comm.rendezvous.notices import Notice, send_notice
from dsdoctor.core.cgroups import Cgroups, read_cgroups
from dsdoctor.core.errors import ImpossiblePlan, NotWritten
from dsdoctor.core.files import PRIVATE, held_folder, make_folder, open_new, sweep, write_text
from dsdoctor.core.host import CHILD_SCRIPTS, Host, LocalHost
from dsdoctor.core.processes import end_session, ending_of
from dsdoctor.core.workspace import TEMPORARY, is_exchanged
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.hosts.ssh import for_any_shell
from dsdoctor.ranks.launchers import TORCHRUN

# The folder for what ranks wrote that failed, and what is let in there of a file that another host sends: names and sizes.


FOLDER, PREFIX = "evidence", "dsdoctor-comm-"
MAX_FILE_BYTES = 1 << 16
MAX_FILES = 64
NAME = re.compile(r"rank-\d{5,7}\.(?:log|stack\.txt|flight\.json|nccl\.log)", re.ASCII)


def write_files(folder: Path, files: Mapping[str, str]) -> tuple[str, ...]:
    """Write files into the folder's ``evidence``, those with another name than ours left out; the paths."""
    wanted = [(name, text) for name, text in files.items() if NAME.fullmatch(name) and text][:MAX_FILES]
    if wanted:
        make_folder(folder / FOLDER, mode=0o700)
    for name, text in wanted:
        write_text(folder / FOLDER / name, text[-MAX_FILE_BYTES:], mode=PRIVATE, errors="replace")
    return tuple(str(folder / FOLDER / name) for name, _ in wanted)


RUNNING = ".running"
"""In a folder of ranks that run: who is killed leaves it there."""


@contextlib.contextmanager
def private_folder() -> Iterator[tuple[Path, Callable[[], None]]]:
    """A new folder for this user alone, removed at the end unless the second of the two is called: among the temporary files, where
    nobody can exchange it, in memory where these have no room. What killed runs left there goes first.

    Raises NotWritten, and ImpossiblePlan where others could exchange it everywhere.
    """
    folder, held = _held_private_folder()
    kept: list[bool] = []
    try:
        yield folder, lambda: kept.append(True)
    finally:
        if kept:
            with contextlib.suppress(OSError):
                (folder / RUNNING).unlink()
        else:
            shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _held_private_folder() -> tuple[Path, int]:
    failure: OSError | None = None
    for place in dict.fromkeys((tempfile.gettempdir(), *TEMPORARY, "/dev/shm")):
        if is_exchanged(place):
            continue
        with contextlib.suppress(OSError):
            sweep(Path(place), PREFIX, _is_left)
        try:
            folder, held = held_folder(Path(place), PREFIX)
        except OSError as error:
            failure = failure or error
            continue
        try:
            write_text(folder / RUNNING, "", mode=PRIVATE)
        except OSError as error:
            failure = failure or error
            shutil.rmtree(folder, ignore_errors=True)
            os.close(held)
            continue
        return folder, held
    if failure is not None:
        raise NotWritten(failure.errno, failure.strerror, failure.filename or "the folder for temporary files")
    raise ImpossiblePlan(
        "no folder for temporary files can be used: others could replace what ranks write there",
        hint="export TMPDIR=/a/folder/you/own",
    )


def _is_left(folder: Path) -> bool:
    """Whether a folder that nobody holds is one of a killed run: what a run keeps for the user is neither empty nor marked."""
    return (folder / RUNNING).exists() or not any(folder.iterdir())


# How many ranks, and where -> the orders of the hosts, and the variables of each rank. Starts nothing.


@dataclass(frozen=True, kw_only=True)
class HostOrder:
    """The ranks of a host: ``first`` and how many of the whole world, who is the master, and the arguments of each.

    ``token`` is the run's, ``seconds`` the most that they may take, ``hosts`` what ``rank_of`` reads in DSDOCTOR_COMM_HOSTS.
    """

    first: int
    count: int
    world: int
    master: str
    port: int
    token: str
    seconds: float
    hosts: str = ""
    arguments: tuple[str, ...] = ()

    @property
    def ranks(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.count)


def variables_of(order: HostOrder, rank: int) -> dict[str, str]:
    """What tells a rank of an order who it is: ``rank_of`` reads it."""
    return {
        TORCHRUN.rank: str(rank),
        TORCHRUN.world: str(order.world),
        TORCHRUN.local_rank: str(rank - order.first),
        TORCHRUN.local_world: str(order.count),
        "MASTER_ADDR": order.master,
        "MASTER_PORT": str(order.port),
        "DSDOCTOR_COMM_RUN": order.token,
        **({"DSDOCTOR_COMM_HOSTS": order.hosts} if order.hosts else {}),
    }


def host_orders(
    hosts: Sequence[Slots], *, master: str, port: int, token: str, seconds: float, arguments: Sequence[str] = ()
) -> dict[str, HostOrder]:
    """The order of each host of a hostfile, ranks in its order."""
    names = ",".join(f"{host.name}*{host.slots}" for host in hosts)
    order = HostOrder(
        first=0,
        count=0,
        world=sum(host.slots for host in hosts),
        master=master,
        port=port,
        token=token,
        hosts=names,
        seconds=seconds,
        arguments=tuple(arguments),
    )
    orders: dict[str, HostOrder] = {}
    for host in hosts:
        order = replace(order, first=order.first + order.count, count=host.slots)
        orders[host.name] = order
    return orders


def remote_command(argv: Sequence[str], folder: str, variables: Mapping[str, str], name: str = "") -> str:
    """One command for any login shell: ``argv`` with ``variables`` in ``folder``, at home where that is not there. ``name``: what
    the shell calls itself."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    script = f"cd {shlex.quote(folder)} 2>/dev/null || cd || exit\n{exports}exec {shlex.join(argv)}\n"
    return for_any_shell(script, name or argv[0])


def module_command(python: str, module: str, *arguments: str, folder: str) -> tuple[str, ...]:
    """As ``python -m module`` of any release, without the modules of the current folder, which others may have put there: but
    where dsdoctor itself has been taken from ``folder``, after all others."""
    last = [folder] if Path(__file__).parents[3] == Path(folder) else []
    code = (
        f"import sys; sys.path[:] = [*filter(None, sys.path), *{last!r}]; from runpy import run_module; "
        f"run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return (python, "-c", code, *arguments)


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


MIN_RANK_MIB, MIN_RANK_TASKS = 150, 8
"""What a rank takes at the least (torch 2.13 on processors, measured: 190 to 330 MiB of its own and 11 tasks)."""


def max_ranks(host: Host) -> tuple[int, str]:
    """How many ranks this machine can bear at most, and by what: its memory, or the tasks that it allows."""
    groups = read_cgroups(host)
    meminfo = dict(line.split(":", 1) for line in (host.read("/proc/meminfo") or "").splitlines() if ":" in line)
    free = sum(int(meminfo[name].split()[0]) << 10 for name in ("MemAvailable", "SwapFree") if name in meminfo)
    bounds: list[tuple[int, str]] = []
    if free:
        bounds.append((free, f"{free >> 20:,} MiB of memory are free"))
    if groups.memory is not None:
        bounds.append((groups.memory, f"its memory cgroup allows {groups.memory >> 20:,} MiB"))
    found = [(size // (MIN_RANK_MIB << 20), f"{what}, and a rank takes {MIN_RANK_MIB} MiB") for size, what in bounds]
    tasks = [(left, f"{what}, and a rank takes {MIN_RANK_TASKS}") for left, what in _free_tasks(host, groups)]
    found += [(left // MIN_RANK_TASKS, what) for left, what in tasks]
    return min(found, default=(sys.maxsize, ""))


def _free_tasks(host: Host, groups: Cgroups) -> Iterator[tuple[int, str]]:
    """Processes and threads that may still be started here, by each limit."""
    running = (host.read("/proc/loadavg") or "").split("/")[-1].split(" ")[0]
    for name in ("pid_max", "threads-max"):
        most = (host.read(f"/proc/sys/kernel/{name}") or "").strip()
        if most.isdecimal() and running.isdecimal():
            left = max(int(most) - int(running), 0)
            yield left, f"{left:,} more processes and threads may be started (kernel.{name})"
    if groups.most_tasks is not None:
        left = max(groups.most_tasks - groups.tasks, 0)
        yield left, f"its pids cgroup allows {left:,} more processes and threads"
    most_of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most_of_user != resource.RLIM_INFINITY and os.geteuid() != 0:
        yield most_of_user, f"its user may have {most_of_user:,} processes and threads (ulimit -u)"


def check_proc(place: Path = Path("/proc/self/stat")) -> None:
    """Raises ImpossiblePlan where the kernel does not tell of processes and networks: a rank asks for both."""
    if not place.exists():
        raise ImpossiblePlan("a rank needs /proc, which is not mounted here", hint="mount -t proc proc /proc")


def check_room(count: int, host: Host) -> None:
    """Raises ImpossiblePlan where so many ranks are certainly too many for this machine."""
    most, because = max_ranks(host)
    if count > most:
        raise ImpossiblePlan(
            f"{count:,} ranks were requested, but this machine supports {most:,} at most: {because}",
            hint=f"give --nproc {most} or less" if most else "check what uses its memory and its processes",
        )


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
    """Run all ranks here. Whatever happens, no rank is left running. Raises ImpossiblePlan where they are too many."""
    check_room(order.count, LocalHost())
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
                [sys.executable, str(CHILD_SCRIPTS / "run_module.py"), MODULE, *self._order.arguments],
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
