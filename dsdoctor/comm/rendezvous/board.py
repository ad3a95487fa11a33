"""The board: messages between the control processes of all ranks over a TCPStore. Keys are prefixed by a random token.

Rank 0 writes numbered orders, every rank reads them and adds its answer to that order's log. A log is a counter and an entry
for each number, so rank 0 reads every answer once: traffic grows with the number of ranks, not with its square.
"""

import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

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

    def __init__(self, board: "Board", name: str) -> None:
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


class Board:
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
    return msgspec.json.decode(content, type=kind)
