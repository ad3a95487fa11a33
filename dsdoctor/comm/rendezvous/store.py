"""The board of a test: messages between the control processes of all ranks over a TCPStore. Keys are prefixed by a random token.

Rank 0 writes numbered orders, every rank waits for them and adds its answer to that order's log. A log is a counter and an entry
for each number, so rank 0 reads every answer once: traffic grows with the number of ranks, not with its square. Needs no torch:
where torchrun's agent does not serve the store, rank 0 does from its first moment.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from dsdoctor.comm.local.interfaces import bounded
from dsdoctor.comm.models import Claim, Rank
from dsdoctor.comm.rendezvous.notices import RANK_ZERO, RankZero, ask, ports, rank_zero_at
from dsdoctor.comm.rendezvous.tcp_store import BACKLOG, StoreClient, StoreServer
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.redaction import process
from dsdoctor.core.text import decode

Message = TypeVar("Message")
BATCH = 256
"""Entries fetched by one request."""
SMALL, MOST = 800, 1 << 26
"""Bytes. A longer message is compressed: that of a rank with eight GPUs then passes where whole frames are lost (an MTU that one
switch does not have), and the mesh can tell so. What is more than ``MOST`` after that is no message of ours."""


class TcpStore(Protocol):
    """The part of ``StoreClient`` that a board uses."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: bytes, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def wait(self, key: str, seconds: float, /) -> bool: ...


class Log:
    """An append-only list of messages on the board, with a reader's place in it."""

    def __init__(self, board: "MessageBoard", name: str) -> None:
        self._board, self._name, self._read = board, name, 0

    def write(self, message: object) -> int:
        """Add a message; returns its number, from 1."""
        number = self._board.store.add(self._board.key(f"{self._name}/n"), 1)
        self._board.put(f"{self._name}/{number}", message)
        return number

    @property
    def read(self) -> int:
        """How many messages were read here."""
        return self._read

    def count(self) -> int:
        """How many messages were ever written."""
        return self._board.store.add(self._board.key(f"{self._name}/n"), 0)

    def wait(self, seconds: float) -> bool:
        """Whether a message is there that was not read here, now or within so many seconds. The store is asked once for each."""
        return self._board.wait(f"{self._name}/{self._read + 1}", seconds)

    def news(self, kind: type[Message]) -> Iterator[Message]:
        """The messages that came since the last call. A message whose writer died between its number and its text is waited
        for a second and then skipped."""
        last = self.count()
        while self._read < last:
            upto = min(last, self._read + BATCH)
            keys = [self._board.key(f"{self._name}/{number}") for number in range(self._read + 1, upto + 1)]
            self._read = upto
            for text in self._texts(keys):
                # the store is open to whoever reaches its port: what is no such message is nobody's
                with suppress(msgspec.MsgspecError):
                    yield unpacked(text, kind)

    def _texts(self, keys: list[str]) -> list[bytes]:
        store = self._board.store
        deadline = time.monotonic() + 1
        while not store.check(keys):
            if time.monotonic() > deadline:
                return [store.get(key) for key in keys if store.check([key])]
            time.sleep(0.01)
        return list(store.multi_get(keys))


class MessageBoard:
    """Typed messages under one prefix of a store. ``ours``: this process wrote the prefix, and leads the test."""

    def __init__(self, store: TcpStore, prefix: str, *, ours: bool = False) -> None:
        self.store, self.prefix, self.ours = store, prefix, ours

    def key(self, name: str) -> str:
        """The store's key for a name."""
        return f"{self.prefix}/{name}"

    def put(self, name: str, message: object) -> None:
        """Write a message."""
        self.store.set(self.key(name), packed(message))

    def has(self, name: str) -> bool:
        """Whether there is a message of that name."""
        return self.store.check([self.key(name)])

    def wait(self, name: str, seconds: float) -> bool:
        """Whether there is a message of that name, now or within so many seconds."""
        return self.store.wait(self.key(name), seconds)

    def get(self, name: str, kind: type[Message]) -> Message:
        """A message that is there."""
        return unpacked(self.store.get(self.key(name)), kind)

    def log(self, name: str) -> Log:
        """The log of that name, read from its beginning."""
        return Log(self, name)


def packed(message: object) -> bytes:
    """A message as it stands in the store: JSON, or its zlib stream, which begins with "x" as no JSON does.

    >>> packed({"rank": 3}), packed("a" * 100_000)[:1], len(packed("a" * 100_000)) < SMALL
    (b'{"rank":3}', b'x', True)
    """
    text = msgspec.json.encode(message)
    return text if len(text) <= SMALL else zlib.compress(text)


def unpacked(content: bytes, kind: type[Message]) -> Message:
    """A message of that kind. Raises msgspec.MsgspecError for what is none."""
    if content.startswith(b"x"):
        stream = zlib.decompressobj()
        try:
            content = stream.decompress(content, MOST)
        except zlib.error as error:
            raise msgspec.DecodeError(str(error)) from None
        if not stream.eof:
            raise msgspec.DecodeError(f"cut off, or over {MOST} bytes")
    return decode(content, kind)


