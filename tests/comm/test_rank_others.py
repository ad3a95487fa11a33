"""Each rank is compared with all that do not share its processors: the same figures as by hand, and of thousands at once."""

import random
import time
from statistics import median

import pytest

from dsdoctor.comm.results import Pace
from dsdoctor.comm.speed.checks import RANK_CHECKS, Figure, Ranks
from tests.each import each

RANKS = 8000


@each("seed", range(40))
def test_the_figures_of_the_others_are_those_that_are_counted_by_hand(seed: int) -> None:
    drawn = random.Random(seed)
    by_rank = {
        rank: drawn.choice((0.0, 1.0, 2.5, drawn.random())) for rank in drawn.sample(range(99), drawn.randint(2, 30))
    }
    without = set(drawn.sample([*by_rank], drawn.randint(0, len(by_rank) - 1))) | {200}
    left = [figure for rank, figure in by_rank.items() if rank not in without]

    figure = Figure(by_rank)

    assert figure.least(without) == min(left)
    assert figure.most(without) == max(left)
    assert figure.median(without) == median(left)


@pytest.mark.slow
@each("delayed, cpu", [(0.0, 0.0), (0.5, 0.02), (0.5, 0.0)])
def test_thousands_of_ranks_are_compared_at_once(delayed: float, cpu: float) -> None:
    paces = [
        Pace(rank=rank, compute=0.02 * (3 if rank == 77 else 1), waited=0.001 * (rank != 77), cpu=cpu, delayed=delayed)
        for rank in range(RANKS)
    ]
    ranks = Ranks(paces=paces, hosts=[f"n{rank // 8}" for rank in range(RANKS)])
    began = time.process_time()

    found = [finding.rule for check in RANK_CHECKS for finding in check(ranks)]

    assert time.process_time() - began < 8
    assert found == (["processors-busy"] if cpu else ["rank-straggles"] + ["processors-busy"] * bool(delayed))
