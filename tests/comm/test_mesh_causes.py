"""Generated meshes with one planted cause: one finding, which names it."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import permutations

import pytest

from dsdoctor.comm.local.fingerprint import examine
from dsdoctor.comm.mesh import checks as mesh_checks
from dsdoctor.comm.mesh.matrix import ConnectionMatrix, HostPair
from dsdoctor.comm.mesh.mesh import largest_that_arrives
from dsdoctor.comm.models import ChosenInterface, Claim, CommPhase, Interface, Local, PhaseState
from dsdoctor.comm.results import ConnectOutcome, PhaseResult, Reach, verdict
from dsdoctor.core.finding import Finding, Severity
from tests.comm.made_claims import claim, claims
from tests.each import each

DOWN = (ConnectOutcome.TIMED_OUT, ConnectOutcome.UNREACHABLE, ConnectOutcome.REFUSED)
SIZES = ((3, 1), (4, 1), (8, 1), (8, 2))


def meshed(
    made: tuple[Claim, ...],
    failed: Iterable[HostPair] = (),
    outcome: ConnectOutcome = ConnectOutcome.TIMED_OUT,
    **more: dict[int, str],
) -> ConnectionMatrix:
    """All pairs tried; those between the hosts of ``failed`` end in ``outcome``. ``more``: fields of a Reach by its source."""
    bad = set(failed)
    found = []
    for one, other in permutations(made, 2):
        ended = outcome if (one.host, other.host) in bad else ConnectOutcome.REACHED
        found.append(
            Reach(
                source=one.rank,
                target=other.rank,
                outcome=ended,
                address=other.address,
                **{name: values[one.rank] for name, values in more.items() if one.rank in values},
            )
        )
    return ConnectionMatrix(made, tuple(found))


def told(mesh: ConnectionMatrix) -> list[Finding]:
    return [finding for check in mesh_checks.CHECKS for finding in check(mesh)]


def hosts_of(made: tuple[Claim, ...]) -> list[str]:
    return sorted({one.host for one in made})


@each(("world", "per_host"), SIZES)
@each("outcome", DOWN)
@each("side", ["to", "from", "both"])
def test_the_firewall_of_one_host_is_one_finding_that_names_it(
    world: int, per_host: int, outcome: ConnectOutcome, side: str
) -> None:
    made = claims(world, per_host)
    hosts = hosts_of(made)
    for host in hosts:
        others = [other for other in hosts if other != host]
        pairs = [(other, host) for other in others if side in {"to", "both"}]
        pairs += [(host, other) for other in others if side in {"from", "both"}]
        (finding,) = told(meshed(made, pairs, outcome))

        assert host in finding.title
        assert ("only-master-port" in finding.rule) == (host == hosts[0] and side != "from")
        assert (finding.rule == "mesh-unreached") == (host != hosts[0] and side == "both")


def test_hosts_that_all_fail_with_each_other_are_one_finding() -> None:
    made = claims(8, 1)
    hosts = hosts_of(made)

    (finding,) = told(meshed(made, permutations(hosts, 2)))

    assert finding.rule == "mesh-only-master-port"
    assert finding.title.startswith("connections between nodea,")
    assert finding.title.endswith(" fail, except to the master port on nodea: timed out")


def test_a_ring_of_closed_directions_is_not_told_of_all_hosts() -> None:
    found = told(meshed(claims(3, 1), [("nodea", "nodeb"), ("nodeb", "nodec"), ("nodec", "nodea")]))

    assert sorted(finding.rule for finding in found) == ["mesh-one-way", "mesh-one-way", "mesh-only-master-port"]


def test_two_firewalls_are_two_findings_with_a_host_each() -> None:
    made = claims(8, 1)
    pairs = [(other, host) for host in ("nodec", "nodef") for other in hosts_of(made) if other != host]

    said = [finding.title.split(" (timed out)")[0] for finding in told(meshed(made, pairs))]

    assert [title.rsplit(" ", 1)[1] for title in said] == ["nodec", "nodef"]


def test_a_rejection_is_not_told_as_a_missing_route() -> None:
    (finding,) = told(meshed(claims(3, 1), [("nodeb", "nodec")], ConnectOutcome.UNREACHABLE))

    assert "a firewall that rejects, or no route on the way" in finding.title


@each("host", [1, 2])
def test_an_address_behind_nat_is_told_and_no_port_is_to_be_opened(host: int) -> None:
    made = tuple(replace(one, address="192.168.5.2") if one.rank == host else one for one in claims(3, 1))
    name = made[host].host
    pairs = [(other, name) for other in hosts_of(made) if other != name]

    (finding,) = told(meshed(made, pairs, seen_as={host: "10.0.0.50"}))

    assert "is behind NAT, its address 192.168.5.2 appears as" in finding.title
    assert "10.0.0.50" in finding.title
    assert finding.fix is not None
    assert "ports" not in finding.fix.text


@each("host", range(3))
def test_connections_that_worked_before_are_a_limit_and_no_port(host: int) -> None:
    made = claims(3, 1)
    name = made[host].host
    pairs = [(other, name) for other in hosts_of(made) if other != name]
    later = meshed(made, pairs, ConnectOutcome.REFUSED)

    (finding,) = told(replace(later, before=meshed(made).reaches))

    assert "connections worked at first" in finding.title
    assert finding.fix is not None
    assert f"limit on connections on {name}" in finding.fix.text


def test_a_route_by_another_interface_is_named_with_its_link() -> None:
    made = list(claims(3, 1))
    local = made[2].local
    assert local is not None
    second = Interface(name="eth1", address="10.0.0.33", prefix=24, mtu=1500, up=False)
    made[2] = replace(made[2], local=replace(local, interfaces=(*local.interfaces, second)))

    (finding,) = told(meshed(tuple(made), [("nodeb", "nodec"), ("nodec", "nodeb")], sent_from={2: "10.0.0.33"}))

    assert "nodec sends to 10.0.0.2 by eth1 10.0.0.33, which has no link" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands == ("ip route get 10.0.0.2",)


def test_a_route_back_by_another_interface_is_told_by_what_did_arrive() -> None:
    made = list(claims(3, 1))
    local = made[1].local
    assert local is not None
    second = Interface(name="eth1", address="10.0.1.2", prefix=24, mtu=1500)
    made[1] = replace(made[1], local=replace(local, interfaces=(*local.interfaces, second)))
    mesh = meshed(tuple(made), [("nodec", "nodeb")])
    turned = tuple(
        replace(one, sent_from="10.0.1.2") if (one.source, one.target) == (1, 2) else one for one in mesh.reaches
    )

    (finding,) = told(replace(mesh, reaches=turned))

    assert finding.rule == "mesh-one-way"
    assert finding.title == (
        "nodec cannot connect to nodeb (timed out): nodeb sends to 10.0.0.3 by eth1 10.0.1.2, not by eth0"
    )
    assert finding.fix is not None
    assert (finding.fix.text, finding.fix.commands) == ("correct the route on nodeb", ("ip route get 10.0.0.3",))


@each("usable", [1300, 1400, None])
@each("host", range(4))
def test_one_host_behind_a_small_mtu_is_one_finding_with_the_size_that_passes(host: int, usable: int | None) -> None:
    made = claims(4, 1)
    name = made[host].host
    pairs = [pair for pair in permutations(hosts_of(made), 2) if name in pair]
    mesh = meshed(made, pairs, ConnectOutcome.STALLED)
    mesh = replace(mesh, reaches=tuple(replace(reach, usable=usable, pmtu=9000) for reach in mesh.reaches))

    (finding,) = told(mesh)

    assert finding.rule == "mesh-mtu-hole"
    assert f"between {name} and each of" in finding.title
    assert finding.fix is not None
    assert finding.fix.commands[-1] == f"sudo ip link set dev eth0 mtu {usable or 1500}"


def test_an_mtu_of_1500_is_not_advised_where_it_is_set() -> None:
    made = tuple(
        replace(one, local=replace(one.local, interfaces=tuple(replace(i, mtu=1500) for i in one.local.interfaces)))
        for one in claims(2, 1)
        if one.local
    )
    (finding,) = told(meshed(made, [("nodea", "nodeb")], ConnectOutcome.STALLED))

    assert finding.fix is not None
    assert not any("ip link set" in command for command in finding.fix.commands)


@each("size", [576, 700, 1280, 1300, 1399, 1400, 1476, 1499, 4000, 8999])
@each("most", [1500, 9000, 65535])
def test_the_largest_packet_that_arrives_is_found_to_the_byte(size: int, most: int) -> None:
    found = largest_that_arrives(lambda tried: tried <= size, most, until=time.monotonic() + 60)

    assert found == min(size, most - 1) or (found is None and size < 576 + (most - 575) // 17)


def test_the_same_loopback_on_all_hosts_is_one_finding_with_all_ranks() -> None:
    made = tuple(
        claim(
            number,
            per_host=1,
            world=3,
            address="127.0.0.1",
            interface="lo",
            other=f"10.0.0.{number + 1}",
            other_port=1,
            local=Local(
                hostname=f"node{number}",
                chosen=ChosenInterface(name="lo", address="127.0.0.1", because="the hostname does not resolve"),
                routed=ChosenInterface(name="eth0", address=f"10.0.0.{number + 1}", because=""),
            ),
        )
        for number in range(3)
    )
    mesh = meshed(made, permutations(hosts_of(made), 2), ConnectOutcome.REFUSED)
    mesh = replace(mesh, reaches=tuple(replace(reach, via_other=True) for reach in mesh.reaches))

    (finding,) = told(mesh)

    assert (finding.rule, finding.severity) == ("mesh-loopback-address", Severity.ERROR)
    assert "ranks 0 (nodea), 1 (nodeb), 2 (nodec) would listen on 127.0.0.1" in finding.title


def test_a_wrong_interface_is_not_also_a_firewall() -> None:
    made = list(claims(3, 1))
    made[1] = replace(made[1], address="10.99.0.2", interface="eth1", other="10.0.0.2", other_port=1)
    mesh = meshed(tuple(made), [("nodea", "nodeb"), ("nodec", "nodeb")])
    mesh = replace(mesh, reaches=tuple(replace(reach, via_other=reach.target == 1) for reach in mesh.reaches))

    assert [finding.rule for finding in told(mesh)] == ["mesh-wrong-interface"]


def test_one_address_on_two_hosts_is_told_and_nothing_else() -> None:
    made = tuple(replace(one, address="172.17.0.2") if one.rank else one for one in claims(3, 1))

    (finding,) = told(meshed(made, [("nodeb", "nodec"), ("nodec", "nodeb")], ConnectOutcome.STRANGER))

    assert finding.title.startswith("nodeb and nodec have the same address 172.17.0.2")


def test_hosts_of_which_the_mtu_is_not_known_are_not_compared() -> None:
    made = tuple(
        replace(one, fingerprint={"mtu": mtu, "interface": "eth0"} if mtu else {})
        for one, mtu in zip(claims(3, 1), ("1500", "", "1500"), strict=True)
    )
    odd = replace(made[1], fingerprint={"mtu": "9000", "interface": "eth0"})

    assert examine(made) == ()
    (finding,) = examine((made[0], odd, made[2]))
    assert (finding.rule, finding.severity) == ("host-differs", Severity.WARNING)


def test_the_name_of_a_host_s_interface_is_not_to_be_given_to_all() -> None:
    made = claims(3, 1)
    odd = replace(made[1], fingerprint={"GLOO_SOCKET_IFNAME": "eth1"})

    (finding,) = examine((made[0], odd, made[2]))

    assert finding.fix is not None
    assert finding.fix.commands == ("unset GLOO_SOCKET_IFNAME", "export GLOO_SOCKET_IFNAME=INTERFACE")


def test_a_verdict_does_not_say_that_all_reach_each_other_where_some_do_not() -> None:
    cut = Finding.warning("mesh-one-way", "nodea cannot connect to nodec")
    phases = [
        PhaseResult(phase=phase, state=state, seconds=1.0, said="", findings=found)
        for phase, state, found in (
            (CommPhase.RENDEZVOUS, PhaseState.OK, ()),
            (CommPhase.MESH, PhaseState.SLOW, (cut,)),
            (CommPhase.RIGHT, PhaseState.OK, ()),
        )
    ]

    said = verdict(phases, world=3, hosts=("nodea", "nodeb", "nodec"), backend="gloo")

    assert said == "! 3 of 3 ranks get the same results (gloo, 3 hosts), but tcp mesh: nodea cannot connect to nodec"


@pytest.mark.slow
def test_a_thousand_hosts_with_many_pairs_cut_are_judged_at_once() -> None:
    made = tuple(
        replace(claim(0), rank=number, host=f"n{number:04}", address=f"10.0.{number // 250}.{number % 250}")
        for number in range(1000)
    )
    found = tuple(
        Reach(
            source=one,
            target=(one + (1 << bit)) % 1000,
            outcome=ConnectOutcome.TIMED_OUT if one % 100 == 7 else ConnectOutcome.REACHED,
        )
        for one in range(1000)
        for bit in range(10)
    )
    began = time.monotonic()

    assert len(told(ConnectionMatrix(made, found))) == 10
    assert time.monotonic() - began < 20
