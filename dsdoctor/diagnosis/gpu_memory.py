"""The message of torch's allocator that the GPU is full -> who holds the memory. Judges by its figures alone."""

import re
from dataclasses import dataclass

UNITS = {"KiB": 1 / 2**20, "MiB": 1 / 2**10, "GiB": 1.0}
SIZE = r"([\d.]{1,12}) ([KMG]iB)"
TOTAL = re.compile(rf"total capacity of {SIZE}")
FREE = re.compile(rf"of which {SIZE} is free")
OTHERS = re.compile(rf"Process (\d{{1,9}}) has {SIZE} memory in use")
OWN = re.compile(rf"this process has {SIZE} memory in use")
LOOSE = re.compile(rf"{SIZE} is reserved by PyTorch but unallocated")

MUCH = 0.25
"""From this share of the GPU on it matters what other processes hold."""


@dataclass(frozen=True, kw_only=True)
class OtherProcesses:
    """Other processes on the same GPU: their numbers, what they hold, and what the one that failed holds, in GiB."""

    pids: tuple[str, ...]
    held: float
    own: float


def held_by_others(text: str) -> OtherProcesses | None:
    """The other processes that hold more than all that this one left unused, and much of the GPU; None else.

    A container does not know its own number on the host: a message that does not name "this process" may mean itself.

    >>> message = ("a total capacity of 79.25 GiB of which 410.94 MiB is free. Process 4711 has 44.71 GiB memory in use. "
    ...     "this process has 34.12 GiB memory in use. 1.20 GiB is reserved by PyTorch but unallocated")
    >>> held_by_others(message)
    OtherProcesses(pids=('4711',), held=44.71, own=34.12)
    >>> held_by_others(message.replace("44.71 GiB", "310.20 MiB")) is None
    True
    """
    total, own = _size(TOTAL, text), _size(OWN, text)
    others = OTHERS.findall(text)
    if not others or not own or not total:
        return None
    held = sum(float(number) * UNITS[unit] for _, number, unit in others)
    if held < MUCH * total or held <= _size(FREE, text) + _size(LOOSE, text):
        return None
    return OtherProcesses(pids=tuple(pid for pid, _, _ in others), held=held, own=own)


def _size(pattern: re.Pattern[str], text: str) -> float:
    """A figure of the message in GiB; 0 where it is not told."""
    found = pattern.search(text)
    return float(found[1]) * UNITS[found[2]] if found else 0.0
