"""The lines before a process's end -> what its logger said last of an error; a program that catches all prints no traceback."""

import re
from collections.abc import Iterable
from itertools import islice

from dsdoctor.diagnosis.clean import last_segment
from dsdoctor.diagnosis.losses import FINITE
from dsdoctor.diagnosis.stages import STEP

NEAR = 6
"""So many lines before the end, at most, stands what a program said of it."""

A_LOGGER = re.compile(r"(?:^|[\s\[|])(?:ERROR|CRITICAL|FATAL)(?:[\s\]|]|:\S{0,60}:)")
"""The level of a line that tells of an error."""

NO_PROGRAM = re.compile(
    r"torch/distributed|launch\.py:\d|launcher/|srun: |slurm|mpirun|elastic|Root Cause|^ERROR: |exit(?:ed|s|code)?\b.{0,20}\d"
)
"""Lines of launchers and of tools, which tell of another process."""

GOES_ON = re.compile(r"[Rr]etry|[Ss]kip|[Cc]ontinu|again|[Ii]gnor|non-fatal|fall(?:ing)? back")


def last_words(before: Iterable[bytes], line: int) -> tuple[int, str] | None:
    """The number and the text of the line. ``before``: the lines before this one, the last one first.

    >>> last_words([b"", b"2026-11-23 ERROR trainer: Fatal: no rows"], 9), last_words([b"ERROR trainer: bad row, skipping it"], 9)
    ((7, '2026-11-23 ERROR trainer: Fatal: no rows'), None)
    """
    for age, raw in enumerate(islice(before, NEAR), 1):
        if STEP.search(raw[-400:]) or FINITE.search(raw[-400:]):
            return None
        text = raw.decode("utf-8", "replace").strip()
        if A_LOGGER.search(text[:200]) and not NO_PROGRAM.search(text):
            return None if GOES_ON.search(text) else (line - age, last_segment(raw)[:400])
    return None
