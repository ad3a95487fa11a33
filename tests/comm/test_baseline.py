"""A test against a saved one: the file, and what it is that got slower."""

import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.comm.results import PairTime, Report
from dsdoctor.comm.speed.baseline import MEASURE, SCHEMA, Base, base_of, load, save, slower
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.report.terminal import finding_lines, printable
from tests.comm.reports import MIB, good_phases, healthy_2, healthy_4, paces, pairs, report, slow_node, speed, speeds

DAY = "2026-11-14"
NODES = tuple(f"node{letter}" for letter in "abcd" for _ in range(2))


def eight(**changes: object) -> Report:
    """Eight ranks on four hosts."""
    facts: dict[str, object] = {"pairs": pairs(NODES), "paces": paces(8), "speeds": speeds(8), **changes}
    return report(NODES, good_phases(8, 4), **facts)


def slowed(found: Report, factor: float, concerned: Callable[[PairTime], bool]) -> Report:
    times = (replace(pair, seconds=pair.seconds * factor) if concerned(pair) else pair for pair in found.pairs)
    return replace(found, pairs=tuple(times))


def titles(now: Report, then: Report | Base) -> list[str]:
    base = then if isinstance(then, Base) else base_of(then, DAY)
    return [finding.title for finding in slower(now, base)]


def test_what_was_saved_is_read_again(tmp_path: Path) -> None:
    save(healthy_4(), tmp_path / "base.json", date=DAY)

    assert load(tmp_path / "base.json") == base_of(healthy_4(), DAY)
    assert [path.name for path in tmp_path.iterdir()] == ["base.json"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        (b'{"schema": "dsdoctor/1"}', f"has the schema 'dsdoctor/1', expected is '{SCHEMA}'"),
        (b"[1]", "no baseline"),
        (b"\xff\xfe", "no baseline"),
        (f'{{"schema": "{SCHEMA}", "date": "x", "world": 2'.encode(), "damaged"),
        (f'{{"schema": "{SCHEMA}", "date": "x", "world": "two", "backend": "gloo"}}'.encode(), "damaged"),
    ],
)
def test_a_file_that_is_no_baseline_is_refused_with_a_next_step(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "base.json").write_bytes(content)

    with pytest.raises(UsageError, match=said) as caught:
        load(tmp_path / "base.json")

    assert "--save base.json" in caught.value.hint


def test_a_file_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        save(healthy_2(), tmp_path / "none" / "base.json")


REAL_PAIRS = (
    (1585, 1230, 921, 1738, 1632, 2490),
    (1949, 1739, 1309, 1428, 1558, 2214),
    (1661, 1548, 1675, 1512, 1026, 1843),
    (1782, 1826, 2028, 1633, 1901, 1874),
    (2263, 2083, 2022, 1977, 2634, 2454),
    (2614, 1961, 2341, 2233, 2280, 2625),
)
"""MB/s of 4 MiB between four gloo ranks on loopback, six runs one after the other on two busy processors."""
REAL_TIMES = (
    ((0.96, 7.07), (7.79, 11.48), (17.11, 30.5)),
    ((1.5, 6.31), (7.28, 17.96), (13.66, 19.04)),
    ((1.07, 5.33), (8.17, 23.45), (14.29, 18.86)),
    ((2.54, 5.64), (7.6, 20.01), (14.0, 18.89)),
    ((0.86, 6.8), (6.65, 15.27), (11.89, 18.91)),
    ((0.75, 8.14), (8.6, 17.39), (12.63, 18.26)),
)
"""p50 and p99 in ms of all_reduce of 8 B, 1 MiB and 4 MiB in the same runs."""


def real(bandwidths: Iterable[int], times: Iterable[tuple[float, float]]) -> Report:
    ranks = ((0, 1), (0, 2), (0, 3), (1, 2), (2, 3), (3, 1))
    timed = [
        replace(speed("all_reduce", size, p50 / 1e3, 4), p50=p50 / 1e3, p99=p99 / 1e3)
        for size, (p50, p99) in zip((8, MIB, 4 * MIB), times, strict=True)
    ]
    found = [
        PairTime(source=a, target=b, size=4 * MIB, seconds=4 * MIB / (rate * 1e6))
        for (a, b), rate in zip(ranks, bandwidths, strict=True)
    ]
    return report(("nodea",) * 4, good_phases(4, 1), pairs=tuple(found), speeds=tuple(timed))


def test_the_noise_of_real_runs_is_not_told() -> None:
    runs = [real(*run) for run in zip(REAL_PAIRS, REAL_TIMES, strict=True)]

    told = [title for now, then in itertools.permutations(runs, 2) for title in titles(now, then)]

    assert told == []


def test_a_node_that_lost_a_fifth_is_named() -> None:
    now = slowed(eight(), 1 / 0.78, lambda pair: {NODES[pair.source], NODES[pair.target]} & {"nodeb"} != set())

    findings = [finding for finding in slower(now, base_of(eight(), DAY)) if "hosts" in finding.title]

    assert [finding.title for finding in findings] == [
        "nodeb lost 22 % against 2026-11-14: 1.12 GB/s, was 1.44 GB/s (median of its pairs with other hosts)"
    ]
    assert findings[0].severity is Severity.WARNING
    assert findings[0].evidence == (
        "nearly all of its 12 pairs with other hosts lost as much: it is the host and not one path",
    )