RETRY = 0.2
CONNECT = 3.0
ANSWER = 6.0
"""Seconds in which what listens must answer."""
TOKEN = 3.0
"""Seconds from the moment at which a store answers to that at which its rank 0 has written to it, where the port was taken."""
LOOK, BESIDE = 2.0, 0.3
"""Seconds between two looks at the ports beside the master's that refuses, and for a connection to each."""
LOOKUP_SECONDS = 3.0
ENDING_SECONDS = 2.0
"""Seconds in which who has the master's port and answers nobody may end."""


@dataclass(frozen=True, kw_only=True)
class StoreUnreachable:
    """Why there is no store. ``taken``: the port was taken when rank 0 wanted to serve on it. ``listener`` is the process
    that listens there, where it is one of this user on this host, and ``above`` says that it started this rank; ``banner`` is
    what it sent. ``elsewhere``: the address is none of rank 0's host, and does not lead to it. ``rank_zero`` is another rank 0
    that serves on that port or beside it; ``holders`` are the processes of a test that has begun there, rank 0 first.
    ``token_missing``: a store answers, and no rank 0 of this test has written to it. ``ended``: it went while this rank waited."""

    outcome: ConnectOutcome
    seconds: float
    taken: bool = False
    listener: str | None = None
    above: bool = False
    banner: str = ""
    elsewhere: bool = False
    rank_zero: RankZero | None = None
    holders: tuple[Claim, ...] = ()
    token_missing: bool = False
    ended: bool = False
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The store of rank 0. ``failure``: why it is not at the master's address; ``own_address``: whether that is one of this host's;
    ``beside``: where it answers too."""

    server: StoreServer
    me: RankZero
    failure: StoreUnreachable | None = None
    own_address: bool = True
    beside: tuple[str, int] | None = None


def open_served(rank: Rank) -> Served:
    """Listen on the master's port, unless torchrun's agent does, and on one of those beside it. Answers nobody yet."""
    found = bounded(lambda: socket.getaddrinfo(rank.master, None, type=socket.SOCK_STREAM), LOOKUP_SECONDS)
    addresses = sorted({str(entry[4][0]) for entry in found or ()}, key=lambda address: ":" in address)
    sockets: list[socket.socket] = []
    failure, own_address = None, True
    if not addresses:
        failure = StoreUnreachable(outcome=ConnectOutcome.NO_NAME, seconds=0.0)
    elif not rank.agent_store:
        try:
            listening, own_address = _bound_soon(addresses[0], rank.port)
            sockets.append(listening)
        except OSError as error:
            taken, why = error.errno == errno.EADDRINUSE, error.strerror or str(error)
            failure = StoreUnreachable(
                outcome=ConnectOutcome.STRANGER, seconds=0.0, taken=taken, detail="" if taken else why
            )
    beside = None
    for port in ports(rank.port) if addresses else ():
        with suppress(OSError):
            listening, is_own = _bound(addresses[0], port)
            sockets.append(listening)
            beside = addresses[0] if is_own else "127.0.0.1" if listening.family == socket.AF_INET else "::1", port
            break
    me = RankZero(run=rank.run, world=rank.world, port=rank.port, host=socket.gethostname(), pid=os.getpid())
    server = StoreServer(sockets)
    server.put(RANK_ZERO, msgspec.json.encode(me))
    return Served(server=server, me=me, failure=failure, own_address=own_address, beside=beside)


def _bound_soon(address: str, port: int) -> tuple[socket.socket, bool]:
    """The same as ``_bound``; who has the port and answers nobody is ending, such as the job before this one."""
    until = time.monotonic() + ENDING_SECONDS
    while True:
        try:
            return _bound(address, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
            heard = ask(address, port, timeout=BESIDE, listen=BESIDE)
            if heard.said or heard.outcome not in {ConnectOutcome.REFUSED, ConnectOutcome.STRANGER}:
                raise
        time.sleep(RETRY)


def _bound(address: str, port: int) -> tuple[socket.socket, bool]:
    """A socket that listens at an address, else at all; whether it is one of this host's: a service's or a translated one is not.
    Raises OSError."""
    listening, is_own = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET), True
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listening.bind(("", port))
            is_own = False
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening, is_own


def open_board(rank: Rank, seconds: float, served: Served | None = None) -> MessageBoard | StoreUnreachable:
    """The board of this test: rank 0 makes its prefix known to the others under the name of the run. ``served``: rank 0's store."""
    began, failure = time.monotonic(), served.failure if served else None
    if failure and not failure.taken:
        return failure
    if served and not failure and not served.own_address and (outcome := _leads_elsewhere(served, rank)):
        return StoreUnreachable(outcome=outcome, seconds=ANSWER, elsewhere=True)
    # the port may be taken by a second rank 0; joining as a client makes both visible
    taken = failure is not None
    store = _reach(rank, min(seconds, ANSWER) if taken else seconds, taken=taken)
    if isinstance(store, StoreUnreachable):
        return store
    try:
        found = _find(store, rank, TOKEN if taken else seconds - (time.monotonic() - began), taken=taken)
    except OSError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        found = StoreUnreachable(outcome=ConnectOutcome.CUT_OFF, seconds=time.monotonic() - began, ended=True)
    if isinstance(found, StoreUnreachable):
        store.close()
    return found


