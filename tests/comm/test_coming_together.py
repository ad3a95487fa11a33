"""Who listens where the master should be, and what a rank says that finds no store, or another job's."""

import itertools
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import Absent
from dsdoctor.comm.rendezvous.notices import RankZero, ask, ports
from dsdoctor.comm.rendezvous.store import StoreUnreachable, open_board
from dsdoctor.comm.rendezvous.tcp_store import NONCE
from dsdoctor.comm.results import ConnectOutcome
from tests.comm.made_claims import claim, rank

ZERO = RankZero(run="0", world=4, port=29500, host="nodea", pid=77)


def answered(reply: bytes, *, close: bool = True) -> tuple[ConnectOutcome, str]:
    """What is heard of a listener that sends so many bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            caller, _ = server.accept()
            caller.recv(64)
            caller.sendall(reply)
            if close:
                caller.close()
            held.append(caller)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        heard = ask("127.0.0.1", server.getsockname()[1], timeout=5, listen=0.3)
        thread.join(10)
        for caller in held:
            caller.close()
    return heard.outcome, heard.said


def test_a_listener_is_told_by_what_it_answers_to_torchs_own_question() -> None:
    assert answered(NONCE) == (ConnectOutcome.REACHED, "")
    assert answered(b"", close=False) == (ConnectOutcome.SILENT, "")
    assert answered(b"") == (ConnectOutcome.STRANGER, "")
    assert answered(b"HTTP/1.0 400 Bad request\r\n") == (ConnectOutcome.STRANGER, "HTTP/1.0 400 Bad request")
    assert answered(bytes(range(9)), close=False) == (ConnectOutcome.STRANGER, "")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert ask("127.0.0.1", port, timeout=5, listen=1).outcome is ConnectOutcome.REFUSED


def test_who_holds_the_masters_port_on_this_host_is_named_and_whether_it_started_the_rank() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            caller, _ = server.accept()
            with caller:
                caller.recv(64)
                caller.sendall(b"HTTP/1.0 400 Bad request\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        why = open_board(rank(1, master="127.0.0.1", port=server.getsockname()[1], launcher="variables"), 20.0)
        thread.join(10)

    assert isinstance(why, StoreUnreachable)
    assert (why.outcome, why.banner, why.above) == (ConnectOutcome.STRANGER, "HTTP/1.0 400 Bad request", True)
    assert (why.listener or "").startswith(f"pid {os.getpid()} (")
    assert "python" in (why.listener or "")


def test_of_a_program_on_the_masters_port_no_argument_is_shown() -> None:
    script = (
        "import socket, sys\n"
        "s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)\n"
        "c, _ = s.accept(); c.recv(64); c.sendall(b'hello\\r\\n'); sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", script, "--hub-token", "hf_Zq7Secret"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        port = int(other.stdout.readline())
        why = open_board(rank(1, master="127.0.0.1", port=port, launcher="variables"), 20.0)
        other.communicate("")

    assert isinstance(why, StoreUnreachable)
    assert why.listener == f"pid {other.pid} ({sys.executable} (4 more words not shown))"


def titles(why: StoreUnreachable, number: int = 1, **more: object) -> list[tuple[str, str]]:
    absent = Absent(me=rank(number), host="nodeb", why=why, **more)  # type: ignore[arg-type]
    return [(finding.rule, finding.title) for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)]


@pytest.mark.slow
def test_every_combination_of_facts_gives_one_finding_and_never_ends_a_launcher() -> None:
    flags = ("taken", "above", "elsewhere", "token_missing", "ended")
    others = (None, ZERO, replace(ZERO, port=29499), replace(ZERO, run="9"))
    for outcome in ConnectOutcome:
        if outcome in {ConnectOutcome.REACHED, ConnectOutcome.STALLED}:
            continue
        for values in itertools.product((False, True), repeat=len(flags)):
            for other, listener in itertools.product(others, (None, "pid 7 (torchrun)")):
                given = dict(zip(flags, values, strict=True))
                why = StoreUnreachable(outcome=outcome, seconds=9, rank_zero=other, listener=listener, **given)  # type: ignore[arg-type]
                absent = Absent(me=rank(1), host="nodeb", why=why)
                found = [finding for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)]
                assert len(found) == 1, (why, found)
                if why.above and found[0].fix:
                    assert "end that process" not in repr(found[0].fix), found


def test_a_master_address_of_another_host_and_a_port_of_another_job_are_named() -> None:
    elsewhere = StoreUnreachable(outcome=ConnectOutcome.REFUSED, seconds=6, elsewhere=True)
    assert titles(elsewhere, 0, addresses=("10.0.0.9",)) == [
        (
            "master-address-not-here",
            "rank 0 (nodeb): MASTER_ADDR 10.0.0.1 is not an address of this host, but rank 0 runs here",
        )
    ]
    differs = StoreUnreachable(outcome=ConnectOutcome.REFUSED, seconds=6, rank_zero=replace(ZERO, port=29499))
    assert titles(differs) == [
        (
            "master-port-differs",
            "rank 1 (nodeb): no rank 0 serves a store on MASTER_PORT 29500; a rank 0 on nodea, of this job or another, uses 29499",
        )
    ]
    named = StoreUnreachable(outcome=ConnectOutcome.REFUSED, seconds=6, rank_zero=replace(ZERO, port=29499, run="7"))
    absent = Absent(me=rank(1, run="7"), host="nodeb", why=named)
    assert [finding.title for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)] == [
        "rank 1 (nodeb): MASTER_PORT is 29500, but rank 0 (nodea) uses 29499"
    ]
    held = StoreUnreachable(outcome=ConnectOutcome.STRANGER, seconds=6, holders=(claim(0, pid=7), claim(1, pid=8)))
    assert titles(held) == [
        ("master-port-held", "rank 1 (nodeb): another job is using 10.0.0.1:29500: rank 0 is pid 7 on nodea")
    ]


def test_no_port_is_proposed_at_which_another_jobs_rank_0_listens() -> None:
    for port in (*range(1, 65536, 499), *range(65520, 65536)):
        for mine in (port, *ports(port)):
            why = StoreUnreachable(outcome=ConnectOutcome.STRANGER, seconds=6, rank_zero=replace(ZERO, port=port))
            absent = Absent(
                me=rank(1, port=mine), host="nodeb", why=replace(why, token_missing=mine == port, taken=True)
            )
            found = [finding for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)]
            assert len(found) == 1
            proposed = rendezvous_checks.free_port_like(max(port, mine))
            assert str(proposed) in repr(found[0].fix)
            assert 0 < proposed < 1 << 16
            assert not {proposed, *ports(proposed)} & {port, *ports(port)}


def test_a_refusing_master_is_told_with_what_its_name_is_here() -> None:
    refused = StoreUnreachable(outcome=ConnectOutcome.REFUSED, seconds=6)
    own = "is this host itself, and rank 0 is not on it"
    for resolved, said in (
        (("10.0.0.2",), "10.0.0.1:29500 (10.0.0.1 is 10.0.0.2 here), where rank 0 should be, refuses"),
        (("127.0.0.1",), f"where rank 0 should be, refuses: 127.0.0.1 {own}"),
        (("10.0.0.5",), f"where rank 0 should be, refuses: 10.0.0.5 {own}"),
    ):
        ((rule, title),) = titles(refused, resolved=resolved, addresses=("10.0.0.5",))
        assert rule == "master-unreachable"
        assert said in title
