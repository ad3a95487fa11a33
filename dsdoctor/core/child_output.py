"""What a child process prints -> chunks of bytes, until it has ended. Never waits for whoever else holds its pipes.

A compiler wrapper may start a server that stays (sccache, an nvcc with a daemon): it inherits the pipes, and their end never comes.
"""

import os
import selectors
import subprocess
import time
from collections.abc import Iterator

CHUNK = 1 << 16
POLL = 0.05
"""Seconds between two looks at whether the child has ended, while nothing comes. A pipe that is closed is seen at once."""

GRACE = 0.25
"""Seconds without output, after the end of a child, that are the end of its output. What is in a pipe by then is read."""


class TooLate(Exception):
    """The child did not end in time."""


def chunks(process: "subprocess.Popen[bytes]", *, deadline: float | None = None) -> Iterator[tuple[int, bytes]]:
    """What the child prints: 1 or 2 for its stdout or stderr, and some bytes. Ends when the child has, or has closed both.

    Raises TooLate at ``deadline`` (``time.monotonic()``).
    """
    silent_since: float | None = None
    with selectors.DefaultSelector() as selector:
        for number, pipe in ((1, process.stdout), (2, process.stderr)):
            if pipe is not None:
                selector.register(pipe, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(POLL)
            for key, _ in ready:
                if data := os.read(key.fd, CHUNK):
                    yield key.data, data
                else:
                    selector.unregister(key.fileobj)
            now = time.monotonic()
            if ready or not has_ended(process.pid):
                silent_since = None
            else:
                silent_since = silent_since or now
                if now - silent_since >= GRACE:
                    return
            if deadline is not None and now >= deadline:
                raise TooLate


def lines(process: "subprocess.Popen[bytes]") -> Iterator[bytes]:
    """The same by lines, without their ends, stdout and stderr as they come. The last one needs no end."""
    rest = b""
    for _, data in chunks(process):
        *whole, rest = (rest + data).split(b"\n")
        yield from whole
    if rest:
        yield rest


def has_ended(pid: int) -> bool:
    """Whether a child of ours has ended. It is not reaped: its exit status stays for who waits for it."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True
