"""Which folders are trusted: nobody but this user and root can change what lies in one, or put another one in its place.

What lies in dsdoctor's cache is executed (toolkits, op_builder of an sdist) or packed into wheels: who may write there, or may put
another folder in its place, can run code as whoever uses it. Only owners, modes and access lists are looked at.

A path is walked as the kernel walks it: from one open folder to the next, each link and each ".." where it stands. Every part is
judged before the next one is opened, so what is judged is what was passed, and nobody else can exchange it from then on: the path
without links that ``trusted`` returns stays what it is, and is what callers use.

Who is in a group is known where all users are listed on this system. A directory service (LDAP, SSSD) need not list its users:
there a group counts as one user's own only where its name and its number are those of the user, as useradd makes them.
"""

import errno
import grp
import os
import pwd
import re
import shutil
import stat
import struct
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from shlex import quote

from dsdoctor.core.files import is_this_user, is_unmapped, real_path

ACCESS_LIST = "system.posix_acl_access"
NAMED_USER, NAMED_GROUP, OWNING_GROUP, MASK = 0x02, 0x08, 0x04, 0x10
ENTRY = struct.Struct("<HHI")
"""An entry of the list: what kind of entry, its permission bits, the number of the user or group."""
VERSION_BYTES = 4
WRITE = 2
NAME_SERVICES = Path("/etc/nsswitch.conf")
LOCAL_USERS = Path("/etc/passwd")
MAX_USERS_BYTES = 4 << 20
"""Bytes of the local list of users beyond which nobody is looked for in it."""
LISTING = {"files", "compat", "systemd", "altfiles", "extrausers", "db", "mymachines"}
SOCKETS = {"sss": "/var/lib/sss/pipes/nss", "winbind": "/run/samba/winbindd/pipe"}
"""Services that many systems name without having them: where each listens, if it is there."""
NOBODYS = {"sync", "shutdown", "halt", "operator"}
NO_SHELLS = {"nologin", "false", "sync", "shutdown", "halt"}
"""What RHEL's and Fedora's own accounts in root's group have for a shell: nobody can be one of them."""
SHARED = stat.S_IWGRP | stat.S_ISGID
"""The mode bits of a folder that is shared with its group on purpose (mode 2770): no umask sets them by accident."""
ENTERED = stat.S_IXGRP | stat.S_IXOTH
HOST_FOLDERS = frozenset(
    map(
        Path, ("/", "/home", "/tmp", "/var", "/var/tmp", "/var/cache", "/run", "/run/user", "/dev", "/dev/shm", "/proc")
    )
)
HOST_TREES = tuple(map(Path, ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc")))
"""What belongs to root on every system (hier(7)): alone, and with all that lies in it."""
MAX_LINKS = 40
"""As many as the kernel follows on one way."""
PASSED = getattr(os, "O_PATH", 0) | os.O_NOFOLLOW | os.O_CLOEXEC
ASIDE = "not-trusted"
MAX_SHOWN = 3
WILDCARD, ESCAPED = re.compile(r"[*?[]"), re.compile(r"\[([*?[])\]")


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
        return f"everyone may write to {path}", "chmod o-w"
    if not found.st_mode & stat.S_IWGRP:
        # with an access control list, these bits are its mask: what nobody named in it can exceed
        return None
    listed = _access_list(path)
    for kind, number in listed:
        if kind == NAMED_USER and number not in {os.geteuid(), 0, found.st_uid}:
            return f"an access control list lets {user_name(number)} write to {path}", _to_end_the_list()
        if kind == NAMED_GROUP and number != known_group and (why := _others_in(number)):
            return f"an access control list lets group {number} write to {path} ({why})", _to_end_the_list()
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
    """Why a group is shared with other users, in words; None where nobody but this user and root is in it."""
    if is_unmapped("gid", number):
        return f"{number}, which represents every group that this user namespace does not map"
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
        if LOCAL_USERS.stat().st_size > MAX_USERS_BYTES:
            there.add(str(LOCAL_USERS))
    return there


class Distrusted(Exception):
    """A folder is not to be used; the message says why, with the command that changes that."""


@dataclass(frozen=True, kw_only=True)
class _Sharing:
    """A folder that its owner shares with a group on purpose: who that is, which group, and which folder."""

    user: int
    group: int
    folder: os.stat_result


@dataclass(frozen=True, kw_only=True)
class _Passed:
    """A folder, a link or a file on the way to a path: no link leads to ``path``, though it may be one itself."""

    path: Path
    found: os.stat_result
    is_last: bool


def trusted(folder: Path, inside: str = "", *, shareable: bool = False) -> Path | None:
    """A folder that can be used, by the path without links that leads to it; None where it does not exist yet.

    Raises Distrusted. It and its parents up to the root must belong to this user or to root, and nobody else may write to them.
    In a parent with the sticky bit (/tmp) others may: there they can neither rename nor remove what is this user's. A ``shareable``
    folder may be one of mode 2770 and a group of this user: its owner and that group are then trusted with it and with its parents.

    ``inside`` is a pattern of what is judged as well, with every folder and link on the way from the folder to it; nothing of
    a folder that is shared, where others' entries are meant to be.
    """
    place = folder.absolute()
    sharing = _sharing(place) if shareable else None
    try:
        last = _judge_way(place, inside=inside, shareable=shareable, sharing=sharing)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Distrusted(f"{error.filename or place} cannot be inspected: {error.strerror}") from None
    if sharing is not None and not os.path.samestat(last.found, sharing.folder):
        raise Distrusted(f"{place} was replaced during the inspection")
    if inside and sharing is None and (why := _distrust_inside(last.path, inside)):
        raise Distrusted(why)
    return last.path


def distrust(folder: Path, inside: str = "", *, shareable: bool = False, existing: bool = False) -> str | None:
    """Why ``trusted`` refuses a folder; None where it can be used, or does not exist yet. ``existing``: that is a reason too."""
    try:
        real = trusted(folder, inside, shareable=shareable)
    except Distrusted as refusal:
        return str(refusal)
    return f"{folder} is not there" if existing and real is None else None


def _judge_way(place: Path, *, inside: str, shareable: bool, sharing: _Sharing | None) -> _Passed:
    """The end of a way of which every part can be trusted. Raises Distrusted, and OSError where the way ends before."""
    last = None
    with closing(_walk(place)) as way:
        for last in way:
            is_folder = last.is_last and not stat.S_ISLNK(last.found.st_mode)
            emptied = _how_to_empty(last.path) if inside and is_folder else None
            why = _why_not(last.path, last.found, is_parent=not last.is_last, sharing=sharing, emptied=emptied)
            if why and shareable and is_folder and not last.found.st_mode & stat.S_IWOTH:
                why = f"{why}; {_how_to_share(last.path)}"
            if why:
                raise Distrusted(why)
    assert last is not None
    return last


def _distrust_inside(folder: Path, pattern: str) -> str | None:
    """The same for what lies in a folder that is trusted itself. Where nobody else can enter that, only owners matter."""
    try:
        entered = bool(folder.stat().st_mode & ENTERED)
        names = {path.relative_to(folder) for path in folder.glob(pattern)}
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{folder} cannot be inspected: {error.strerror}"
    # a folder that may be entered and not listed hides nothing
    for name in sorted({_plain_start(pattern), *names} - {Path()}):
        if why := _wrong_on_the_way(folder, name, entered=entered):
            return f"{why}; {_put_aside(folder, folder / name.parts[0])}"
    return None


def _plain_start(pattern: str) -> Path:
    """The parts of a pattern before the first with a wildcard.

    >>> _plain_start("cuda-[[]13/home/bin/*").as_posix()
    'cuda-[13/home/bin'
    """
    parts = pattern.split("/")
    plain = takewhile(lambda part: not WILDCARD.search(ESCAPED.sub("", part)), parts)
    return Path(*(ESCAPED.sub(r"\1", part) for part in plain))


def _wrong_on_the_way(folder: Path, name: Path, *, entered: bool) -> str | None:
    entry_is_link = (folder / name.parts[0]).is_symlink()
    # one that is not there is neither run nor read
    with suppress(OSError), closing(_walk(folder / name, start=folder)) as way:
        for passed in way:
            path, found = passed.path, passed.found
            within = folder in path.parents
            # a link further in, which is this user's own, leads to the part of this machine that a toolkit was planned with
            whose_matters = within or entry_is_link
            if whose_matters and _is_stranger(found.st_uid) and (within or not _is_of_the_host(path, found)):
                return _belongs_to(path, found.st_uid)
            if why := _written_by_others(path, found, within=within, entered=entered, strict=whose_matters):
                return why
    return None


def _written_by_others(path: Path, found: os.stat_result, *, within: bool, entered: bool, strict: bool) -> str | None:
    if stat.S_ISLNK(found.st_mode) or (within and not entered):
        return None
    if not within and stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return None
    if not strict and not found.st_mode & stat.S_IWOTH:
        return None
    writers = who_may_write(path, found)
    return f"{writers[0]}, so its contents may be anyone's" if writers else None


def _walk(path: Path, start: Path = Path("/")) -> Generator[_Passed, None, None]:
    """Everything that the kernel passes on the way from ``start`` to a path below it, each opened out of the folder before.

    A link is read after whoever asks has seen whose it is. From "/" on, the root comes first. Raises OSError where the way ends.
    """
    names = path.parts[1:] if start == Path("/") else path.relative_to(start).parts
    here, ahead, links = start, [*reversed(names)], 0
    folder = os.open(start, PASSED)
    try:
        if start == Path("/"):
            yield _Passed(path=here, found=os.fstat(folder), is_last=not ahead)
        while ahead:
            name = ahead.pop()
            entry = _open_entry(folder, name, here)
            found = os.fstat(entry)
            if stat.S_ISLNK(found.st_mode):
                try:
                    yield _Passed(path=here / name, found=found, is_last=not ahead)
                    target = os.readlink("", dir_fd=entry)
                finally:
                    os.close(entry)
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(here / name))
                ahead.extend(part for part in reversed(target.split("/")) if part not in {"", "."})
                if not target.startswith("/"):
                    if not ahead:  # a link to "."
                        yield _Passed(path=here, found=os.fstat(folder), is_last=True)
                    continue
                entry, here = os.open("/", PASSED), Path("/")
                found = os.fstat(entry)
            else:
                here = here.parent if name == ".." else here / name
            os.close(folder)
            folder = entry
            yield _Passed(path=here, found=found, is_last=not ahead)
    finally:
        os.close(folder)


def _open_entry(folder: int, name: str, where: Path) -> int:
    """Open an entry of an open folder by its name alone: a link itself, a folder that is mounted when it is entered as that."""
    try:
        entry = os.open(name, PASSED, dir_fd=folder)
        if not stat.S_ISDIR(os.fstat(entry).st_mode):
            return entry
        os.close(entry)
        return os.open(name, PASSED | os.O_DIRECTORY, dir_fd=folder)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(where / name)) from None


