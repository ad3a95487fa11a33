"""torch's TCPStore without torch: a client, and the server of rank 0.

The wire is that of torch 2.2 and later (TCPStoreBackend.hpp): a byte for each operation, lengths as uint64 of the machine's own
order. torch's own clients speak to this server too: those of the processes that exchange. Values are bytes that nobody executes.
"""

import contextlib
import resource
import selectors
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from dsdoctor.comm.mesh.mesh import connect
from dsdoctor.comm.results import ConnectOutcome

VALIDATE, SET, COMPARE_SET, GET, ADD, CHECK, WAIT, COUNT, DELETE, APPEND, MULTI_GET, MULTI_SET, CANCEL, PING = range(14)
NONCE = b"who\n"
MAGIC = struct.pack("=I", 0x3C85F7CE)
PROBE = bytes([VALIDATE]) + MAGIC + bytes([PING]) + NONCE
"""What a client sends first; a store answers with the four bytes of its own."""
READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
CONNECT_TIMEOUT_SECONDS, ANSWER_TIMEOUT_SECONDS = 3.0, 30.0
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 3, socket.TCP_KEEPCNT: 4}
"""Seconds until a silent peer is asked, between two questions, and their number: a host that is gone is noticed while one waits."""
MAX_VALUE_BYTES, MAX_KEYS = 1 << 24, 1 << 20
MAX_REQUEST_BYTES = 2 * MAX_VALUE_BYTES
"""What one caller may have sent before its request is whole: a stranger fills no memory."""
PART = 1 << 18
BACKLOG = 2048
RETRY_ACCEPT_SECONDS = 0.1


class StoreClient:
    """A client of such a store. Raises OSError where none answers, or none any more."""

    def __init__(self, address: str, port: int, *, timeout: float = CONNECT_TIMEOUT_SECONDS) -> None:
        opened = connect(address, port, timeout=timeout)
        if isinstance(opened, ConnectOutcome):
            raise (ConnectionRefusedError if opened is ConnectOutcome.REFUSED else TimeoutError)(opened.value)
        self._socket, self._waits_for = opened, ""
        try:
            opened.settimeout(ANSWER_TIMEOUT_SECONDS)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in KEEPALIVE.items():
                opened.setsockopt(socket.IPPROTO_TCP, option, value)
            opened.sendall(PROBE)
            if self._read(len(NONCE)) != NONCE:
                raise ConnectionError("no store of torch answers there")
        except BaseException:
            opened.close()
            raise

    def set(self, key: str, value: bytes) -> None:
        """Write a value; the store answers nothing."""
        self._ask(SET, _sized(f"/{key}".encode()) + _sized(value))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; its new value."""
        self._ask(ADD, _sized(f"/{key}".encode()) + struct.pack("=q", amount))
        return int(struct.unpack("=q", self._read(8))[0])

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        self._ask(CHECK, _keys(keys))
        return self._read(1) == READY

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values that are there."""
        self._ask(MULTI_GET, _keys(keys))
        return [self._read(struct.unpack("=Q", self._read(8))[0]) for _ in keys]

    def wait(self, key: str, seconds: float) -> bool:
        """Whether there is a key, now or within so many seconds. The store is asked once, however often this is called for it."""
        if self._waits_for != key:
            self._ask(WAIT, _keys([key]))
            self._waits_for = key
        with selectors.DefaultSelector() as ready:
            ready.register(self._socket, selectors.EVENT_READ)
            if not ready.select(max(seconds, 0.0)):
                return False
        self._waits_for = ""
        return self._read(1) == STOP_WAITING

    def close(self) -> None:
        """End the connection."""
        self._socket.close()

    def _ask(self, operation: int, rest: bytes) -> None:
        """Send a request; one that waits is withdrawn first, which a store confirms after an answer that may be on its way."""
        if self._waits_for:
            self._waits_for = ""
            self._socket.sendall(bytes([CANCEL]))
            if self._read(1) == STOP_WAITING:
                self._read(1)
        self._socket.sendall(bytes([operation]) + rest)

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._socket.recv(min(size - len(data), PART))
            if not part:
                raise ConnectionError("the store has closed the connection")
            data += part
        return bytes(data)


