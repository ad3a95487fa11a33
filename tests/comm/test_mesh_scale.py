"""Meshes of thousands of ranks: one cause is one finding, and it is found at once; a hole in the MTU of all is no host's."""

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from dsdoctor.comm.mesh import checks
from dsdoctor.comm.mesh.matrix import ConnectionMatrix
from dsdoctor.comm.mesh.mesh import peers
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Finding
from tests.comm.made_claims import claim, claims
from tests.each import each

STALLED, REACHED = ConnectOutcome.STALLED, ConnectOutcome.REACHED
HOSTS, PER_HOST = 300, 8
SECONDS = 4.0


def told(mesh: ConnectionMatrix) -> list[Finding]:
    return [finding for check in checks.CHECKS for finding in check(mesh)]


def large(ended: Callable[[int, int], ConnectOutcome]) -> ConnectionMatrix:
    """The attempts of many ranks; those between two hosts end as ``ended`` says."""
    first = replace(claim(0), local=None)
    made = tuple(
        replace(
            first,
            rank=rank,
            local_rank=rank % PER_HOST,
            host=f"n{rank // PER_HOST:03}",
            address=f"10.0.{rank // PER_HOST // 250}.{rank // PER_HOST % 250}",
        )
        for rank in range(HOSTS * PER_HOST)
    )
    found = []
    for one in made:
        for target in peers(one.rank, len(made)):
            source, host = one.rank // PER_HOST, target // PER_HOST
            outcome = ended(source, host) if source != host else REACHED
            found.append(Reach(source=one.rank, target=target, outcome=outcome))
    return ConnectionMatrix(made, tuple(found))


@pytest.mark.slow
@each(
    "name, ended, rules",
    [
        ("all well", lambda _, __: REACHED, []),
        ("all stalled", lambda _, __: STALLED, ["mesh-mtu-hole"]),
        ("one host", lambda one, other: STALLED if 7 in {one, other} else REACHED, ["mesh-mtu-hole"]),
        ("all cut", lambda _, __: ConnectOutcome.TIMED_OUT, ["mesh-only-master-port"]),
        (
            "many pairs",
            lambda one, other: STALLED if one % 50 == 3 and other == one + 1 else REACHED,
            ["mesh-mtu-hole"] * 6,
        ),
    ],
)
def test_thousands_of_ranks_are_judged_at_once(
    name: str, ended: Callable[[int, int], ConnectOutcome], rules: list[str]
) -> None:
    mesh = large(ended)
    began = time.process_time()

    assert [finding.rule for finding in told(mesh)] == rules, name
    assert time.process_time() - began < SECONDS


def test_single_ranks_of_every_host_that_are_not_reached_are_found_at_once() -> None:
    mesh = large(lambda _, __: REACHED)
    gone = [
        replace(reach, outcome=ConnectOutcome.REFUSED) if reach.target % PER_HOST == 1 else reach
        for reach in mesh.reaches
    ]
    began = time.process_time()

    assert len(told(ConnectionMatrix(mesh.claims, tuple(gone)))) == HOSTS
    assert time.process_time() - began < SECONDS


def stalls(world: int, bad: set[tuple[int, int]]) -> list[Finding]:
    made = claims(world, 1)
    return told(
        ConnectionMatrix(
            made,
            tuple(
                Reach(
                    source=one.rank,
                    target=other.rank,
                    outcome=STALLED if (one.rank, other.rank) in bad else REACHED,
                    address=other.address,
                    usable=1500,
                )
                for one, other in permutations(made, 2)
            ),
        )
    )


@each("world", range(3, 9))
def test_a_hole_in_the_mtu_of_the_whole_network_accuses_no_host(world: int) -> None:
    every = {*permutations(range(world), 2)}
    (whole,) = stalls(world, every)
    assert whole.title.startswith("large messages between ")
    assert "each of" not in whole.title
    assert whole.fix is not None
    assert "every host" in whole.fix.text
    if world > 3:
        # all but those between two hosts, which share a switch
        (most,) = stalls(world, every - {(0, 1), (1, 0)})
        assert most.title.startswith("most large messages between ")


@each("world", range(4, 9))
def test_one_host_or_two_behind_a_small_mtu_are_each_named(world: int) -> None:
    for bad in (*combinations(range(world), 1), *(combinations(range(world), 2) if world > 5 else ())):
        found = stalls(world, {pair for pair in permutations(range(world), 2) if {*bad} & {*pair}})
        titles = " ".join(finding.title for finding in found)
        assert len(found) == len(bad), titles
        assert all(f"between node{'abcdefgh'[one]} and each of" in titles for one in bad)
