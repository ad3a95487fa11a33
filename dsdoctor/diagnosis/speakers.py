"""A raw line of a log -> which process wrote it, as far as its prefix says. Reads only the head of the line."""

import re
from dataclasses import dataclass

HEAD = 240
COLOUR = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]")
RANK = re.compile(rb"\[(?:rank ?|Rank )(\d{1,5})\]|(?:^|[\]:|] ?)rank(\d{1,5}): ")
LOCAL = re.compile(rb"\[default(\d{1,5})\]:?|^default(\d{1,5}): ")
MPI = re.compile(rb"^\[\d{1,5},(\d{1,5})\]<std(?:out|err)>")
TASK = re.compile(rb"^ {0,4}(\d{1,5}): ")
RAY = re.compile(rb"^\((?:\w{1,60} )?(pid=\d{1,9}(?:, ip=[\w.:]{3,40})?)\) ")
HOST = re.compile(rb"^(?:\[(?:pod/)?([A-Za-z][\w./-]{0,80})\] |([A-Za-z][\w.-]{0,60}\d[\w.-]{0,20})(?: \| |: ))")


@dataclass(frozen=True)
class Speaker:
    """A process that writes to a log: its rank, its number on its node or in its Slurm step, its host; None where unknown."""

    rank: int | None = None
    local: int | None = None
    task: int | None = None
    host: str = ""

    @property
    def number(self) -> int | None:
        """The rank, or what stands for it where nothing else is known."""
        numbers = (self.rank, self.task, self.local)
        return next((number for number in numbers if number is not None), None)


NOBODY = Speaker()


def speaker_of(raw: bytes, *, tasks: bool = False) -> Speaker:
    """Who wrote a line. ``tasks``: a number at the head is that of a Slurm task.

    >>> speaker_of(b"[default1]:[rank5]: Traceback (most recent call last):").rank
    5
    >>> speaker_of(b"node-2: [rank7]: x").host, speaker_of(b"3: step 1", tasks=True).task, speaker_of(b"3: step 1").number
    ('node-2', 3, None)
    """
    head = raw[:HEAD]
    if b"\x1b" in head:
        head = COLOUR.sub(b"", head)
    rank, local, task = RANK.search(head), LOCAL.search(head), (TASK.match(head) if tasks else None)
    if rank is None:
        rank = MPI.match(head)
    host = HOST.match(head) or RAY.match(head)
    return Speaker(
        rank=_number(rank),
        local=_number(local),
        task=_number(task),
        host=next((part for part in host.groups() if part), b"").decode() if host else "",
    )


def same_process(one: Speaker, other: Speaker) -> bool:
    """Whether two lines may be of one process: no number that both have differs.

    >>> same_process(Speaker(local=1), Speaker(rank=1, local=1)), same_process(Speaker(rank=1), Speaker(rank=2))
    (True, False)
    """
    if one.rank is not None and other.rank is not None:
        return one.rank == other.rank
    if one.task is not None and other.task is not None:
        return one.task == other.task
    if one.host and other.host and one.host != other.host:
        return False
    return one.number == other.number


def are_two(one: Speaker, other: Speaker) -> bool:
    """Whether two lines are surely of two processes: both are numbered, and not alike.

    >>> are_two(Speaker(rank=1), Speaker(rank=2)), are_two(Speaker(rank=1), Speaker())
    (True, False)
    """
    return one.number is not None and other.number is not None and not same_process(one, other)


def _number(found: re.Match[bytes] | None) -> int | None:
    return next(int(group) for group in found.groups() if group) if found else None
