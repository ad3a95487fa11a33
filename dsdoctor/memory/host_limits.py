"""This process and its host -> what limits its memory; and an allocation that failed -> which limit refused it, where that is sure.

On the host an allocation fails by a limit of the process (setrlimit(2): RLIMIT_AS, RLIMIT_DATA), by strict overcommit
(vm.overcommit_memory 2), or because it is larger than the machine. A full control group or a full machine kills instead.
"""

import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
NEAR = 0.97
"""Where it is not known how much was asked for, a limit counts as met from this share on: of what the process had at most."""
ASKED = (
    re.compile(r"tried to allocate (?P<count>\d+)(?P<unit>) bytes"),
    re.compile(r"[Tt]ried to allocate (?P<count>[\d.]+) (?P<unit>[KMGT]iB)"),
    re.compile(r"Unable to allocate (?P<count>[\d.]+) (?P<unit>[KMGT]iB|bytes) for an array"),
)
UNITS = {"": 1, "bytes": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30, "TiB": 1 << 40}


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


def asked_bytes(said: str) -> int | None:
    """What an exception says was asked for, in bytes.

    >>> asked_bytes("you tried to allocate 2000000000 bytes."), asked_bytes("Tried to allocate 1.50 GiB. GPU 0")
    (2000000000, 1610612736)
    """
    found = next((match for pattern in ASKED if (match := pattern.search(said))), None)
    return int(float(found["count"]) * UNITS[found["unit"]]) if found else None


def look_limits(root: Path = Path("/")) -> HostLimits:
    """Read /proc, the limits of this process and its control group (v2 and v1)."""
    process, machine = _table(root / "proc/self/status"), _table(root / "proc/meminfo")
    strict = _text(root / "proc/sys/vm/overcommit_memory") == "2"
    group, used = _group(root)
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
        group=group,
        group_used=used,
    )


def refused_by(asked: int | None, limits: HostLimits) -> str:
    """The limit that refused an allocation of ``asked`` bytes, in words; "" where none of them explains it."""
    for what, had, limit in (
        ("the limit of this process's address space (`ulimit -v`, RLIMIT_AS)", limits.mapped, limits.address_space),
        ("the limit of this process's data (`ulimit -d`, RLIMIT_DATA)", limits.data, limits.data_limit),
        ("the host's limit of what may be promised (vm.overcommit_memory = 2)", limits.committed, limits.commit_limit),
    ):
        if had is not None and limit is not None and (had + asked > limit if asked else had > NEAR * limit):
            return f"{what}: {_amount(limit)}, and {_amount(had)} of it were taken"
    whole = (limits.total or 0) + (limits.swap or 0)
    if asked and limits.total and asked > whole:
        return f"the machine: it has {_amount(limits.total)}, and {_amount(asked)} were asked for at once"
    return ""


def limit_lines(said: str, limits: HostLimits) -> Iterator[str]:
    """What refused the host memory that an exception asked for, or what is known where nothing decides."""
    by = refused_by(asked_bytes(said), limits)
    resident = f"this process holds {_amount(limits.resident)}" if limits.resident is not None else ""
    free = f"{_amount(limits.available)} of the host's {_amount(limits.total)} are available" if limits.total else ""
    full = limits.group is not None and limits.group_used is not None and limits.group_used > NEAR * limits.group
    group = f"its control group holds {_amount(limits.group_used)} of {_amount(limits.group)}" if full else ""
    facts = ", ".join(fact for fact in (resident, free, group) if fact)
    if by:
        yield f"what refused it: {by}"
        yield f"    {facts}"
    else:
        yield f"what refused it is not known: {facts}, and no limit of this process was met"


def _table(path: Path) -> dict[str, int]:
    """The lines `Name: N kB`, in bytes."""
    return {name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", _text(path), re.MULTILINE)}


def _group(root: Path) -> tuple[int | None, int | None]:
    """The smallest limit of the control groups that this process is in, and how much of that group's memory is used."""
    found: list[tuple[int, int | None]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, own = (*line.split(":", 2), "", "")[:3]
        if number != "0" and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("" if number == "0" else "memory")
        names = (
            ("memory.max", "memory.current") if number == "0" else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        folder = base / own.lstrip("/")
        for each in (folder, *folder.parents):
            limit = _text(each / names[0])
            if limit.isdecimal() and int(limit) < 1 << 60:
                used = _text(each / names[1])
                found.append((int(limit), int(used) if used.isdecimal() else None))
            if each == base:
                break
    return min(found, default=(None, None), key=lambda entry: entry[0] or 0)


def _soft(limit: int) -> int | None:
    soft, _ = resource.getrlimit(limit)
    return None if soft == resource.RLIM_INFINITY else soft


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _amount(size: int | None) -> str:
    return "?" if size is None else f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / MIB:.0f} MiB"
