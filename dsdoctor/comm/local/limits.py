"""How a process of a rank ended and what its control groups say of that time -> which limit ended it, in words."""

import os
import re
import resource
from dataclasses import dataclass

from dsdoctor.core.cgroups import Cgroups, read_cgroups
from dsdoctor.core.host import LocalHost
from dsdoctor.rules import book

MIB = 1 << 20
NO_TASK = re.compile(
    r"can't start new thread|thread constructor failed|pthread_create|thread creation failed|cannot fork|fork: retry"
    r"|fork\w*\(.*(?:\n.*){0,12}BlockingIOError",
    re.IGNORECASE,
)
"""What is said where the kernel refuses a process or thread: CPython, libstdc++, OpenBLAS and libgomp, shells."""
TRY_AGAIN = re.compile(r"resource temporarily unavailable|errno 11\b|EAGAIN", re.IGNORECASE)
"""The error of clone(2) without that name: a socket that is not ready says the same."""
NEAR = 0.95
"""The part of a limit of tasks from which it counts as reached: what was refused is not among those counted."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A rank's control groups, and the tasks that its user may have and has (None: no limit, or it does not bind root)."""

    groups: Cgroups
    most_tasks: int | None = None
    tasks: int = 0


def limits_now() -> Limits:
    """This process's, now."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    bound = most != resource.RLIM_INFINITY and os.geteuid() != 0
    groups = read_cgroups(LocalHost())
    return Limits(groups=groups, most_tasks=most if bound else None, tasks=_tasks_of_user() if bound else 0)


def _tasks_of_user() -> int:
    """Threads of all processes of this user."""
    host, mine, count = LocalHost(), str(os.getuid()), 0
    for path in host.glob("/proc/[0-9]*/status"):
        lines = dict(line.split(":", 1) for line in (host.read(path) or "").splitlines() if ":" in line)
        if lines.get("Uid", "").split()[:1] == [mine]:
            count += int(lines.get("Threads", "1").strip())
    return count


def why_ended(before: Limits, now: Limits, *, ended: str | None, error: str | None) -> str:
    """Which limit ended a process, "" where none is known to. ``ended``: how it died; ``error``: what it raised.

    >>> before, now = (Limits(groups=Cgroups(memory=420 << 20, kills=kills)) for kills in (1, 2))
    >>> why_ended(before, now, ended="killed by SIGKILL", error=None)
    'the out-of-memory killer of its memory cgroup, whose limit is 420 MiB'
    """
    if ended and "SIGKILL" in ended:
        return _killed(before.groups, now.groups)
    if error and (NO_TASK.search(error) or (TRY_AGAIN.search(error) and now.groups.refused > before.groups.refused)):
        return _refused(before, now)
    return ""


def _killed(before: Cgroups, now: Cgroups) -> str:
    if now.memory is not None and now.kills > before.kills:
        return book.phrase("comm", "memory-cgroup-killed", mib=f"{now.memory / MIB:,.0f}")
    return ""


def what_else(before: Limits, now: Limits, *, ended: str | None) -> str:
    """What may have ended a process, "" where nothing is known or ``why_ended`` knows it. The kernel counts for the whole machine,
    with other containers and users."""
    was, groups = before.groups, now.groups
    if not (ended and "SIGKILL" in ended and groups.host_kills > was.host_kills) or _killed(was, groups):
        return ""
    group = groups.paths.get("memory", "/")
    if "memory" in groups.unseen and group != "/":
        return book.phrase("comm", "host-killed-hidden", group=group)
    return book.phrase("comm", "host-killed")


def _refused(before: Limits, now: Limits) -> str:
    groups = now.groups
    if groups.most_tasks is not None and (
        groups.refused > before.groups.refused or groups.tasks >= NEAR * groups.most_tasks
    ):
        refused = max(groups.refused - before.groups.refused, 0)
        return book.phrase(
            "comm",
            "pids-cgroup-refused" if refused else "pids-cgroup-full",
            limit=groups.most_tasks,
            tasks=groups.tasks,
            refused=refused,
        )
    if now.most_tasks is not None and now.tasks >= NEAR * now.most_tasks:
        return book.phrase("comm", "user-tasks-full", limit=now.most_tasks, tasks=now.tasks)
    group = groups.paths.get("pids", "/")
    return book.phrase("comm", "pids-cgroup-hidden", group=group) if "pids" in groups.unseen and group != "/" else ""
