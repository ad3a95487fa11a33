"""What Python's fault handler writes at SIGUSR2 -> stacks. It writes also while C code holds the interpreter's lock."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from dsdoctor.hang.models import Frame, ThreadStack
from dsdoctor.hang.processes import catches

LINE = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)')
HEAD = re.compile(r"(?:Current thread|Thread) (?P<id>0x[0-9a-f]+)|Stack \(most recent call first\)")
OWN_THREAD = "dsdoctor/hang/sampler.py"


def parse_dump(text: str) -> Iterator[ThreadStack]:
    """The threads of one dump; the last of them is the main thread.

    >>> dump = 'Thread 0x1 (most recent call first):\\n  File "a.py", line 3 in f\\n  File "a.py", line 9 in <module>\\n'
    >>> [[(frame.line, frame.function) for frame in thread.frames] for thread in parse_dump(dump)]
    [[(9, '<module>'), (3, 'f')]]
    """
    names: list[str] = []
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if head := HEAD.match(line):
            names.append(head["id"] or "main")
            stacks.append([])
        elif stacks and (found := LINE.fullmatch(line)):
            number = int(found["line"]) if found["line"].isdigit() else 0
            stacks[-1].append(Frame(file=found["file"], line=number, function=found["function"]))
    for place, (name, frames) in enumerate(zip(names, stacks, strict=True), 1):
        yield ThreadStack(name=name, frames=tuple(reversed(frames)), main=place == len(stacks))


def asked_for(pid: int, path: Path, *, seconds: float = 1.0) -> tuple[ThreadStack, ...]:
    """The stacks of a process that has promised to write them to a file at SIGUSR2; none where it does not in this time."""
    try:
        before = path.stat().st_size
        if not catches(pid, signal.SIGUSR2):
            return ()
        os.kill(pid, signal.SIGUSR2)
        last = time.monotonic() + seconds
        while (size := path.stat().st_size) == before and time.monotonic() < last:
            time.sleep(0.02)
        if size == before:
            return ()
        # the handler writes in several pieces
        time.sleep(0.05)
        with path.open("rb") as file:
            file.seek(before)
            return tuple(parse_dump(file.read(1 << 20).decode(errors="replace")))
    except OSError:
        return ()
