"""The lines of a failed build -> the first one that names the cause, not one that only repeats that something failed."""

import re
from collections.abc import Iterable

STRONG = re.compile(
    r"dsdoctor: error:"
    r"|No space left on device"
    r"|Killed signal terminated program|died due to signal|ninja: fatal"
    r"|(?:fatal )?error\s*:\s*\S|: error [A-Z]?\d+"
    r"|undefined reference to|cannot find -l\S+|cannot open shared object"
    r"|nvcc fatal\s*:"
)
WEAK = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception)\b: .*|error: .*)|command not found|: not found")
ECHO = re.compile(
    r"ninja: build stopped|subcommand failed|Error compiling objects|command .* failed with exit (code|status)"
)
LONGEST = 300


def first_error(lines: Iterable[str]) -> str | None:
    """The first real error line, None when there is none.

    >>> first_error(["[1/2] g++ -c a.cpp", "a.cpp:1:10: fatal error: libaio.h: No such file or directory",
    ...     "ninja: build stopped: subcommand failed.", "RuntimeError: Error compiling objects for extension"])
    'a.cpp:1:10: fatal error: libaio.h: No such file or directory'
    """
    weak = None
    for line in lines:
        if ECHO.search(line):
            continue
        if STRONG.search(line) and not _is_command(line):
            return line.strip()[:LONGEST]
        if weak is None and WEAK.search(line):
            weak = line.strip()[:LONGEST]
    return weak


def _is_command(line: str) -> bool:
    return re.match(r"\s*(\[\d+/\d+\] )?\S*(c\+\+|g\+\+|gcc|cc|nvcc|clang)\S* -", line) is not None
