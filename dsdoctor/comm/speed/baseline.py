"""A baseline: the figures of a communication test in a file; a later test compared with it -> what got slower. Judges
figures only."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median

import msgspec

from dsdoctor.comm.results import Pace, PairTime, Report, Speed
from dsdoctor.comm.speed.changes import (
    LEAST_LOSS,
    SpeedChange,
    loss,
    lossy_hosts,
    lossy_paces,
    lossy_paths,
    pace_changes,
    pair_changes,
)
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited, write_bytes
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import Step, step
from dsdoctor.core.json_text import decode, encode
from dsdoctor.core.sentences import and_more

SCHEMA = "dsdoctor-comm/1"
MOST = 12
"""Lines of evidence."""
MEASURE = step("python -m dsdoctor comm --save base.json")


@dataclass(frozen=True, kw_only=True)
class Base:
    """What is kept of a Report: who took part and every figure. ``date`` is a day, such as "2026-11-14"."""

    schema: str
    date: str
    world: int
    backend: str
    launcher: str = ""
    hosts: tuple[str, ...] = ()
    speeds: tuple[Speed, ...] = ()
    pairs: tuple[PairTime, ...] = ()
    paces: tuple[Pace, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)


def base_of(report: Report, date: str) -> Base:
    """What is kept of a report."""
    return Base(
        schema=SCHEMA,
        date=date,
        world=report.world,
        backend=report.backend,
        launcher=report.launcher,
        hosts=hosts_of(report),
        speeds=report.speeds,
        pairs=report.pairs,
        paces=report.paces,
        versions=report.versions,
    )


def hosts_of(report: Report) -> tuple[str, ...]:
    """The host of every rank, from the ranks themselves where the report has none; "" where it is not known."""
    by_rank = {claim.rank: claim.host for claim in report.ranks}
    told = dict(enumerate(report.hosts))
    return tuple(told.get(rank) or by_rank.get(rank, "") for rank in range(report.world))


def save(report: Report, path: Path, *, date: str | None = None) -> None:
    """Write the file whole: beside it first, then renamed. Raises UsageError where it cannot be written."""
    day = date or datetime.now(timezone.utc).date().isoformat()
    try:
        write_bytes(path, msgspec.json.format(encode(base_of(report, day)), indent=1) + b"\n")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}", hint="name a file in a folder that exists"
        ) from error


def load(path: Path) -> Base:
    """Read what ``save`` wrote. Raises UsageError for a file that is missing, is no baseline, is of another version, or
    damaged."""
    hint = f"save a baseline while all is well: {MEASURE.line}"
    try:
        content = read_limited(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    try:
        schema = decode(content, dict).get("schema")
        if schema != SCHEMA:
            raise UsageError(f"{path} has the schema {schema!r}, expected is {SCHEMA!r}", hint=hint)
        return decode(content, Base)
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is no baseline, or it is damaged: {error}", hint=hint) from error


def slower(report: Report, base: Base) -> Iterator[Finding]:
    """Everything that a report shows against a baseline: what got slower, what cannot be compared."""
    for check in CHECKS:
        yield from check(report, base)


def slower_than_before(report: Report, base: Base) -> Iterator[Finding]:
    """Communication is slower than it was when the baseline was saved.

    A collective counts when its median time is now above the 99th percentile of then, and at least 15 % of its
    bandwidth is lost. A host counts when nearly all of its pairs with other hosts, or its ranks' own computing, lost 15
    % or three times the spread that the other figures show, whichever is more; so does the path between two hosts. A
    pair that lost by itself must have lost twice as much. Fewer than twelve pairs, or six ranks, do not show what is
    noise: then two thirds must be lost.

    Why it matters: something changed since: the versions (reported if they differ), the link's speed, or another job on
    the same nodes.

    How to fix it: find out what changed. If the new state is the right one, save a new baseline.

        $ ethtool INTERFACE
        $ ibstat
        $ nvidia-smi topo -m
        $ python -m dsdoctor comm --save base.json

    Since: 0.1
    """
    for told in (_slower_hosts, _slower_paths, _slower_computing, _slower_collectives):
        for title, evidence in told(report, base):
            yield Finding.warning(
                "slower-than-before",
                title,
                evidence=(*evidence, *_other_versions(report, base)),
                fix=f"find out what changed since {base.date}; if that is intended, save a new baseline",
                steps=(MEASURE,),
            )


def baseline_not_comparable(report: Report, base: Base) -> Iterator[Finding]:
    """The baseline is from a different job, so some or all of its figures say nothing about this one.

    Why it matters: times of collectives can be compared between runs with the same backend and as many ranks on as many
    hosts; those of a pair where both hosts took part in both runs, each with as many ranks. What cannot be compared was
    left out.

    How to fix it: compare with a baseline of the same job.

        $ python -m dsdoctor comm --save base.json

    Since: 0.1
    """
    why = tuple(_differences(report, base))
    fix = "compare with a baseline of the same job"
    steps: tuple[Step, ...] = (MEASURE,)
    if why:
        title = f"not everything can be compared with the baseline of {base.date}: {why[0]}"
    elif not report.speeds and not report.pairs:
        title = f"nothing was timed, so nothing can be compared with the baseline of {base.date}"
        fix, steps = "run it without --quick", ()
    elif not base.speeds and not base.pairs:
        title = f"the baseline of {base.date} holds no times: it was saved by a quick or a broken test"
    else:
        return
    yield Finding.note("baseline-not-comparable", title, evidence=why[1:], fix=fix, steps=steps)


def _differences(report: Report, base: Base) -> Iterator[str]:
    here, there = hosts_of(report), base.hosts
    if report.backend != base.backend:
        yield f"the backend is {report.backend}, was {base.backend}: no figure but that of computing was compared"
    if report.world != base.world:
        yield f"{report.world} ranks, were {base.world}: no collective was compared"
    elif _shape(here) != _shape(there):
        yield "the ranks are spread over the hosts in another way: no collective was compared"
    new, gone = sorted(set(here) - set(there)), sorted(set(there) - set(here))
    if new and there:
        yield f"{_some(new)} took no part then" + (f", {_some(gone)} takes no part now" if gone else "")
    fewer = [host for host, count in Counter(there).items() if host in here and Counter(here)[host] != count]
    if fewer:
        yield f"{_some(fewer)} has another number of ranks: its pairs were not compared"


def _some(names: Iterable[str]) -> str:
    return and_more([name or "a host without a name" for name in names], 4)


def _shape(hosts: tuple[str, ...]) -> list[int]:
    """How many ranks each host has, without their names."""
    return sorted(Counter(hosts).values())


def _other_versions(report: Report, base: Base) -> tuple[str, ...]:
    names = [name for name in report.versions if name in base.versions]
    return tuple(
        f"{name} is {report.versions[name]}, was {base.versions[name]}"
        for name in names
        if report.versions[name] != base.versions[name]
    )


Told = Iterator[tuple[str, tuple[str, ...]]]
"""Titles with their evidence."""


def _slower_collectives(report: Report, base: Base) -> Told:
    if report.backend != base.backend or _shape(hosts_of(report)) != _shape(base.hosts):
        return
    before = {(speed.op, speed.size): speed for speed in base.speeds}
    both = [(now, before[now.op, now.size]) for now in report.speeds if (now.op, now.size) in before]
    slow = [(now, then) for now, then in both if now.p50 > then.p99 and now.p50 * (1 - LEAST_LOSS) >= then.p50 > 0]
    if not slow:
        return
    slow.sort(key=lambda pair: pair[1].p50 / pair[0].p50)
    lines = tuple(_collective(now, then) for now, then in slow)
    title = f"{lines[0]} on {base.date}"
    more = (f"{len(slow)} of {len(both)} timed collectives are slower",) if len(both) > 1 else ()
    yield title, (*more, *lines[1:MOST])


def _collective(now: Speed, then: Speed) -> str:
    ratio = now.p50 / then.p50
    return f"{now.op} of {now.size:,} bytes takes {now.p50 * 1e3:.3g} ms, {ratio:.1f} times its {then.p50 * 1e3:.3g} ms"


def _changes(report: Report, base: Base) -> tuple[SpeedChange, ...]:
    if report.backend != base.backend:
        return ()
    return pair_changes(report.pairs, hosts_of(report), base.pairs, base.hosts)


def _slower_hosts(report: Report, base: Base) -> Told:
    changes = _changes(report, base)
    lossy = lossy_hosts(changes)
    across = [change for change in changes if len(change.between) > 1]
    if lossy and len(lossy) == len({host for change in across for host in change.between}):
        yield f"all {len(lossy)} hosts {_lost(across, base)} (median of their pairs with each other)", ()
        return
    for host, mine in lossy.items():
        evidence = f"nearly all of its {len(mine)} pairs with other hosts lost as much: it is the host and not one path"
        yield f"{host} {_lost(mine, base)} (median of its pairs with other hosts)", (evidence,)


def _slower_paths(report: Report, base: Base) -> Told:
    """Pairs that lost more than their hosts explain, grouped by the hosts between which they are."""
    changes = _changes(report, base)
    for mine in lossy_paths(changes, lossy_hosts(changes)):
        between, worst = mine[0].between, min(mine, key=lambda change: change.log)
        where = f"between {between[0]} and {between[1]}" if len(between) > 1 else f"within {between[0]}"
        if len(mine) == 1:
            yield f"ranks {worst.ranks[0]} and {worst.ranks[1]} ({where}) {_lost(mine, base)}", ()
        else:
            evidence = (
                f"the most: ranks {worst.ranks[0]} and {worst.ranks[1]}, {_rate(worst.now)}, was {_rate(worst.then)}"
            )
            yield f"{len(mine)} pairs of ranks {where} {_lost(mine, base)}", (evidence,)


def _slower_computing(report: Report, base: Base) -> Told:
    for host, mine in lossy_paces(pace_changes(report.paces, hosts_of(report), base.paces, base.hosts)):
        now, then = median(1e3 / change.now for change in mine), median(1e3 / change.then for change in mine)
        yield (
            f"{host} computes slower than on {base.date}: the same work takes {now:.3g} ms, took {then:.3g} ms",
            ("measured without communication: the network is not the cause",),
        )


def _lost(changes: Sequence[SpeedChange], base: Base) -> str:
    now, then = median(change.now for change in changes), median(change.then for change in changes)
    return f"lost {100 * loss(changes):.0f} % against {base.date}: {_rate(now)}, was {_rate(then)}"


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e9 else f"{bandwidth / 1e6:.3g} MB/s"


CHECKS = (slower_than_before, baseline_not_comparable)
