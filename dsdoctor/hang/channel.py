"""Between nodes: a node's supervisor hands what it saw to the one on rank 0's host, by plain TCP. Nothing is asked of the
job's store.

The one that listens greets with a random word; a report is JSON behind a length and an HMAC over that word and the text, with
the run's secret. What does not bear it, is too long or too slow is dropped. While all is well a node sends a few words now and
then, so that one that falls silent is known by its name.
"""

import contextlib
import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dsdoctor.core.text import decode, encode
from dsdoctor.hang.models import Incident, RankView

# The environment of a rank -> what all ranks of its run have in common: a key, where rank 0's supervisor listens, a secret.
#
# Nothing is asked of the job's own store: it dies with rank 0, and its calls may wait.


TOKEN = "DSDOCTOR_HANG_TOKEN"  # noqa: S105 - the name of a variable
SAME_FOR_ALL = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
FIRST_PORT, PORTS, TRIES = 20_000, 12_000, 8
"""Below those that the kernel gives to outgoing connections (32768 and above)."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """``key`` names the run; ``secret`` proves that a message is of it. Without DSDOCTOR_HANG_TOKEN the secret is made of
    what launchers tell every rank, so it keeps runs apart, and keeps out only those who do not know the job."""

    key: str
    master: str
    ports: tuple[int, ...]
    secret: bytes


def identity(environment: Mapping[str, str], *, user: int, place: str = "") -> RunIdentity | None:
    """None where no launcher said where rank 0 is. ``place``: an address given to torch itself."""
    master = environment.get("MASTER_ADDR") or place
    if not master:
        return None
    known = [f"{name}={environment.get(name, '')}" for name in SAME_FOR_ALL]
    base = "\n".join(["dsdoctor hang", str(user), place if "MASTER_ADDR" not in environment else "", *known])
    digest = hashlib.sha256(base.encode(errors="replace")).digest()
    secret = hashlib.sha256(digest + environment.get(TOKEN, "").encode(errors="replace")).digest()
    start = int.from_bytes(digest[:4], "big")
    ports = tuple(FIRST_PORT + (start + 97 * number) % PORTS for number in range(TRIES))
    return RunIdentity(key=secret.hex()[:12], master=master, ports=ports, secret=secret)


def node_name() -> str:
    """This node: its name, since when it runs, and which process numbers are meant, where containers share a name."""
    namespace = boot = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()}/{namespace}/{boot}"


def node_id(folder: Path) -> str:
    """What tells this node from all others of a run, also from containers of one host: where its ranks' files are, too."""
    state = folder.stat()
    return hashlib.sha256(f"{node_name()}/{state.st_dev}/{state.st_ino}".encode(errors="replace")).hexdigest()[:8]


def node_folder(key: str, *, user: int, bases: tuple[str, ...] = ("/dev/shm", "/tmp")) -> Path:
    """A private folder of this run on this node. Raises OSError where none can be made."""
    tag = hashlib.sha256(node_name().encode(errors="replace")).hexdigest()[:6]
    failure: OSError = FileNotFoundError("no place for shared memory")
    for base in bases:
        try:
            outer = Path(base) / f"dsdoctor-hang-{user}"
            _private(outer, user)
            _private(outer / f"{key}-{tag}", user)
            return outer / f"{key}-{tag}"
        except OSError as error:
            failure = error
    raise failure


