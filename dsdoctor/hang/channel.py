"""Between nodes: a node's supervisor hands what it saw to the one on rank 0's host, by plain TCP.

Both ends greet with random words and show by an HMAC over them that they know the run's secret, before the one sends a report
and the other reads it. Who does not, is too slow or wants too much is dropped; many may call at once. While all is well a node
sends a few words now and then, so that one that falls silent is known by its name; when nothing moves it sends what it saw.

The secret is random: the first rank whose process group is there leaves it in the job's own store, where the others find it, and
writes it into the private folder of its node. Before that nodes tell only of themselves, unless DSDOCTOR_HANG_TOKEN is set.

Talks and waits, judges nothing.
"""

import contextlib
import functools
import hashlib
import hmac
import os
import queue
import re
import selectors
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.core.files import is_this_user
from dsdoctor.core.script import UnlistedThread
from dsdoctor.core.text import decode, encode
from dsdoctor.hang.models import Incident, RankView

TOKEN = "DSDOCTOR_HANG_TOKEN"  # noqa: S105 - the name of a variable
SAME_FOR_ALL = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
SECRET_KEY, SECRET_FILE, SECRET_BYTES = "dsdoctor/hang/secret", "secret", 32
FIRST_PORT, PORT_COUNT, MAX_PORTS_TRIED = 20_000, 12_000, 8
"""Below those that the kernel gives to outgoing connections (32768 and above)."""
SECRET_TIMEOUT_SECONDS = 5.0
"""How long a rank waits for the job's store to say what the run's secret is."""
NONCE_BYTES, MAC_BYTES = 16, 32
HELLO, LENGTH = struct.Struct("<16sI32s"), struct.Struct("<I")
MAX_REPORT_BYTES, MAX_ANSWER_BYTES = 16 << 20, 1 << 20
"""Bytes."""
EXCHANGE_TIMEOUT_SECONDS, SEND_TIMEOUT_SECONDS = 3.0, 9.0
STRANGER_TIMEOUT_SECONDS, REPORT_TIMEOUT_SECONDS, EXPIRY_POLL_SECONDS = 3.0, 15.0, 0.5
MAX_STRANGERS, MAX_CONNECTIONS = 64, 512
MAX_HEARTBEAT_SECONDS, MAX_MISSED_HEARTBEATS = 15.0, 3
"""Seconds between two words of a node while all is well, and how many may be missed."""
GATHER_TIMEOUT_SECONDS, MAX_REPORT_AGE_SECONDS = 4.0, 30.0
"""Seconds to wait for the other nodes' reports, and after which one is of the past."""


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """``key`` names the run, for who sees its environment; ``secret`` proves that a message is of it; empty: not known yet."""

    key: str
    master: str
    ports: tuple[int, ...]
    secret: bytes


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
    """What became of a report: the answer to it; or there was no way to the host; or nobody of this run listens there.
    ``unproven``: who listens speaks as a watch does, and does not know this node's secret: it may be the one of another start of
    the run, so nothing is known of the host."""

    answer: Answer | None = None
    unreachable: bool = False
    unproven: bool = False


def identity(environment: Mapping[str, str], *, user: int, place: str = "") -> RunIdentity | None:
    """None where no launcher set the address of rank 0. ``place``: an address given to torch itself."""
    master = environment.get("MASTER_ADDR") or place
    if not master:
        return None
    known = [f"{name}={environment.get(name, '')}" for name in SAME_FOR_ALL]
    base = "\n".join(["dsdoctor hang", str(user), place if "MASTER_ADDR" not in environment else "", *known])
    digest = hashlib.sha256(base.encode(errors="replace")).digest()
    token = environment.get(TOKEN, "")
    known_to_all = hashlib.sha256(digest + token.encode(errors="replace")).digest()
    start = int.from_bytes(digest[:4], "big")
    ports = tuple(FIRST_PORT + (start + 97 * number) % PORT_COUNT for number in range(MAX_PORTS_TRIED))
    secret = hashlib.sha256(b"secret" + known_to_all).digest() if token else b""
    return RunIdentity(key=known_to_all.hex()[:12], master=master, ports=ports, secret=secret)


def shared_secret(store: Any) -> str:
    """The secret of a run, by its job's store: that of the first rank that asks. One question, which waits for no other rank; ""
    for a store that cannot answer it soon, or whose file anybody may read.

    Asked from a thread and over a connection of its own: that of the process may be in use, by a wait of half an hour.
    """
    inner = store
    while (below := getattr(inner, "underlying_store", None)) is not None:
        inner = below
    if type(inner).__name__ == "FileStore":
        return ""
    answers: list[str] = []
    asking = UnlistedThread(functools.partial(_ask_secret, store, inner, answers))
    asking.start()
    asking.join(SECRET_TIMEOUT_SECONDS)
    return answers[0] if answers else ""


