"""A rank's heartbeat: who it is and what it is doing, told before torch is imported, which may take minutes.

The first process of a rank imports no torch. It speaks the protocol of torch's store by itself and writes there as soon as a store
answers at the master's address. Until rank 0 has imported torch there is none: its own first process answers there meanwhile.
"""

import contextlib
import errno
import ipaddress
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from dsdoctor.comm.local.interfaces import bounded
from dsdoctor.comm.mesh.mesh import connect
from dsdoctor.comm.models import Claim, Rank
from dsdoctor.comm.rendezvous.notices import NONCE, PROBE, rank_zero_of, read_line
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.text import decode

SET, ADD = 1, 4
"""Operations of torch's store (TCPStoreBackend.hpp), one byte each; a length is a uint64 of the machine's own order."""
CONNECT_TIMEOUT_SECONDS, ANSWER_TIMEOUT_SECONDS = 3.0, 6.0
RETRY_SECONDS, BLOCKED_RETRY_SECONDS = 0.1, 5.0
BEAT_SECONDS, RANKS_PER_SECOND = 1.0, 1000
"""Seconds between two beats of a rank; of more ranks than that the store gets so many beats a second."""
STALE_BEATS, STALE_SECONDS = 4, 15.0
"""A rank that has sent nothing for so long is not known to be alive any more."""
LOOKUP_SECONDS = 3.0
MAX_LENGTH = 4096
BACKLOG = 2048
BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """A rank's process, what it is doing (``at``, such as "importing torch") and for how many seconds."""

    rank: int
    world: int
    host: str
    pid: int
    at: str
    seconds: float = 0.0

    @property
    def doing(self) -> str:
        """The end of a sentence: what it is doing, and for how long."""
        return f"{self.at[:60]}, {self.seconds:.0f} s"

    @property
    def claim(self) -> Claim:
        """The same process as a rank that has come, as far as it is known."""
        return Claim(
            rank=self.rank,
            world=self.world,
            local_rank=0,
            host=self.host,
            pid=self.pid,
            address="",
            port=0,
            seen=time.time(),
        )


