"""What a rank tells before it has torch, over a real store of torch; rank 0's port until it serves one."""

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dsdoctor.comm.models import Rank
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous import heartbeat
from dsdoctor.comm.rendezvous.checks import Absent, Arrivals
from dsdoctor.comm.rendezvous.heartbeat import (
    Door,
    Heartbeat,
    HeartbeatReader,
    HeartbeatSender,
    StoreClient,
    open_door,
    prefix_of,
)
from dsdoctor.comm.rendezvous.notices import ask
from dsdoctor.comm.rendezvous.store import StoreUnreachable
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.processes import fork
from tests.comm.made_claims import claim, claims, rank

BEAT = Heartbeat(rank=3, world=4, host="nodeb", pid=77, at="importing torch", seconds=31.0)


def store() -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


def until(true: Callable[[], Any]) -> Any:
    limit = time.monotonic() + 30
    while not (found := true()) and time.monotonic() < limit:
        time.sleep(0.02)
    return found


def here(**more: Any) -> Rank:
    return rank(master="127.0.0.1", **more)


def test_a_client_without_torch_and_torchs_own_read_what_the_other_wrote() -> None:
    served = store()
    client = StoreClient("127.0.0.1", served.port)

    assert client.add("n", 2) == 2
    assert served.add("n", 3) == 5
    client.set("key/of ours", b"\x00\xff" * 5000)
    assert client.add("n", 0) == 5
    assert served.get("key/of ours") == b"\x00\xff" * 5000
    client.close()


def test_what_is_no_store_of_torch_is_not_taken_for_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.close()
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


def test_a_rank_says_what_it_does_until_it_has_come() -> None:
    served = store()
    reader = HeartbeatReader(served, "0", 4)
    sender = HeartbeatSender(here(number=3, port=served.port), "nodeb")
    sender.say("importing torch")

    def heard() -> tuple[Heartbeat, ...]:
        reader.look()
        return tuple(beat for beat in reader.alive if beat.at == "importing torch")

    (beat,) = until(heard)
    assert (beat.rank, beat.world, beat.host, beat.pid) == (3, 4, "nodeb", os.getpid())
    assert re.fullmatch(r"importing torch, \d+ s", beat.doing)
    assert list(reader.rivals((claim(3, host="nodeb", pid=os.getpid()),))) == []
    assert [each.pid for each, _ in reader.rivals((claim(3, host="nodea", pid=9),))] == [os.getpid()]
    sender.end()


def test_what_others_write_into_the_store_ends_no_reader() -> None:
    served, prefix = store(), prefix_of("0")
    for number, text in enumerate(
        (b"{", b"\xff", b"[]", b'{"rank":"x"}', b'{"host":"\xff"}', b'{"x":' + b"[" * 4000, b"x" * 100_000), 1
    ):
        served.add(f"{prefix}/n", 1)
        served.set(f"{prefix}/{number}", text)
    served.add(f"{prefix}/n", 10**9)
    reader = HeartbeatReader(served, "0", 2)

    reader.look()

    assert reader.alive == ()


def test_a_process_that_was_ended_and_started_anew_is_no_second_one() -> None:
    served, prefix = store(), prefix_of("0")

    def write(number: int, beat: Heartbeat) -> None:
        import msgspec

        served.set(f"{prefix}/{number}", msgspec.json.encode(beat))

    def look() -> list[bool]:
        reader = HeartbeatReader(served, "0", 4)
        for seconds in (1.0, 2.0):
            write(2, replace(BEAT, pid=78, seconds=seconds))
            until(lambda: reader.look() or [each for each in reader.alive if each.seconds == seconds])  # noqa: B023
        return [lives for _, lives in reader.rivals(())]

    served.add(f"{prefix}/n", 2)
    write(1, BEAT)
    assert look() == [False]


def test_rank_0s_port_says_what_it_does_and_is_given_to_who_serves_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        me = here(port=free.getsockname()[1], run="7")
    door = open_door(me)
    assert isinstance(door, Door)
    read, write = os.pipe()
    taken, tell = os.pipe()

    def other() -> None:
        os.read(read, 1)
        listening = door.take()
        assert listening is not None
        os.write(tell, b".")
        caller, _ = listening.accept()
        caller.sendall(b"ours\n")

    fork(other)
    door.serve()
    door.say("importing torch")
    # callers who say nothing keep nobody waiting
    silent = [socket.create_connection(("127.0.0.1", me.port)) for _ in range(8)]
    zero = ask("127.0.0.1", me.port, timeout=5, listen=5).rank_zero
    for each in silent:
        each.close()
    assert zero is not None
    assert (zero.run, zero.port, zero.at) == ("7", me.port, "importing torch")
    os.write(write, b".")
    os.read(taken, 1)
    assert ask("127.0.0.1", me.port, timeout=5, listen=5).said == "ours"
    for end in (read, write, taken, tell):
        os.close(end)


def test_a_port_that_another_has_is_no_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        assert open_door(here(port=held.getsockname()[1])) is None
    assert open_door(rank(master="no.such.name.invalid", port=29500)) is None


def test_a_rank_that_imports_torch_is_no_missing_one() -> None:
    arrivals = Arrivals(me=rank(), claims=claims()[:2], waited=58.0, starting={3: BEAT})
    found = [finding for check in rendezvous_checks.CHECKS for finding in check(arrivals)]

    assert [(finding.rule, finding.title) for finding in found] == [
        ("rank-starting", "rank 3 (nodeb) still importing torch after 31 s"),
        ("rank-missing", "rank 2 never joined; waited 58 s at 10.0.0.1:29500"),
    ]


def test_who_is_a_rank_of_a_named_job_that_has_begun_is_its_second_process() -> None:
    why = StoreUnreachable(outcome=ConnectOutcome.STRANGER, seconds=6, holders=(claim(0, pid=7), claim(1, pid=8)))
    for run, rule in (("job.7", "rank-claimed-again"), ("0", "master-port-held")):
        absent = Absent(me=rank(1, run=run), host="nodeb", why=why)
        (finding,) = [finding for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)]
        assert finding.rule == rule
    assert heartbeat.beat_seconds(16_000) == 16.0
