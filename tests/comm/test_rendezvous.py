"""The findings of the rendezvous: which ranks came, and which did not."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from dsdoctor.comm.models import Claim, Rank
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.rendezvous.checks import Absent, Arrivals
from dsdoctor.comm.rendezvous.notices import NOTICES, Notice, Notices, send_notice
from dsdoctor.comm.rendezvous.store import StoreUnreachable, open_served
from dsdoctor.comm.rendezvous.tcp_store import StoreClient
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding
from dsdoctor.core.processes import fork
from tests.comm.made_claims import claim, claims, rank


def judged(made: tuple[Claim, ...], **more: object) -> list[Finding]:
    me = rank(hosts=("nodea", "nodea", "nodeb", "nodeb"))
    arrivals = Arrivals(me=me, claims=made, waited=30.2, **more)  # type: ignore[arg-type]
    return [finding for check in rendezvous_checks.CHECKS for finding in check(arrivals)]


def told(here: Rank, number: int, host: str, why: str, *, seconds: float, stay: float = 0.0) -> bool:
    notice = Notice(run=here.run, rank=number, host=host, why=why, port=here.port)
    return send_notice(here.master, here.port, notice, seconds=seconds, stay=stay)


def test_all_there_is_nothing_to_say() -> None:
    assert judged(claims()) == []


def test_the_missing_ranks_are_named_with_the_hosts_that_the_launcher_gave_them() -> None:
    (finding,) = judged(claims()[:2])

    assert finding.rule == "rank-missing"
    assert finding.title == "ranks 2-3 (nodeb) never joined; waited 30 s at 10.0.0.1:29500"


def test_where_a_rank_is_missing_it_is_said_what_the_masters_name_is_on_the_host_of_rank_0() -> None:
    for resolved, said in (
        ((), ""),
        (("10.0.0.1",), ""),
        (("10.0.0.7",), "MASTER_ADDR 10.0.0.1 is 10.0.0.7 here; hosts that resolve it differently cannot join"),
        (
            ("127.0.0.1",),
            "MASTER_ADDR 10.0.0.1 is 127.0.0.1, a loopback address: other hosts cannot reach it",
        ),
    ):
        (finding,) = judged(claims()[:2], resolved=resolved)
        assert finding.evidence[1:] == ((said,) if said else ())


def test_a_rank_that_said_why_it_cannot_come_is_not_called_missing() -> None:
    notice = Notice(run="0", rank=3, host="nodeb", why="torch cannot be imported:\n libcudart.so.13")

    assert [(finding.rule, finding.title) for finding in judged(claims()[:2], notices={3: notice, 0: notice})] == [
        ("rank-unable", "rank 3 (nodeb) cannot take part: torch cannot be imported: libcudart.so.13"),
        ("rank-missing", "rank 2 (nodeb) never joined; waited 30 s at 10.0.0.1:29500"),
    ]


Connect = Callable[[int], StoreClient]


def hearing(connected: Connect, run: str = "0") -> tuple[Rank, Notices]:
    """Rank 0 that serves its store, and what it hears there."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = rank(master="127.0.0.1", port=free.getsockname()[1], run=run, world=4)
    open_served(here).server.serve()
    return here, Notices(here, [connected(here.port)])


def test_a_notice_is_heard_of_this_run_only_and_no_other_text_ends_the_reader(connected: Connect) -> None:
    here, notices = hearing(connected, "7")
    store = connected(here.port)
    for junk in (b"", b"{" * 9000, b'{"run":"7","rank":-1,"host":"x","why":"y"}', b"\xff", b'{"x":' + b"[" * 4000):
        store.set(f"{NOTICES}/{store.add(f'{NOTICES}/n', 1)}", junk)

    assert told(here, 1, "nodeb", "no room", seconds=1.0)
    assert told(replace(here, run="8"), 2, "nodec", "another run", seconds=0.1)
    assert told(here, 2, "nodec", "no torch", seconds=1.0)
    assert told(here, 2, "nodec", "the second", seconds=1.0)
    store.add(f"{NOTICES}/n", 10**9)
    notices.look()
    assert {number: notice.why for number, notice in notices.heard.items()} == {1: "no room", 2: "no torch"}


def test_a_rank_with_another_port_of_a_job_without_a_name_accuses_nobody_and_is_told_where_one_is_missing(
    connected: Connect,
) -> None:
    for run, ours in (("0", False), ("7", True)):
        here, notices = hearing(connected, run)
        notice = Notice(run=run, rank=2, host="nodec", why="no store", port=here.port + 1)

        assert send_notice(here.master, here.port, notice, seconds=20.0)
        notices.look()
        assert (2 in notices.heard, 2 in notices.perhaps) == (ours, not ours)
        if not ours:
            (missing,) = judged(claims()[:2], perhaps=notices.perhaps)
            assert missing.rule == "rank-missing"
            assert f"a rank 2 on nodec with MASTER_PORT {here.port + 1} connected here" in missing.evidence[-1]
            assert judged(claims(), perhaps=notices.perhaps) == []