class StoreClient:
    """A client of torch's store (torch 2.2 or later) that needs no torch. Raises OSError where no such store answers."""

    def __init__(self, address: str, port: int) -> None:
        opened = connect(address, port, timeout=CONNECT_TIMEOUT_SECONDS)
        if isinstance(opened, ConnectOutcome):
            raise (ConnectionRefusedError if opened is ConnectOutcome.REFUSED else TimeoutError)(opened.value)
        self._socket = opened
        try:
            opened.settimeout(ANSWER_TIMEOUT_SECONDS)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.sendall(PROBE)
            if self._read(len(NONCE)) != NONCE:
                raise ConnectionError("no store of torch answers there")
        except BaseException:
            opened.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Write a value; the store answers nothing."""
        self._socket.sendall(bytes([SET]) + _sized(f"/{key}".encode()) + _sized(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        self._socket.sendall(bytes([ADD]) + _sized(f"/{key}".encode()) + struct.pack("=q", amount))
        return int(struct.unpack("=q", self._read(8))[0])

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise ConnectionError("the store has closed the connection")
            data += part
        return data


def _sized(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def prefix_of(run: str) -> str:
    """Where the heartbeats of a run stand in its store: a counter, and an entry for each process."""
    return f"dsdoctor-comm/{run}/heartbeats"


class HeartbeatSender:
    """Writes this rank's heartbeat as soon as a store answers, until it is ended. Its thread ends with the process.

    ``alone``: seconds since the store went with which it had spoken, 0.0 where it has not gone."""

    def __init__(self, rank: Rank, host: str) -> None:
        self._rank, self._host, self._pid = rank, host, os.getpid()
        self._at, self._since = "starting", time.monotonic()
        self._gone: float | None = None
        self._over = threading.Event()
        threading.Thread(target=self._send, daemon=True).start()

    def say(self, at: str) -> None:
        """What the rank is doing from now on."""
        if at != self._at:
            self._at, self._since = at, time.monotonic()

    def end(self) -> None:
        """Send nothing more: the rank has come, or will not."""
        self._over.set()

    @property
    def alone(self) -> float:
        """Seconds since the store went."""
        gone = self._gone
        return 0.0 if gone is None else time.monotonic() - gone

    def _send(self) -> None:
        prefix, met = prefix_of(self._rank.run), False
        while not self._over.is_set():
            pause = max(RETRY_SECONDS, self._rank.world / RANKS_PER_SECOND)
            try:
                store = self._store()
            except (TimeoutError, UnicodeError):
                # a firewall answers only so often, and that answer is the finding of who looks for the store
                self._over.wait(BLOCKED_RETRY_SECONDS)
                continue
            except OSError as error:
                if met and self._gone is None and isinstance(error, ConnectionRefusedError):
                    self._gone = time.monotonic()
                self._over.wait(pause)
                continue
            with contextlib.suppress(OSError), contextlib.closing(store):
                number = store.add(f"{prefix}/n", 1)
                met, self._gone = True, None
                while not self._over.is_set():
                    store.set(f"{prefix}/{number}", msgspec.json.encode(self._heartbeat()))
                    # asked for, because a store answers nothing to what is written
                    store.add(f"{prefix}/n", 0)
                    self._over.wait(beat_seconds(self._rank.world))
                return
            self._over.wait(pause)

    def _store(self) -> StoreClient:
        return StoreClient(self._rank.master, self._rank.port)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(
            rank=self._rank.rank,
            world=self._rank.world,
            host=self._host,
            pid=self._pid,
            at=self._at,
            seconds=time.monotonic() - self._since,
        )


def beat_seconds(world: int) -> float:
    """Seconds between two beats.

    >>> beat_seconds(2), beat_seconds(8000)
    (1.0, 8.0)
    """
    return max(BEAT_SECONDS, world / RANKS_PER_SECOND)


class Readable(Protocol):
    """The part of torch's store that a reader needs."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class HeartbeatReader:
    """The heartbeats of a run, read from its store. A process that has torch may read them by torch's own client."""

    def __init__(self, store: Readable, run: str, world: int) -> None:
        self._store, self._prefix, self._world = store, prefix_of(run), world
        self._last: dict[tuple[int, str, int], tuple[Heartbeat, float, int]] = {}
        self._next = 0.0

    def look(self, *, at_once: bool = False) -> None:
        """Read what was written, once in a while: a look takes at most a tenth of the time."""
        began = time.monotonic()
        if began < self._next and not at_once:
            return
        # the store is open to whoever reaches its port
        last = min(self._store.add(f"{self._prefix}/n", 0), 4 * self._world + BATCH)
        for first in range(1, last + 1, BATCH):
            keys = [f"{self._prefix}/{number}" for number in range(first, min(first + BATCH, last + 1))]
            for text in self._texts(keys):
                with contextlib.suppress(msgspec.MsgspecError):
                    self._keep(decode(text[:MAX_LENGTH], Heartbeat))
        now = time.monotonic()
        self._next = now + max(BEAT_SECONDS / 2, 10 * (now - began))

    def _texts(self, keys: list[str]) -> list[bytes]:
        if self._store.check(keys):
            return list(self._store.multi_get(keys))
        # one has its number and is not written yet
        return self._store.multi_get(there) if (there := [key for key in keys if self._store.check([key])]) else []

    def _keep(self, beat: Heartbeat) -> None:
        who = beat.rank, beat.host, beat.pid
        before = self._last.get(who)
        if before is None or before[0] != beat:
            self._last[who] = beat, time.monotonic(), before[2] + 1 if before else 1

    @property
    def alive(self) -> tuple[Heartbeat, ...]:
        """The processes that were heard of not long ago, by rank."""
        stale = time.monotonic() - max(STALE_SECONDS, STALE_BEATS * beat_seconds(self._world))
        return tuple(beat for _, (beat, heard, _) in sorted(self._last.items()) if heard > stale)

    @property
    def silent(self) -> tuple[tuple[Heartbeat, float], ...]:
        """The processes that were heard of once, and the seconds since."""
        alive, now = set(self.alive), time.monotonic()
        return tuple((beat, now - heard) for _, (beat, heard, _) in sorted(self._last.items()) if beat not in alive)

    def rivals(self, claims: Iterable[Claim]) -> Iterator[tuple[Heartbeat, bool]]:
        """Processes that say that they are a rank which another process is already, and whether it is known that both live: one
        that was ended and started anew has left a heartbeat that does not go on."""
        first = {claim.rank: (claim.host, claim.pid) for claim in reversed(tuple(claims))}
        recent = time.monotonic() - STALE_BEATS * beat_seconds(self._world)
        for beat, heard, count in sorted(self._last.values(), key=lambda each: (each[0].rank, -each[2])):
            if heard > recent and first.setdefault(beat.rank, (beat.host, beat.pid)) != (beat.host, beat.pid):
                yield beat, count > 1


