"""The message of torch's allocator that the GPU is full -> who holds the memory. Judges by its figures alone."""

import re
from dataclasses import dataclass

UNITS = {"KiB": 1 / 2**20, "MiB": 1 / 2**10, "GiB": 1.0}
SIZE = r"([\d.]{1,12}) ([KMG]iB)"
TOTAL = re.compile(rf"total capac(?:i)?ty of {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
OTHERS = re.compile(rf"Process (\d{{1,9}}) has {SIZE} memory in use")
OWN = re.compile(rf"this process has {SIZE} memory in use")
LOOSE = re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")
ALLOCATED = re.compile(rf"{SIZE} is allocated by PyTorch")

MUCH = 0.25
"""From this share of the GPU on it matters what other processes hold."""

OF_CUDA = 1.5
"""Up to so many times of what torch holds a process may hold with CUDA's own context and NCCL's buffers."""


@dataclass(frozen=True, kw_only=True)
class OtherProcesses:
    """Other processes on the same GPU: their numbers, what they hold, and what the one that failed holds, in GiB.

    ``among_them``: the one that failed is one of them, and the message does not tell which.
    """

    pids: tuple[str, ...]
    held: float
    own: float
    among_them: bool = False


def held_by_others(text: str) -> OtherProcesses | None:
    """The other processes that hold more than all that this one left unused, and much of the GPU; None else.

    A container does not know its own number on the host: where the message names no "this process", it is the one of them
    that holds as much as torch says that it does, or a little more.

    >>> message = ("a total capacity of 79.25 GiB of which 410.94 MiB is free. Process 4711 has 44.71 GiB memory in use. "
    ...     "this process has 34.12 GiB memory in use. 1.20 GiB is reserved by PyTorch but unallocated")
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=34.12, among_them=False)
    >>> held_by_others(message.replace("44.71 GiB", "310.20 MiB")) is None
    True
    >>> message = message.replace("this process", "Process 12").replace("34.12", "9.12") + "; 7.50 GiB is allocated by PyTorch"
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=9.12, among_them=False)
    """
    total, own = _size(TOTAL, text), _size(OWN, text)
    others = [(pid, float(number) * UNITS[unit]) for pid, number, unit in OTHERS.findall(text)]
    mine = [] if own else _may_be_mine(others, _size(ALLOCATED, text) + _size(LOOSE, text))
    if len(mine) == 1:
        others, own = [one for one in others if one is not mine[0]], mine[0][1]
    if not others or not (own or mine) or not total:
        return None
    held = sum(size for _, size in others)
    foreign = held - max((size for _, size in mine), default=0.0) if len(mine) > 1 else held
    if foreign < MUCH * total or foreign <= _size(FREE, text) + _size(LOOSE, text):
        return None
    return OtherProcesses(pids=tuple(pid for pid, _ in others), held=held, own=own, among_them=len(mine) > 1)


def _may_be_mine(processes: list[tuple[str, float]], torch: float) -> list[tuple[str, float]]:
    """The processes that torch's own figures may be of."""
    least = min((size for _, size in processes if size >= torch), default=0.0)
    return [one for one in processes if torch and torch <= one[1] <= max(least, torch * OF_CUDA)]


def _size(pattern: re.Pattern[str], text: str) -> float:
    """A figure of the message in GiB; 0 where it is not told."""
    found = pattern.search(text)
    return float(found[1]) * UNITS[found[2]] if found else 0.0
