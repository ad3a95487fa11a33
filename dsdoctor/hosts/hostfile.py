"""The text of a hostfile or a .deepspeed_env -> what DeepSpeed 0.19.8 reads from it, what it refuses and what it misreads.
What parses never raises.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited
from dsdoctor.ranks.nodelist import expand, fold
from dsdoctor.rules import book

LINE = re.compile(r"^(\S+)\s+slots=(\d+)(.*)$", re.DOTALL)
HOST = re.compile(r"(?:[A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.-]*")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
MAX_DIGITS = 6
"""A larger number of slots is a typing error, and a list of that many ranks would fill the memory."""
VALUE_PROBLEMS = (
    (r"^'|'$", "single-quotes"),
    (r'"', "double-quotes"),
    (r"[^\s]\s+#", "comment-in-value"),
    (r"`|\$\(", "command-in-value"),
    (r"\$[A-Za-z_{]", "variable-in-value"),
    (r"\\", "backslash-in-value"),
)
"""What a value may hold that does not arrive unchanged, with the phrase about it: DeepSpeed puts it into double quotes, and a
shell reads it."""


@dataclass(frozen=True, kw_only=True)
class Slots:
    """A host of a hostfile, the ranks it takes, and the line (from 1) that says so."""

    name: str
    slots: int
    line: int


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """A line (from 1; 0: the whole file) that is not what it should be. ``refused``: DeepSpeed stops at it; else it goes on
    with something that was not meant. ``text`` is the line, of a .deepspeed_env without the value; ``host`` is given where
    the line names a host again; ``bad_name``: nobody can be asked at what it names."""

    line: int
    text: str
    what: str
    refused: bool
    host: str | None = None
    bad_name: bool = False


@dataclass(frozen=True, kw_only=True)
class Hostfile:
    """What a hostfile says: the hosts that DeepSpeed takes from it, in its order, and what is wrong."""

    hosts: tuple[Slots, ...]
    complaints: tuple[Complaint, ...] = ()


@dataclass(frozen=True, kw_only=True)
class EnvironmentFile:
    """What a .deepspeed_env says. ``values`` are unchanged and may be secrets: never show them."""

    values: dict[str, str]
    complaints: tuple[Complaint, ...] = ()


def parse_hostfile(text: str) -> Hostfile:
    """Read a hostfile more strictly than DeepSpeed does (its runner.py, ``_parse_hostfile``). Never raises.

    >>> parse_hostfile("node1 slots=8").hosts
    (Slots(name='node1', slots=8, line=1),)
    >>> parse_hostfile("node1 slots = 8").complaints[0].what
    'not of the form "HOST slots=NUMBER"'
    >>> parse_hostfile("node1 slots=2x").complaints[0].what
    "what follows slots=2 is ignored: 'x'"
    """
    hosts: dict[str, Slots] = {}
    complaints: list[Complaint] = []
    for number, line in _lines(text):
        if line == "" or line.startswith("#"):
            continue
        match = LINE.match(line)
        refused = _refused(match, hosts)
        if match is None or refused is not None:
            host = match[1] if match and match[1] in hosts else None
            complaints.append(Complaint(line=number, text=_short(line), what=refused or "", refused=True, host=host))
            continue
        complaints += (Complaint(line=number, text=_short(line), what=w, refused=False) for w in _swallowed(match))
        if not HOST.fullmatch(match[1]):
            what = book.phrase("hosts", _kind_of_name(match[1]), name=repr(_short(match[1])))
            complaints.append(Complaint(line=number, text=_short(line), what=what, refused=False, bad_name=True))
        if len(match[2]) <= MAX_DIGITS:
            hosts[match[1]] = Slots(name=match[1], slots=int(match[2]), line=number)
    if not hosts and not complaints:
        complaints.append(Complaint(line=0, text="", what="no host in it", refused=True))
    return Hostfile(hosts=tuple(hosts.values()), complaints=tuple(complaints))


def read_hosts(hostfile: Path) -> tuple[str, ...]:
    """The hosts of a DeepSpeed hostfile. Raises UsageError for one that DeepSpeed refuses, and for invalid names."""
    try:
        read = parse_hostfile(read_limited(hostfile).decode("utf-8", errors="replace"))
    except OSError as error:
        hint = "write one line for each node, as in: node1 slots=8"
        raise UsageError(f"the hostfile {hostfile} cannot be read: {error.strerror}", hint=hint) from None
    # lines that DeepSpeed misreads do no harm here, except a name that ssh would take for something else
    names = {entry.line for entry in read.hosts if not HOST.fullmatch(entry.name)}
    for bad in read.complaints:
        if bad.refused or bad.line in names:
            where = f"{hostfile}, line {bad.line}" if bad.line else str(hostfile)
            raise UsageError(f"{where}: {bad.what}", hint="write one line for each node, as in: node1 slots=8")
    return tuple(entry.name for entry in read.hosts)


def parse_deepspeed_env(text: str) -> EnvironmentFile:
    """Read a .deepspeed_env as DeepSpeed does (runner.py splits at the first "=", and pdsh's remote shell gets
    ``export NAME=VALUE;``, the value between double quotes where it holds more than letters, digits and _@%+=:,./-).

    >>> parse_deepspeed_env("GLOO_SOCKET_IFNAME=eth0").values
    {'GLOO_SOCKET_IFNAME': 'eth0'}
    >>> parse_deepspeed_env("NCCL_DEBUG").complaints[0].what
    'no "=" in it'
    """
    values: dict[str, str] = {}
    complaints: list[Complaint] = []
    for number, line in _lines(text):
        name, equals, value = (part.strip() for part in line.partition("="))
        shown = f"{_short(name)}=..." if equals else ""
        problems = tuple(_misread(name, equals, value, name in values))
        complaints += (Complaint(line=number, text=shown, what=what, refused=refused) for what, refused in problems)
        if NAME.fullmatch(name) and equals:
            values[name] = value
    return EnvironmentFile(values=values, complaints=tuple(complaints))


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines as Python's ``readlines`` ends them: at \\n, \\r and \\r\\n alone; without space around them."""
    return ((number, line.strip()) for number, line in enumerate(io.StringIO(text, newline=None), start=1))


