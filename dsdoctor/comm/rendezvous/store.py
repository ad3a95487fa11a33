"""Opens the board: serve the store (rank 0 without torchrun) or connect to it, within our own time limits.

torch does not keep its own limits: connecting takes twice the timeout asked for, and with another program on the port a client
waits for ever. So who listens is asked over plain TCP first, and torch is called in a thread that may be abandoned.
"""

import contextlib
import errno
import os
import secrets
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import msgspec

from dsdoctor.comm.local.interfaces import bounded
from dsdoctor.comm.mesh.mesh import connect
from dsdoctor.comm.models import Claim, Rank
from dsdoctor.comm.rendezvous.heartbeat import BACKLOG, Door, Heartbeat, HeartbeatReader, bind
from dsdoctor.comm.rendezvous.notices import Listener, RankZero, ask, ports
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.redaction import process
from dsdoctor.core.text import decode

# The board: messages between the control processes of all ranks over a TCPStore. Keys are prefixed by a random token.
#
# Rank 0 writes numbered orders, every rank reads them and adds its answer to that order's log. A log is a counter and an entry
# for each number, so rank 0 reads every answer once: traffic grows with the number of ranks, not with its square.


Message = TypeVar("Message")
BATCH = 256
"""Entries fetched by one request."""
SMALL, MOST = 800, 1 << 26
"""Bytes. A longer message is compressed: that of a rank with eight GPUs then passes where whole frames are lost (an MTU that one
switch does not have), and the mesh can tell so. What is more than ``MOST`` after that is no message of ours."""


class TcpStore(Protocol):
    """The part of torch.distributed's TCPStore that is used."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: bytes | str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


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
ASKED_PER_SECOND = 1000
"""How often rank 0 is asked, by all ranks together, whether it serves its store by now."""
TOKEN = 3.0
"""Seconds from the moment at which a store answers to that at which its rank 0 has written to it."""
LOOK, BESIDE = 2.0, 0.3
"""Seconds between two looks at the ports beside the master's that refuses, and for a connection to each."""


@dataclass(frozen=True, kw_only=True)
class StoreUnreachable:
    """Why there is no store. ``taken``: the port was taken when rank 0 wanted to serve on it. ``listener`` is the process
    that listens there, where it is one of this user on this host, and ``above`` says that it started this rank; ``banner`` is
    what it sent. ``elsewhere``: the address is none of rank 0's host, and does not lead to it. ``rank_zero`` is another rank 0
    that listens on that port or beside it; ``holders`` are the processes of a test that has begun there, rank 0 first.
    ``slow``: a store answers, and torch's client was not through with it in time. ``token_missing``: a store answers, and no
    rank 0 of this test has written to it. ``ended``: it went while this rank waited. ``starting``: ``rank_zero`` is this job's own,
    and did not serve a store yet when the time was up."""

    outcome: ConnectOutcome
    seconds: float
    taken: bool = False
    listener: str | None = None
    above: bool = False
    banner: str = ""
    elsewhere: bool = False
    rank_zero: RankZero | None = None
    holders: tuple[Claim, ...] = ()
    slow: bool = False
    token_missing: bool = False
    ended: bool = False
    starting: bool = False
    detail: str = ""


Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """How long a store is waited for: ``seconds``, and until ``latest`` (monotonic) while rank 0 is heard of, which is starting.
    ``say`` gets what is waited for then."""

    seconds: float
    latest: float = 0.0
    say: Say = print


def open_board(rank: Rank, wait: Wait, door: Door | None = None) -> MessageBoard | StoreUnreachable:
    """The board of this test: rank 0 makes its prefix known to the others under the name of the run. ``door``: rank 0's port, where
    it listens already."""
    began = time.monotonic()
    store = _serve(rank, wait.seconds, door) if rank.rank == 0 and not rank.agent_store else None
    if isinstance(store, StoreUnreachable) and not store.taken:
        return store
    # the port may be taken by a second rank 0; joining as a client makes both visible
    taken = isinstance(store, StoreUnreachable)
    if store is None or isinstance(store, StoreUnreachable):
        store = _reach(rank, replace(wait, seconds=min(wait.seconds, ANSWER)) if taken else wait, taken=taken)
    if isinstance(store, StoreUnreachable):
        return store
    left = TOKEN if taken else wait.seconds - (time.monotonic() - began)
    try:
        return _find(store, rank, replace(wait, seconds=left), taken=taken)
    except Exception as error:
        # torch raises another type in each release
        print(f"{type(error).__name__}: {error}", flush=True)
        return StoreUnreachable(outcome=ConnectOutcome.CUT_OFF, seconds=time.monotonic() - began, ended=True)


