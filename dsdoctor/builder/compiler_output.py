"""The lines that a compiler or linker wrote: the first that names the cause, not one that only repeats that something failed."""

import re
from collections.abc import Iterable

CAUSE = re.compile(
    r"dsdoctor: error:"
    r"|No space left on device"
    r"|Killed signal terminated program|died due to signal|ninja: fatal"
    r"|(?:fatal )?error\s*:\s*\S|: error [A-Z]?\d+"
    r"|undefined reference to|cannot find -l\S+|cannot open shared object"
    r"|nvcc fatal\s*:"
)
POSSIBLE_CAUSE = re.compile(r"^\s*(?:[\w.]*(?:Error|Exception)\b: .*|error: .*)|command not found|: not found")
REPEAT = re.compile(
    r"ninja: build stopped|subcommand failed|Error compiling objects|command .* failed with exit (code|status)"
)
MAX_ERROR_LENGTH = 300


def first_error(lines: Iterable[str]) -> str | None:
    """The first real error line, None when there is none.

    >>> first_error(["[1/2] g++ -c a.cpp", "a.cpp:1:10: fatal error: libaio.h: No such file or directory",
    ...     "ninja: build stopped: subcommand failed.", "RuntimeError: Error compiling objects for extension"])
    'a.cpp:1:10: fatal error: libaio.h: No such file or directory'
    """
    possible = None
    for line in lines:
        if REPEAT.search(line):
            continue
        if CAUSE.search(line) and not _is_command(line):
            return line.strip()[:MAX_ERROR_LENGTH]
        if possible is None and POSSIBLE_CAUSE.search(line):
            possible = line.strip()[:MAX_ERROR_LENGTH]
    return possible


def _is_command(line: str) -> bool:
    return re.match(r"\s*(\[\d+/\d+\] )?\S*(c\+\+|g\+\+|gcc|cc|nvcc|clang)\S* -", line) is not None
