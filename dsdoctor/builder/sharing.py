"""The mode and owner of a cache folder -> why its contents are not to be trusted, and the rights of what is written into it.

What lies in the cache becomes part of wheels: who may write there may run code as whoever builds.
"""

import os
import stat
from pathlib import Path
from shlex import quote

from dsdoctor.builder.cache.checked_files import PRIVATE

SHARED = stat.S_IWGRP | stat.S_ISGID
"""The sign that a folder is shared with its group on purpose (mode 2770): no umask makes it by accident."""


def distrust(folder: Path) -> str | None:
    """Why nothing is taken from a folder or put into it; None where it is fine, or not made yet.

    Fine is a folder of this user (or of root) that nobody else may write, and one that its owner shares with a group of
    this user: mode 2770. What everybody may write is never fine.
    """
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be looked at: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is no folder"
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to {folder}; chmod o-w {quote(str(folder))} ends that"
    shared = found.st_mode & SHARED == SHARED
    if found.st_mode & stat.S_IWGRP and not shared:
        return f"the group may write to {folder}; chmod 2770 {quote(str(folder))} shares it on purpose, chmod 700 ends that"
    if found.st_uid in {os.geteuid(), 0} or (shared and found.st_gid in {os.getegid(), *os.getgroups()}):
        return None
    return f"{folder} belongs to user {found.st_uid}, this is user {os.geteuid()}; its owner shares it with a group by chmod 2770"


def mode_inside(folder: Path) -> int:
    """The mode of folders that are made in a cache folder: what it lets its group and others do, they do."""
    try:
        return PRIVATE | folder.stat().st_mode & 0o2075
    except OSError:
        return PRIVATE
