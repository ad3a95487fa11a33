"""An allocation that failed: what limits this process, which limit refused it, and what of the script's keeps tensors.

On the host an allocation fails by a limit of the process (setrlimit(2): RLIMIT_AS, RLIMIT_DATA), by strict overcommit
(vm.overcommit_memory 2), or because it is larger than the machine. A full control group or a full machine kills instead.
"""

import math
import re
import resource
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from dsdoctor.core.cgroups import read_cgroups
from dsdoctor.core.host import Host
from dsdoctor.core.script import is_user_file
from dsdoctor.memory.ledger import amount

MIB = 1 << 20
NEAR_LIMIT_SHARE = 0.97
"""Where it is not known how much was asked for, a limit counts as met from this share on: of what the process had at most."""
ASKED = (
    re.compile(r"tried to allocate (?P<count>\d+)(?P<unit>) bytes"),
    re.compile(r"[Tt]ried to allocate (?P<count>[\d.]+) (?P<unit>[KMGT]iB)"),
    re.compile(r"Unable to allocate (?P<count>[\d.]+) (?P<unit>[KMGT]iB|bytes) for an array"),
)
UNITS = {"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}
MIN_TENSORS = 8
"""Tensors in one container from which on it is told: fewer are what a step itself has in hand."""
MAX_ENTRIES = 10_000
"""Entries of one container that are looked at."""


@dataclass(frozen=True, kw_only=True)
class HostLimits:
    """Bytes; None for what is not limited or cannot be read. ``mapped`` and ``data`` are the most that the process has had."""

    resident: int | None = None
    mapped: int | None = None
    data: int | None = None
    address_space: int | None = None
    data_limit: int | None = None
    total: int | None = None
    available: int | None = None
    swap: int | None = None
    commit_limit: int | None = None
    committed: int | None = None
    group: int | None = None
    group_used: int | None = None


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the script has a name for, and where: a container, and how many of its tensors keep a graph and how many bytes its
    tensors are; or one tensor that is the sum of ``count`` tensors with their graphs (``is_sum``)."""

    name: str
    place: str
    count: int
    size: int = 0
    is_sum: bool = False


def asked_bytes(said: str) -> int | None:
    """What an exception says was asked for, in bytes.

    >>> asked_bytes("you tried to allocate 2000000000 bytes."), asked_bytes("Tried to allocate 1.50 GiB. GPU 0")
    (2000000000, 1610612736)
    """
    found = next((match for pattern in ASKED if (match := pattern.search(said))), None)
    return int(float(found["count"]) * UNITS[found["unit"]]) if found else None


def look_limits(host: Host) -> HostLimits:
    """Read /proc, the limits of this process and of its control group."""
    process, machine = _table(host.read("/proc/self/status")), _table(host.read("/proc/meminfo"))
    strict = (host.read("/proc/sys/vm/overcommit_memory") or "").strip() == "2"
    groups = read_cgroups(host)
    return HostLimits(
        resident=process.get("VmRSS"),
        mapped=process.get("VmPeak"),
        data=process.get("VmData"),
        address_space=_soft(resource.RLIMIT_AS),
        data_limit=_soft(resource.RLIMIT_DATA),
        total=machine.get("MemTotal"),
        available=machine.get("MemAvailable"),
        swap=machine.get("SwapFree"),
        commit_limit=machine.get("CommitLimit") if strict else None,
        committed=machine.get("Committed_AS") if strict else None,
        group=groups.memory,
        group_used=groups.memory_used,
    )


def refused_by(asked: int | None, limits: HostLimits) -> str:
    """The limit that refused an allocation of ``asked`` bytes, in words; "" where none of them explains it."""
    for what, had, limit in (
        ("the limit of this process's address space (`ulimit -v`, RLIMIT_AS)", limits.mapped, limits.address_space),
        ("the limit of this process's data (`ulimit -d`, RLIMIT_DATA)", limits.data, limits.data_limit),
        ("the host's limit of what may be promised (vm.overcommit_memory = 2)", limits.committed, limits.commit_limit),
    ):
        if had is not None and limit is not None and (had + asked > limit if asked else had > NEAR_LIMIT_SHARE * limit):
            return f"{what}: {amount(limit)}, and {amount(had)} of it were taken"
    whole = (limits.total or 0) + (limits.swap or 0)
    if asked and limits.total and asked > whole:
        return f"the machine: it has {amount(limits.total)}, but {amount(asked)} were requested at once"
    return ""


def limit_lines(said: str, limits: HostLimits) -> Iterator[str]:
    """What refused the host memory that an exception asked for, or what is known where nothing decides."""
    by = refused_by(asked_bytes(said), limits)
    resident = f"this process holds {amount(limits.resident)}" if limits.resident is not None else ""
    known = limits.total is not None and limits.available is not None
    free = f"{amount(limits.available or 0)} of the host's {amount(limits.total or 0)} are available" if known else ""
    full = (
        limits.group is not None
        and limits.group_used is not None
        and limits.group_used > NEAR_LIMIT_SHARE * limits.group
    )
    group = f"its control group holds {amount(limits.group_used or 0)} of {amount(limits.group or 0)}" if full else ""
    facts = ", ".join(fact for fact in (resident, free, group) if fact)
    if by:
        yield f"what refused it: {by}"
        yield f"    {facts}"
    else:
        yield f"the limit that refused it is unknown: {facts}, and no limit of this process was met"


def kept_graphs(
    traceback: TracebackType | None, *, fewest: float = MIN_TENSORS, least: float = math.inf
) -> tuple[Kept, ...]:
    """What the frames of the user's own code can name, the most graphs first, each once.

    ``fewest``: tensors with graphs from which on a container or a sum is told: one step has some in hand itself, the hidden
    states of its layers for one. ``least``: bytes of tensors from which on a container is told that keeps no graph.
    """
    found: dict[int, Kept] = {}
    for frame in _frames(traceback):
        place = Path(frame.f_code.co_filename).name
        names = {**frame.f_globals, **frame.f_locals}
        for name, value in list(names.items()):
            for called, held in _held(name, value):
                if id(held) not in found and not name.startswith("__"):
                    kept = _sum(called, place, held) if _is_tensor(held) else _container(called, place, held)
                    if kept.count >= max(fewest, MIN_TENSORS) or kept.size >= least:
                        found[id(held)] = kept
    return tuple(sorted(found.values(), key=lambda kept: (-kept.count, -kept.size)))


def _table(text: str | None) -> dict[str, int]:
    """The lines `Name: N kB`, in bytes."""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text or "", re.MULTILINE)}


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _sum(name: str, place: str, tensor: Any) -> Kept:
    """A running sum of numbers, as losses are: one addition over the other. Sums of larger tensors are residual connections."""
    node, count = getattr(tensor, "grad_fn", None) if tensor.numel() == 1 else None, 0
    while node is not None and node.name().startswith("AddBackward") and count < MAX_ENTRIES:
        count += 1
        below = [part for part, _ in node.next_functions if part is not None]
        node = next((part for part in below if part.name().startswith("AddBackward")), None)
    return Kept(name=name, place=place, count=count, is_sum=True)


def _container(name: str, place: str, container: Any) -> Kept:
    """How many of its tensors, also in pairs and dictionaries, have a ``grad_fn``, and the bytes of all."""
    values = container.values() if isinstance(container, Mapping) else container
    try:
        entries = list(islice(values, MAX_ENTRIES))
    except RuntimeError:  # another thread changes it
        entries = []
    inner = (part for entry in entries for part in (_parts(entry) if _is_container(entry) else (entry,)))
    tensors = [part for part in inner if _is_tensor(part)]
    graphs = sum(getattr(part, "grad_fn", None) is not None for part in tensors)
    size = sum(part.numel() * part.element_size() for part in tensors)
    return Kept(name=name, place=place, count=graphs if graphs >= MIN_TENSORS else 0, size=size)


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        if is_user_file(traceback.tb_frame.f_code.co_filename):
            yield traceback.tb_frame
        traceback = traceback.tb_next


def _held(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The value itself, or what an object of the script's own has as attributes."""
    if _is_container(value) or _is_tensor(value):
        yield name, value
    elif not isinstance(value, type) and type(value).__module__.partition(".")[0] not in {
        "torch",
        "deepspeed",
        "builtins",
    }:
        for inner, part in list(_attributes(value).items()):
            if _is_container(part) or _is_tensor(part):
                yield f"{name}.{inner}", part


def _attributes(value: Any) -> dict[str, Any]:
    """What is in an object, without asking it: a proxy would answer for another."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_container(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, bytearray, range)) and _plain(value)


def _plain(value: Any) -> bool:
    """Python's own containers alone: another's may compute what it is asked for."""
    return type(value).__module__ in {"builtins", "collections"}


def _parts(entry: Any) -> list[Any]:
    return list(islice(entry.values() if isinstance(entry, Mapping) else entry, 16))


def _is_tensor(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)
