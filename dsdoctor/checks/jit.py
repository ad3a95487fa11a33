"""Machine -> findings about torch's cache of ops that are compiled at run time."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from dsdoctor.checks.advice import BUILD_WHEEL
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.machine import Machine
from dsdoctor.core.processes import FileHolder

STALE_AFTER = 600.0
LOCKS_RELEASED_SINCE = Version("2.14")
"""From this torch on the operating system holds the lock, so a file that is left behind blocks nobody."""


def jit_cache_shared(machine: Machine) -> Iterator[Finding]:
    """TORCH_EXTENSIONS_DIR names the cache of ops compiled at run time, so all environments share one folder."""
    jit = machine.jit
    if jit and jit.named and jit.ops:
        yield Finding.note(
            "jit-cache-shared",
            f"TORCH_EXTENSIONS_DIR={jit.folder} holds {', '.join(jit.ops[:6])} of whichever environment built them",
            fix="give each environment a folder of its own",
            steps=(step('export TORCH_EXTENSIONS_DIR="$VIRTUAL_ENV/torch_extensions"'),),
        )


def stale_jit_cache(machine: Machine) -> Iterator[Finding]:
    """A lock file was left behind in the cache of ops compiled at run time."""
    jit, torch = machine.jit, machine.torch
    if not jit or not torch or _at_least(torch.minor, LOCKS_RELEASED_SINCE):
        return
    for op, age in sorted(jit.locks.items()):
        holder, path = jit.holders.get(op, FileHolder()), f"{jit.folder}/{op}/lock"
        if holder.pid is None and not holder.doubt:
            yield Finding.error(
                "stale-jit-cache",
                f"no process holds {path}, {age / 60:.0f} minutes old: every program that loads {op} waits for it for ever",
                evidence=[f"torch {torch.version} takes a lock file for a running compilation"],
                affects=(op,),
                fix="remove it: a launch that was killed while it compiled has left it",
                steps=(
                    step("fuser -v {lock}", lock=path, note="shows nobody"),
                    step("rm -- {lock}", lock=path),
                ),
            )
        elif holder.pid is None and age > STALE_AFTER:
            yield _old_lock(path, op, age, torch.version, holder.doubt)


def _old_lock(path: str, op: str, age: float, torch: str, doubt: str) -> Finding:
    """Of a lock that somebody may hold who is not seen from here."""
    return Finding.warning(
        "stale-jit-cache",
        f"{path} is {age / 60:.0f} minutes old: every program that loads {op} waits for it",
        evidence=[f"torch {torch} takes a lock file for a running compilation", f"who holds it is not known: {doubt}"],
        affects=(op,),
        fix="if nobody holds it, remove it",
        steps=(
            step("fuser -v {lock}", lock=path, note="who holds it; nothing: nobody"),
            step("rm -- {lock}", lock=path, note="only where nobody does"),
        ),
    )


def torch_extensions_permission(machine: Machine) -> Iterator[Finding]:
    """The cache of ops compiled at run time cannot be written by this user."""
    jit = machine.jit
    if jit and not jit.writable:
        yield Finding.warning(
            "torch-extensions-permission",
            f"{jit.folder} cannot be written: ops cannot be compiled at run time",
            fix="name a folder of your own, or install a wheel that holds the ops",
            steps=(step("export TORCH_EXTENSIONS_DIR=/path/you/own/torch_extensions"), BUILD_WHEEL),
        )


def _at_least(version: str, least: Version) -> bool:
    try:
        return Version(version) >= least
    except InvalidVersion:
        return False


CHECKS = (jit_cache_shared, stale_jit_cache, torch_extensions_permission)