def _find(store: TcpStore, rank: Rank, wait: Wait, *, taken: bool) -> MessageBoard | StoreUnreachable:
    """The board of a store: rank 0 writes the random prefix, the others wait for it."""
    name = f"dsdoctor-comm/{rank.run}/token"
    if rank.rank == 0 and not taken and store.add(f"{name}/n", 1) == 1:
        token = secrets.token_hex(8)
        store.set(name, token)
        return MessageBoard(store, f"dsdoctor-comm/{token}", ours=True)
    began, beats = time.monotonic(), HeartbeatReader(store, rank.run, rank.world)
    until = began + max(wait.seconds, 1.0)
    while not store.check([name]):
        beats.look()
        zero = next((beat for beat in beats.alive if beat.rank == 0 and rank.rank), None)
        if zero:
            wait.say(f"waiting for rank 0 ({zero.host}): {zero.at}")
        if time.monotonic() > (max(until, wait.latest) if zero else until):
            return StoreUnreachable(
                outcome=ConnectOutcome.SILENT,
                seconds=time.monotonic() - began,
                token_missing=True,
                taken=taken,
                starting=zero is not None,
                rank_zero=_as_rank_zero(zero, rank) if zero else None,
                **_listening(rank.port, taken),
            )
        time.sleep(0.05)
    return MessageBoard(store, f"dsdoctor-comm/{store.get(name).decode(errors='replace')}")


def _as_rank_zero(beat: Heartbeat, rank: Rank) -> RankZero:
    return RankZero(
        run=rank.run, world=beat.world, port=rank.port, host=beat.host, pid=beat.pid, at=beat.at, seconds=beat.seconds
    )


