"""A rank's samples in a file in shared memory: written once a second, read by the node's supervisor without any lock.

Written by plain writes of room that was taken at the start, and not through a mapping: a full /dev/shm then is an error
when the watch begins, and never a SIGBUS in a training. Standard library alone."""

import errno
import os
import stat
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.files import PRIVATE, open_new

MAGIC = b"dsdhang1"
HEAD = struct.Struct("<8sQdIIIII")
SLOTS, SLOT_BYTES = 8, 24 * 1024
FIRST_SLOT_OFFSET = 64
LEAVING, STALLED, JOINED, ARRIVALS, UNWATCHED = 1, 2, 4, 8, 16


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The newest sample's head. ``clock``: the system's monotonic clock. ``progress`` and ``stack`` are checksums that
    change when the rank called a collective or made a step, and when its main thread is somewhere else."""

    number: int
    clock: float
    progress: int
    stack: int
    flags: int
    length: int
    checksum: int


class RingWriter:
    """The writing end. Raises OSError where there is no room."""

    def __init__(self, path: Path) -> None:
        self._file = open_new(path, mode=PRIVATE)
        os.posix_fallocate(self._file.fileno(), 0, FIRST_SLOT_OFFSET + SLOTS * SLOT_BYTES)
        self._number = 0

    def write(self, payload: bytes, *, clock: float, progress: int, stack: int, flags: int) -> None:
        """Add a sample; one that is too long is left out, and only its head is written."""
        self._number += 1
        if len(payload) > SLOT_BYTES:
            payload = b""
        fields = (MAGIC, self._number, clock, progress, stack, flags, len(payload), zlib.crc32(payload))
        os.pwrite(self._file.fileno(), payload, FIRST_SLOT_OFFSET + self._number % SLOTS * SLOT_BYTES)
        # the head comes last: a reader never follows it to a sample that is not there yet
        os.pwrite(self._file.fileno(), HEAD.pack(*fields), 0)

    def close(self) -> None:
        """Write no more."""
        self._file.close()


class RingReader:
    """The reading end. Raises OSError where there is no such file."""

    def __init__(self, path: Path) -> None:
        self._number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        state = os.fstat(self._number)
        self.owner = state.st_uid
        if not stat.S_ISREG(state.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

    def beat(self) -> Heartbeat | None:
        """The head of the newest sample; None before the first."""
        head = os.pread(self._number, HEAD.size, 0)
        if len(head) < HEAD.size or not head.startswith(MAGIC):
            return None
        _, number, clock, progress, stack, flags, length, checksum = HEAD.unpack(head)
        return Heartbeat(
            number=number, clock=clock, progress=progress, stack=stack, flags=flags, length=length, checksum=checksum
        )

    def payload(self) -> bytes | None:
        """The newest sample, None where there is none, or only ones that were overwritten while they were read."""
        for _ in range(3):
            beat = self.beat()
            if beat is None or not beat.length:
                return None
            payload = os.pread(self._number, beat.length, FIRST_SLOT_OFFSET + beat.number % SLOTS * SLOT_BYTES)
            if zlib.crc32(payload) == beat.checksum:
                return payload
        return None

    def close(self) -> None:
        """Give the file back."""
        os.close(self._number)
