"""Figures of groups of nodes -> the slow node, the slow path, and no rank that is only late; on figures of any size."""

import itertools
import random
from collections.abc import Callable

import pytest

from dsdoctor.comm.groups import CHECKS, Groups, NodeSpeeds, Part, Trial, bandwidth, judged, play
from dsdoctor.core.finding import Finding

MIB = 1 << 20
CHANCE = random.Random(22)


def told(
    nodes: int,
    seconds: Callable[[set[int]], float],
    latency: Callable[[set[int]], float],
    trips: dict[tuple[int, int], float] | None = None,
) -> list[Finding]:
    """What is said of nodes of which a group needs so many seconds for 1 MiB, and so many for a few bytes; gloo, with noise."""
    parts: list[Part] = [(node,) for node in range(nodes)]

    def run(what: str, groups: Groups) -> Trial:
        figures = {}
        for group in groups:
            members = {part[0] for part in group}
            small = latency(members) * CHANCE.uniform(1.0, 1.3)
            # what runs at the same time shares two processors
            busy = 1 + len(groups) / 4
            figures[group] = bandwidth(group, MIB, small + seconds(members) * busy * CHANCE.uniform(1.0, 2.0), small)
        return Trial(what=what, groups=groups, failed=(), figures=figures)

    outcome = play(parts, run, lambda trials: judged(trials, "gloo", None))
    seen = NodeSpeeds(outcome=outcome, hosts=tuple(f"n{node}" for node in range(nodes)), trips=trips or {})
    return [finding for check in CHECKS for finding in check(seen)]


@pytest.mark.parametrize("nodes", [3, 4, 5, 6, 8, 16, 65])
@pytest.mark.parametrize("rate", [1e6, 10e6, 30e6])
def test_slow_nodes_are_named_and_no_others(nodes: int, rate: float) -> None:
    for count in (0, 1, 2):
        slow = set(CHANCE.sample(range(nodes), count))
        found = told(nodes, lambda group, slow=slow: MIB / rate if group & slow else MIB / 400e6, lambda _: 0.002)  # type: ignore[misc]
        names = {finding.title.split()[0] for finding in found}

        assert {finding.rule for finding in found} <= {"node-is-slow"}, (slow, found)
        # of few nodes of which a third are slow none shows what is usual
        assert names == {f"n{node}" for node in slow} or (3 * count >= nodes and not names), slow


def test_nodes_that_are_well_and_noisy_are_not_told() -> None:
    for nodes in (3, 4, 5, 6, 8, 9, 16, 33, 65) * 8:
        assert told(nodes, lambda _: MIB / 400e6 * CHANCE.uniform(1.0, 2.0), lambda _: 0.002) == []


@pytest.mark.parametrize("nodes", [3, 4, 8, 16])
@pytest.mark.parametrize("late", [0.03, 0.3, 3.0])
def test_a_rank_that_is_late_whatever_the_size_is_no_slow_node(nodes: int, late: float) -> None:
    for rank in range(nodes):
        found = told(nodes, lambda _: MIB / 400e6, lambda group, rank=rank: late if rank in group else 0.002)  # type: ignore[misc]

        assert found == []


def test_a_path_is_named_where_it_was_tried_and_never_a_node() -> None:
    named = 0
    for pair in map(set, itertools.combinations(range(8), 2)):
        found = told(8, lambda group, pair=pair: MIB / 10e6 if pair <= group else MIB / 400e6, lambda _: 0.002)  # type: ignore[misc]
        rules = {finding.rule for finding in found}
        assert rules <= {"node-path-is-slow", "node-groups-are-slow"}
        named += "node-path-is-slow" in rules

    # four pairs are tried in the first round, and the groups of four show most of the others
    assert named >= 4


@pytest.mark.parametrize("trip", [0.01, 0.08])
@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_of_a_slow_node_that_is_far_away_its_round_trip_is_told_and_no_cable(nodes: int, trip: float) -> None:
    trips = {pair: trip if 1 in pair else 1e-4 for pair in itertools.combinations(range(nodes), 2)}

    (found,) = told(nodes, lambda group: MIB / 2e6 if 1 in group else MIB / 400e6, lambda _: 0.002, trips)
    near = told(
        nodes, lambda group: MIB / 2e6 if 1 in group else MIB / 400e6, lambda _: 0.002, dict.fromkeys(trips, trip)
    )

    away = f"n1 is far away, {trip * 1e3:.3g} ms round trip (the others 0.1 ms), and slow: "
    assert (found.title[: len(away)], "cable" in str(found.fix)) == (away, False)
    assert [finding.title.startswith("n1 is slow: ") for finding in near] == [True]
