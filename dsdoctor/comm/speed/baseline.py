"""Two tests of the same ranks, now and before -> which collectives are slower, and between which hosts. Judges figures only."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

from dsdoctor.comm.results import Report, Speed
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import Step, step

LEAST_LOSS = 0.15
"""The least loss that is reported."""
MOST = 12
"""Lines of evidence about collectives."""
MOST_PLACES = 3
MEASURE = step("python -m dsdoctor comm --json > base.json")


def slower(report: Report, base: Report) -> tuple[Finding, ...]:
    """Everything that a report shows against one from before: what got slower, and whether it can be compared at all."""
    return tuple(finding for check in CHECKS for finding in check(report, base))


def slower_than_before(report: Report, base: Report) -> Iterator[Finding]:
    """Communication is slower than it was when the other test was made.

    A collective counts when its median time is now above the 99th percentile of then, and at least 15 % of its
    bandwidth is lost. The hosts between which messages lost most are named beside it.

    Why it matters: something changed since: the versions (reported if they differ), the link's speed, or another job on
    the same nodes. Where all nodes lost alike, no comparison among them shows it.

    How to fix it: find out what changed. If the new state is the right one, keep its figures to compare with later.

        $ ethtool INTERFACE
        $ ibstat
        $ nvidia-smi topo -m
        $ python -m dsdoctor comm --json > base.json

    Since: 0.1
    """
    if any(_differences(report, base)):
        return
    before = {(speed.op, speed.size): speed for speed in base.speeds}
    both = [(now, before[now.op, now.size]) for now in report.speeds if (now.op, now.size) in before]
    slow = [(now, then) for now, then in both if now.p50 > then.p99 and now.p50 * (1 - LEAST_LOSS) >= then.p50 > 0]
    if not slow:
        return
    slow.sort(key=lambda pair: pair[1].p50 / pair[0].p50)
    lines = [_collective(now, then) for now, then in slow]
    yield Finding.warning(
        "slower-than-before",
        f"{lines[0]} of before",
        evidence=(
            f"{len(slow)} of {len(both)} timed collectives are slower",
            *lines[1:MOST],
            *_worst_places(report, base),
            *_other_versions(report, base),
        ),
        fix="find out what changed since; if that is intended, keep the new figures",
        steps=(MEASURE,),
    )


def baseline_not_comparable(report: Report, base: Report) -> Iterator[Finding]:
    """The test from before was of other ranks, so its figures say nothing about these.

    Why it matters: times of collectives can be compared between tests with the same backend and as many ranks on as many
    hosts. Nothing was compared.

    How to fix it: compare with a test of the same job.

        $ python -m dsdoctor comm --json > base.json

    Since: 0.1
    """
    why = next(_differences(report, base), None)
    fix = "compare with a test of the same job"
    steps: tuple[Step, ...] = (MEASURE,)
    if why is None and not report.speeds:
        why, fix, steps = "nothing was timed now", "run it without --quick", ()
    elif why is None and not base.speeds:
        why = "it holds no times: it was quick, or broken"
    if why is not None:
        title = f"the test from before cannot be compared with this one: {why}"
        yield Finding.note("baseline-not-comparable", title, fix=fix, steps=steps)


def _differences(report: Report, base: Report) -> Iterator[str]:
    if report.backend != base.backend:
        yield f"the backend is {report.backend}, was {base.backend}"
    if report.world != base.world:
        yield f"{report.world} ranks, were {base.world}"
    elif _shape(report) != _shape(base):
        yield "the ranks are spread over the hosts in another way"


def _shape(report: Report) -> list[int]:
    """How many ranks each host has, without their names."""
    return sorted(Counter(report.hosts).values())


def _collective(now: Speed, then: Speed) -> str:
    ratio = now.p50 / then.p50
    return f"{now.op} of {now.size:,} bytes takes {now.p50 * 1e3:.3g} ms, {ratio:.1f} times its {then.p50 * 1e3:.3g} ms"


def _worst_places(report: Report, base: Report) -> Iterator[str]:
    """The hosts between which messages lost most, as far as both tests timed them."""
    now, then = _rates(report), _rates(base)
    lost = sorted((now[place] / then[place], place) for place in now.keys() & then.keys())
    for part, place in lost[:MOST_PLACES]:
        if part <= 1 - LEAST_LOSS:
            where = " - ".join(place) if len(place) > 1 else f"within {place[0]}"
            yield f"{where}: {now[place] / 1e6:,.0f} MB/s between two ranks, were {then[place] / 1e6:,.0f}"


def _rates(report: Report) -> dict[tuple[str, ...], float]:
    """Bytes a second between two ranks, by the hosts that they are on."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    hosts = dict(enumerate(report.hosts))
    for pair in report.pairs:
        place = {hosts.get(pair.source, ""), hosts.get(pair.target, "")}
        if pair.seconds > 0 and "" not in place:
            found[tuple(sorted(place))].append(pair.size / pair.seconds)
    return {place: median(rates) for place, rates in found.items()}


def _other_versions(report: Report, base: Report) -> Iterator[str]:
    for name, version in report.versions.items():
        if base.versions.get(name, version) != version:
            yield f"{name} is {version}, was {base.versions[name]}"


CHECKS = (slower_than_before, baseline_not_comparable)