def test_who_told_stays_until_the_process_that_serves_has_ended() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        here = rank(master="127.0.0.1", port=free.getsockname()[1], world=2)
    read, write = os.pipe()

    def serve() -> None:
        open_served(here).server.serve()
        notices = Notices(here, [StoreClient("127.0.0.1", here.port)])
        while not notices.heard:
            time.sleep(0.01)
            notices.look()
        os.write(write, b".")
        time.sleep(60)

    left = threading.Event()
    telling = threading.Thread(target=lambda: told(here, 1, "b", "y", seconds=20, stay=40) and left.set())
    serving = fork(serve)
    telling.start()
    os.read(read, 1)
    stayed = not left.wait(0.1)
    os.kill(serving, signal.SIGKILL)
    os.waitpid(serving, 0)
    telling.join(30)
    assert stayed
    assert left.is_set()
    for end in (read, write):
        os.close(end)


def test_a_rank_claimed_twice_is_told_with_both_processes_and_not_as_a_missing_one() -> None:
    made = (*claims()[:3], claim(2, pid=999, host="nodea"))

    (finding,) = judged(made)

    assert finding.rule == "rank-duplicated"
    assert finding.title == "2 processes claim rank 2: pid 102 on nodeb, pid 999 on nodea"
    assert finding.evidence == ("no process is rank 3",)


def test_ranks_that_count_otherwise_are_told_by_size() -> None:
    (finding,) = judged((*claims()[:3], claim(3, world=3)))

    assert finding.rule == "world-size-differs"
    assert finding.title == "world size 3: rank 3 (nodeb); world size 4: ranks 0-1 (nodea), 2 (nodeb)"


def test_two_ranks_on_one_gpu_are_named_with_their_local_ranks() -> None:
    made = tuple(
        replace(made_claim, gpu="GPU-1") if made_claim.host == "nodea" else made_claim for made_claim in claims()
    )

    assert [finding.title for finding in judged(made)] == [
        "ranks 0 (LOCAL_RANK 0), 1 (LOCAL_RANK 1) on nodea would use the same GPU GPU-1"
    ]


def test_a_late_rank_is_a_warning() -> None:
    made = (*claims()[:3], claim(3, seen=50.0, arrived=5038.0, started=5000.0))

    (finding,) = judged(made)

    assert finding.title == "rank 3 (nodeb) joined 40 s after the first"
    assert finding.evidence == ("it took 38.0 s from its own start to the rendezvous",)


def test_a_wrong_clock_is_no_late_rank() -> None:
    assert judged((*claims()[:3], claim(3, arrived=9999.0, started=9990.0))) == []


def alone(why: StoreUnreachable) -> list[tuple[str, str]]:
    absent = Absent(me=rank(1), host="nodeb", why=why)
    return [(finding.rule, finding.title) for check in rendezvous_checks.ABSENT_CHECKS for finding in check(absent)]


def test_each_way_in_which_the_master_is_not_reached_has_one_sentence() -> None:
    where = "rank 1 (nodeb): 10.0.0.1:29500, where rank 0 should be,"

    assert alone(StoreUnreachable(outcome=ConnectOutcome.REFUSED, seconds=9)) == [
        ("master-unreachable", f"{where} refuses")
    ]
    assert alone(StoreUnreachable(outcome=ConnectOutcome.TIMED_OUT, seconds=9)) == [
        ("master-unreachable", f"{where} does not answer")
    ]
    assert alone(StoreUnreachable(outcome=ConnectOutcome.NO_ROUTE, seconds=9)) == [
        ("master-unreachable", f"{where} cannot be routed to")
    ]
    assert alone(StoreUnreachable(outcome=ConnectOutcome.NO_NAME, seconds=0)) == [
        ("master-unreachable", f"{where} is a name that does not resolve")
    ]
    assert (
        alone(StoreUnreachable(outcome=ConnectOutcome.SILENT, seconds=9, token_missing=True))[0][0]
        == "rank-zero-missing"
    )
    assert alone(StoreUnreachable(outcome=ConnectOutcome.STRANGER, seconds=0, detail="Permission denied")) == [
        ("master-port-refused", "rank 0 (nodeb) cannot listen on 10.0.0.1:29500: Permission denied")
    ]


def test_a_stranger_on_the_port_is_named_with_what_it_says() -> None:
    ((rule, title),) = alone(
        StoreUnreachable(outcome=ConnectOutcome.STRANGER, seconds=1, banner="SSH-2.0-x", listener="pid 7 (sshd)")
    )

    assert rule == "master-port-in-use"
    assert "pid 7 (sshd) is already listening on 10.0.0.1:29500" in title
    assert 'it sends "SSH-2.0-x"' in title


def test_the_plain_connection_that_is_proposed_tells_an_open_port_from_a_closed_one() -> None:
    def tried(port: int) -> str:
        me = replace(rank(1), master="127.0.0.1", port=port)
        why = StoreUnreachable(outcome=ConnectOutcome.REFUSED, seconds=1)
        (finding,) = rendezvous_checks.master_unreachable(Absent(me=me, host="nodeb", why=why))
        assert finding.fix is not None
        return subprocess.run(["sh", "-c", finding.fix.commands[0]], capture_output=True, text=True, check=False).stdout

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert tried(port) == "reachable\n"
    assert tried(port) == ""
