"""Ranks that run now -> an incident, by two looks from outside: at the kernel, at the ring of a watched rank, else by py-spy.
Looks, judges nothing."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.host import Host
from dsdoctor.hang import processes, py_spy
from dsdoctor.hang.local_rank import LocalRank, with_call, with_source
from dsdoctor.hang.models import MOVED, PROCESSES, Frame, Incident, RankView, Sample, ThreadStack
from dsdoctor.hang.rank_processes import RankProcess
from dsdoctor.hang.run_identity import node_name
from dsdoctor.hang.stacks import main_of

APART = 3.0
CPU, BYTES = 0.10, 1 << 20
"""A rank works that took that share of a processor, or moved so many bytes."""
FOLDERS = ("/dev/shm", "/tmp")


@dataclass(frozen=True, kw_only=True)
class Look:
    """A process at one moment. ``stacks``: or in words why they cannot be read."""

    clock: float
    facts: processes.ProcessFacts | None
    bytes: int
    children: tuple[float, int]
    stacks: tuple[ThreadStack, ...] | str


def look_at(ranks: Iterable[RankProcess], host: Host, *, apart: float = APART) -> Incident:
    """Look twice at some ranks, so many seconds apart."""
    name = node_name().partition("/")[0]
    watched = {rank.pid: found for rank in ranks if (found := watched_rank(rank, name)) is not None}
    began = time.monotonic()
    first = {rank.pid: look_once(rank.pid, host, known=rank.pid in watched) for rank in ranks}
    progress = {pid: rank.beat.progress for pid, rank in watched.items() if rank.beat}
    time.sleep(max(0.0, began + apart - time.monotonic()))
    views = []
    for rank in ranks:
        last = look_once(rank.pid, host, known=rank.pid in watched)
        view = _view(rank, name, last, watched.get(rank.pid), progress.get(rank.pid))
        views.append(_with_activity(view, first[rank.pid], last, uses_gpu(rank.pid)))
    return Incident(
        world=max([len(views), *(rank.world for rank in ranks), *(rank.rank + 1 for rank in ranks)]),
        still=time.monotonic() - began,
        after=0.0,
        ranks=tuple(views),
        when=time.time(),
        source=PROCESSES,
    )


def look_once(pid: int, host: Host, *, known: bool) -> Look:
    """Look at a process. ``known``: it tells its stacks itself."""
    return Look(
        clock=time.monotonic(),
        facts=processes.facts_of(pid),
        bytes=processes.moved_bytes(pid),
        children=processes.work_of_children(pid, processes.all_parents()),
        stacks=() if known else py_spy.stacks_of(pid, host),
    )


def watched_rank(rank: RankProcess, host: str) -> LocalRank | None:
    """The rank's own ring, where the watch of dsdoctor.run is in it."""
    for base in FOLDERS:
        for path in Path(base).glob(f"dsdoctor-hang-*/*/rank-*-{rank.pid}.ring"):
            try:
                found = LocalRank(path, host)
                found.look()
            except (OSError, ValueError):
                continue
            return found if found.beat is not None else None
    return None


def uses_gpu(pid: int) -> bool:
    """Whether a process has a GPU open: then a thread that only waits may burn its processor."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
        return any(os.readlink(f"/proc/{pid}/fd/{name}").startswith("/dev/nvidia") for name in names)  # noqa: PTH115
    except OSError:
        return False


def _view(rank: RankProcess, host: str, look: Look, watched: LocalRank | None, progress: int | None) -> RankView:
    if watched is not None:
        watched.look()
        seen = watched.view()
        moved = watched.beat is not None and watched.beat.progress != progress
        return replace(seen, rank=rank.rank, activity=MOVED if moved else "")
    state = look.facts.state if look.facts else ""
    threads = () if isinstance(look.stacks, str) else look.stacks
    sample = with_source(
        Sample(rank=rank.rank, world=rank.world, pid=rank.pid, time=time.time(), joined=True, threads=threads)
    )
    view = RankView(
        rank=rank.rank,
        host=host,
        pid=rank.pid,
        sample=sample,
        state=state,
        ended="" if look.facts else "it ended while it was looked at",
        waits=processes.waits_in(rank.pid),
        unread=look.stacks if isinstance(look.stacks, str) else "",
    )
    return with_call(view) if look.facts else view


def _with_activity(view: RankView, first: Look, last: Look, gpu: bool) -> RankView:
    """The view with why it is not still, in words, as far as two looks tell."""
    seconds = max(last.clock - first.clock, 0.1)
    words = [view.activity] if view.activity else []
    if _main(first) != _main(last):
        words.append(f"it stood at 2 places in {seconds:.0f} s")
    if first.facts and last.facts and not gpu and (share := (last.facts.cpu - first.facts.cpu) / seconds) >= CPU:
        words.append(f"it took {share:.0%} of a processor")
    if (moved := last.bytes - first.bytes) >= BYTES:
        words.append(f"it read or wrote {moved >> 20} MiB")
    if (share := (last.children[0] - first.children[0]) / seconds) >= CPU:
        words.append(f"its child processes took or waited for {share:.0%} of a processor")
    return replace(view, activity=", ".join(words))


def _main(look: Look) -> tuple[Frame, ...]:
    return () if isinstance(look.stacks, str) else main_of(look.stacks)