def _find(store: StoreClient, rank: Rank, seconds: float, *, taken: bool) -> MessageBoard | StoreUnreachable:
    """The board of a store: rank 0 writes the random prefix, the others wait for it."""
    name, began = f"dsdoctor-comm/{rank.run}/token", time.monotonic()
    zero = rank_zero_at(store)
    if zero and (zero.run, zero.port) != (rank.run, rank.port):
        return StoreUnreachable(
            outcome=ConnectOutcome.STRANGER, seconds=0.0, taken=taken, rank_zero=zero, **_listening(rank.port, taken)
        )
    if rank.rank == 0 and not taken and store.add(f"{name}/n", 1) == 1:
        token = secrets.token_hex(8)
        store.set(name, token.encode())
        return MessageBoard(store, f"dsdoctor-comm/{token}", ours=True)
    if not store.wait(name, max(seconds, 1.0)):
        return StoreUnreachable(
            outcome=ConnectOutcome.SILENT,
            seconds=time.monotonic() - began,
            token_missing=True,
            taken=taken,
            **_listening(rank.port, taken),
        )
    return MessageBoard(store, f"dsdoctor-comm/{store.get(name).decode(errors='replace')}")


def _leads_elsewhere(served: Served, rank: Rank) -> ConnectOutcome | None:
    """How connecting to the master's address ends where that does not lead to this store."""
    until, outcome = time.monotonic() + ANSWER, ConnectOutcome.TIMED_OUT
    while time.monotonic() < until:
        heard = ask(rank.master, rank.port, timeout=CONNECT, listen=CONNECT)
        outcome = ConnectOutcome.STRANGER
        if heard.outcome is not ConnectOutcome.REACHED:
            outcome = heard.outcome
        else:
            with suppress(OSError), contextlib.closing(StoreClient(rank.master, rank.port)) as store:
                if rank_zero_at(store) == served.me:
                    return None
        time.sleep(RETRY)
    return outcome


def _reach(rank: Rank, seconds: float, *, taken: bool) -> StoreClient | StoreUnreachable:
    """Connect as a client, as soon as the port is open."""
    began, outcomes, other = time.monotonic(), Counter[ConnectOutcome](), None
    look, until = began + LOOK, began + seconds
    while (left := until - time.monotonic()) > 0:
        heard = ask(rank.master, rank.port, timeout=min(CONNECT, max(left, 0.2)), listen=ANSWER)
        if heard.outcome is ConnectOutcome.REACHED:
            with suppress(OSError):
                return StoreClient(rank.master, rank.port)
        elif heard.outcome in {ConnectOutcome.SILENT, ConnectOutcome.STRANGER}:
            return StoreUnreachable(
                outcome=heard.outcome,
                seconds=time.monotonic() - began,
                taken=taken,
                banner=heard.said,
                **_listening(rank.port, heard.here),
            )
        outcomes[heard.outcome] += 1
        if rank.rank and time.monotonic() > look and heard.outcome is ConnectOutcome.REFUSED:
            look, other = time.monotonic() + LOOK, _rank_zero_beside(rank)
        if other:
            return StoreUnreachable(outcome=heard.outcome, seconds=time.monotonic() - began, rank_zero=other)
        time.sleep(RETRY)
    # the time limit may have cut the last attempt short, so the most frequent outcome counts
    outcome = outcomes.most_common(1)[0][0] if outcomes else ConnectOutcome.TIMED_OUT
    return StoreUnreachable(outcome=outcome, seconds=time.monotonic() - began, taken=taken)


def _rank_zero_beside(rank: Rank) -> RankZero | None:
    """The rank 0 that waits for us with another MASTER_PORT: it serves its store on one of the ports above its own too."""
    for port in ports(rank.port):
        with suppress(OSError), contextlib.closing(StoreClient(rank.master, port, timeout=BESIDE)) as store:
            heard = rank_zero_at(store)
            if heard and (heard.run, heard.world) == (rank.run, rank.world) and heard.port != rank.port:
                return heard
    return None


def _listening(port: int, here: bool) -> dict[str, Any]:
    """``listener`` and ``above`` of what listens on the master's port, where that is one of this host's."""
    found = _owner(port) if here else None
    return {"listener": _shown(found), "above": found is not None and found in _above()}


def _owner(port: int) -> int | None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return int(one.pid)
    return None


def _above() -> set[int]:
    """This process and those that started it: a launcher must not be ended."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        return {os.getpid(), *(one.pid for one in psutil.Process().parents())}
    return {os.getpid()}


def _shown(pid: int | None) -> str | None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.Process(pid) if pid else None
        return f"pid {pid} ({process(found.cmdline(), found.name())[:120]})" if found else None
    return None
