"""py-spy, where it is there and allowed -> the stacks of a process that knows nothing of us, or why there are none."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.core.host import Host
from dsdoctor.core.text import decode
from dsdoctor.hang.models import Frame, ThreadStack

NAME = "py-spy"
LONGEST = 20.0
NOT_INSTALLED = "py-spy is not installed"
REFUSED = "the kernel does not let py-spy read it"
SIGNS = (
    ("permission denied", REFUSED),
    ("operation not permitted", REFUSED),
    ("no such process", "there is no such process any more"),
    ("no such file", "there is no such process any more"),
    ("failed to find python version", "it is no Python that py-spy knows"),
    ("python version", "it is no Python that py-spy knows"),
)


def program(host: Host) -> str | None:
    """py-spy on PATH, or beside this Python."""
    beside = str(Path(sys.executable).with_name(NAME))
    return host.which(NAME) or (beside if host.exists(beside) else None)


def stacks_of(pid: int, host: Host) -> tuple[ThreadStack, ...] | str:
    """The stacks of a process, outermost frame first, or in words why they cannot be read. It stands still meanwhile, for some
    milliseconds."""
    path = program(host)
    if path is None:
        return NOT_INSTALLED
    answer = host.run([path, "dump", "--json", "--pid", str(pid)], timeout=LONGEST)
    if answer.returncode is None:
        return f"py-spy did not answer within {LONGEST:.0f} s"
    try:
        return tuple(parse_threads(decode(answer.stdout.encode(), list), pid)) if answer.ok else why_not(answer.stderr)
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return "py-spy's answer was not understood"


def parse_threads(threads: list[Any], pid: int) -> Iterator[ThreadStack]:
    """The threads of ``py-spy dump --json``.

    >>> frame = {"name": "f", "filename": "/a/t.py", "line": 3}
    >>> told = {"thread_name": None, "os_thread_id": 7, "frames": [frame, {**frame, "name": "<module>", "line": 9}]}
    >>> [(each.main, [inner.line for inner in each.frames]) for each in parse_threads([told], 7)]
    [(True, [9, 3])]
    """
    for thread in threads:
        frames = tuple(
            # newer Pythons tell the qualified name
            Frame(file=str(frame["filename"]), line=int(frame["line"]), function=str(frame["name"]).rpartition(".")[2])
            for frame in reversed(thread["frames"])
        )
        main = thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread"
        yield ThreadStack(name=str(thread.get("thread_name") or "thread"), frames=frames, main=main)


def why_not(said: str) -> str:
    """What py-spy's error means, in words.

    >>> why_not("Error: Permission Denied: Try running again with elevated permissions by going 'sudo env ...'")
    'the kernel does not let py-spy read it'
    """
    known = next((words for sign, words in SIGNS if sign in said.lower()), None)
    first = next((line for line in said.splitlines() if line.strip()), "")
    return known or f"py-spy said: {first[:160]}"
