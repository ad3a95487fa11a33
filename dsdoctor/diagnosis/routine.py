"""Lines of a build of which very many are alike: how often each kind came, so that the others need not be searched."""

from dataclasses import dataclass, field

ROUTINE, KINDS = 200, 1000
"""How many compile commands of one extension, and how many warnings, are read before the others are skipped; of how many kinds."""

A_COMMAND, A_WARNING = b"-DTORCH_EXTENSION_NAME=", b": warning: "
"""Parts of torch's compile commands, and of the warnings of gcc and clang; errors name the file, then ``error:``."""


def kind_of(raw: bytes) -> bytes:
    """The extension that a command compiles, or ``: warning: ``; nothing where a line is neither, or says more.

    >>> kind_of(b"c++ -DTORCH_EXTENSION_NAME=cpu_adam -O3 -c a.cpp"), kind_of(b"x.h:1:1: warning: unused"), kind_of(b"step 7")
    (b'cpu_adam', b': warning: ', b'')
    """
    if A_COMMAND in raw and b"illed" not in raw:  # a shell says "Killed" in the line of the command
        return raw.partition(A_COMMAND)[2][:40].split(b" ")[0] or A_COMMAND
    return A_WARNING if A_WARNING in raw and b"rror:" not in raw else b""


@dataclass
class Routine:
    """How often lines of each kind came."""

    times: dict[bytes, int] = field(default_factory=dict)

    def is_known(self, kind: bytes) -> bool:
        """Count one more line of a kind; whether very many came before it."""
        before = self.times.get(kind, 0)
        if len(self.times) < KINDS or before:
            self.times[kind] = before + 1
        return before >= ROUTINE