def _sized(data: bytes) -> bytes:
    return struct.pack("=Q", len(data)) + data


def _keys(keys: Sequence[str]) -> bytes:
    return struct.pack("=Q", len(keys)) + b"".join(_sized(f"/{key}".encode()) for key in keys)


class _Incomplete(Exception):
    """The rest of a request has not come yet."""


class _Caller:
    """A connection: what it sent and was not read yet, what it is to get, and the keys that it still waits for."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened
        self.inbox, self.outbox, self.place = bytearray(), bytearray(), 0
        self.wanted: set[bytes] = set()
        self.is_known = False

    def take(self, size: int) -> bytes:
        """The next bytes of a request."""
        if size > MAX_VALUE_BYTES:
            raise ValueError("too long")
        if self.place + size > len(self.inbox):
            raise _Incomplete
        part = bytes(self.inbox[self.place : self.place + size])
        self.place += size
        return part

    def number(self) -> int:
        """A length."""
        return int(struct.unpack("=Q", self.take(8))[0])

    def text(self) -> bytes:
        """A key or a value."""
        return self.take(self.number())

    def texts(self) -> list[bytes]:
        """Keys."""
        count = self.number()
        if count > MAX_KEYS:
            raise ValueError("too many")
        return [self.text() for _ in range(count)]


class StoreServer:
    """The store of rank 0. Opened by its first process before any other is started; answers from a thread of that one alone."""

    def __init__(self, listening: Sequence[socket.socket]) -> None:
        self._listening = tuple(listening)
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[_Caller]] = defaultdict(set)
        self._ready = selectors.DefaultSelector()

    def put(self, key: str, value: bytes) -> None:
        """Write a value before it serves."""
        self._values[f"/{key}".encode()] = value

    def serve(self) -> None:
        """Answer from now on, in a thread that ends with the process, as many as the hard limit of open files allows."""
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        for listening in self._listening:
            listening.setblocking(False)
            self._ready.register(listening, selectors.EVENT_READ, None)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Stop listening, where another process serves."""
        for listening in self._listening:
            listening.close()
        self._ready.close()

    def _serve(self) -> None:
        while True:
            for key, events in self._ready.select():
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                elif not self._attend(key.data, events):
                    self._leave(key.data)

    def _accept(self, listening: socket.socket) -> None:
        try:
            opened, _ = listening.accept()
        except OSError:  # no descriptor is left, or the caller is gone
            time.sleep(RETRY_ACCEPT_SECONDS)
            return
        opened.setblocking(False)
        with contextlib.suppress(OSError):
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._ready.register(opened, selectors.EVENT_READ, _Caller(opened))

    def _attend(self, caller: _Caller, events: int) -> bool:
        """Read what a caller sent and write what it gets; whether it stays."""
        try:
            if events & selectors.EVENT_READ:
                part = caller.socket.recv(PART)
                if not part:
                    return False
                caller.inbox += part
                if len(caller.inbox) > MAX_REQUEST_BYTES:
                    return False
                self._requests(caller)
            self._write(caller)
        except BlockingIOError:
            return True
        except (OSError, ValueError, KeyError, struct.error):
            # it is gone, or is no client of such a store
            return False
        return True

    def _requests(self, caller: _Caller) -> None:
        """Answer every request that has come as a whole."""
        while caller.inbox:
            caller.place = 0
            try:
                operation = caller.take(1)[0]
                if not caller.is_known and operation != VALIDATE:
                    raise ValueError("no client of a store")
                OPERATIONS[operation](self, caller)
            except _Incomplete:
                return
            del caller.inbox[: caller.place]

    def _write(self, caller: _Caller) -> None:
        """Send what can be sent now; the rest when the connection takes more."""
        if caller.outbox:
            with contextlib.suppress(BlockingIOError):
                del caller.outbox[: caller.socket.send(caller.outbox)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.outbox else 0)
        if self._ready.get_key(caller.socket).events != events:
            self._ready.modify(caller.socket, events, caller)

    def _leave(self, caller: _Caller) -> None:
        self._forget(caller)
        self._ready.unregister(caller.socket)
        caller.socket.close()

    def _validate(self, caller: _Caller) -> None:
        if caller.take(len(MAGIC)) != MAGIC:
            raise ValueError("no client of a store")
        caller.is_known = True

    def _ping(self, caller: _Caller) -> None:
        caller.outbox += caller.take(len(NONCE))

    def _set(self, caller: _Caller) -> None:
        key, value = caller.text(), caller.text()
        self._keep(key, value)

    def _compare_set(self, caller: _Caller) -> None:
        key, expected, desired = caller.text(), caller.text(), caller.text()
        now = self._values.get(key)
        if now == expected or (now is None and not expected):
            self._keep(key, desired)
        caller.outbox += _sized(self._values.get(key, expected))

    def _get(self, caller: _Caller) -> None:
        caller.outbox += _sized(self._values[caller.text()])

    def _add(self, caller: _Caller) -> None:
        key, amount = caller.text(), struct.unpack("=q", caller.take(8))[0]
        value = int(self._values.get(key, b"0")) + amount
        self._keep(key, str(value).encode())
        caller.outbox += struct.pack("=q", value)

    def _check(self, caller: _Caller) -> None:
        caller.outbox += READY if all(key in self._values for key in caller.texts()) else NOT_READY

    def _wait(self, caller: _Caller) -> None:
        caller.wanted = {key for key in caller.texts() if key not in self._values}
        for key in caller.wanted:
            self._waiting[key].add(caller)
        if not caller.wanted:
            caller.outbox += STOP_WAITING

    def _cancel(self, caller: _Caller) -> None:
        self._forget(caller)
        caller.outbox += WAIT_CANCELED

    def _forget(self, caller: _Caller) -> None:
        """It waits for nothing any more."""
        for key in caller.wanted:
            self._waiting[key].discard(caller)
        caller.wanted = set()

    def _count(self, caller: _Caller) -> None:
        caller.outbox += struct.pack("=q", len(self._values))

    def _delete(self, caller: _Caller) -> None:
        caller.outbox += struct.pack("=q", self._values.pop(caller.text(), None) is not None)

    def _append(self, caller: _Caller) -> None:
        key, value = caller.text(), caller.text()
        self._keep(key, self._values.get(key, b"") + value)

    def _multi_get(self, caller: _Caller) -> None:
        for value in [self._values[key] for key in caller.texts()]:
            caller.outbox += _sized(value)

    def _multi_set(self, caller: _Caller) -> None:
        for key, value in [(caller.text(), caller.text()) for _ in range(min(caller.number(), MAX_KEYS))]:
            self._keep(key, value)

    def _keep(self, key: bytes, value: bytes) -> None:
        """Write a value, and tell those who wait for it."""
        self._values[key] = value
        for caller in self._waiting.pop(key, ()):
            caller.wanted.discard(key)
            if not caller.wanted:
                caller.outbox += STOP_WAITING
                # one that is gone is noticed when it is read from
                with contextlib.suppress(OSError):
                    self._write(caller)


OPERATIONS: dict[int, Callable[[StoreServer, _Caller], None]] = {
    VALIDATE: StoreServer._validate,
    SET: StoreServer._set,
    COMPARE_SET: StoreServer._compare_set,
    GET: StoreServer._get,
    ADD: StoreServer._add,
    CHECK: StoreServer._check,
    WAIT: StoreServer._wait,
    COUNT: StoreServer._count,
    DELETE: StoreServer._delete,
    APPEND: StoreServer._append,
    MULTI_GET: StoreServer._multi_get,
    MULTI_SET: StoreServer._multi_set,
    CANCEL: StoreServer._cancel,
    PING: StoreServer._ping,
}