RETRY_ACCEPT_SECONDS = 0.1


class Door:
    """Rank 0's port until its store is served there: whoever asks is told that rank 0 runs, and what it is doing.

    Opened by the first process of rank 0 before it starts the one that imports torch, which takes the port over."""

    def __init__(self, rank: Rank, listening: socket.socket, *, own_address: bool) -> None:
        self._rank, self._listening, self.own_address = rank, listening, own_address
        self._mine, self._theirs = socket.socketpair()
        self._at, self._since = "starting", time.monotonic()

    def say(self, at: str) -> None:
        """What rank 0 is doing from now on."""
        if at != self._at:
            self._at, self._since = at, time.monotonic()

    def serve(self) -> None:
        """Answer from a thread, until the port is taken over. Called in the first process, after the other was started."""
        self._theirs.close()
        threading.Thread(target=self._serve, daemon=True).start()

    def take(self) -> socket.socket | None:
        """The listening socket, which nobody else answers on any more; None where that is not sure. Called in the other process."""
        self._mine.close()
        # any other failure: the first process is gone, and answers no more
        with self._theirs, contextlib.suppress(OSError):
            try:
                self._theirs.settimeout(ANSWER_TIMEOUT_SECONDS)
                self._theirs.sendall(b".")
                while self._theirs.recv(1):
                    continue
            except TimeoutError:
                self._listening.close()
                return None
        return self._listening

    def close(self) -> None:
        """Where no other process was started."""
        for each in (self._listening, self._mine, self._theirs):
            each.close()

    def _serve(self) -> None:
        with self._mine, self._listening:
            while self._mine not in (ready := select.select([self._listening, self._mine], [], [])[0]):
                if ready:
                    try:
                        caller, _ = self._listening.accept()
                    except OSError:  # no descriptor is left, or the caller is gone
                        time.sleep(RETRY_ACCEPT_SECONDS)
                        continue
                    # a caller who says nothing keeps none of the others waiting
                    with contextlib.suppress(RuntimeError):
                        threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with contextlib.suppress(OSError), caller:
            if read_line(caller) == PROBE:
                rank, seconds = self._rank, time.monotonic() - self._since
                who = rank_zero_of(rank, os.getpid())
                caller.sendall(msgspec.json.encode(replace(who, at=self._at, seconds=seconds)) + b"\n")


def bind(listening: socket.socket, rank: Rank) -> bool:
    """Bind to the master's address, else to all; whether it is one of this host's: a service's or a translated one is not. Raises
    OSError."""
    try:
        listening.bind((rank.master, rank.port))
    except (TypeError, UnicodeError) as error:
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from None
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno != errno.EADDRNOTAVAIL:
            raise
        listening.bind(("", rank.port))
        return False
    return True


def open_door(rank: Rank) -> Door | None:
    """Listen on the master's port; None where that cannot be done now, which is told when the store cannot be served there."""
    master: str | None = rank.master
    try:
        ipaddress.ip_address(rank.master)
    except ValueError:
        found = bounded(
            lambda: socket.getaddrinfo(rank.master, None, socket.AF_INET, socket.SOCK_STREAM), LOOKUP_SECONDS
        )
        master = str(found[0][4][0]) if found else None
    if master is None:
        return None
    listening = socket.socket(socket.AF_INET6 if ":" in master else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own_address = bind(listening, replace(rank, master=master))
        listening.listen(BACKLOG)
        return Door(rank, listening, own_address=own_address)
    except OSError:
        listening.close()
        return None
