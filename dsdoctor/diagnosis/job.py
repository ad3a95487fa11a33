"""A job's folder -> its logs: those of torchrun's --log-dir, of Slurm's steps, of Ray's workers, of a cluster's pods."""

import os
import re
from pathlib import Path

from dsdoctor.core.errors import UsageError

MAX_DEPTH = 6
"""Folders below these are not looked into: torchrun's logs lie four deep."""
MAX_LOGS = 20_000
A_LOG = re.compile(r"(?:\.(?:log|out|err|stdout|stderr|txt)(?:\.\d{1,3})?(?:\.gz)?|^(?:stdout|stderr)(?:\.\w{1,10})?)$")
NO_LOG = re.compile(r"^(?:requirements|constraints|README|LICENSE|hostfile)|^\.")


def logs_in(folder: Path) -> list[str]:
    """The logs below a folder in the order of their names, numbers by their value. Links are not followed, empty files left out.

    Raises UsageError where there are none.
    """
    found: list[str] = []
    for place, folders, files in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [] if depth >= MAX_DEPTH else [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(place) / name
            if (
                A_LOG.search(name)
                and not NO_LOG.match(name)
                and not path.is_symlink()
                and path.is_file()
                and path.stat().st_size
            ):
                found.append(str(path))
    if not found:
        raise UsageError(
            f"{folder} has no logs (*.log, *.out, *.err, *.txt, also .gz)", hint="name the log files themselves"
        )
    if len(found) > MAX_LOGS:
        raise UsageError(
            f"{folder} has {len(found):,} logs, at most {MAX_LOGS:,} are read at once",
            hint="name the folder of one job",
        )
    return sorted(found, key=_in_order)


def _in_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d{1,12})", path)]
