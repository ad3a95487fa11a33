"""Our own inability, and nothing else: a sick machine is a Finding. Each error carries its exit code and a next step."""

import errno
import re
import resource
import shutil
from shlex import quote

FULL = {errno.ENOSPC, errno.EDQUOT}
OF_THE_NAME = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}
MAX_SHOWN_NAME = 80
"""Characters of a path that is refused for what it is."""
OF_THE_MACHINE = {
    *(errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EFBIG),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
}
"""What a disk or a limit refuses: no defect of ours. Another error that comes as far as to end a command is one."""
NO_TEMPORARY = "No usable temporary directory"
"""How Python's tempfile says that it could write to none."""
EVERY_FILE = float("inf")
A_PAGE = 4096
RAISE_FILE_LIMIT = "raise the limit: ulimit -f unlimited, or in the settings of the job's scheduler"
SAYS_FULL = re.compile(
    r"No space left on device|Disk quota exceeded|\[?Errno (28|122)\b|not enough (free )?space", re.IGNORECASE
)


class DoctorError(Exception):
    """Something dsdoctor itself could not do.

    ``message`` states what is the matter with the two facts that clash; ``hint`` is the next command or step.
    """

    exit_code = 5

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(DoctorError):
    """What was asked makes no sense: an unknown op, a malformed architecture, a source that is none."""

    exit_code = 2


class ImpossiblePlan(DoctorError):
    """What was asked makes sense, and this machine cannot do it."""

    exit_code = 3


class BuildFailed(DoctorError):
    """A compiler, a fetch or a proof failed; nothing half-made was left behind."""

    exit_code = 4


class NotWritten(OSError):
    """A file or folder that somebody named, or that is needed, cannot be written. ``filename`` is its path."""


def disk_full(text: str) -> bool:
    """Whether a program's own words say that it found no space.

    >>> disk_full("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device")
    True
    """
    return SAYS_FULL.search(text) is not None


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no space, and nothing about a file that was read meanwhile."""
    if isinstance(error, shutil.Error):
        return disk_full(str(error))
    return isinstance(error, OSError) and (error.errno in FULL or NO_TEMPORARY in str(error.strerror))


def _file_limit() -> float:
    """How many bytes of a file this process may write."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return EVERY_FILE if soft == resource.RLIM_INFINITY else soft


def refused_by_system(error: OSError) -> DoctorError:
    """What the operating system refused, as an error of ours."""
    if NO_TEMPORARY in str(error.strerror) and _file_limit() < A_PAGE:
        return ImpossiblePlan(
            "no temporary file can be created: this process may not write any (ulimit -f)", hint=RAISE_FILE_LIMIT
        )
    if NO_TEMPORARY in str(error.strerror):
        return ImpossiblePlan(
            f"no temporary file can be created; the disk is full or not writable: {error.strerror}",
            hint="free some space (df -h), or export TMPDIR=/a/folder/on/another/disk",
        )
    if is_full(error):
        # shutil.copytree tells of all files at once: (from, to, why)
        first = error.args[0][0] if isinstance(error, shutil.Error) and isinstance(error.args[0], list) else ()
        path = str(error.filename or next(iter(first[1:]), ""))
        return ImpossiblePlan(
            f"the disk is full: {path or 'no space left to write to'}",
            hint=f"df -h {quote(path)} shows how full it is; free some space, or choose a path on another disk"
            if path
            else "df -h",
        )
    if isinstance(error, NotWritten) and error.errno == errno.EFBIG:
        limit = _file_limit()
        limited = limit < EVERY_FILE
        most = f"this process may write ({limit:,} bytes, ulimit -f)" if limited else "its file system allows"
        return ImpossiblePlan(
            f"{error.filename} cannot be written: it would be larger than {most}",
            hint=RAISE_FILE_LIMIT if limited else "choose a path on another disk",
        )
    if isinstance(error, NotWritten):
        why = error.strerror or str(error)
        return UsageError(
            f"{error.filename} cannot be written: {why}", hint="choose a path in an existing folder that you own"
        )
    if error.errno in OF_THE_NAME:
        name = str(error.filename or "")
        shown = f"{name[:MAX_SHOWN_NAME]}..." if len(name) > MAX_SHOWN_NAME else name or "the path"
        return UsageError(f"{shown} cannot be used: {error.strerror}", hint="name another path")
    place = f": {error.filename}" if error.filename else ""
    kind = ImpossiblePlan if error.errno in OF_THE_MACHINE else DoctorError
    return kind(f"the system refused: {error.strerror or error}{place}", hint="fix that and run again")