def _how_to_empty(folder: Path) -> str | None:
    """How to be rid of what others put into a folder: all of it goes, a new one is made. None where all is this user's."""
    try:
        owners = {path: path.lstat().st_uid for path in sorted(folder.iterdir())}
    except OSError:
        return None
    foreign = [f"{path.name} of {user_name(uid)}" for path, uid in owners.items() if _is_stranger(uid)]
    if not foreign:
        return None
    more = f" and {len(foreign) - MAX_SHOWN} more" if len(foreign) > MAX_SHOWN else ""
    aside = f"mv {quote(str(folder))} {quote(f'{folder}.{ASIDE}')}"
    return f"others put {', '.join(foreign[:MAX_SHOWN])}{more} there: {aside}; a new one will be created"


def _put_aside(folder: Path, entry: Path) -> str:
    """The command that takes an entry out of a folder. Only root can move a folder of somebody else to another place."""
    about = entry.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid != os.geteuid() != 0:
        return f"mv {quote(str(folder))} {quote(f'{folder}.{ASIDE}')}; a new one will be created"
    return f"mv {quote(str(entry))} {quote(f'{folder}.{ASIDE}-{entry.name}')}; it will be created again"


def _sharing(folder: Path) -> _Sharing | None:
    """Who shares a folder with a group that this user is in, by a mode that no umask sets by accident."""
    try:
        found = folder.stat()
    except OSError:
        return None
    ours = found.st_gid in {os.getegid(), *os.getgroups()}
    if not ours or found.st_mode & SHARED != SHARED:
        return None
    if is_unmapped("uid", found.st_uid) or is_unmapped("gid", found.st_gid):
        # every unmapped group of this user has that number too
        return None
    return _Sharing(user=found.st_uid, group=found.st_gid, folder=found)