def _serve(rank: Rank, seconds: float, door: Door | None) -> "TcpStore | StoreUnreachable":
    """Listen on the master's address where that is one of this host's, else on all."""
    listening, ours = door.take() if door else None, door is not None and door.own_address
    if listening is None:
        listening = socket.socket(socket.AF_INET6 if ":" in rank.master else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door = None
    with listening:
        try:
            if door is None:
                ours = bind(listening, rank)
                listening.listen(BACKLOG)
        except OSError as error:
            if isinstance(error, socket.gaierror):
                return StoreUnreachable(outcome=ConnectOutcome.NO_NAME, seconds=0.0)
            taken, why = error.errno == errno.EADDRINUSE, error.strerror or str(error)
            return StoreUnreachable(
                outcome=ConnectOutcome.STRANGER, seconds=0.0, taken=taken, detail="" if taken else why
            )
        outcome = None if ours else _leads_elsewhere(listening, rank)
        if outcome:
            return StoreUnreachable(outcome=outcome, seconds=ANSWER, elsewhere=True)
        handle = os.dup(listening.fileno())
    return _torch_store(rank, handle, seconds) or StoreUnreachable(
        outcome=ConnectOutcome.SILENT, seconds=seconds, slow=True
    )


def _leads_elsewhere(listening: socket.socket, rank: Rank) -> ConnectOutcome | None:
    """How connecting to the master's address ends where that does not lead to this socket."""
    until, outcome = time.monotonic() + ANSWER, ConnectOutcome.TIMED_OUT
    listening.settimeout(1.0)
    while time.monotonic() < until:
        opened = connect(rank.master, rank.port, timeout=CONNECT)
        if isinstance(opened, ConnectOutcome):
            outcome = opened
        else:
            with opened, contextlib.suppress(OSError):
                listening.accept()[0].close()
                listening.settimeout(None)
                return None
            outcome = ConnectOutcome.STRANGER
        time.sleep(RETRY)
    return outcome


def _reach(rank: Rank, wait: Wait, *, taken: bool) -> "TcpStore | StoreUnreachable":
    """Connect as a client, as soon as the port is open. A rank 0 of this run that does not serve its store yet is waited for."""
    began, outcomes, other = time.monotonic(), Counter[ConnectOutcome](), None
    look, until = began + LOOK, began + wait.seconds
    starting: RankZero | None = None
    while time.monotonic() < (max(until, wait.latest) if starting else until):
        left = max(until, wait.latest if starting else 0.0) - time.monotonic()
        heard = ask(rank.master, rank.port, timeout=min(CONNECT, max(left, 0.2)), listen=ANSWER)
        starting = heard.rank_zero if heard.rank_zero and _is_starting(heard.rank_zero, rank) else None
        if starting:
            wait.say(f"waiting for rank 0 ({starting.host}): {starting.at}")
            time.sleep(max(RETRY, rank.world / ASKED_PER_SECOND))
            continue
        if heard.outcome in {ConnectOutcome.REACHED, ConnectOutcome.SILENT, ConnectOutcome.STRANGER}:
            return _join(rank, heard, left, began, taken=taken)
        outcomes[heard.outcome] += 1
        if rank.rank and time.monotonic() > look and heard.outcome is ConnectOutcome.REFUSED:
            look, other = time.monotonic() + LOOK, _rank_zero_beside(rank)
        if other:
            return StoreUnreachable(outcome=heard.outcome, seconds=time.monotonic() - began, rank_zero=other)
        time.sleep(RETRY)
    seconds = time.monotonic() - began
    if starting:
        return StoreUnreachable(
            outcome=ConnectOutcome.SILENT, seconds=seconds, taken=taken, rank_zero=starting, starting=True
        )
    # the time limit may have cut the last attempt short, so the most frequent outcome counts
    outcome = outcomes.most_common(1)[0][0] if outcomes else ConnectOutcome.TIMED_OUT
    return StoreUnreachable(outcome=outcome, seconds=seconds, taken=taken)


def _is_starting(heard: RankZero, rank: Rank) -> bool:
    """Whether it is rank 0 of this job, before it serves its store."""
    return bool(heard.at) and (heard.run, heard.port) == (rank.run, rank.port)


def _join(rank: Rank, heard: Listener, left: float, began: float, *, taken: bool) -> "TcpStore | StoreUnreachable":
    """torch's client of what listens there; a store before torch 2.2 is one that answers torch's client alone."""
    store = None
    if heard.outcome is ConnectOutcome.REACHED:
        # a client that waits for the name server is slow, and its store is one all the same
        store = _torch_store(rank, None, max(left, 3 * ANSWER))
    elif not heard.said and heard.rank_zero is None:
        store = _torch_store(rank, None, min(ANSWER, max(left, 1.0)))
    return store or StoreUnreachable(
        outcome=heard.outcome,
        seconds=time.monotonic() - began,
        taken=taken,
        banner=heard.said,
        rank_zero=heard.rank_zero,
        slow=heard.outcome is ConnectOutcome.REACHED,
        **_listening(rank.port, heard.here),
    )


def _rank_zero_beside(rank: Rank) -> RankZero | None:
    """The rank 0 that waits for us with another MASTER_PORT: it listens for notices on one of the ports above its own."""
    for port in ports(rank.port):
        heard = ask(rank.master, port, timeout=BESIDE, listen=BESIDE).rank_zero
        if heard and heard.run == rank.run and heard.world == rank.world and heard.port != rank.port:
            return heard
    return None


def _torch_store(rank: Rank, handle: int | None, seconds: float) -> TcpStore | None:
    """torch's store, None where it does not answer in time. torch raises another type in each release."""
    return bounded(lambda: _open(rank, handle), seconds, (Exception,))


def _open(rank: Rank, handle: int | None) -> TcpStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=30)}
    if handle is not None:
        options["master_listen_fd"] = handle
    store = TCPStore(rank.master, rank.port, None, handle is not None, **options)
    # a client's constructor accepts any listener; only an answer proves that it is a store
    store.add("dsdoctor-comm/probe", 0)
    return cast(TcpStore, store)


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
