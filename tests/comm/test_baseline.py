"""A test against an earlier one of the same ranks: which collectives got slower, and where."""

import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.comm.command import compared
from dsdoctor.comm.models import PhaseState
from dsdoctor.comm.results import PairTime, Report, read_remote_report
from dsdoctor.comm.speed.speed_checks import AGAIN, OTHER_BASE, slower_collectives
from dsdoctor.core.finding import Severity
from dsdoctor.ui.terminal import finding_lines, printable
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


RERUNS = Path(__file__).parents[2] / "benchmarks" / "results" / "comm-reruns-2026-11-23.json"
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

    told = [finding for now, then in itertools.permutations(runs, 2) for finding in slower_collectives(now, then)]

    assert told == []


def of_rerun(run: dict[str, Any]) -> Report:
    world = run["ranks"]
    timed = [
        replace(speed(op, size, p50, world), p50=p50, p99=p99) for op, size, p50, p99 in run["op, bytes, p50, p99"]
    ]
    sent = [PairTime(source=source, target=target, size=MIB, seconds=took) for source, target, took in run["pairs"]]
    return report(("nodea",) * world, good_phases(world, 1), speeds=tuple(timed), pairs=tuple(sent))


def test_of_healthy_reruns_under_load_few_are_told_and_none_without_saying_that_it_may_be_load() -> None:
    whole = json.loads(RERUNS.read_text())
    runs = [of_rerun(run) for run in whole["runs"]]
    both = [(now, then) for now, then in itertools.permutations(runs, 2) if now.world == then.world]

    told = [finding for now, then in both for finding in slower_collectives(now, then)]
    assert (len(told), len(both)) == (whole["told"], whole["compared"])
    assert len(told) * 4 <= len(both)
    assert [finding for finding in told if "it may be load" not in finding.evidence[-1]] == []


def some_slower(of: Report, factor: float, slow: int, backend: str, wild: float) -> tuple[Report, Report]:
    """Now and before: so many collectives, from the small ones on, are slower. ``wild``: the 99th percentile in medians."""
    ordered = sorted(of.speeds, key=lambda each: each.size)
    before = [replace(each, p99=each.p50 * wild) for each in ordered]
    times = [factor] * slow + [1.0] * (len(ordered) - slow)
    now = [replace(each, p50=each.p50 * factor) for each, factor in zip(before, times, strict=True)]
    return replace(of, speeds=tuple(now), backend=backend), replace(of, speeds=tuple(before), backend=backend)


def test_a_wild_tail_of_before_hides_no_loss_and_a_lone_collective_of_gloo_is_no_loss() -> None:
    wrong, of = [], eight()
    for factor, slow, backend, wild in itertools.product(
        (1.05, 1.5, 2.5, 5.0, 50.0), (0, 1, 3, 6, 7, 15), ("gloo", "nccl"), (1.2, 4.0, 90.0)
    ):
        bar = min(wild, 3.0 if backend == "gloo" else 2.0)
        # six are of 1 KiB or less, which is one size
        want = slow >= (7 if backend == "gloo" else 1) and factor > max(bar, 1.18)
        now, then = some_slower(of, factor, slow, backend, wild)
        found = slower_collectives(now, then)
        if [finding.rule for finding in found] != ["slower-than-before"] * want:
            wrong.append((factor, slow, backend, wild, found))

    assert wrong == []


def test_messages_between_two_hosts_count_by_themselves() -> None:
    wrong = []
    between = frozenset(("nodea", "nodec"))
    for factor, backend in itertools.product((1.5, 3.0, 6.0, 50.0), ("gloo", "nccl")):
        base = eight(backend=backend)
        want = factor > (5 if backend == "gloo" else 2)
        titles = [finding.title for finding in slower_collectives(slowed(base, factor, between), base)]
        if len(titles) != want or any(not title.startswith("nodea - nodec: ") for title in titles):
            wrong.append((factor, backend, titles))

    assert wrong == []


def test_the_verdict_says_what_was_compared() -> None:
    base = eight()
    other = replace(base, speeds=tuple(replace(each, size=2 * each.size) for each in base.speeds))
    still = replace(base, speeds=tuple(replace(each, p50=0.0, p99=0.0) for each in base.speeds))
    lone = some_slower(base, 9.0, 1, "gloo", 1.2)[0]
    said = {
        "15 of 15 collectives and messages on 10 paths compared with before: none slower": compared(base, base),
        "15 of 15 collectives and messages on 10 paths compared with before: 1 slower, too few": compared(lone, base),
        "0 of 15 collectives and messages on 10 paths compared with before: none slower": compared(base, other),
        "nothing could be compared with before": compared(base, replace(base, backend="nccl")),
        "nothing could be compared with before (": compared(replace(base, pairs=()), still),
    }
    notes = {why: [finding.rule for finding in found.findings] for why, found in said.items()}

    assert [(why, found.verdict) for why, found in said.items() if f"; {why}" not in found.verdict] == []
    assert [found.state for found in said.values()] == [PhaseState.OK] * len(said)
    assert list(notes.values()) == [[], [], *[["baseline-not-comparable"]] * 3]
    for before, why in ((other, "no collective of the same size was timed in both"), (still, "a time in it is 0")):
        assert [finding.title.rpartition(": ")[2] for finding in slower_collectives(base, before)] == [why]
    worse = compared(base, replace(base, speeds=speeds(8, times=0.1)))
    assert "compared with before" not in worse.verdict
    assert worse.state is PhaseState.SLOW


