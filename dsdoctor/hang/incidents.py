"""Where incidents come from: the files of a watched run, dumps of torch's flight recorders, and ranks that run now.

A watched run has a file a rank. Dumps are of jobs that never knew dsdoctor, one a rank, and nothing in them is executed: torch
writes pickle, which is taken apart by its opcodes. Numbers, texts, lists and dicts are all that a dump holds, and whatever would
import or call something, or shares its parts without an end, is refused; then each field must be what torch writes there. Running
ranks are looked at twice from outside: at the kernel, at the ring of a watched rank, else by py-spy. Judges nothing.
"""

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dsdoctor.checkpoint.inert_pickle import NotUnderstood, read_pickle
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import MAX_READ_BYTES, PRIVATE, is_this_user, make_folder, read_limited, write_bytes
from dsdoctor.core.host import Host
from dsdoctor.core.text import decode, encode
from dsdoctor.hang import outside, processes
from dsdoctor.hang.channel import node_name
from dsdoctor.hang.local_rank import MIN_CPU_SHARE, MIN_MOVED_BYTES, LocalRank, with_call, with_source
from dsdoctor.hang.models import (
    MOVED,
    PROCESSES,
    RECORDERS,
    Frame,
    GroupState,
    Incident,
    Operation,
    RankView,
    Sample,
    ThreadStack,
)
from dsdoctor.hang.processes import RankProcess
from dsdoctor.hang.stacks import Sources, main_of

SCHEMA = "dsdoctor/1"

MAX_RANK_FILES = 100_000
DUMP_NAME = re.compile(r"(?:nccl|fr|comm_lib)_?trace(?:_rank)?_+(\d{1,7})(?:\.json|\.pkl|\.pickle)?", re.ASCII)
RANK_NUMBER = re.compile(r"(?<!\d)\d{1,7}(?!\d)", re.ASCII)
MAX_OPCODES = 50_000_000
"""A recorder of 20,000 calls, each with forty frames, has a fifth of them."""
MAX_DUMP_BYTES = 256 << 20
MAX_CALLS = 2000
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
SAMPLE_INTERVAL_SECONDS = 3.0

FOLDERS = ("/dev/shm", "/tmp")


@dataclass(frozen=True, kw_only=True)
class RankFile:
    """What is written of one rank; ``view`` and what of the incident is known on its node."""

    schema: str = SCHEMA
    kind: str = "hang-rank"
    run: str = ""
    when: float = 0.0
    still: float = 0.0
    after: float = 0.0
    world: int = 0
    silent_hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    left_hosts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nccl: tuple[str, ...] = ()
    view: RankView


@dataclass(frozen=True, kw_only=True)
class _DumpedFrame:
    name: str = ""
    filename: str = ""
    line: Count | None = None


