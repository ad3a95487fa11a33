"""From measured times and exchanges to names: who is slow, which path, whose data."""

from collections.abc import Mapping
from itertools import combinations

import pytest

from dsdoctor.comm.collectives import checks as collective_checks
from dsdoctor.comm.results import ConnectOutcome, Exchange, Limit, Pace, PairTime, Reach, Speed, Wrong
from dsdoctor.comm.speed import checks as speed_checks
from dsdoctor.comm.speed.checks import Measured
from dsdoctor.core.finding import Finding, Severity

TWO = ("nodea", "nodea", "nodeb", "nodeb")
FOUR = ("nodea", "nodeb", "nodec", "noded")
NVLINK = Limit(bandwidth=370e9, link="NVLink of an H100", because="18 links of 20.6 GB/s (NCCL's src/graph/topo.h)")
NIC = Limit(bandwidth=1.25e9, link="eth0 (10 Gbit/s)", because="/sys/class/net/eth0/speed")


def pairs(usual: float, slow: Mapping[tuple[int, int], float]) -> tuple[PairTime, ...]:
    """All pairs of four ranks with bandwidths in MB/s."""
    return tuple(
        PairTime(source=low, target=high, size=1 << 20, seconds=(1 << 20) / 1e6 / slow.get((low, high), usual))
        for low, high in combinations(range(4), 2)
    )


def speed(op: str, size: int, bus: float, p99: float = 0.01) -> Speed:
    return Speed(
        op=op, size=size, seconds=0.01, p50=0.01, p99=p99, algbw=bus, busbw=bus, slowest=0, medians=(0.01,) * 4
    )


def rules(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.rule for finding in findings]


def test_slow_pairs_around_one_rank_name_the_rank() -> None:
    slow = {(0, 3): 19.0, (1, 3): 20.0, (2, 3): 19.5}

    (found,) = speed_checks.examine(Measured(pairs=pairs(2000, slow), hosts=FOUR))

    assert found.title == "rank 3 (noded) is slow to reach: 19 MB/s, others reach 2e+03 MB/s"
    assert len(found.evidence) == 3


def test_slow_pairs_around_one_host_name_the_host() -> None:
    hosts = ("nodea", "nodeb", "nodec", "nodec")
    slow = dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], 10.0)
    many = pairs(1000, slow) + tuple(
        PairTime(source=low, target=high, size=1 << 20, seconds=0.001) for low, high in combinations(range(4, 9), 2)
    )

    (found,) = speed_checks.examine(Measured(pairs=many, hosts=(*hosts, *"defgh")))

    assert found.title.startswith("host nodec is slow to reach")


def test_a_single_slow_pair_names_the_path() -> None:
    (found,) = speed_checks.examine(Measured(pairs=pairs(1500, {(1, 2): 100.0}), hosts=FOUR))

    assert (
        found.title == "the path between rank 1 (nodeb) and rank 2 (nodec) is slow: 100 MB/s, others reach 1.5e+03 MB/s"
    )


def test_pairs_across_hosts_are_not_compared_with_those_inside_and_noise_is_no_finding() -> None:
    across = dict.fromkeys([(0, 2), (0, 3), (1, 2), (1, 3)], 110.0)

    assert speed_checks.examine(Measured(pairs=pairs(3000, across), hosts=TWO)) == ()
    assert speed_checks.examine(Measured(pairs=pairs(3000, {(0, 1): 1200.0}), hosts=FOUR)) == ()


def late(seconds: float, *bad: int, rtt: float | None = 0.0002) -> tuple[tuple[PairTime, ...], tuple[Reach, ...]]:
    """All pairs of four ranks: messages of these ranks take so long whatever their size; the network's round trip of all."""
    both = list(combinations(range(4), 2))
    late_ones = {pair: seconds if set(pair) & set(bad) else 1e-4 for pair in both}
    return (
        tuple(
            PairTime(source=a, target=b, size=1 << 20, seconds=took + 0.002, latency=took)
            for (a, b), took in late_ones.items()
        ),
        tuple(Reach(source=a, target=b, outcome=ConnectOutcome.REACHED, rtt=rtt) for a, b in both),
    )


@pytest.mark.parametrize(
    ("rtt", "said"),
    [
        (
            0.0002,
            "rank 1 (nodeb) is late with every message: 30 ms round trip at any size, while the network takes",
        ),
        (0.03, "the network to rank 1 (nodeb) takes 30 ms round trip at any size"),
        (
            None,
            "a message to rank 1 (nodeb) and back takes 30 ms at any size; whether the rank or the network is late is unknown",
        ),
    ],
)
def test_a_late_rank_is_no_slow_cable_and_a_long_way_is_no_late_rank(rtt: float | None, said: str) -> None:
    made, reaches = late(0.015, 1, rtt=rtt)

    (found,) = speed_checks.examine(Measured(pairs=made, reaches=reaches, hosts=FOUR, limit=NIC))

    assert (found.rule, found.title[: len(said)]) == ("messages-late", said)


