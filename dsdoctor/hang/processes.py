"""What the kernel tells of a process that is not ours: state, processor time, bytes, what it sleeps in, who has a file
open. Looks."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.core.processes import ending_of

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """A process at one moment. ``started``: tells it from a later process of that number. ``cpu``: seconds. ``bytes``: read
    and written, 0 where the kernel does not tell. ``exit_status``: of one that is dead, as wait gives it."""

    state: str
    started: int
    parent: int
    cpu: float
    exit_status: int = 0


def facts_of(pid: int) -> ProcessFacts | None:
    """None where there is no such process (any more)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - once a second for each rank
            fields = file.read().rpartition(b")")[2].split()
        status = int(fields[49]) if len(fields) > 49 else 0
        return ProcessFacts(
            state=fields[0].decode(),
            started=int(fields[19]),
            parent=int(fields[1]),
            cpu=(int(fields[11]) + int(fields[12])) / TICKS,
            exit_status=status,
        )
    except (OSError, ValueError, IndexError):
        return None


def ending_words(facts: ProcessFacts) -> str:
    """How a dead process ended, as far as its status is shown."""
    return ending_of(facts.exit_status) or "exit status 0"


COUNTED = ("rchar", "wchar", "read_bytes", "write_bytes")


def moved_bytes(pid: int) -> int:
    """Bytes that a process has read and written so far, 0 where that is not shown.

    Of a system call the kernel counts them at its end, and one that writes a checkpoint may take minutes; what reaches a disk's
    pages it counts at once. Both together count some bytes twice, which harms nothing: asked is whether they grow.
    """
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:  # noqa: PTH123
            return sum(int(line.split()[1]) for line in file if line.startswith(COUNTED))
    except (OSError, ValueError, IndexError):
        return 0


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal at this moment: without one SIGUSR2 ends it."""
    return number in caught(pid)


def caught(pid: int) -> frozenset[int]:
    """The signals for which a process has handlers at this moment, none where that is not shown."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            masks = [line.split()[1] for line in file if line.startswith("SigCgt:")]
        mask = int(masks[0], 16)
    except (OSError, ValueError, IndexError):
        return frozenset()
    return frozenset(number + 1 for number in range(64) if mask >> number & 1)


def wanted_cpu(pid: int) -> float:
    """Seconds that a process's main thread has run, or could have run and was given no processor; 0 where that is not shown."""
    try:
        with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:  # noqa: PTH123
            ran, waited, _ = file.read().split()
        return (int(ran) + int(waited)) / 1e9
    except (OSError, ValueError):
        return 0.0


def waits_in(pid: int) -> str:
    """The kernel's function in which the main thread sleeps, "" where that is not shown."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            name = file.read(64).strip()
    except OSError:
        return ""
    return "" if name == "0" else name


def all_parents() -> dict[int, int]:
    """Each process with its parent."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names alone
        facts = facts_of(int(name)) if name.isdigit() else None
        if facts is not None:
            found[int(name)] = facts.parent
    return found


def work_of_children(pid: int, parents: dict[int, int]) -> tuple[float, int]:
    """Seconds of processor time, of their main threads also those of waiting to be given one, and bytes read and written, of
    all processes below one."""
    children = tuple(below(pid, parents))
    seconds = sum(max(facts.cpu, wanted_cpu(child)) for child in children if (facts := facts_of(child)) is not None)
    return seconds, sum(map(moved_bytes, children))


def below(pid: int, parents: dict[int, int]) -> Iterator[int]:
    """The processes that a process started, and those that they started."""
    for child, parent in parents.items():
        if parent == pid:
            yield child
            yield from below(child, parents)


def wait_until_gone(pid: int, seconds: float) -> bool:
    """Whether a process is gone, or becomes so in this time."""
    last = time.monotonic() + seconds
    while (facts := facts_of(pid)) is not None and facts.state not in {"Z", "X"}:
        if time.monotonic() >= last:
            return False
        time.sleep(0.05)
    return True
