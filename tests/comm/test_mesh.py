"""The mesh: real sockets on this machine, and what is read out of a matrix of attempts."""

import random
import socket
import threading
from dataclasses import replace
from itertools import permutations

import pytest

from dsdoctor.comm.mesh import checks as mesh_checks
from dsdoctor.comm.mesh.matrix import ConnectionMatrix
from dsdoctor.comm.mesh.mesh import (
    ANSWER,
    CALL,
    CALLED,
    LARGE,
    MAGIC,
    MeshListener,
    peers,
    reach,
    reach_all,
)
from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Severity
from tests.comm.made_claims import claim, claims, reaches
from tests.each import each


def listening(number: int, token: str) -> Claim:
    listener = MeshListener("127.0.0.1")
    listener.answer(token, number)
    return claim(number, per_host=1, address="127.0.0.1", port=listener.port)


def test_a_rank_that_answers_is_reached_and_a_large_message_passes() -> None:
    me, other = listening(0, "t"), listening(1, "t")

    (found,) = reach_all(me, [other], "t", seconds=5)

    assert (found.source, found.target, found.outcome) == (0, 1, ConnectOutcome.REACHED)
    assert found.bandwidth is not None
    assert found.bandwidth > 1e6
    assert found.mss is not None


def test_a_listener_that_does_not_answer_is_silent_one_of_another_test_a_stranger() -> None:
    me, foreign = claim(0), listening(2, "other")
    with socket.create_server(("127.0.0.1", 0)) as server:
        quiet = claim(1, address="127.0.0.1", port=server.getsockname()[1])

        assert reach(me, quiet, "t", size=0, timeout=0.2).outcome is ConnectOutcome.SILENT
    assert reach(me, foreign, "t", size=0, timeout=2).outcome is ConnectOutcome.STRANGER


def test_a_rank_that_dies_in_the_middle_of_a_message_is_no_hole_in_the_mtu() -> None:
    def greet_and_die(server: socket.socket) -> None:
        caller, _ = server.accept()
        with caller:
            _, digest, _, _, _ = CALL.unpack(caller.recv(CALL.size, socket.MSG_WAITALL))
            caller.sendall(ANSWER.pack(MAGIC, digest, 1, b""))

    with socket.create_server(("127.0.0.1", 0)) as server:
        dying = threading.Thread(target=greet_and_die, args=(server,), daemon=True)
        dying.start()
        other = claim(1, address="127.0.0.1", port=server.getsockname()[1])
        found = reach(claim(0), other, "t", size=LARGE, timeout=2)
        dying.join()

    assert found.outcome is ConnectOutcome.CUT_OFF


def test_a_port_that_answers_as_another_rank_is_a_stranger() -> None:
    other = listening(2, "t")

    assert (
        reach(claim(0), claim(1, address="127.0.0.1", port=other.port), "t", size=0, timeout=2).outcome
        is ConnectOutcome.STRANGER
    )


def test_a_caller_who_knows_no_token_gets_nothing_and_cannot_send_much() -> None:
    other = listening(1, "t")
    with socket.create_connection(("127.0.0.1", other.port)) as caller:
        caller.settimeout(2)
        caller.sendall(CALL.pack(MAGIC, b"no token at all!", 0, 1, 1 << 40))

        assert caller.recv(100) == b""


def test_callers_who_say_nothing_take_no_rank_its_place() -> None:
    me, other = claim(0), listening(1, "t")
    idle = [socket.create_connection(("127.0.0.1", other.port)) for _ in range(CALLED + 50)]

    (found,) = reach_all(me, [other], "t", seconds=5)

    assert found.outcome is ConnectOutcome.REACHED
    for caller in idle:
        caller.close()


def test_above_64_ranks_each_tries_few_and_all_are_joined() -> None:
    world, seen, new = 1000, {0}, {0}
    while new:
        new = {peer for caller in new for peer in peers(caller, world)} - seen
        seen |= new

    assert len(seen) == world
    assert len(peers(7, world)) == 10
    assert sorted(peers(3, 5)) == [0, 1, 2, 4]


def rules(made: tuple[Claim, ...], found: tuple[Reach, ...]) -> list[tuple[str, str]]:
    mesh = ConnectionMatrix(made, found)
    return [(finding.rule, finding.title) for check in mesh_checks.CHECKS for finding in check(mesh)]