def test_all_slow_alike_or_a_little_late_is_no_finding() -> None:
    assert speed_checks.examine(Measured(pairs=late(0.015, 0, 1, 2, 3)[0], hosts=FOUR)) == ()
    assert speed_checks.examine(Measured(pairs=late(0.008, 1)[0], hosts=FOUR)) == ()


def test_the_only_pair_across_hosts_is_compared_with_the_limit_of_the_link() -> None:
    only = (PairTime(source=0, target=1, size=1 << 20, seconds=0.1),)

    assert rules(speed_checks.examine(Measured(pairs=only, hosts=("a", "b"), limit=NIC))) == ["pair-is-slow"]
    assert speed_checks.examine(Measured(pairs=only, hosts=("a", "b"))) == ()


@pytest.mark.parametrize(
    "bus, says", [(300e9, None), (250e9, "68% of the 370 GB/s that NVLink"), (170e9, "46% of the 370 GB/s that NVLink")]
)
def test_nccl_should_come_to_80_percent_of_the_limit(bus: float, says: str | None) -> None:
    speeds = (
        speed("all_reduce", 256 << 20, bus),
        speed("all_reduce", 1 << 20, 10e9),
        speed("all_gather", 256 << 20, 330e9),
    )

    found = speed_checks.examine(Measured(speeds=speeds, limit=NVLINK, hosts=("a",) * 4, backend="nccl"))

    assert rules(found) == ([] if says is None else ["collective-below-limit"])
    assert says is None or says in found[0].title


def test_gloo_is_judged_by_a_known_network_link_alone() -> None:
    slow, usual = (speed("all_reduce", 16 << 20, bus) for bus in (0.1e9, 0.4e9))

    assert rules(speed_checks.examine(Measured(speeds=[slow], limit=NIC, hosts=TWO))) == ["collective-below-limit"]
    assert speed_checks.examine(Measured(speeds=[usual], limit=NIC, hosts=TWO)) == ()
    assert speed_checks.examine(Measured(speeds=[slow], limit=NIC, hosts=("a",) * 4)) == ()
    assert speed_checks.examine(Measured(speeds=[slow], hosts=TWO)) == ()


def test_the_rank_that_works_slowly_and_waits_least_straggles() -> None:
    paces = [Pace(rank=rank, compute=0.010, waited=0.020) for rank in (0, 1, 3)]
    late = Pace(rank=2, compute=0.030, waited=0.0002)
    noise = Pace(rank=2, compute=0.022, waited=0.021)

    (found,) = speed_checks.examine(Measured(paces=(*paces, late), hosts=TWO))

    assert found.title.startswith("rank 2 (nodeb) is slow on its own: 30 ms for work that takes the others 10 ms")
    assert speed_checks.examine(Measured(paces=(*paces, noise), hosts=TWO)) == ()


def test_wrong_data_names_whose_it_is_and_where_it_was_seen() -> None:
    def bad(whose: tuple[int, ...], again: bool | None) -> Exchange:
        wrong = Wrong(index=12, got=8.0, want=9.0, count=3, whose=whose, again=again)
        return Exchange(op="all_reduce sum", dtype="float32", elements=4099, wrong=wrong)

    (found,) = collective_checks.examine({0: [bad((), None)], 1: [bad((2,), True)]}, TWO)
    (transient,) = collective_checks.examine({0: [bad((), False)]}, TWO)

    assert found.severity is Severity.ERROR
    assert found.title == (
        "data from rank 2 (nodeb) arrives corrupted: all_reduce sum of float32 is wrong on rank 1 (nodea)"
    )
    assert found.evidence[0] == (
        "on rank 1 (nodea): all_reduce sum float32 x 4099: first wrong at index 12, 8 for 9, 3 wrong, again when repeated;"
        " whose: rank 2 (nodeb)"
    )
    assert "right when repeated; whose: not known" in transient.evidence[0]


def test_what_a_backend_lacks_is_a_note_and_never_right_or_wrong() -> None:
    skipped = [
        Exchange(op="all_reduce avg", dtype=dtype, elements=1, skipped="Cannot use ReduceOp.AVG with Gloo")
        for dtype in ("float32", "float16")
    ]

    (found,) = collective_checks.examine({0: skipped, 1: skipped})

    assert (found.rule, found.severity) == ("collective-not-available", Severity.NOTE)
    assert found.title == "skipped all_reduce avg of float32 and 1 more: Cannot use ReduceOp.AVG with Gloo"