def _refused(match: re.Match[str] | None, hosts: dict[str, Slots]) -> str | None:
    """Why DeepSpeed stops at a line."""
    if match is None:
        return 'not of the form "HOST slots=NUMBER"'
    if match[1] in hosts:
        return book.phrase("hosts", "host-again", host=_short(match[1]), line=hosts[match[1]].line)
    return None


def _swallowed(match: re.Match[str]) -> Iterator[str]:
    """What DeepSpeed accepts in a line without a warning although it cannot be meant."""
    slots, rest = match[2], match[3]
    if rest and not re.match(r"\s+#", rest):
        yield book.phrase("hosts", "rest-ignored", slots=slots, rest=repr(_short(rest.strip())))
    if len(slots) > MAX_DIGITS:
        yield book.phrase("hosts", "too-many-slots")
    elif int(slots) == 0:
        yield book.phrase("hosts", "no-slots")
    if not slots.isascii():
        yield book.phrase("hosts", "other-digits", slots=repr(slots))


def _kind_of_name(host: str) -> str:
    """Why it is no valid host name, as the name of a phrase."""
    kinds = (
        (host.startswith("-"), "name-is-option"),
        ("[" in host or "," in host, "name-of-several"),
        (":" in host, "name-with-port"),
        (host.startswith("\ufeff"), "name-with-mark"),
    )
    return next((kind for true, kind in kinds if true), "name-invalid")


def _misread(name: str, equals: str, value: str, again: bool) -> Iterator[tuple[str, bool]]:
    """What DeepSpeed or the remote shell makes of a line that was not meant, and whether DeepSpeed stops at it."""
    if not equals:
        comment = name.startswith("#")
        yield ("an empty line" if not name else "a comment" if comment else 'no "=" in it'), True
        return
    if name.startswith("export "):
        yield book.phrase("hosts", "export-in-name"), False
    elif name.startswith("#"):
        yield book.phrase("hosts", "comment-exported"), False
    elif not NAME.fullmatch(name):
        yield book.phrase("hosts", "name-not-exportable"), False
    elif again:
        yield book.phrase("hosts", "set-twice", name=name), False
    yield from ((book.phrase("hosts", problem), False) for form, problem in VALUE_PROBLEMS if re.search(form, value))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "..."


def chosen(hosts: Sequence[Slots], *, include: str | None = None, exclude: str | None = None) -> tuple[Slots, ...]:
    """Those that are left. Both texts are lists of names as Slurm writes them, or with DeepSpeed's "@" in between.

    Raises UsageError for a name that is not among ``hosts``, for slots, for both at once and where nothing is left.

    >>> hosts = [Slots(name=f"n{number}", slots=8, line=number) for number in (3, 1, 2)]
    >>> [host.name for host in chosen(hosts, exclude="n[1-2]")], [host.name for host in chosen(hosts, include="n2@n3")]
    (['n3'], ['n3', 'n2'])
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude cannot be given together", hint="use only one of them")
    text, option = (include, "--include") if include is not None else (exclude, "--exclude")
    if text is None:
        return tuple(hosts)
    named = _names(text, option)
    absent = sorted(named - {host.name for host in hosts})
    if absent:
        raise UsageError(
            f"{option} names {fold(absent)}, but the hostfile has {fold(host.name for host in hosts) or 'no host'}",
            hint="use the hostfile's names",
        )
    left = tuple(host for host in hosts if (host.name in named) == (include is not None))
    if not left:
        raise UsageError(f"{option} {text} leaves none of the {len(hosts)} hosts", hint="leave at least one")
    return left


def _names(text: str, option: str) -> set[str]:
    if ":" in text:
        raise UsageError(
            f"{option} {text!r} names slots, but only whole hosts are tested", hint="change slots= of that line instead"
        )
    try:
        return set(expand(text.strip().replace("@", ",")))
    except UsageError as error:
        raise UsageError(f"{option}: {error}", hint="name hosts as in: n1,gpu[01-08] or n1@n2") from None