@dataclass(frozen=True, kw_only=True)
class _DumpedCall:
    """One entry of a recorder, with the fields that are read here."""

    collective_seq_id: Count | None = None
    process_group: tuple[str | Count, ...] | None = None
    profiling_name: str | None = None
    state: str | None = None
    retired: bool | None = None
    is_p2p: bool | None = None
    input_sizes: tuple[tuple[Count, ...], ...] | None = None
    input_dtypes: tuple[str, ...] | None = None
    time_created_ns: Count | None = None
    timeout_ms: Count | None = None
    frames: tuple[_DumpedFrame, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _DumpedGroup:
    ranks: str | tuple[Count, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class _Dump:
    entries: tuple[_DumpedCall, ...]
    pg_config: dict[str, _DumpedGroup] | None = None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A process at one moment. ``stacks``: or in words why they cannot be read."""

    clock: float
    facts: processes.ProcessFacts | None
    bytes: int
    children: tuple[float, int, int]
    stacks: tuple[ThreadStack, ...] | str


def write_ranks(folder: Path, incident: Incident) -> None:
    """Write a file for each rank of an incident. Raises OSError."""
    make_folder(folder, mode=0o755)
    for view in incident.ranks:
        rank_file = RankFile(
            run=incident.run,
            when=incident.when,
            still=incident.still,
            after=incident.after,
            world=incident.world,
            silent_hosts=incident.silent_hosts,
            left_hosts=incident.left_hosts,
            nccl=incident.nccl,
            view=view,
        )
        write_bytes(folder / f"rank-{view.rank:05d}.json", encode(rank_file), mode=PRIVATE)


def read_ranks(folder: Path) -> Incident:
    """The newest incident whose files lie in a folder. Raises UsageError where there is none."""
    found: list[RankFile] = []
    for path in sorted(folder.glob("rank-*.json"))[:MAX_RANK_FILES]:
        with contextlib.suppress(msgspec.DecodeError):
            read = decode(_content(path), RankFile)
            found += [read] if read.kind == "hang-rank" else []
    if not found:
        raise UsageError(
            f"{folder} holds no files of a hang watch", hint="name the folder that dsdoctor.run printed: dsdoctor-hang"
        )
    newest = max(found, key=lambda each: each.when)
    same = [each for each in found if each.run == newest.run]
    return Incident(
        world=newest.world,
        still=max(each.still for each in same),
        after=newest.after,
        ranks=tuple(each.view for each in sorted(same, key=lambda each: each.view.rank)),
        silent_hosts=_merged(each.silent_hosts for each in same),
        left_hosts=_merged(each.left_hosts for each in same),
        nccl=next((each.nccl for each in same if each.nccl), ()),
        when=newest.when,
        run=newest.run,
    )


def _merged(hosts_of_files: Iterable[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """What all files say of hosts: two nodes may have one name."""
    found: dict[str, set[int]] = {}
    for hosts in hosts_of_files:
        for host, ranks in hosts.items():
            found.setdefault(host, set()).update(ranks)
    return {host: tuple(sorted(ranks)) for host, ranks in found.items()}


def _content(path: Path, max_bytes: int = MAX_READ_BYTES) -> bytes:
    try:
        return read_limited(path, max_bytes)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint="see who owns it: ls -l") from error


def dumps_in(folder: Path) -> dict[int, Path]:
    """The dumps of a folder by rank."""
    found = ((DUMP_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir()) if path.is_file())
    return {int(name[1]): path for name, path in found if name}


def read_dumps(dumps: dict[int, Path]) -> Incident:
    """What the recorders of all ranks say together. Raises UsageError for a file that is no such dump."""
    views = tuple(_dumped_view(rank, path, _dump_content(path)) for rank, path in sorted(dumps.items()))
    world = max(dumps) + 1
    for view in views:
        for group in view.sample.groups if view.sample else ():
            world = max([world, *(rank + 1 for rank in group.ranks)])
    return Incident(world=world, still=0.0, after=0.0, ranks=views, source=RECORDERS)


def _dump_content(path: Path) -> _Dump:
    content = _content(path, MAX_DUMP_BYTES)
    try:
        return decode(content, _Dump) if content[:1] == b"{" else msgspec.convert(plain_pickle(content), _Dump)
    except (ValueError, RecursionError) as error:  # msgspec's own errors are ValueErrors
        raise UsageError(f"{path} is not a flight recorder dump: {error}", hint="name a folder of them") from error


def _dumped_view(rank: int, path: Path, dump: _Dump) -> RankView:
    entries = [entry for entry in dump.entries if not entry.is_p2p][-MAX_CALLS:]
    names: dict[str, list[Operation]] = {}
    timeouts: dict[str, float] = {}
    for entry in entries:
        name = str(next(iter(entry.process_group or ("0",))))
        names.setdefault(name, []).append(_operation(entry))
        timeouts[name] = (entry.timeout_ms or 0) / 1000
    config = dump.pg_config or {}
    groups = tuple(
        GroupState(
            name=name,
            # a list, or its text
            ranks=tuple(map(int, RANK_NUMBER.findall(str(config[name].ranks)))) if name in config else (),
            sequence=operations[-1].sequence,
            operations=tuple(operations),
            timeout=timeouts[name] or None,
        )
        for name, operations in names.items()
    )
    # where the last recorded call was made: torch writes the innermost frame first
    frames = tuple(
        Frame(file=frame.filename, line=frame.line or 0, function=frame.name)
        for frame in reversed((entries[-1].frames or ()) if entries else ())
    )
    stack = ThreadStack(name="MainThread", frames=frames, main=True)
    world = max((max(group.ranks, default=0) + 1 for group in groups), default=0)
    sample = Sample(rank=rank, world=world, pid=0, time=0.0, joined=True, groups=groups, threads=(stack,))
    return RankView(rank=rank, host=path.name, pid=0, sample=sample)


def _operation(entry: _DumpedCall) -> Operation:
    return Operation(
        sequence=entry.collective_seq_id or 0,
        name=(entry.profiling_name or "").rpartition(":")[2],
        sizes=entry.input_sizes or (),
        types=entry.input_dtypes or (),
        state="done" if entry.retired or entry.state == "completed" else entry.state or "",
        called=(entry.time_created_ns or 0) / 1e9,
    )


def plain_pickle(content: bytes) -> Any:
    """The value of a pickle that holds nothing but plain values; raises ValueError for any other.

    >>> import pickle
    >>> plain_pickle(pickle.dumps({"entries": [{"a": (1, 2.5, None, True)}]}))
    {'entries': [{'a': (1, 2.5, None, True)}]}
    >>> plain_pickle(pickle.dumps(print))
    Traceback (most recent call last):
    ValueError: it holds more than plain values (builtins.print)
    """
    names: set[str] = set()
    try:
        read = read_pickle(content, names, max_opcodes=MAX_OPCODES)
    except NotUnderstood as error:
        raise ValueError(str(error)) from None
    if names:
        raise ValueError(f"it holds more than plain values ({min(names)[:100]})")
    return read


def look_at(ranks: Iterable[RankProcess], host: Host, *, apart: float = SAMPLE_INTERVAL_SECONDS) -> Incident:
    """Snapshot twice at some ranks, so many seconds apart."""
    name = node_name().partition("/")[0]
    watched = {rank.pid: found for rank in ranks if (found := watched_rank(rank, name)) is not None}
    began = time.monotonic()
    first = {rank.pid: take_snapshot(rank.pid, host, known=rank.pid in watched) for rank in ranks}
    progress = {pid: rank.beat.progress for pid, rank in watched.items() if rank.beat}
    time.sleep(max(0.0, began + apart - time.monotonic()))
    views, sources = [], Sources()
    for rank in ranks:
        last = take_snapshot(rank.pid, host, known=rank.pid in watched)
        view = _view(rank, name, last, watched.get(rank.pid), progress.get(rank.pid), sources)
        views.append(_with_activity(view, first[rank.pid], last, uses_gpu(rank.pid)))
    return Incident(
        world=max([len(views), *(rank.world for rank in ranks), *(rank.rank + 1 for rank in ranks)]),
        still=time.monotonic() - began,
        after=0.0,
        ranks=tuple(views),
        when=time.time(),
        source=PROCESSES,
    )


def take_snapshot(pid: int, host: Host, *, known: bool) -> Snapshot:
    """Snapshot at a process. ``known``: it tells its stacks itself."""
    return Snapshot(
        clock=time.monotonic(),
        facts=processes.facts_of(pid),
        bytes=processes.moved_bytes(pid),
        children=processes.work_of_children(pid, processes.all_parents()),
        stacks=() if known else outside.stacks_of(pid, host),
    )


def watched_rank(rank: RankProcess, host: str) -> LocalRank | None:
    """The rank's own ring, where the watch of dsdoctor.run is in it: in the folders that its user alone may write to. Anybody may
    make others that are called alike."""
    user = processes.owner_of(rank.pid)
    for base in FOLDERS if user is not None else ():
        outer = Path(base) / f"dsdoctor-hang-{user}"
        for path in outer.glob(f"*/rank-*-{rank.pid}.ring") if _is_alone(outer, user) else ():
            if not _is_alone(path.parent, user):
                continue
            try:
                found = LocalRank(path, host)
                found.look()
            except (OSError, ValueError):
                continue
            if found.owner != user:
                found.close()
                continue
            return found if found.beat is not None else None
    return None


def _is_alone(folder: Path, user: int | None) -> bool:
    """Whether a folder is a user's alone to write to."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o022


def uses_gpu(pid: int) -> bool:
    """Whether a process has a GPU open: then a thread that only waits may burn its processor."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208
        return any(os.readlink(f"/proc/{pid}/fd/{name}").startswith("/dev/nvidia") for name in names)  # noqa: PTH115
    except OSError:
        return False


def _view(
    rank: RankProcess, host: str, snapshot: Snapshot, watched: LocalRank | None, progress: int | None, sources: Sources
) -> RankView:
    if watched is not None:
        watched.look()
        seen = watched.view()
        moved = watched.beat is not None and watched.beat.progress != progress
        return replace(seen, rank=rank.rank, activity=MOVED if moved else "")
    threads = () if isinstance(snapshot.stacks, str) else snapshot.stacks
    sample = Sample(rank=rank.rank, world=rank.world, pid=rank.pid, time=time.monotonic(), joined=True, threads=threads)
    sample = with_source(sample, sources) if is_this_user(processes.owner_of(rank.pid)) else sample
    view = RankView(
        rank=rank.rank,
        host=host,
        pid=rank.pid,
        sample=sample,
        state=snapshot.facts.state if snapshot.facts else "",
        ended="" if snapshot.facts else "it exited while it was sampled",
        waits=processes.waits_in(rank.pid),
        unread=snapshot.stacks if isinstance(snapshot.stacks, str) else "",
    )
    return with_call(view) if snapshot.facts else view


def _with_activity(view: RankView, first: Snapshot, last: Snapshot, gpu: bool) -> RankView:
    """The view with why it is not still, in words, as far as two looks tell."""
    seconds = max(last.clock - first.clock, 0.1)
    words = [view.activity] if view.activity else []
    if _main(first) != _main(last):
        words.append(f"it was at 2 places in {seconds:.0f} s")
    if (
        first.facts
        and last.facts
        and not gpu
        and (share := (last.facts.cpu - first.facts.cpu) / seconds) >= MIN_CPU_SHARE
    ):
        words.append(f"it used {share:.0%} of a processor")
    if (moved := last.bytes - first.bytes) >= MIN_MOVED_BYTES:
        words.append(f"it read or wrote {moved >> 20} MiB")
    if (share := (last.children[0] - first.children[0]) / seconds) >= MIN_CPU_SHARE:
        words.append(f"its child processes used or waited for {share:.0%} of a processor")
    return replace(view, activity=", ".join(words))


def _main(snapshot: Snapshot) -> tuple[Frame, ...]:
    return () if isinstance(snapshot.stacks, str) else main_of(snapshot.stacks)