def test_a_whole_matrix_says_nothing() -> None:
    assert rules(claims(), reaches(claims())) == []


def test_both_ways_closed_to_the_masters_host_is_only_the_masters_port_open() -> None:
    found = rules(claims(), reaches(claims(), a_b=ConnectOutcome.TIMED_OUT, b_a=ConnectOutcome.TIMED_OUT))

    assert found == [
        (
            "mesh-only-master-port",
            "nodea and nodeb reach each other only on the master port; connections to other ports fail: timed out",
        )
    ]


def test_one_way_closed_names_the_direction() -> None:
    to_the_master = rules(claims(), reaches(claims(), b_a=ConnectOutcome.TIMED_OUT))
    from_it = rules(claims(), reaches(claims(), a_b=ConnectOutcome.REFUSED))

    assert to_the_master == [
        ("mesh-only-master-port", "nodeb cannot connect to nodea except on the master port: timed out")
    ]
    assert from_it == [("mesh-one-way", "nodea cannot connect to nodeb (refused); connections the other way work")]


def test_one_way_is_a_warning_where_gloo_opens_its_connections_the_other_way() -> None:
    def severity(made: tuple[Claim, ...], **closed: ConnectOutcome) -> Severity:
        mesh = ConnectionMatrix(made, reaches(made, **closed))
        (finding,) = (finding for check in mesh_checks.CHECKS for finding in check(mesh))
        return finding.severity

    nccl = tuple(replace(made_claim, backend="nccl") for made_claim in claims())

    assert severity(claims(), a_b=ConnectOutcome.REFUSED) is Severity.WARNING
    assert severity(claims(), b_a=ConnectOutcome.REFUSED) is Severity.ERROR
    assert severity(nccl, a_b=ConnectOutcome.REFUSED) is Severity.ERROR


def test_two_hosts_that_both_reach_the_master_and_not_each_other_are_named() -> None:
    made = claims(6)
    found = rules(made, reaches(made, b_c=ConnectOutcome.NO_ROUTE, c_b=ConnectOutcome.NO_ROUTE))

    assert found == [("mesh-unreached", "nodeb and nodec cannot reach each other: no route; both reach nodea")]


def test_a_hole_in_the_mtu_is_told_once_for_two_hosts_with_the_interface() -> None:
    made = claims()
    mesh = ConnectionMatrix(made, reaches(made, a_b=ConnectOutcome.STALLED, b_a=ConnectOutcome.STALLED))
    (finding,) = (finding for check in mesh_checks.CHECKS for finding in check(mesh))

    assert finding.rule == "mesh-mtu-hole"
    assert (
        finding.title
        == "large messages from nodea to nodeb never arrive, small ones do: an MTU on the path is too small"
    )
    assert "MTU 9000" in finding.evidence[0]
    assert finding.fix is not None
    assert finding.fix.commands[0] == "ping -M do -c 1 -s 8972 10.0.0.2"


def test_the_wrong_interface_is_told_where_the_other_address_answers() -> None:
    made = tuple(
        claim(number, address="172.17.0.1", interface="docker0", other="10.0.0.2", other_port=1)
        if number > 1
        else made_claim
        for number, made_claim in enumerate(claims())
    )
    found = tuple(
        Reach(
            source=source,
            target=target,
            outcome=ConnectOutcome.REFUSED if target > 1 else ConnectOutcome.REACHED,
            via_other=target > 1,
        )
        for source, target in ((0, 2), (1, 2), (2, 0), (3, 0))
    )

    assert rules(made, found)[0] == (
        "mesh-wrong-interface",
        "rank 2 (nodeb) would use docker0 172.17.0.1, which rank 0 (nodea), rank 1 (nodea) cannot reach; 10.0.0.2 on eth0 works",
    )


def test_lost_packets_are_a_rate_of_what_was_sent() -> None:
    made = claims(2, per_host=1)
    there = Reach(source=0, target=1, outcome=ConnectOutcome.REACHED, retransmits=22, segments=740)
    back = Reach(source=1, target=0, outcome=ConnectOutcome.REACHED, retransmits=1, segments=720)

    assert rules(made, (there, back)) == [
        ("mesh-lossy", "nodea -> nodeb loses packets: 22 of 740 segments were retransmitted (3.0%)")
    ]


