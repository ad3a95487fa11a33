"""Which nodes and paths are bad is found in few rounds, whichever they are, and what was not decided is not said."""

import itertools
import math
import random

import pytest

from dsdoctor.comm.groups import Groups, Outcome, Part, Trial, play


def played(nodes: int, bad: set[int], paths: set[frozenset[int]], *, alone: bool = False) -> Outcome:
    """Two ranks a node; a group fails where it has a bad node (alone too, with ``alone``), or both ends of a bad path."""
    parts = [(2 * node, 2 * node + 1) for node in range(nodes)]

    def fails(group: tuple[Part, ...]) -> bool:
        members = {part[0] // 2 for part in group}
        if len(group) == 1:
            return alone and bool(members & bad)
        return bool(members & bad) or any(path <= members for path in paths)

    def run(what: str, groups: Groups) -> Trial:
        flat = [rank for group in groups for part in group for rank in part]
        assert len(flat) == len(set(flat))
        return Trial(what=what, groups=groups, failed=tuple(group for group in groups if fails(group)))

    return play(parts, run)


def named(outcome: Outcome) -> tuple[set[int], set[frozenset[int]]]:
    return {part[0] // 2 for part in outcome.bad}, {frozenset(part[0] // 2 for part in path) for path in outcome.paths}


CHANCE = random.Random(22)
FEW = [
    (nodes, set(bad))
    for nodes in (4, 5, 8, 9)
    for count in (0, 1, 2)
    for bad in itertools.combinations(range(nodes), count)
]
MANY = [(nodes, set(CHANCE.sample(range(nodes), nodes // 20))) for nodes in (64, 200, 1000)]


@pytest.mark.parametrize("alone", [False, True])
def test_every_bad_node_is_named_and_no_other_in_few_rounds(*, alone: bool) -> None:
    for nodes, bad in (*FEW, *MANY):
        outcome = played(nodes, bad, set(), alone=alone)

        assert named(outcome) == (bad, set()), (nodes, bad)
        assert len(outcome.trials) <= math.log2(nodes) + 5, (nodes, bad)


def test_a_bad_path_is_no_bad_node() -> None:
    for nodes in (4, 8, 9, 33):
        for first, second in itertools.combinations(range(min(nodes, 9)), 2):
            bad, paths = named(played(nodes, set(), {frozenset({first, second})}))

            assert bad == set(), (nodes, first, second)
            assert paths <= {frozenset({first, second})}


def test_groups_that_fail_though_all_pairs_are_well_are_told_by_their_size() -> None:
    def run(what: str, groups: Groups) -> Trial:
        return Trial(what=what, groups=groups, failed=tuple(group for group in groups if len(group) > 4))

    outcome = play([(rank,) for rank in range(32)], run)

    assert (outcome.bad, outcome.paths, outcome.least_failing) == ((), (), 8)


def test_two_nodes_that_fail_together_are_not_told_apart() -> None:
    for nodes in (2, 3):
        outcome = played(nodes, {0, 1}, set())

        assert (outcome.bad, outcome.paths) == ((), ())


def test_rounds_for_which_no_time_is_left_name_nobody() -> None:
    outcome = play([(rank,) for rank in range(8)], lambda _what, _groups: None)

    assert outcome.trials == ()
    assert (outcome.bad, outcome.good) == ((), set())