def test_a_path_that_lost_is_told_from_its_hosts() -> None:
    now = slowed(eight(), 2.0, lambda pair: {NODES[pair.source], NODES[pair.target]} == {"nodea", "noded"})

    assert titles(now, eight()) == [
        "4 pairs of ranks between nodea and noded lost 50 % against 2026-11-14: 720 MB/s, was 1.44 GB/s"
    ]


def test_one_pair_of_ranks_that_lost_is_named() -> None:
    now = slowed(eight(), 4.0, lambda pair: (pair.source, pair.target) == (1, 6))

    assert titles(now, eight()) == [
        "ranks 1 and 6 (between nodea and noded) lost 75 % against 2026-11-14: 390 MB/s, was 1.56 GB/s"
    ]


def test_hosts_that_all_lost_are_one_finding() -> None:
    now = slowed(eight(), 1.5, lambda pair: NODES[pair.source] != NODES[pair.target])

    (title,) = titles(now, eight())
    assert title.startswith("all 4 hosts lost 33 %")


def test_of_two_ranks_only_a_large_loss_is_told() -> None:
    then = report(("nodea", "nodeb"), good_phases(2, 2), pairs=pairs(("nodea", "nodeb")))

    assert titles(slowed(then, 2.0, lambda _: True), then) == []
    assert titles(slowed(then, 5.0, lambda _: True), then) == [
        "ranks 0 and 1 (between nodea and nodeb) lost 80 % against 2026-11-14: 312 MB/s, was 1.56 GB/s"
    ]


def test_slower_collectives_are_one_finding_with_the_worst_in_its_title() -> None:
    then = eight()
    now = eight(speeds=(replace(then.speeds[-1], p50=then.speeds[-1].p50 * 2), *speeds(8, times=1.5)[:4]))

    (finding,) = slower(replace(now, versions={"torch": "2.14.0"}), base_of(then, DAY))
    assert finding.title == "broadcast of 16,777,216 bytes takes 25.6 ms, 2.0 times its 12.8 ms on 2026-11-14"
    assert finding.evidence[0] == "5 of 5 timed collectives are slower"
    assert finding.evidence[-1] == "torch is 2.14.0, was 2.13.0"


def test_a_node_that_computes_slower_is_not_blamed_on_the_network() -> None:
    (title,) = titles(eight(paces=paces(8, slow=(2, 3))), eight())

    assert title == "nodeb computes slower than on 2026-11-14: the same work takes 31 ms, took 10.4 ms"


def test_hosts_are_told_by_name_wherever_their_ranks_are() -> None:
    turned = report(NODES[::-1], good_phases(8, 4), pairs=pairs(NODES[::-1]), speeds=speeds(8))
    now = slowed(
        turned, 3.0, lambda pair: (turned.hosts[pair.source] == "nodea") != (turned.hosts[pair.target] == "nodea")
    )

    (title,) = titles(now, eight())
    assert title.startswith("nodea lost 6")


def test_another_job_is_compared_as_far_as_it_can_be() -> None:
    more = (*NODES, "nodee")
    now = report(more, good_phases(9, 5), pairs=pairs(more, slow={"nodec": 2.0}), speeds=speeds(9, times=9))

    first, second = slower(now, base_of(eight(), DAY))
    assert first.title.startswith("nodec lost")
    assert (second.rule, second.severity) == ("baseline-not-comparable", Severity.NOTE)
    assert second.title == (
        "not everything can be compared with the baseline of 2026-11-14: 9 ranks, were 8: no collective was compared"
    )
    assert second.evidence == ("nodee took no part then",)


def test_another_backend_and_a_quick_test_are_told() -> None:
    (other,) = titles(eight(backend="nccl"), eight())
    (quick,) = titles(healthy_2(), healthy_2())

    assert "the backend is nccl, was gloo" in other
    assert quick == "nothing was timed, so nothing can be compared with the baseline of 2026-11-14"


def test_figures_of_ranks_that_the_file_does_not_have_harm_nobody() -> None:
    base = replace(base_of(slow_node(), DAY), hosts=("nodea",))

    assert [finding.rule for finding in slower(slow_node(), base)] == ["baseline-not-comparable"]


def test_nothing_that_a_file_of_others_says_becomes_a_command(tmp_path: Path) -> None:
    save(eight(), tmp_path / "base.json", date=DAY)
    told = json.loads((tmp_path / "base.json").read_text())
    fix = {"text": "t", "steps": [{"template": "touch P"}], "commands": ["touch P"]}
    finding = {"rule": "r", "severity": "error", "title": "t", "fix": fix}
    hostile = {
        **told,
        "date": "x\n      $ touch P",
        "backend": "gloo; touch P",
        "findings": [finding],
        "phases": [finding],
    }
    (tmp_path / "base.json").write_text(json.dumps(hostile))
    slow = slowed(eight(), 9, lambda pair: True)
    found = [
        *slower(slow, load(tmp_path / "base.json")),
        *slower(slow, replace(base_of(eight(), DAY), date="\n$ touch P")),
    ]
    lines = [line for told in finding_lines(found) for line in printable(told).splitlines()]

    assert {finding.rule for finding in found} == {"slower-than-before", "baseline-not-comparable"}
    assert {line.strip() for line in lines if line.lstrip().startswith("$")} == {f"$ {MEASURE.line}"}
