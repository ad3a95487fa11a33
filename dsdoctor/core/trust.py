"""A folder -> why what lies in it is not run, built from or written to, or None. Looks at owners and modes only.

What lies in dsdoctor's cache is executed (toolkits, op_builder of an sdist) or packed into wheels: who may write there, or may put
another folder in its place, can run code as whoever uses it.
"""

import contextlib
import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

SHARED = stat.S_IWGRP | stat.S_ISGID
"""The mode bits of a folder that is shared with its group on purpose (mode 2770): no umask sets them by accident."""
OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")
"""The user that stands for all who have no number in this user namespace: in a rootless container, root of the host."""


@dataclass(frozen=True, kw_only=True)
class _Sharing:
    """A folder that its owner shares with a group on purpose: who that is, and which group."""

    user: int
    group: int


def distrust(folder: Path, *, shareable: bool = False) -> str | None:
    """Why a folder is not used, with the command that changes that; None where it can be, or does not exist yet.

    It and its parents up to the root must belong to this user or to root, and nobody else may write to them. In a parent with
    the sticky bit (/tmp) others may: there they can neither rename nor remove what is this user's. A ``shareable`` folder may be
    one of mode 2770 and a group of this user: its owner and that group are then trusted with it and with its parents.
    """
    place = Path(os.path.abspath(folder))  # noqa: PTH100 - the links on the way are judged too
    real = Path(os.path.realpath(place))
    sharing = _sharing(real) if shareable else None
    for path in dict.fromkeys((*reversed(place.parents), *reversed(real.parents), place, real)):
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be looked at: {error.strerror}"
        if why := _why_not(path, found, is_parent=path not in {place, real}, sharing=sharing):
            return (
                f"{why}; {_how_to_share(path)}"
                if shareable and path == real and not found.st_mode & stat.S_IWOTH
                else why
            )
    return None


def _sharing(folder: Path) -> _Sharing | None:
    """Who shares a folder with a group that this user is in, by a mode that no umask sets by accident."""
    try:
        found = folder.stat()
    except OSError:
        return None
    ours = found.st_gid in {os.getegid(), *os.getgroups()}
    return _Sharing(user=found.st_uid, group=found.st_gid) if ours and found.st_mode & SHARED == SHARED else None


def _how_to_share(folder: Path) -> str:
    return f"its owner shares it on purpose with a group by chmod 2770 {quote(str(folder))}"


def _why_not(path: Path, found: os.stat_result, *, is_parent: bool, sharing: _Sharing | None) -> str | None:
    owners = {os.geteuid(), 0, *([sharing.user] if sharing else [])}
    if found.st_uid not in owners and not (is_parent and _is_of_the_host(found)):
        return f"{path} belongs to user {found.st_uid}, this is user {os.geteuid()}; export DSDOCTOR_CACHE=/a/folder/you/own"
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if is_parent and found.st_mode & stat.S_ISVTX:
        return None
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to {path}; chmod o-w {quote(str(path))} ends that"
    known = sharing is not None and found.st_gid == sharing.group
    if found.st_mode & stat.S_IWGRP and not known and not _is_private_group(found.st_gid):
        return f"its group may write to {path}; chmod g-w {quote(str(path))} ends that"
    return None


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
