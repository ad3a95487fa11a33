"""A test against an earlier one of the same ranks: which collectives got slower, and where."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from dsdoctor.comm.report_document import read_remote_report
from dsdoctor.comm.results import Report
from dsdoctor.comm.speed.baseline import MEASURE, slower
from dsdoctor.core.finding import Severity
from dsdoctor.report.terminal import finding_lines, printable
from tests.comm.reports import MIB, good_phases, healthy_2, pairs, report, speed, speeds

NODES = tuple(f"node{letter}" for letter in "abcd" for _ in range(2))


def eight(**changes: object) -> Report:
    """Eight ranks on four hosts."""
    facts: dict[str, object] = {"pairs": pairs(NODES), "speeds": speeds(8), **changes}
    return report(NODES, good_phases(8, 4), **facts)


def slowed(found: Report, factor: float, between: frozenset[str]) -> Report:
    """The messages between these hosts take so much longer."""
    times = (
        replace(pair, seconds=pair.seconds * factor) if {NODES[pair.source], NODES[pair.target]} == between else pair
        for pair in found.pairs
    )
    return replace(found, pairs=tuple(times))


REAL_TIMES = (
    ((0.96, 7.07), (7.79, 11.48), (17.11, 30.5)),
    ((1.5, 6.31), (7.28, 17.96), (13.66, 19.04)),
    ((1.07, 5.33), (8.17, 23.45), (14.29, 18.86)),
    ((2.54, 5.64), (7.6, 20.01), (14.0, 18.89)),
    ((0.86, 6.8), (6.65, 15.27), (11.89, 18.91)),
    ((0.75, 8.14), (8.6, 17.39), (12.63, 18.26)),
)
"""p50 and p99 in ms of all_reduce of 8 B, 1 MiB and 4 MiB of four gloo ranks in six runs one after the other, on two busy
processors."""


def real(times: Iterable[tuple[float, float]]) -> Report:
    timed = [
        replace(speed("all_reduce", size, p50 / 1e3, 4), p50=p50 / 1e3, p99=p99 / 1e3)
        for size, (p50, p99) in zip((8, MIB, 4 * MIB), times, strict=True)
    ]
    return report(("nodea",) * 4, good_phases(4, 1), speeds=tuple(timed))


def test_the_noise_of_real_runs_is_not_told() -> None:
    runs = [real(run) for run in REAL_TIMES]

    told = [finding for now, then in itertools.permutations(runs, 2) for finding in slower(now, then)]

    assert told == []


def test_slower_collectives_are_one_finding_with_the_worst_in_its_title() -> None:
    then = eight()
    now = eight(speeds=(replace(then.speeds[-1], p50=then.speeds[-1].p50 * 2), *speeds(8, times=1.5)[:4]))

    (finding,) = slower(replace(now, versions={"torch": "2.14.0"}), then)
    assert finding.severity is Severity.WARNING
    assert finding.title == "broadcast of 16,777,216 bytes takes 25.6 ms, 2.0 times its 12.8 ms of before"
    assert finding.evidence[0] == "5 of 5 timed collectives are slower"
    assert finding.evidence[-1] == "torch is 2.14.0, was 2.13.0"


def test_the_hosts_between_which_messages_lost_most_stand_beside_it() -> None:
    wrong = []
    for first, second in itertools.combinations_with_replacement(sorted({*NODES}), 2):
        between = frozenset((first, second))
        now = slowed(eight(speeds=speeds(8, times=2)), 3.0, between)
        (finding,) = slower(now, eight())
        places = [line for line in finding.evidence if "between two ranks" in line]
        where = f"{first} - {second}" if first != second else f"within {first}"
        if len(places) != 1 or not places[0].startswith(f"{where}: "):
            wrong.append((where, finding.evidence))

    assert wrong == []


def test_paths_that_lost_nothing_are_not_told() -> None:
    (finding,) = slower(eight(speeds=speeds(8, times=2)), eight())

    assert not any("between two ranks" in line for line in finding.evidence)


def test_a_test_of_other_ranks_is_not_compared() -> None:
    more = (*NODES, "nodee")
    others = {
        "9 ranks, were 8": report(more, good_phases(9, 5), speeds=speeds(9, times=9)),
        "the backend is nccl, was gloo": eight(backend="nccl", speeds=speeds(8, times=9)),
        "the ranks are spread over the hosts in another way": replace(eight(), hosts=("nodea",) * 8),
        "nothing was timed now": eight(speeds=(), pairs=()),
    }

    told = {why: slower(now, eight()) for why, now in others.items()}
    assert {why: [(finding.rule, finding.title) for finding in found] for why, found in told.items()} == {
        why: [("baseline-not-comparable", f"the test from before cannot be compared with this one: {why}")]
        for why in others
    }
    (quick,) = slower(eight(), replace(eight(), speeds=()))
    assert quick.title.endswith("it holds no times: it was quick, or broken")


def test_figures_of_ranks_that_the_file_does_not_have_harm_nobody() -> None:
    base = replace(eight(), hosts=("nodea",))

    assert [finding.rule for finding in slower(eight(), base)] == ["baseline-not-comparable"]
    assert [finding.rule for finding in slower(healthy_2(), healthy_2())] == ["baseline-not-comparable"]


def test_nothing_that_a_file_of_others_says_becomes_a_command() -> None:
    hostile = replace(
        eight(), versions={"torch": "x\n      $ touch P"}, hosts=("\n  $ touch P",) * 8, backend="$ touch P"
    )
    document = msgspec.json.encode({"schema": "dsdoctor/1", "command": "comm", "report": hostile}).decode()
    base = read_remote_report(document)
    assert base is not None
    assert json.loads(document)["report"]["backend"] == "$ touch P"
    slow = eight(speeds=speeds(8, times=9))
    found = [*slower(slow, base), *slower(slow, replace(base, backend="gloo", hosts=slow.hosts))]
    lines = [line for told in finding_lines(found) for line in printable(told).splitlines()]

    assert {finding.rule for finding in found} == {"slower-than-before", "baseline-not-comparable"}
    assert {line.strip() for line in lines if line.lstrip().startswith("$")} == {f"$ {MEASURE.line}"}