def _how_to_share(folder: Path) -> str:
    return f"its owner shares it on purpose with a group by chmod 2770 {quote(str(folder))}"


def _why_not(
    path: Path, found: os.stat_result, *, is_parent: bool, sharing: _Sharing | None, emptied: str | None
) -> str | None:
    shares = sharing is not None and found.st_uid == sharing.user
    if _is_stranger(found.st_uid) and not shares and not (is_parent and _is_of_the_host(path, found)):
        return f"{_belongs_to(path, found.st_uid)}; export DSDOCTOR_CACHE=/a/folder/you/own"
    if stat.S_ISLNK(found.st_mode):
        return None
    if not stat.S_ISDIR(found.st_mode):
        return f"{path} is not a folder"
    if is_parent and found.st_mode & stat.S_ISVTX:
        return None
    if writers := who_may_write(path, found, known_group=sharing.group if sharing else None):
        sentence, command = writers
        return f"{sentence}; {emptied or f'{command} {quote(str(path))} ends that'}"
    return None


def _is_of_the_host(path: Path, found: os.stat_result) -> bool:
    """Whether an owner that this user namespace does not map is root of its host, where everything depends on that owner anyway.

    It may be any stranger of the host. It is root in the folders that are root's on every system. Whoever owns the way to this
    Python, to dsdoctor or to this user's home folder could run code as this user without dsdoctor.
    """
    if not is_unmapped("uid", found.st_uid):
        return False
    if path in HOST_FOLDERS or any(tree == path or tree in path.parents for tree in HOST_TREES):
        return True
    depended_on = [sys.executable, sys.prefix, __file__]
    with suppress(KeyError):
        depended_on.append(pwd.getpwuid(os.geteuid()).pw_dir)
    return any(path in Path(real_path(place)).parents for place in depended_on if place)


def _is_stranger(number: int) -> bool:
    """Whether an owner is neither this user nor root. A number that may stand for anybody is nobody's own, not even one's own."""
    return number != 0 and not is_this_user(number)


def _belongs_to(path: Path, number: int) -> str:
    if is_unmapped("uid", number):
        return f"{path} belongs to a user that this user namespace does not map ({number}), so it may be anyone's"
    return f"{path} belongs to {user_name(number)}, this is {user_name(os.geteuid())}"
