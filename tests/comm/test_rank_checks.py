"""Ranks that did the same work: generated facts of hosts, processors and quotas, and who may be named for them."""

import random
from collections.abc import Sequence

from dsdoctor.comm.results import Held, Pace
from dsdoctor.comm.speed.checks import RANK_CHECKS, Ranks
from dsdoctor.comm.speed.pace import Place, equals
from tests.each import each

WORK = 0.02
EVERYWHERE = 0b1111


def measured(
    places: Sequence[Place], delayed: Sequence[float], cpu: Sequence[float] = (), waited: Sequence[float] = ()
) -> tuple[Pace, ...]:
    """The paces of ranks at these places that wait for a processor this part of their time."""
    cpu = cpu or [WORK] * len(places)
    return tuple(
        Pace(
            rank=rank,
            compute=cpu[rank] / (1 - delayed[rank]),
            waited=waited[rank] if waited else 0.01,
            cpu=cpu[rank],
            delayed=delayed[rank],
            equals=equals(places, rank),
        )
        for rank in range(len(places))
    )


def told(paces: Sequence[Pace], held: Sequence[Held] = ()) -> list[tuple[str, str]]:
    """What is said of ranks; that processors are busy is said of none."""
    return [(rule, title) for rule, title in noted(paces, held) if rule != "processors-busy"]


def noted(paces: Sequence[Pace], held: Sequence[Held] = (), starts: Sequence[float] = ()) -> list[tuple[str, str]]:
    hosts = [f"n{rank}" for rank in range(len(paces))]
    return [
        (finding.rule, finding.title)
        for check in RANK_CHECKS
        for finding in check(Ranks(paces=paces, held=held, hosts=hosts, starts=dict(enumerate(starts))))
    ]


def test_ranks_that_are_given_the_same_processors_are_never_named_however_the_load_falls_on_them() -> None:
    drawn = random.Random(7)
    for _ in range(300):
        world = drawn.randint(2, 6)
        places = [Place(7, EVERYWHERE, 1)] * world
        delayed = [drawn.choice((0.0, drawn.uniform(0, 0.97))) for _ in range(world)]
        waited = [drawn.uniform(1e-4, 0.3) for _ in range(world)]
        assert told(measured(places, delayed, [WORK * drawn.uniform(1, 1.6) for _ in range(world)], waited)) == []


def test_noise_on_hosts_of_their_own_names_nobody() -> None:
    drawn = random.Random(8)
    for _ in range(300):
        world = drawn.randint(2, 6)
        places = [Place(rank, EVERYWHERE, 1) for rank in range(world)]
        delayed = [drawn.uniform(0, 0.28) for _ in range(world)]
        cpu = [WORK * drawn.uniform(1, 1.4) for _ in range(world)]
        assert told(measured(places, delayed, cpu, [drawn.uniform(1e-4, 0.3) for _ in range(world)])) == []


@each(
    "places",
    [
        [Place(7, 0b10, 1), Place(7, 0b01, 1), Place(7, 0b10, 1)],  # cores of its own
        [Place(rank, EVERYWHERE, 1) for rank in range(3)],  # a host of its own
        [Place(7, EVERYWHERE, 1), Place(7, EVERYWHERE, 2), Place(7, EVERYWHERE, 1)],  # a cgroup of its own
    ],
)
def test_who_waits_for_processors_that_the_others_do_not_use_is_named_with_its_share(places: list[Place]) -> None:
    ((rule, title),) = told(measured(places, [0.04, 0.52, 0.08], waited=[0.02, 0.001, 0.03]))

    assert rule == "rank-lacks-processor"
    assert title.startswith("rank 1 (n1) waited for a CPU 52% of the time, the others 6%")


def test_a_processor_that_runs_slowly_is_told_from_one_that_is_not_given() -> None:
    places = [Place(rank, EVERYWHERE, 1) for rank in range(4)]
    cpu = [WORK, WORK, 2 * WORK, WORK]

    ((rule, title),) = told(measured(places, [0.0] * 4, cpu, [0.02, 0.02, 0.0002, 0.02]))

    assert (rule, title.split(";")[0]) == (
        "rank-straggles",
        "rank 2 (n2) is slow on its own: 40 ms of CPU time for work that takes the others 20 ms",
    )


@each(
    "held, says",
    [
        (
            (1, 0.12, 80, 75),
            "rank 1 (n1) throttled by the cgroup's CPU quota: 0.12 CPUs were used up in 75 of 80",
        ),
        ((1, 2.0, 80, 3), None),
        ((1, 0.0, 0, 0), None),
        ((1, 0.5, 3, 3), None),
    ],
)
def test_a_quota_is_the_cause_where_it_was_used_up_again_and_again(
    held: tuple[int, float, int, int], says: str | None
) -> None:
    rank, quota, periods, throttled = held
    places = [Place(number, EVERYWHERE, 1) for number in range(3)]

    found = told(
        measured(places, [0.0, 0.8 if says else 0.0, 0.0], waited=[0.02, 0.0001, 0.02]),
        [Held(rank=rank, quota=quota, periods=periods, throttled=throttled)],
    )

    assert [rule for rule, _ in found] == (["cpu-quota-used-up"] if says else [])
    assert says is None or found[0][1].startswith(says)


def test_on_a_gpu_the_time_of_the_work_itself_counts_beside_the_other_ranks_of_the_host() -> None:
    paces = [Pace(rank=rank, compute=0.010, waited=0.020) for rank in (0, 1, 2)]
    late = Pace(rank=3, compute=0.030, waited=0.0002)

    assert [rule for rule, _ in told((*paces, late))] == ["rank-straggles"]


def test_on_a_busy_host_it_is_noted_that_all_wait_and_by_how_much() -> None:
    paces = measured([Place(7, EVERYWHERE, 1)] * 3, [0.56, 0.05, 0.34])

    assert noted(paces) == [
        ("processors-busy", "the CPUs are busy: ranks 0 (n0), 2 (n2) waited 34% to 56% of the time for one")
    ]
    assert noted(measured([Place(7, EVERYWHERE, 1)] * 3, [0.2, 0.05, 0.1])) == []


@each(
    "mine, rules",
    [
        (8.1, ["rank-lacks-processor", "processors-busy"]),
        (1.9, ["processors-busy"]),
        (3.0, ["processors-busy"]),
    ],
)
def test_where_all_wait_now_the_start_tells_who_waits_always(mine: float, rules: list[str]) -> None:
    apart = [Place(7, 0b10, 1), Place(7, 0b01, 1), Place(7, 0b10, 1)]
    shared = [Place(7, 0b11, 1)] * 3
    starts = (1.4, mine, 1.5)

    found = noted(measured(apart, [0.57, 0.6, 0.62]), starts=starts)
    assert [rule for rule, _ in found] == rules
    assert mine < 8 or found[0][1].startswith("rank 1 (n1) waited 8.1 s for a CPU during startup, the others 1.4 s")
    assert [rule for rule, _ in noted(measured(shared, [0.57, 0.6, 0.62]), starts=starts)] == ["processors-busy"]
    assert noted(measured(apart, [0.1, 0.1, 0.1]), starts=starts) == []
