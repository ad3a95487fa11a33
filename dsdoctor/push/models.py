"""The data of a push to a node: what is sent, how the node is reached, its messages, the outcome. Data only."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.finding import Finding
from dsdoctor.hosts.remote_finding import RemoteFinding


class NodeState(enum.Enum):
    """The outcome of a push on a node."""

    INSTALLED = "installed"
    VERIFIED = "verified"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"
    FAILED = "failed"


class NodeStep(enum.Enum):
    """The steps of a push on a node."""

    CONNECT = "connect"
    COPY = "copy"
    VERIFY = "verify"
    INSTALL = "install"


@dataclass(frozen=True, kw_only=True)
class Present:
    """The DeepSpeed that an import would take on a node. ``version`` is None where its records are missing."""

    version: str | None
    location: str


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A file that is sent: its path here, its size in bytes, its sha256 in hexadecimal digits."""

    path: Path
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a node is reached and worked on: ``ssh`` with its arguments up to the host, and its whole ``environment``;
    ``python`` is the interpreter there, ``limit`` the seconds for each step. ``unreached`` makes the finding from host,
    ssh's status (None: it did not end in time) and its message."""

    ssh: tuple[str, ...]
    environment: Mapping[str, str]
    python: str
    limit: float
    dry_run: bool
    unreached: Callable[[str, int | None, str], Finding]


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """The outcome on one node. ``step`` is the last one that was begun; ``now`` is the DeepSpeed that is there at the end,
    where that is known (``known``); ``already``: this very wheel was there, and pip was not called."""

    host: str
    state: NodeState
    step: NodeStep
    findings: tuple[Finding, ...]
    before: Present | None
    now: Present | None
    known: bool
    already: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class NodeMessage:
    """A message of a node; which fields it has depends on ``say``."""

    say: str
    step: NodeStep = NodeStep.CONNECT
    why: str = ""
    name: str = ""
    names: tuple[str, ...] = ()
    sha256: str = ""
    status: int | None = None
    findings: tuple[RemoteFinding, ...] = ()
    before: Present | None = None
    now: Present | None = None
    asked: bool = False
    already: bool = False
    left: bool = False
    folder: str = ""
    environment: tuple[str, ...] = ()


class NodeEnded(Exception):
    """The push stops at this node. ``finding`` says why."""

    def __init__(self, state: NodeState, finding: Finding) -> None:
        super().__init__(finding.title)
        self.state, self.finding = state, finding