def _ask_secret(store: Any, inner: Any, answers: list[str]) -> None:
    try:
        host, port = getattr(inner, "host", None), getattr(inner, "port", None)
        if host is not None and port is not None:
            # torch prints a page about a store that is gone, and this does not
            socket.create_connection((host, port), timeout=SECRET_TIMEOUT_SECONDS).close()
        own = store.clone() if hasattr(store, "clone") else store
        answered = own.compare_set(SECRET_KEY, "", os.urandom(SECRET_BYTES).hex())
    except Exception:  # whatever a store of another kind raises
        return
    text = answered.decode("ascii", "replace") if isinstance(answered, bytes) else str(answered)
    answers += [text] if re.fullmatch(f"[0-9a-f]{{{2 * SECRET_BYTES}}}", text) else []


def with_secret(run: RunIdentity, folder: Path | None) -> RunIdentity:
    """The run with the secret that a rank of this node has written down, where no token gave one."""
    if os.environ.get(TOKEN) or folder is None:
        return run
    try:
        return replace(run, secret=bytes.fromhex((folder / SECRET_FILE).read_text(encoding="ascii")))
    except (OSError, ValueError):
        return run


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
    failure: OSError = FileNotFoundError("no room for shared memory")
    for base in bases:
        try:
            outer = Path(base) / f"dsdoctor-hang-{user}"
            _make_private(outer)
            _make_private(outer / f"{key}-{tag}")
            return outer / f"{key}-{tag}"
        except OSError as error:
            failure = error
    raise failure


def _make_private(folder: Path) -> None:
    """Make a folder that is this user's alone; one of somebody else, or a link, is refused."""
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or not is_this_user(state.st_uid) or state.st_mode & 0o022:
        raise PermissionError(f"{folder} is shared with other users")


class Connection:
    """One node that calls, or a stranger: nothing of it is kept before it has shown that it knows the secret."""

    def __init__(self, connected: socket.socket, address: str) -> None:
        self.socket, self.address = connected, address
        self.is_known = False
        self.until = time.monotonic() + STRANGER_TIMEOUT_SECONDS
        self._greeting = os.urandom(NONCE_BYTES)
        self._nonces = b""
        self._wanted, self._parts = HELLO.size, bytearray()
        connected.setblocking(False)
        connected.send(self._greeting)

    def read(self, secret: bytes) -> bytes | None:
        """Take what has come: the whole report once it is there. Raises OSError or ValueError for what is not of this run."""
        part = self.socket.recv(min(self._wanted - len(self._parts), 1 << 20))
        if not part:
            raise ConnectionError("closed")
        self._parts += part
        if len(self._parts) < self._wanted:
            return None
        whole, self._parts = bytes(self._parts), bytearray()
        if self.is_known:
            return _checked(secret, b"report", self._nonces, whole)
        own, length, mac = HELLO.unpack(whole)
        self._nonces = self._greeting + own
        _check(secret, b"hello", self._nonces + LENGTH.pack(length), mac)
        if length > MAX_REPORT_BYTES:
            raise ValueError("too long")
        self.is_known, self.until, self._wanted = True, time.monotonic() + REPORT_TIMEOUT_SECONDS, MAC_BYTES + length
        self.socket.send(_mac(secret, b"welcome", self._nonces))
        return None

    def answer(self, secret: bytes, text: bytes) -> None:
        """Say what there is to say. Raises OSError."""
        self.socket.send(LENGTH.pack(len(text)) + _mac(secret, b"answer", self._nonces + text) + text)