def test_no_step_writes_over_the_figures_of_before_and_looking_comes_first() -> None:
    found = [
        *slower_collectives(eight(speeds=speeds(8, times=9)), eight()),
        *slower_collectives(eight(), eight(backend="nccl")),
    ]
    steps = [step.printed for finding in found if finding.fix for step in finding.fix.steps]

    assert steps[0] == "uptime"
    assert [line for line in steps if "> base.json" in line] == []
    assert [line for line in steps if "--json" in line and "# with the " not in line] == []


def test_slower_collectives_are_one_finding_with_the_worst_in_its_title() -> None:
    then = eight()
    now = eight(speeds=(replace(then.speeds[-1], p50=then.speeds[-1].p50 * 2), *speeds(8, times=1.5)[:4]))

    (finding,) = slower_collectives(replace(now, versions={"torch": "2.14.0"}), then)
    assert finding.severity is Severity.WARNING
    assert finding.title == "broadcast of 16,777,216 bytes takes 25.6 ms, 2.0 times its 12.8 ms of before"
    assert finding.evidence[0] == "5 of 5 timed collectives are slower"
    assert finding.evidence[-2] == "torch is 2.14.0, was 2.13.0"
    assert "it may be load" in finding.evidence[-1]


def test_the_hosts_between_which_messages_lost_most_stand_beside_it() -> None:
    wrong = []
    for first, second in itertools.combinations_with_replacement(sorted({*NODES}), 2):
        between = frozenset((first, second))
        now = slowed(eight(speeds=speeds(8, times=2)), 3.0, between)
        (finding,) = slower_collectives(now, eight())
        places = [line for line in finding.evidence if "between two ranks" in line]
        where = f"{first} - {second}" if first != second else f"within {first}"
        if len(places) != 1 or not places[0].startswith(f"{where}: "):
            wrong.append((where, finding.evidence))

    assert wrong == []


def test_paths_that_lost_nothing_are_not_told() -> None:
    (finding,) = slower_collectives(eight(speeds=speeds(8, times=2)), eight())

    assert not any("between two ranks" in line for line in finding.evidence)


def test_a_test_of_other_ranks_is_not_compared() -> None:
    more = (*NODES, "nodee")
    others = {
        "9 ranks, were 8": report(more, good_phases(9, 5), speeds=speeds(9, times=9)),
        "the backend is nccl, was gloo": eight(backend="nccl", speeds=speeds(8, times=9)),
        "the ranks are spread over the hosts in another way": replace(eight(), hosts=("nodea",) * 8),
        "nothing was timed now": eight(speeds=(), pairs=()),
    }

    told = {why: slower_collectives(now, eight()) for why, now in others.items()}
    assert {why: [(finding.rule, finding.title) for finding in found] for why, found in told.items()} == {
        why: [("baseline-not-comparable", f"the test from before cannot be compared with this one: {why}")]
        for why in others
    }
    (quick,) = slower_collectives(eight(), replace(eight(), speeds=()))
    assert quick.title.endswith("it holds no times: it was quick, or broken")


def test_figures_of_ranks_that_the_file_does_not_have_harm_nobody() -> None:
    base = replace(eight(), hosts=("nodea",))

    assert [finding.rule for finding in slower_collectives(eight(), base)] == ["baseline-not-comparable"]
    assert [finding.rule for finding in slower_collectives(healthy_2(), healthy_2())] == ["baseline-not-comparable"]


def test_nothing_that_a_file_of_others_says_becomes_a_command() -> None:
    hostile = replace(
        eight(), versions={"torch": "x\n      $ touch P"}, hosts=("\n  $ touch P",) * 8, backend="$ touch P"
    )
    document = msgspec.json.encode({"schema": "dsdoctor/1", "command": "comm", "report": hostile}).decode()
    base = read_remote_report(document)
    assert base is not None
    assert json.loads(document)["report"]["backend"] == "$ touch P"
    slow = eight(speeds=speeds(8, times=9))
    found = [
        *slower_collectives(slow, base),
        *slower_collectives(slow, replace(base, backend="gloo", hosts=slow.hosts)),
    ]
    lines = [line for told in finding_lines(found) for line in printable(told).splitlines()]

    assert {finding.rule for finding in found} == {"slower-than-before", "baseline-not-comparable"}
    ours = {"$ uptime", "$ ethtool eth0", *(f"$ {step.printed}" for step in (AGAIN, OTHER_BASE))}
    offered = {line.strip().removeprefix("then ") for line in lines}
    assert {line for line in offered if line.startswith("$")} == ours
