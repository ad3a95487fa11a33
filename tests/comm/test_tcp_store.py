"""torch's store without torch: our client and torch's own, our server and torch's own, all four together; and rank 0's port."""

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from dsdoctor.comm.models import Claim
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import LOOKING_UP, Absent, Importing, rank_starting
from dsdoctor.comm.rendezvous.notices import ask, ports, rank_zero_at
from dsdoctor.comm.rendezvous.store import MessageBoard, StoreUnreachable, open_board, open_served
from dsdoctor.comm.rendezvous.tcp_store import (
    ADD,
    CHECK,
    MAGIC,
    MAX_KEYS,
    MAX_VALUE_BYTES,
    MULTI_GET,
    MULTI_SET,
    PROBE,
    SET,
    VALIDATE,
    WAIT,
    StoreClient,
    StoreServer,
)
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.processes import fork
from tests.comm.made_claims import claim, rank
from tests.each import each

Connect = Callable[[int], StoreClient]


@pytest.fixture
def port() -> Iterator[int]:
    """That of a server of ours."""
    listening = socket.create_server(("127.0.0.1", 0))
    StoreServer([listening]).serve()
    yield int(listening.getsockname()[1])


def torchs(port: int = 0, *, serves: bool = False) -> Any:
    """torch's own client, or its own server."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", port, None, serves, timedelta(seconds=20), wait_for_workers=False)


def test_our_client_and_torchs_own_server_read_what_the_other_wrote(connected: Connect) -> None:
    served = torchs(serves=True)
    client = connected(served.port)

    assert client.add("n", 2) == 2
    assert served.add("n", 3) == 5
    client.set("key/of ours", b"\x00\xff" * 5000)
    assert client.add("n", 0) == 5
    assert served.get("key/of ours") == b"\x00\xff" * 5000
    assert (client.check(["n", "key/of ours"]), client.check(["n", "none"])) == (True, False)
    assert client.multi_get(["n", "key/of ours"]) == [b"5", b"\x00\xff" * 5000]
    assert not client.wait("later", 0.05)
    served.set("later", "x")
    assert client.wait("later", 20)
    assert not client.wait("never", 0.0)
    assert client.get("later") == b"x", "a wait that goes on is withdrawn"


def test_torchs_own_client_finds_all_that_it_asks_for_at_our_server(port: int) -> None:
    store = torchs(port)

    store.set("a", "b")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "z"])) == (b"b", True, False)
    assert (store.compare_set("a", "b", "c"), store.compare_set("a", "x", "d")) == (b"c", b"c")
    assert (store.compare_set("new", "", "d"), store.compare_set("none", "q", "d")) == (b"d", b"q")
    assert (store.add("n", 3), store.add("n", -1), store.get("n")) == (3, 2, b"2")
    store.multi_set(["k1", "k2"], ["1", "2"])
    store.append("k1", "x")
    assert store.multi_get(["k1", "k2"]) == [b"1x", b"2"]
    assert (store.num_keys(), store.delete_key("k1"), store.delete_key("k1")) == (5, True, False)
    try:
        store.wait(["never"], timedelta(seconds=0.1))
    except Exception as error:
        # torch raises another type in each release
        assert "never" in str(error) or "timeout" in str(error)
    else:
        raise AssertionError("it did not wait")
    store.set("large", b"z" * 3_000_000)
    assert len(store.get("large")) == 3_000_000


def test_who_waits_is_told_when_the_key_is_there_and_asks_once(port: int, connected: Connect) -> None:
    one, other = connected(port), connected(port)
    assert [one.wait("go", 0.0) for _ in range(3)] == [False] * 3
    threading.Timer(0.1, other.set, ("go", b"1")).start()
    began = time.monotonic()

    assert one.wait("go", 30)
    assert time.monotonic() - began < 20
    assert (one.get("go"), one.add("n", 1)) == (b"1", 1)


def test_callers_who_say_nothing_keep_no_client_waiting(port: int, connected: Connect) -> None:
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    began = time.monotonic()

    assert connected(port).add("n", 1) == 1
    assert time.monotonic() - began < 20
    for caller in idle:
        caller.close()


def test_who_leaves_while_it_waits_keeps_nothing_from_the_others(port: int, connected: Connect) -> None:
    stays, writer = connected(port), connected(port)
    with contextlib.closing(StoreClient("127.0.0.1", port)) as leaves:
        assert not leaves.wait("go", 0.0)
    assert not stays.wait("go", 0.0)
    writer.set("go", b"1")

    assert stays.wait("go", 20)


class Counted(StoreClient):
    """A client that knows what it asked for."""

    def __init__(self, port: int) -> None:
        self.asked: list[int] = []
        super().__init__("127.0.0.1", port)

    def _ask(self, operation: int, rest: bytes) -> None:
        self.asked.append(operation)
        super()._ask(operation, rest)


def test_a_reader_that_waits_for_the_next_message_asks_the_store_once(port: int, connected: Connect) -> None:
    with contextlib.closing(Counted(port)) as store:
        log = MessageBoard(store, "t").log("answers")
        assert [log.wait(0.0) for _ in range(50)] == [False] * 50
        MessageBoard(connected(port), "t").log("answers").write("a")
        assert log.wait(20.0)
        assert list(log.news(str)) == ["a"]
        assert not log.wait(0.0)

    assert store.asked == [WAIT, ADD, CHECK, MULTI_GET, WAIT]


@each(
    "text",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        bytes([ADD]) + b"\0" * 64,
        bytes([VALIDATE]) + b"none",
        bytes([VALIDATE]) + MAGIC + b"\xff",
        bytes([VALIDATE]) + MAGIC + bytes([SET]) + struct.pack("=Q", 1 << 40),
        b"",
    ],
)
def test_what_others_send_ends_their_connection_and_no_server(text: bytes, connected: Connect) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    StoreServer([listening]).serve()
    with socket.create_connection(listening.getsockname()) as stranger:
        stranger.settimeout(20)
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)
        assert stranger.recv(9) == b""
    assert connected(listening.getsockname()[1]).add("n", 1) == 1


def test_what_is_no_store_of_torch_is_not_taken_for_one() -> None:
    for port in (server_that_says(b"SSH-2.0-x\r\n"), server_that_says(b"")):
        try:
            StoreClient("127.0.0.1", port)
        except ConnectionError as error:
            assert "store" in str(error)
        else:
            raise AssertionError("taken for a store")


def server_that_says(text: bytes) -> int:
    """The port of a process that answers one caller so."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        caller, _ = listening.accept()
        caller.recv(64)
        caller.sendall(text)
        caller.close()

    fork(serve)
    with listening:
        return int(listening.getsockname()[1])


