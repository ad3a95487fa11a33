"""The control groups of this process, v1 and v2: their limits of processors, memory and tasks, and how often each held it back.

Sources: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel; proc(5) for /proc/self/cgroup and mountinfo.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from dsdoctor.core.host import Host

NO_LIMIT = 1 << 60
"""Bytes; v1 writes a number above it where there is no limit."""
CONTROLLERS = ("cpu", "memory", "pids")


@dataclass(frozen=True, kw_only=True)
class Cgroups:
    """What is read at one moment; of several groups above each other the tightest one with a limit counts, of equal ones the one
    that held back most. ``quota``: processors, 0 for no limit; ``periods`` of the quota so far, in ``throttled`` of which it was
    used up. ``memory`` in bytes, of which ``memory_used`` are taken, None where that is not told; ``kills``: processes of this
    one's own group that the out-of-memory killer ended. ``refused``: how often a process or thread was refused. ``host_kills``:
    processes that the out-of-memory killer ended on the whole host. ``paths``: the group by controller; ``unseen``: controllers
    whose files are not mounted here."""

    quota: float = 0.0
    periods: int = 0
    throttled: int = 0
    memory: int | None = None
    memory_used: int | None = None
    kills: int = 0
    tasks: int = 0
    most_tasks: int | None = None
    refused: int = 0
    host_kills: int = 0
    paths: dict[str, str] = field(default_factory=dict)
    unseen: tuple[str, ...] = ()


def read_cgroups(host: Host) -> Cgroups:
    """Look now."""
    paths = _paths(host)
    folders = {name: tuple(_folders(host, name, path)) for name, path in paths.items()}
    quotas, tasks_of = _quotas(host, folders.get("cpu", ())), _tasks(host, folders.get("pids", ()))
    quota, periods, throttled = min(quotas, key=lambda each: (each[0], -each[2]), default=(0.0, 0, 0))
    limits = _memory(host, folders.get("memory", ()))
    memory, kills, used = min(limits, key=lambda each: each[0], default=(None, 0, None))
    most_tasks, tasks, refused = min(tasks_of, key=lambda each: (each[0], -each[2], -each[1]), default=(None, 0, 0))
    return Cgroups(
        quota=quota,
        periods=periods,
        throttled=throttled,
        memory=memory,
        memory_used=used,
        kills=kills,
        tasks=tasks,
        most_tasks=most_tasks,
        refused=refused,
        host_kills=_count(host, "/proc/vmstat", "oom_kill"),
        paths=paths,
        unseen=tuple(name for name in CONTROLLERS if name in paths and not folders[name]),
    )


def free_memory(host: Host) -> int | None:
    """Bytes of memory that this process may still take: what the machine says is available, and what its cgroup's limit leaves."""
    meminfo = (line.split() for line in (host.read("/proc/meminfo") or "").splitlines())
    available = next((int(words[1]) << 10 for words in meminfo if words[:1] == ["MemAvailable:"]), None)
    groups = read_cgroups(host)
    left = None if groups.memory is None else max(0, groups.memory - (groups.memory_used or 0))
    return min((size for size in (available, left) if size is not None), default=None)


def _paths(host: Host) -> dict[str, str]:
    """The group of each controller, by what v1 says and else v2's."""
    found, unified = {}, None
    for line in (host.read("/proc/self/cgroup") or "").splitlines():
        _, names, path = (line.split(":", 2) + ["", ""])[:3]
        if not names:
            unified = path
        found.update(dict.fromkeys({*names.split(",")} & {*CONTROLLERS}, path))
    return {**({} if unified is None else dict.fromkeys(CONTROLLERS, unified)), **found}


def _folders(host: Host, controller: str, path: str) -> Iterator[str]:
    """The folders of a group and of those above it, as far as they are mounted here; the last mount on a place is the one seen."""
    for line in reversed((host.read("/proc/self/mountinfo") or "").splitlines()):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in {"cgroup", "cgroup2"}:
            continue
        if kind[0] == "cgroup" and controller not in kind[2].split(","):
            continue
        root, top = fields[3].rstrip("/"), fields[4]
        if path != root and not path.startswith(f"{root}/"):
            # what is mounted here are groups that this process is not in
            continue
        below = path.removeprefix(root)
        parts = [part for part in below.split("/") if part]
        found = [top + "".join(f"/{part}" for part in parts[:depth]) for depth in range(len(parts), -1, -1)]
        has_it = kind[0] == "cgroup" or controller in (host.read(f"{top}/cgroup.controllers") or "").split()
        if has_it and any(host.exists(f"{folder}/cgroup.procs") for folder in found):
            yield from found
            return


def _quotas(host: Host, folders: tuple[str, ...]) -> Iterator[tuple[float, int, int]]:
    for folder in folders:
        parts = (host.read(f"{folder}/cpu.max") or "").split()
        parts = parts or [_text(host, f"{folder}/cpu.cfs_quota_us"), _text(host, f"{folder}/cpu.cfs_period_us")]
        if len(parts) == 2 and all(part.isdecimal() for part in parts) and int(parts[1]):
            stat = f"{folder}/cpu.stat"
            yield (
                int(parts[0]) / int(parts[1]),
                _count(host, stat, "nr_periods"),
                _count(host, stat, "nr_throttled"),
            )


def _memory(host: Host, folders: tuple[str, ...]) -> Iterator[tuple[int, int, int | None]]:
    """Limits, the kills of the process's own group, and what is used: v1 counts a kill only there, whichever limit was reached; v2
    there and above, where those of other groups are counted too."""
    own = next((count for folder in folders if (count := _kills(host, folder)) is not None), 0)
    for folder in folders:
        limit = _text(host, f"{folder}/memory.max") or _text(host, f"{folder}/memory.limit_in_bytes")
        if limit.isdecimal() and int(limit) < NO_LIMIT:
            used = _text(host, f"{folder}/memory.current") or _text(host, f"{folder}/memory.usage_in_bytes")
            yield int(limit), own, int(used) if used.isdecimal() else None


def _kills(host: Host, folder: str) -> int | None:
    """None where the group counts none: v2's at the top."""
    for name in ("memory.events", "memory.oom_control"):
        if host.exists(f"{folder}/{name}"):
            return _count(host, f"{folder}/{name}", "oom_kill")
    return None


def _tasks(host: Host, folders: tuple[str, ...]) -> Iterator[tuple[int, int, int]]:
    for folder in folders:
        limit, now = _text(host, f"{folder}/pids.max"), _text(host, f"{folder}/pids.current")
        if limit.isdecimal() and now.isdecimal():
            yield int(limit), int(now), _count(host, f"{folder}/pids.events", "max")


def _text(host: Host, path: str) -> str:
    return (host.read(path) or "").strip()


def _count(host: Host, path: str, name: str) -> int:
    """The number behind a name in a file of lines."""
    for line in (host.read(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return 0