@pytest.mark.parametrize("host", range(4))
def test_packets_that_one_host_loses_are_one_finding(host: int) -> None:
    made = claims(4, per_host=1)
    found = tuple(
        Reach(
            source=one,
            target=other,
            outcome=ConnectOutcome.REACHED,
            retransmits=40 if host in (one, other) else 0,
            segments=1000,
        )
        for one, other in permutations(range(4), 2)
    )

    assert rules(made, found) == [
        (
            "mesh-lossy",
            f"node{'abcd'[host]}, with 3 other hosts, loses packets: 240 of 6000 segments were retransmitted (4.0%)",
        )
    ]


@each("world", [3, 4, 6])
@each("seed", range(12))
def test_a_loss_of_two_percent_at_one_host_names_that_host(world: int, seed: int) -> None:
    made, chance = claims(world, per_host=1), random.Random(seed)
    host = chance.randrange(world)

    def lost(one: int, other: int) -> int:
        return sum(chance.random() < 0.02 for _ in range(720)) if host in (one, other) else 0

    found = tuple(
        Reach(source=one, target=other, outcome=ConnectOutcome.REACHED, retransmits=lost(one, other), segments=720)
        for one, other in permutations(range(world), 2)
    )

    titles = [title for rule, title in rules(made, found)]
    assert [title.split(" ")[0].strip(",") for title in titles] == [f"node{'abcdef'[host]}"], titles


def test_a_loss_that_shows_between_two_hosts_only_names_the_one_that_both_ends_share() -> None:
    made = claims(3, per_host=1)
    again = {(0, 2): 16, (2, 0): 12, (1, 2): 6, (2, 1): 5}
    found = tuple(
        Reach(
            source=one,
            target=other,
            outcome=ConnectOutcome.REACHED,
            retransmits=again.get((one, other), 0),
            segments=720,
        )
        for one, other in permutations(range(3), 2)
    )

    ((_, title),) = rules(made, found)
    assert title.startswith("nodec, with 2 other hosts, loses packets: 39 of 2880 segments")


def test_a_path_that_loses_both_ways_is_one_finding() -> None:
    made = claims(4, per_host=1)
    found = tuple(
        Reach(
            source=one,
            target=other,
            outcome=ConnectOutcome.REACHED,
            retransmits=20 if {one, other} == {0, 1} else 0,
            segments=1000,
        )
        for one, other in permutations(range(4), 2)
    )

    assert rules(made, found) == [
        ("mesh-lossy", "the path between nodea and nodeb loses packets: 40 of 2000 segments were retransmitted (2.0%)")
    ]


def test_packets_that_two_hosts_of_many_lose_are_two_findings() -> None:
    made = claims(8, per_host=1)
    found = tuple(
        Reach(
            source=one,
            target=other,
            outcome=ConnectOutcome.REACHED,
            retransmits=40 if {3, 6} & {one, other} else 0,
            segments=1000,
        )
        for one, other in permutations(range(8), 2)
    )

    assert [title.split(" loses")[0] for _, title in rules(made, found)] == [
        "noded, with 7 other hosts,",
        "nodeg, with 6 other hosts,",
    ]


def test_packets_that_are_lost_everywhere_are_one_finding_and_no_host_s() -> None:
    made = claims(4, per_host=1)
    found = tuple(
        Reach(source=one, target=other, outcome=ConnectOutcome.REACHED, retransmits=20, segments=1000)
        for one, other in permutations(range(4), 2)
    )

    assert rules(made, found) == [
        (
            "mesh-lossy",
            "the network between the 4 hosts loses packets: 240 of 12000 segments were retransmitted (2.0%)",
        )
    ]


def test_two_paths_without_a_host_in_common_are_two_findings() -> None:
    made = claims(4, per_host=1)
    found = tuple(
        Reach(
            source=one,
            target=other,
            outcome=ConnectOutcome.REACHED,
            retransmits=50 if (one, other) in {(0, 1), (2, 3)} else 0,
            segments=1000,
        )
        for one, other in permutations(range(4), 2)
    )

    assert [title.split(" loses")[0] for _, title in rules(made, found)] == ["nodea -> nodeb", "nodec -> noded"]


def test_a_large_message_is_what_the_text_says() -> None:
    assert LARGE == 1_048_576
