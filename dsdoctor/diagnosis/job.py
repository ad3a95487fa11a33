"""A job's folder -> its logs: those of torchrun's --log-dir, of Slurm's steps, of Ray's workers, of a cluster's pods."""

import os
import re
from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import open_regular
from dsdoctor.diagnosis.lines import is_text

MAX_DEPTH = 6
"""Folders below these are not looked into: torchrun's logs lie four deep."""
MAX_LOGS = 20_000
A_LOG = re.compile(r"(?:\.(?:log|out|err|stdout|stderr|txt)(?:\.\d{1,3})?(?:\.gz)?|^(?:stdout|stderr)(?:\.\w{1,10})?)$")
SAMPLE = 8192
"""So many bytes of a file show whether it is text: an a.out is none."""
NO_LOG = re.compile(r"^(?:requirements|constraints|README|LICENSE|hostfile)|^\.")


def logs_in(folder: Path) -> list[str]:
    """The logs below a folder in the order of their names, numbers by their value.

    Links are not followed; what is empty, no text or gone by then is left out.

    Raises UsageError where there are none, or a folder cannot be read.
    """
    found: list[str] = []
    for place, folders, files in os.walk(folder, onerror=_refused):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = [] if depth >= MAX_DEPTH else [name for name in folders if not name.startswith(".")]
        names = (name for name in files if A_LOG.search(name) and not NO_LOG.match(name))
        found += [str(path) for name in names if _is_log(path := Path(place) / name)]
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


def _refused(error: OSError) -> None:
    raise UsageError(
        f"{error.filename} cannot be read: {error.strerror}", hint="name the log files themselves"
    ) from error


def _is_log(path: Path) -> bool:
    """Whether a file has text in it. One that may not be read is taken: that it cannot be is told when it is opened."""
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with open_regular(path) as stream:
            sample = stream.read(SAMPLE)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return bool(sample) and (path.suffix == ".gz" or is_text(sample))


def _in_order(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d{1,12})", path)]
