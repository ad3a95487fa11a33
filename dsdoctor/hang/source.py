"""The source lines that stacks name. A file is read once, and never waited for long: it may lie on the disk that does not answer.
Looks.
"""

import threading
from pathlib import Path

from dsdoctor.core.files import open_regular

LARGEST_SOURCE = 16 << 20
"""Bytes, of one file and of all that are kept."""
SHOWN_CHARACTERS = 160
READ_SECONDS = 2.0
MAX_UNREAD = 3
"""Files that did not come in that time, after which no more are read: each keeps a thread."""


class Sources:
    """The text of regular files as they were when they were first asked for; empty where there is none: what a stack names may be
    a pipe, a device, or in no file."""

    def __init__(self) -> None:
        self._lines: dict[str, list[bytes]] = {}
        self._kept = self._unread = 0

    def line(self, file: str, number: int) -> str:
        """A line as it is shown; "" where there is none."""
        lines = self._of(file)
        found = lines[max(0, number - 1)] if number <= len(lines) else b""
        return found.decode("utf-8", "replace").strip()[:SHOWN_CHARACTERS]

    def text(self, file: str, size: int) -> bytes:
        """The begin of a file."""
        return b"\n".join(self._of(file))[:size]

    def _of(self, file: str) -> list[bytes]:
        lines = self._lines.get(file)
        if lines is None:
            lines = self._read(file).split(b"\n")
            size = sum(map(len, lines))
            if self._kept + size > LARGEST_SOURCE:
                self._lines.clear()
                self._kept = 0
            self._lines[file] = lines
            self._kept += size
        return lines

    def _read(self, file: str) -> bytes:
        if self._unread >= MAX_UNREAD:
            return b""
        texts: list[bytes] = []
        reader = threading.Thread(target=lambda: texts.append(_begin_of(file)), daemon=True)
        reader.start()
        reader.join(READ_SECONDS)
        self._unread += not texts
        return texts[0] if texts else b""


def _begin_of(file: str) -> bytes:
    try:
        with open_regular(Path(file)) as source:
            return source.read(LARGEST_SOURCE)
    except (OSError, ValueError):
        return b""
