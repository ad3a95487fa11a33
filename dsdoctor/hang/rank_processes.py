"""Process numbers as a user has them -> the ranks that are meant: of a launcher those below it. Looks."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dsdoctor.core.errors import UsageError
from dsdoctor.hang.processes import all_parents, facts_of
from dsdoctor.ranks.launchers import RANKS, TORCHRUN

WORLDS = (
    "WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
PYTHONS = ("python", "pypy")


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A rank's process. ``rank``: as its environment says, else its place among those that were named. ``world``: 0 where that
    is not known."""

    pid: int
    rank: int
    world: int


def rank_processes(pids: Iterable[int]) -> tuple[RankProcess, ...]:
    """The ranks among some processes and below them. Raises UsageError for processes that are not there, or of two runs."""
    parents = all_parents()
    found: list[RankProcess] = []
    for pid in dict.fromkeys(pids):
        if facts_of(pid) is None:
            raise UsageError(f"there is no process {pid}", hint="pgrep -af python shows those that are")
        for each in dict.fromkeys(python_below(rank, parents) for rank in ranks_below(pid, parents)):
            if all(each != known.pid for known in found):
                found.append(_known(each, len(found)))
    by_rank: dict[int, RankProcess] = {}
    for process in found:
        if process.rank in by_rank:
            pair = f"{by_rank[process.rank].pid} and {process.pid}"
            raise UsageError(f"processes {pair} both are rank {process.rank}", hint="name the processes of one run")
        by_rank[process.rank] = process
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def ranks_below(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """A rank itself; of what is none, a launcher, the topmost ranks that it started; the process itself where there are none."""
    if TORCHRUN.rank in environment_of(pid):
        return (pid,)
    below = tuple(_topmost(pid, parents, (TORCHRUN.rank,)))
    if below or any(name in environment_of(pid) for name in RANKS):
        return below or (pid,)
    return tuple(_topmost(pid, parents, RANKS)) or (pid,)


def python_below(pid: int, parents: Mapping[int, int]) -> int:
    """The Python that a wrapper around it (a shell, numactl) runs; the process itself where there is none."""
    if is_python(pid):
        return pid
    children = sorted(child for child, parent in parents.items() if parent == pid)
    return next((found for child in children if is_python(found := python_below(child, parents))), pid)


def is_python(pid: int) -> bool:
    """By the name of its program."""
    try:
        return os.readlink(f"/proc/{pid}/exe").rpartition("/")[2].startswith(PYTHONS)  # noqa: PTH115
    except OSError:
        return False


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty where this user may not read it."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            pairs = file.read(1 << 20).decode(errors="replace").split("\0")
    except OSError:
        return {}
    return {name: value for name, mark, value in (pair.partition("=") for pair in pairs) if mark}


def _topmost(pid: int, parents: Mapping[int, int], names: tuple[str, ...]) -> Iterator[int]:
    for child in sorted(child for child, parent in parents.items() if parent == pid):
        if any(name in environment_of(child) for name in names):
            yield child
        else:
            yield from _topmost(child, parents, names)


def _known(pid: int, place: int) -> RankProcess:
    environment = environment_of(pid)
    return RankProcess(
        pid=pid,
        rank=next((int(environment[name]) for name in RANKS if environment.get(name, "").isdigit()), place),
        world=next((int(environment[name]) for name in WORLDS if environment.get(name, "").isdigit()), 0),
    )