def _private(folder: Path, user: int) -> None:
    """Make a folder that is this user's alone; one of somebody else, or a link, is refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != user or state.st_mode & 0o022:
        raise PermissionError(f"{folder} is not this user's alone")


GREETING, MAC = 16, 32
HEAD = struct.Struct("<I32s")
LARGEST = 64 << 20
SLOWEST = 3.0


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node saw of its ranks. ``node``: tells it from others of that host's name. ``still``: seconds since any of them
    moved. ``views``: only when nothing moves."""

    host: str
    still: float
    node: str = ""
    ranks: tuple[int, ...] = ()
    views: tuple[RankView, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What rank 0's node says to a report: who it is, whether it has told of this hang, and whether all ranks are to end."""

    host: str
    ranks: tuple[int, ...] = ()
    told: bool = False
    stop: bool = False


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What became of a report: the answer to it; or there was no way to the host; or nobody of this run listens there."""

    answer: Answer | None = None
    unreachable: bool = False


class Listener:
    """The listening end, on rank 0's host. ``port`` is None where none of the run's ports was free."""

    def __init__(self, run: RunIdentity) -> None:
        self._secret = run.secret
        self._socket = _bound(run.ports)
        self.port = self._socket.getsockname()[1] if self._socket else None

    def reports(self, seconds: float, answer: Answer, *, enough: int = 1 << 20) -> list[NodeReport]:
        """The reports that come in this time, until they cover so many ranks. ``answer``: what is said to each."""
        found: list[NodeReport] = []
        last = time.monotonic() + seconds
        while self._socket and sum(len(report.views) for report in found) < enough:
            self._socket.settimeout(max(0.001, last - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except OSError:
                break
            with connection, contextlib.suppress(OSError, msgspec.DecodeError, ValueError):
                found.append(_received(connection, self._secret, answer))
        return found

    def close(self) -> None:
        """Listen no more."""
        if self._socket:
            self._socket.close()


def send_report(run: RunIdentity, report: NodeReport) -> Sent:
    """Hand a report to the supervisor on rank 0's host."""
    for port in run.ports:
        try:
            with socket.create_connection((run.master, port), timeout=SLOWEST) as connection:
                answer = _sent(connection, run.secret, encode(report))
                if answer is not None:
                    return Sent(answer=answer)
        except ConnectionRefusedError:
            continue
        except OSError:
            # no way to that host: the other ports would take as long
            return Sent(unreachable=True)
    return Sent()


def _sent(connection: socket.socket, secret: bytes, text: bytes) -> Answer | None:
    """Send one report, and read the answer; None where another program listens there."""
    connection.settimeout(SLOWEST)
    try:
        greeting = _exactly(connection, GREETING)
        connection.sendall(HEAD.pack(len(text), _mac(secret, greeting, text)) + text)
        return decode(_message(connection, secret, greeting + b"answer"), Answer)
    except (OSError, ValueError):
        return None


def _received(connection: socket.socket, secret: bytes, answer: Answer) -> NodeReport:
    """One report. Raises OSError or ValueError for what is not of this run."""
    connection.settimeout(SLOWEST)
    greeting = os.urandom(GREETING)
    connection.sendall(greeting)
    report = decode(_message(connection, secret, greeting), NodeReport)
    text = encode(answer)
    connection.sendall(HEAD.pack(len(text), _mac(secret, greeting + b"answer", text)) + text)
    return report


def _message(connection: socket.socket, secret: bytes, greeting: bytes) -> bytes:
    """A text that bears the run's secret. Raises OSError or ValueError."""
    length, mac = HEAD.unpack(_exactly(connection, HEAD.size))
    if length > LARGEST:
        raise ValueError("too long")
    text = _exactly(connection, length)
    if not hmac.compare_digest(mac, _mac(secret, greeting, text)):
        raise ValueError("of another run")
    return text


def _mac(secret: bytes, greeting: bytes, text: bytes) -> bytes:
    return hmac.new(secret, greeting + text, hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError where the other end stops before, OSError where it takes too long."""
    last = time.monotonic() + SLOWEST
    parts = bytearray()
    while len(parts) < count:
        if time.monotonic() > last:
            raise TimeoutError
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("closed")
        parts += part
    return bytes(parts)


def _bound(ports: tuple[int, ...]) -> socket.socket | None:
    for port in ports:
        listening = socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if listening.family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listening.bind(("", port))
            listening.listen(1024)
            return listening
        except OSError:
            listening.close()
    return None


# What the supervisors of a run's nodes know of each other: each tells the one on rank 0's host now and then that it is there, and
# what it saw when nothing moves. Talks and waits, judges nothing.


LONGEST_BEAT, BEATS_LOST = 15.0, 3
"""Seconds between two words of a node while all is well, and how many may be missed."""
TOGETHER, OLD = 4.0, 30.0
"""Seconds to wait for the other nodes' reports, and after which one is of the past."""


class Nodes:
    """The other nodes of a run, as this one sees them. ``answer``: what rank 0's node told last, on any other. ``node``: which of
    those that have this host's name it is."""

    def __init__(self, run: RunIdentity, host: str, node: str = "") -> None:
        self._run, self._host, self._node = run, host, node
        self._listener: Listener | None = None
        self._hosts: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._reports: dict[str, tuple[float, NodeReport]] = {}
        self._sent = 0.0
        self._lost_since: float | None = None
        self._unreachable = False
        self.answer: Answer | None = None

    def take(self, answer: Answer, seconds: float = 0.0, *, enough: int = 1 << 20) -> None:
        """On rank 0's node: take what the others have sent."""
        self._listener = self._listener or Listener(self._run)
        for report in self._listener.reports(seconds, answer, enough=enough):
            self.note(report)

    def note(self, report: NodeReport) -> None:
        """Another node has said something."""
        now, node = time.monotonic(), f"{report.host}/{report.node}"
        reported = self._reports.get(node)
        if reported is not None and report.still < now - reported[0]:
            # it has gone on since: where its ranks were then accuses none of them
            del self._reports[node]
        self._heard[node], self._hosts[node] = now, report.host
        if report.ranks:
            self._ranks[node] = report.ranks
        if report.views:
            self._reports[node] = (now, report)

    def _name_of(self, node: str) -> str:
        """A node as it is told: by its host, where no other one has that name."""
        host = self._hosts[node]
        return node if [*self._hosts.values(), self._host].count(host) > 1 else host

    def is_due(self, limit: float) -> bool:
        """Whether it is time for the next word to rank 0's node."""
        return time.monotonic() - self._sent >= beat_of(limit)

    def send(self, report: NodeReport) -> bool:
        """On any other node: tell rank 0's node something. Whether it took that."""
        self._sent = time.monotonic()
        sent = send_report(self._run, replace(report, host=self._host, node=self._node))
        if sent.answer is not None:
            self.answer, self._lost_since = sent.answer, None
        elif self._lost_since is None or sent.unreachable != self._unreachable:
            self._lost_since = self._sent
        self._unreachable = sent.unreachable
        return sent.answer is not None

    def joined(self, incident: Incident, limit: float, answer: Answer, *, together: float = TOGETHER) -> Incident:
        """On rank 0's node: the incident with what the others say, who notice it in the same seconds, and with those that are
        not heard any more."""
        last = time.monotonic() + together
        views = self._with_reports(incident)
        while len(views) < incident.world and time.monotonic() < last:
            self.take(answer, 1.0, enough=incident.world - len(views))
            views = self._with_reports(incident)
        seen = {view.rank for view in views}
        lost = time.monotonic() - BEATS_LOST * beat_of(limit) - together
        silent = {
            self._name_of(node): ranks
            for node, ranks in self._ranks.items()
            if self._heard[node] < lost and not seen.issuperset(ranks)
        }
        return replace(incident, ranks=tuple(sorted(views, key=lambda view: view.rank)), silent_hosts=silent)

    def _with_reports(self, incident: Incident) -> tuple[RankView, ...]:
        own = {view.rank for view in incident.ranks}
        ages = [(time.monotonic() - when, report) for when, report in self._reports.values()]
        known = [replace(view, age=view.age + age) for age, each in ages if age < OLD for view in each.views]
        return (*incident.ranks, *(view for view in known if view.rank not in own))

    def is_elsewhere_alive(self, incident: Incident) -> bool:
        """On rank 0's node: whether a node is heard of that has not said yet that nothing moves there."""
        seen = {view.rank for view in incident.ranks}
        lost = incident.silent_hosts
        return any(
            self._name_of(node) not in lost and not seen.issuperset(ranks) for node, ranks in self._ranks.items()
        )

    def without_leader(self, incident: Incident, limit: float) -> Incident:
        """On any other node: the incident with rank 0's node lost, as far as that is known."""
        # once is not enough: a machine may be slow for a moment, and a watch that failed is begun anew
        enough = self._lost_since is not None and time.monotonic() - self._lost_since >= 2 * beat_of(limit)
        if self.answer is None or not enough:
            return incident
        lost = {self.answer.host: self.answer.ranks}
        return replace(incident, silent_hosts=lost) if self._unreachable else replace(incident, left_hosts=lost)

    def tell_all(self, answer: Answer, seconds: float, *, still_waiting: Callable[[], bool]) -> None:
        """On rank 0's node: have the answer heard by every node that is known, or wait so long."""
        asked = time.monotonic()
        while still_waiting() and time.monotonic() - asked < seconds:
            if all(heard > asked for heard in self._heard.values()):
                return
            self.take(answer, 0.5, enough=1)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()


def beat_of(limit: float) -> float:
    """Seconds between two words of a node, where that many without a movement are a hang.

    >>> beat_of(60.0), beat_of(4.0)
    (15.0, 1.0)
    """
    return min(LONGEST_BEAT, limit / 4)
