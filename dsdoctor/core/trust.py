"""A folder -> why what lies in it is not run, built from or written to, or None. Looks at owners and modes only.

What lies in dsdoctor's cache is executed (toolkits, op_builder of an sdist) or packed into wheels: who may write there, or may put
another folder in its place, can run code as whoever uses it.
"""

import contextlib
import grp
import os
import pwd
import stat
from pathlib import Path
from shlex import quote

OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
"""The user that stands for all who have no number in this user namespace: in a rootless container, root of the host."""


def distrust(folder: Path) -> str | None:
    """Why a folder is not used, with the command that changes that; None where it can be, or does not exist yet.

    It and its parents up to the root must belong to this user or to root, and nobody else may write to them. In a parent with
    the sticky bit (/tmp) others may: there they can neither rename nor remove what is this user's.
    """
    place = Path(os.path.abspath(folder))  # noqa: PTH100 - the links on the way are judged too
    real = Path(os.path.realpath(place))
    for path in dict.fromkeys((*reversed(place.parents), *reversed(real.parents), place, real)):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be looked at: {error.strerror}"
        if why := _why_not(path, found, is_parent=path not in {place, real}):
            return why
    return None


def _why_not(path: Path, found: os.stat_result, *, is_parent: bool) -> str | None:
    if not _is_ours(found, is_parent=is_parent):
        return f"{path} belongs to user {found.st_uid}, this is user {os.geteuid()}; export DSDOCTOR_CACHE=/a/folder/you/own"
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if is_parent and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to {path}; chmod o-w {quote(str(path))} ends that"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"its group may write to {path}; chmod g-w {quote(str(path))} ends that"
    return None


def _is_ours(found: os.stat_result, *, is_parent: bool) -> bool:
    return found.st_uid in {os.geteuid(), 0} or (is_parent and _is_of_the_host(found))


def _is_of_the_host(found: os.stat_result) -> bool:
    """Whether it belongs to nobody of this user namespace: the root folder of a rootless container."""
    try:
        unmapped = int(OVERFLOW_UID.read_text(encoding="ascii"))
        return (
            found.st_uid == unmapped
            and Path("/proc/self/uid_map").read_text(encoding="ascii").split()[2] != "4294967295"
        )
    except (OSError, ValueError, IndexError):
        return False


def _is_private_group(number: int) -> bool:
    """Whether nobody but this user and root is in a group: many systems give each user one, and a umask of 002."""
    if number == 0:
        return True
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        return number == os.getegid() and not _has_members(number)
    return user.pw_gid == number and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _has_members(number: int) -> bool:
    """Whether this system knows anybody in a group: in a container, a user given as a number has one that nobody knows."""
    with contextlib.suppress(KeyError):
        if grp.getgrgid(number).gr_mem:
            return True
    return any(user.pw_gid == number for user in pwd.getpwall())