class Listener:
    """The listening end, on rank 0's host, in a thread of its own: who calls and says nothing keeps nobody waiting. ``port`` is
    None where none of the run's ports was free. ``answer``: what is said to each report."""

    def __init__(self, run: RunIdentity, answer: Answer) -> None:
        self.secret, self.answer = run.secret, answer
        self._socket = _bound(run.ports)
        self.port = self._socket.getsockname()[1] if self._socket else None
        self._came: queue.SimpleQueue[tuple[float, NodeReport]] = queue.SimpleQueue()
        self._open: dict[int, Connection] = {}
        self._closing, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def reports(self, seconds: float, *, enough: int = 1 << 20) -> list[tuple[float, NodeReport]]:
        """The reports that have come and those that come in this time, until they cover so many ranks, each with when it came."""
        found: list[tuple[float, NodeReport]] = []
        last = time.monotonic() + seconds
        while sum(len(report.views) for _, report in found) < enough:
            left = last - time.monotonic()
            try:
                found.append(self._came.get(block=left > 0, timeout=max(0.0, left) or None))
            except queue.Empty:
                break
        return found

    def close(self) -> None:
        """Listen no more."""
        self._wake.close()
        self._thread.join()
        for each in (self._closing, self._socket, *(connection.socket for connection in self._open.values())):
            if each is not None:
                each.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._closing, selectors.EVENT_READ)
            if self._socket is not None:
                ready.register(self._socket, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select(EXPIRY_POLL_SECONDS):
                    if key.fileobj is self._closing:
                        return
                    if key.fileobj is self._socket:
                        with contextlib.suppress(OSError):
                            self._accept(self._socket, ready)
                    elif key.fd in self._open:
                        self._hear(self._open[key.fd], ready)
                now = time.monotonic()
                for late in [each for each in self._open.values() if each.until < now]:
                    self._drop(late, ready)

    def _accept(self, listening: socket.socket, ready: selectors.BaseSelector) -> None:
        connected, address = listening.accept()
        try:
            new = Connection(connected, str(address[0]))
        except OSError:
            connected.close()
            return
        strangers = [each for each in self._open.values() if not each.is_known]
        if len(strangers) >= MAX_STRANGERS:
            # of the host that has most of them the oldest
            crowd = Counter(each.address for each in strangers).most_common(1)[0][0]
            self._drop(next(each for each in strangers if each.address == crowd), ready)
        if len(self._open) >= MAX_CONNECTIONS:
            connected.close()
            return
        self._open[connected.fileno()] = new
        ready.register(connected, selectors.EVENT_READ)

    def _hear(self, connection: Connection, ready: selectors.BaseSelector) -> None:
        # what is no report of ours is not answered: whoever sent it is let go, as who was answered
        with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
            try:
                text = connection.read(self.secret)
                if text is None:
                    return
                report = decode(text, NodeReport)
                text = encode(self.answer)
                self._came.put((time.monotonic(), report))
                connection.answer(self.secret, text)
            except BlockingIOError:
                return
        self._drop(connection, ready)

    def _drop(self, connection: Connection, ready: selectors.BaseSelector) -> None:
        ready.unregister(connection.socket)
        del self._open[connection.socket.fileno()]
        connection.socket.close()


def send_report(run: RunIdentity, report: NodeReport) -> Sent:
    """Hand a report to the supervisor on rank 0's host."""
    last, unproven = time.monotonic() + SEND_TIMEOUT_SECONDS, False
    for port in run.ports:
        if time.monotonic() > last:
            break
        try:
            with socket.create_connection((run.master, port), timeout=EXCHANGE_TIMEOUT_SECONDS) as connection:
                sent = _sent(connection, run.secret, encode(report))
                if sent.answer is not None:
                    return sent
                unproven = unproven or sent.unproven
        except ConnectionRefusedError:
            continue
        except OSError:
            # no way to that host: the other ports would take as long
            return Sent(unreachable=True)
    return Sent(unproven=unproven)


def _sent(connection: socket.socket, secret: bytes, text: bytes) -> Sent:
    """Send one report to who knows the secret, and read the answer; none where another program listens there."""
    connection.settimeout(EXCHANGE_TIMEOUT_SECONDS)
    own, speaks = os.urandom(NONCE_BYTES), False
    try:
        nonces = _exactly(connection, NONCE_BYTES) + own
        speaks = True
        length = LENGTH.pack(len(text))
        connection.sendall(own + length + _mac(secret, b"hello", nonces + length))
        _check(secret, b"welcome", nonces, _exactly(connection, MAC_BYTES))
        connection.sendall(_mac(secret, b"report", nonces + text) + text)
        (size,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
        if size > MAX_ANSWER_BYTES:
            return Sent()
        return Sent(answer=decode(_checked(secret, b"answer", nonces, _exactly(connection, MAC_BYTES + size)), Answer))
    except (OSError, ValueError):
        return Sent(unproven=speaks)


def _checked(secret: bytes, kind: bytes, nonces: bytes, whole: bytes) -> bytes:
    """The text behind its proof. Raises ValueError."""
    _check(secret, kind, nonces + whole[MAC_BYTES:], whole[:MAC_BYTES])
    return whole[MAC_BYTES:]


def _check(secret: bytes, kind: bytes, text: bytes, mac: bytes) -> None:
    if not hmac.compare_digest(mac, _mac(secret, kind, text)):
        raise ValueError("of another run")


def _mac(secret: bytes, kind: bytes, text: bytes) -> bytes:
    return hmac.new(secret, kind + text, hashlib.sha256).digest()


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes. Raises ConnectionError where the other end stops before, OSError where it takes too long."""
    last = time.monotonic() + EXCHANGE_TIMEOUT_SECONDS
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


class Nodes:
    """The other nodes of a run, as this one sees them. ``answer``: what rank 0's node told last, on any other. ``node``: which of
    those that have this host's name it is."""

    def __init__(self, run: RunIdentity, host: str, node: str = "", folder: Path | None = None) -> None:
        self._run, self._host, self._node, self._folder = run, host, node, folder
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
        listener = self._listening(answer)
        if listener is None:
            time.sleep(seconds)
            return
        for when, report in listener.reports(seconds, enough=enough):
            self.note(report, when)

    def _listening(self, answer: Answer) -> Listener | None:
        """The listening end, with the newest answer and secret; None while there is no secret."""
        self._run = with_secret(self._run, self._folder)
        if not self._run.secret:
            return None
        self._listener = self._listener or Listener(self._run, answer)
        self._listener.secret, self._listener.answer = self._run.secret, answer
        return self._listener

    def note(self, report: NodeReport, when: float | None = None) -> None:
        """Another node has said something."""
        now, node = when or time.monotonic(), f"{report.host}/{report.node}"
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
        return time.monotonic() - self._sent >= heartbeat_seconds(limit)

    def send(self, report: NodeReport) -> bool:
        """On any other node: tell rank 0's node something. Whether it took that."""
        self._sent = time.monotonic()
        self._run = with_secret(self._run, self._folder)
        if not self._run.secret:
            return False
        sent = send_report(self._run, replace(report, host=self._host, node=self._node))
        if sent.answer is not None:
            self.answer, self._lost_since = sent.answer, None
        elif sent.unproven:
            self._lost_since = None
        elif self._lost_since is None or sent.unreachable != self._unreachable:
            self._lost_since = self._sent
        self._unreachable = sent.unreachable
        return sent.answer is not None

    def joined(
        self, incident: Incident, limit: float, answer: Answer, *, together: float = GATHER_TIMEOUT_SECONDS
    ) -> Incident:
        """On rank 0's node: the incident with what the others say, who notice it in the same seconds, and with those that are
        not heard any more."""
        last = time.monotonic() + together
        views = self._with_reports(incident)
        while len(views) < incident.world and time.monotonic() < last:
            self.take(answer, 1.0, enough=incident.world - len(views))
            views = self._with_reports(incident)
        seen = {view.rank for view in views}
        lost = time.monotonic() - MAX_MISSED_HEARTBEATS * heartbeat_seconds(limit) - together
        silent = {
            self._name_of(node): ranks
            for node, ranks in self._ranks.items()
            if self._heard[node] < lost and not seen.issuperset(ranks)
        }
        return replace(incident, ranks=tuple(sorted(views, key=lambda view: view.rank)), silent_hosts=silent)

    def _with_reports(self, incident: Incident) -> tuple[RankView, ...]:
        own = {view.rank for view in incident.ranks}
        ages = [(time.monotonic() - when, report) for when, report in self._reports.values()]
        known = [
            replace(view, age=view.age + age)
            for age, each in ages
            if age < MAX_REPORT_AGE_SECONDS
            for view in each.views
        ]
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
        enough = self._lost_since is not None and time.monotonic() - self._lost_since >= 2 * heartbeat_seconds(limit)
        if self.answer is None or not enough:
            return incident
        lost = {self.answer.host: self.answer.ranks}
        return replace(incident, silent_hosts=lost) if self._unreachable else replace(incident, left_hosts=lost)

    def tell_all(self, answer: Answer, seconds: float, *, still_waiting: Callable[[], bool]) -> None:
        """On rank 0's node: have the answer heard by every node that is known, or wait so long."""
        self._listening(answer)
        asked = time.monotonic()
        while still_waiting() and time.monotonic() - asked < seconds:
            if all(heard > asked for heard in self._heard.values()):
                return
            self.take(answer, 0.5, enough=1)

    def close(self) -> None:
        """Listen no more."""
        if self._listener is not None:
            self._listener.close()


def heartbeat_seconds(limit: float) -> float:
    """Seconds between two words of a node, where that many without a movement are a hang.

    >>> heartbeat_seconds(60.0), heartbeat_seconds(4.0)
    (15.0, 1.0)
    """
    return min(MAX_HEARTBEAT_SECONDS, limit / 4)
