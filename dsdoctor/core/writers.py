"""A file or folder -> who else may write to it: by its mode, by its group and who is in that, by a POSIX access control list.

Who is in a group is known where all users are listed on this system. A directory service (LDAP, SSSD) need not list its users:
there a group counts as one user's own only where its name and its number are those of the user, as useradd makes them.
"""

import grp
import os
import pwd
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ACCESS_LIST = "system.posix_acl_access"
NAMED_USER, NAMED_GROUP, OWNING_GROUP, MASK = 0x02, 0x08, 0x04, 0x10
ENTRY = struct.Struct("<HHI")
"""An entry of the list: what kind of entry, its permission bits, the number of the user or group."""
VERSION_BYTES = 4
WRITE = 2

NAME_SERVICES = Path("/etc/nsswitch.conf")
LOCAL_USERS = Path("/etc/passwd")
LONGEST = 4 << 20
"""Bytes of the local list of users beyond which nobody is looked for in it."""
LISTING = {"files", "compat", "systemd", "altfiles", "extrausers", "db", "mymachines"}
SOCKETS = {"sss": "/var/lib/sss/pipes/nss", "winbind": "/run/samba/winbindd/pipe"}
"""Services that many systems name without having them: where each listens, if it is there."""


NOBODYS = {"sync", "shutdown", "halt", "operator"}
NO_SHELLS = {"nologin", "false", "sync", "shutdown", "halt"}
"""What RHEL's and Fedora's own accounts in root's group have for a shell: nobody can be one of them."""


def user_name(number: int) -> str:
    """What messages call a user.

    >>> user_name(0)
    'user root (0)'
    """
    try:
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:
        return f"user {number}"


def who_may_write(path: Path, found: os.stat_result, *, known_group: int | None = None) -> tuple[str, str] | None:
    """A sentence on who besides its owner and root may write there, and the command that ends it without the path.

    None where nobody may. ``known_group`` is a group that it is shared with on purpose.
    """
    if found.st_mode & stat.S_IWOTH:
        return f"everybody may write to {path}", "chmod o-w"
    if not found.st_mode & stat.S_IWGRP:
        # with an access control list, these bits are its mask: what nobody named in it can exceed
        return None
    listed = _access_list(path)
    for kind, number in listed:
        if kind == NAMED_USER and number not in {os.geteuid(), 0, found.st_uid}:
            return f"by an access control list {user_name(number)} may write to {path}", _to_end_the_list()
        if kind == NAMED_GROUP and number != known_group and (why := _others_in(number)):
            return f"by an access control list group {number} may write to {path} ({why})", _to_end_the_list()
    by_group = not listed or any(kind == OWNING_GROUP for kind, _ in listed)
    if by_group and found.st_gid != known_group and (why := _others_in(found.st_gid)):
        return f"its group may write to {path} ({why})", "chmod g-w"
    return None


def _to_end_the_list() -> str:
    # without setfacl: chmod takes the permission from the list's mask, so from all who are named in it
    return "setfacl -b" if shutil.which("setfacl") else "chmod g-w"


def _access_list(path: Path) -> tuple[tuple[int, int], ...]:
    """The kind and number of each entry that grants writing, the mask taken into account; () where there is no list."""
    try:
        data = os.getxattr(path, ACCESS_LIST, follow_symlinks=False)
    except OSError:
        return ()
    entries = list(ENTRY.iter_unpack(data[VERSION_BYTES:]))
    mask = next((allowed for kind, allowed, _ in entries if kind == MASK), WRITE)
    # the mask itself, so that a list which lets nobody write is still told from none
    return (
        (MASK, 0),
        *((kind, number) for kind, allowed, number in entries if allowed & mask & WRITE and kind != MASK),
    )


def _others_in(number: int) -> str | None:
    """Why a group is not this user's alone, in words; None where nobody but this user and root is in it."""
    others = sorted(set(_others(number)))
    if others:
        return f"{', '.join(others[:3])}{' and more' if len(others) > 3 else ''} in it"
    # sssd and winbind give no user the primary group 0 (min_id in sssd.conf(5), the ranges of idmap)
    unlisted = _unlisted() - (set(SOCKETS) if number == 0 else set())
    if number == 0 and not unlisted:
        return None
    try:
        group, user = grp.getgrgid(number), pwd.getpwuid(os.geteuid())
    except KeyError:
        # in a container, a user given as a number may have a group that nobody knows
        return None if number == os.getegid() and not unlisted else f"{number}, not this user's own"
    if user.pw_gid != number or group.gr_name != user.pw_name:
        return f"{group.gr_name}, not this user's own"
    if unlisted and number != user.pw_uid:
        return f"{group.gr_name}, whose members {', '.join(sorted(unlisted))} need not list"
    return None


def _others(number: int) -> Iterator[str]:
    """The users that this system knows in a group, besides this one and root."""
    allowed = {os.geteuid(), 0}
    with suppress(KeyError):
        for name in grp.getgrgid(number).gr_mem:
            if _number_of(name) not in allowed:
                yield name
    for name, user, group in _users():
        if group == number and user not in allowed:
            yield name


def _number_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None


def _users() -> Iterator[tuple[str, int, int]]:
    """Name, number and primary group of the users of this system. A directory service is not asked: it may have a million."""
    if not _unlisted():
        for user in pwd.getpwall():
            if not _is_nobodys(user.pw_name, user.pw_shell):
                yield user.pw_name, user.pw_uid, user.pw_gid
        return
    with suppress(OSError):
        for line in LOCAL_USERS.read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split(":")
            numbers = len(fields) > 3 and fields[2].isdecimal() and fields[3].isdecimal()
            if numbers and not _is_nobodys(fields[0], fields[-1]):
                yield fields[0], int(fields[2]), int(fields[3])


def _is_nobodys(name: str, shell: str) -> bool:
    return name in NOBODYS and shell.rpartition("/")[2] in NO_SHELLS


def _unlisted() -> set[str]:
    """The services that give this system users which they need not list."""
    try:
        lines = NAME_SERVICES.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition("#")[0].split()[1:] for line in lines if line.startswith(("passwd:", "group:")))
    services = {word for words in named for word in words if not word.startswith(("[", "!")) and word[:1].isalpha()}
    there = {name for name in services - LISTING if name not in SOCKETS or Path(SOCKETS[name]).exists()}
    with suppress(OSError):
        if LOCAL_USERS.stat().st_size > LONGEST:
            there.add(str(LOCAL_USERS))
    return there