def test_rank_0_serves_at_its_port_and_beside_it_and_says_who_it_is(connected: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        me = rank(master="127.0.0.1", port=free.getsockname()[1], run="7")
    served = open_served(me)
    served.server.serve()

    assert (served.failure, served.own_address) == (None, True)
    for port in (me.port, *(port for port in ports(me.port) if served.beside == ("127.0.0.1", port))):
        assert ask("127.0.0.1", port, timeout=5, listen=5).outcome is ConnectOutcome.REACHED
        zero = rank_zero_at(connected(port))
        assert zero is not None
        assert (zero.run, zero.port, zero.pid) == ("7", me.port, os.getpid())
    other = open_board(rank(1, master="127.0.0.1", port=me.port, run="8"), 5.0)
    assert isinstance(other, StoreUnreachable)
    assert other.rank_zero == served.me, "another job's store is not joined"


def test_a_port_that_another_has_or_no_name_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        taken = open_served(rank(master="127.0.0.1", port=held.getsockname()[1]))
        taken.server.close()
    assert taken.failure is not None
    assert taken.failure.taken
    unknown = open_served(rank(master="no.such.name.invalid", port=29500))
    unknown.server.close()
    assert unknown.failure is not None
    assert unknown.failure.outcome is ConnectOutcome.NO_NAME


def test_a_port_whose_holder_is_ending_is_waited_for() -> None:
    held = socket.create_server(("127.0.0.1", 0))
    port = held.getsockname()[1]

    def end() -> None:
        held.accept()[0].close()
        held.close()

    threading.Thread(target=end, daemon=True).start()
    served = open_served(rank(master="127.0.0.1", port=port))
    served.server.close()

    assert served.failure is None


def test_a_rank_that_imports_torch_says_for_how_long_and_one_that_looks_itself_up_blames_the_name_server() -> None:
    late = [
        Importing(claim=claim(3), doing="importing torch", seconds=31.0),
        Importing(claim=claim(2), doing=LOOKING_UP, seconds=40.0),
    ]

    assert [(finding.rule, finding.title) for finding in rank_starting(late, rank())] == [
        ("rank-starting", "rank 3 (nodeb) still importing torch after 31 s"),
        (
            "store-slow",
            "rank 2 (nodeb): the store at 10.0.0.1:29500 answers, but torch did not connect within 40 s",
        ),
    ]


def test_who_is_a_rank_of_a_named_job_that_has_begun_is_its_second_process() -> None:
    holders: tuple[Claim, ...] = (claim(0, pid=7), claim(1, pid=8))
    why = StoreUnreachable(outcome=ConnectOutcome.STRANGER, seconds=6, holders=holders)
    for run, rule in (("job.7", "rank-claimed-again"), ("0", "master-port-held")):
        absent = Absent(me=rank(1, run=run), host="nodeb", why=why)
        (finding,) = [finding for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)]
        assert finding.rule == rule


@pytest.mark.slow
def test_a_request_that_never_ends_fills_no_memory() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    StoreServer([listening]).serve()
    value = struct.pack("=Q", 1) + b"k" + struct.pack("=Q", MAX_VALUE_BYTES) + bytes(MAX_VALUE_BYTES)

    with socket.create_connection(listening.getsockname(), timeout=20) as stranger, pytest.raises(OSError):
        stranger.sendall(PROBE + bytes([MULTI_SET]) + struct.pack("=Q", MAX_KEYS))
        for _ in range(8):
            stranger.sendall(value)
        raise AssertionError("the store has read it all")
