"""Machine -> findings about torch's cache of ops that are compiled at run time."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Machine
from dsdoctor.core.processes import FileHolder
from dsdoctor.rules import book

STALE_AFTER = 600.0
LOCKS_RELEASED_SINCE = Version("2.14")
"""From this torch on the operating system holds the lock, so a file that is left behind blocks nobody."""


def jit_cache_shared(machine: Machine) -> Iterator[Finding]:
    """TORCH_EXTENSIONS_DIR names the cache of ops compiled at run time, so all environments share one folder."""
    jit = machine.jit
    if jit and jit.named and jit.ops:
        yield book.finding("jit-cache-shared", Severity.NOTE, folder=jit.folder, ops=jit.ops[:6])


def stale_jit_cache(machine: Machine) -> Iterator[Finding]:
    """A lock file was left behind in the cache of ops compiled at run time."""
    jit, torch = machine.jit, machine.torch
    if not jit or not torch or _at_least(torch.minor, LOCKS_RELEASED_SINCE):
        return
    takes = f"torch {torch.version} uses a lock file while it compiles"
    for op, age in sorted(jit.locks.items()):
        holder, path = jit.holders.get(op, FileHolder()), f"{jit.folder}/{op}/lock"
        if holder.pid is None and not holder.doubt:
            yield book.finding(
                "stale-jit-cache",
                Severity.ERROR,
                case="not-held",
                evidence=[takes],
                affects=(op,),
                lock=path,
                op=op,
                minutes=f"{age / 60:.0f}",
            )
        elif holder.pid is None and age > STALE_AFTER:
            yield book.finding(
                "stale-jit-cache",
                Severity.WARNING,
                evidence=[takes, f"its holder is unknown: {holder.doubt}"],
                affects=(op,),
                lock=path,
                op=op,
                minutes=f"{age / 60:.0f}",
            )


def torch_extensions_permission(machine: Machine) -> Iterator[Finding]:
    """The cache of ops compiled at run time cannot be written by this user."""
    jit = machine.jit
    if jit and not jit.writable:
        yield book.finding("torch-extensions-permission", Severity.WARNING, folder=jit.folder)


def _at_least(version: str, least: Version) -> bool:
    try:
        return Version(version) >= least
    except InvalidVersion:
        return False


CHECKS = (jit_cache_shared, stale_jit_cache, torch_extensions_permission)
