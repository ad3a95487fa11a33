"""Two tests of the same ranks, now and before -> which collectives are slower, and between which hosts. Judges figures only."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from dsdoctor.comm.results import Report, Speed
from dsdoctor.core.finding import Finding, Step, step

LEAST_LOSS = 0.15
"""The least loss that is reported."""
TIMES_SLOWER = {"gloo": 3.0}
"""From so many times its median of before a collective counts, whatever its 99th percentile was; TIMES for other backends.
gloo's depends on what else the processors do: of eleven healthy runs on two processors at a load of 2 to 9, two by two, half
had a collective that was 3 times slower or more, up to 13, and 13 of 62 had three or more of nine at two sizes. No bar
parts these from a loss, so several have to agree, and it is said that it may be load."""
TIMES = 2.0
SEVERAL = {"gloo": 3}
"""So many collectives, of two sizes at least, have to agree; 1 for other backends."""
PLACE_SLOWER = {"gloo": 5.0}
"""From so many times slower on messages between two hosts count by themselves; the same runs' best messages differed by 4.1."""
MOST = 12
"""Lines of evidence about collectives."""
MOST_PLACES = 3
AGAIN = step("python -m dsdoctor comm --json > again.json", note="with the same options")
OTHER_BASE = step("python -m dsdoctor comm --json > base-of-this-job.json", note="with the options of this job")
SMALL = 1 << 10
"""Bytes; what is smaller is of one size: its time is latency."""
LOAD = "with gloo it may be load: on busy processors ranks wait this long for each other, and nothing is wrong then"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What both tests timed, and what of it is slower: collectives, and messages by the hosts between which they went."""

    timed: int
    collectives: int = 0
    slow: tuple[tuple[Speed, Speed], ...] = ()
    places: int = 0
    slow_places: int = 0
    agree: bool = False

    @property
    def told(self) -> str:
        """In words; empty where nothing was compared."""
        if not self.collectives and not self.places:
            return ""
        lone = f"{len(self.slow)} slower, too few to tell from load" if self.slow else "none slower"
        paths = f" and messages on {self.places} path{'s' * (self.places != 1)}" if self.places else ""
        return f"{self.collectives} of {self.timed} collectives{paths} compared with before: {lone}"


def slower(report: Report, base: Report) -> tuple[Finding, ...]:
    """Everything that a report shows against one from before: what got slower, and whether it can be compared at all."""
    return tuple(finding for check in CHECKS for finding in check(report, base))


def compare(report: Report, base: Report) -> Compared:
    """What is in both tests; nothing where they are of other ranks."""
    if any(_differences(report, base)):
        return Compared(timed=len(report.speeds))
    before = {(speed.op, speed.size): speed for speed in base.speeds if speed.p50 > 0}
    both = [(now, before[now.op, now.size]) for now in report.speeds if now.p50 > 0 and (now.op, now.size) in before]
    slow = [(now, then) for now, then in both if _counts(now, then, report.backend)]
    slow.sort(key=lambda pair: pair[1].p50 / pair[0].p50)
    parts = [part for part, _ in _kept(report, base)]
    several = min(SEVERAL.get(report.backend, 1), len(both))
    sizes, slow_sizes = ({max(now.size, SMALL) for now, _ in pairs} for pairs in (both, slow))
    return Compared(
        timed=len(report.speeds),
        collectives=len(both),
        slow=tuple(slow),
        places=len(parts),
        slow_places=sum(part * PLACE_SLOWER.get(report.backend, TIMES) <= 1 for part in parts),
        agree=len(slow) >= max(several, 1) and len(slow_sizes) >= min(2, several, len(sizes)),
    )


def _counts(now: Speed, then: Speed, backend: str) -> bool:
    """Whether a collective is slower than its times of before explain."""
    bar = min(max(then.p99, then.p50), TIMES_SLOWER.get(backend, TIMES) * then.p50)
    return now.p50 > bar and now.p50 * (1 - LEAST_LOSS) >= then.p50


def slower_than_before(report: Report, base: Report) -> Iterator[Finding]:
    """Communication is slower than it was when the other test was made.

    A collective counts when its median time is now above the 99th percentile of then, or twice the median of then (with
    gloo three times), and at least 15 % of its bandwidth is lost. With gloo three have to agree, of two sizes. Messages
    between two hosts count by themselves from half of their bandwidth (with gloo a fifth) on.

    Why it matters: something changed since: the versions (reported if they differ), the link's speed, or another job on
    the same nodes. Where all nodes lost alike, no comparison among them shows it. gloo works on the processors, so with
    it load alone can look the same: run it again before anything is changed.

    How to fix it: see what else runs there, and run the test again with the same options. If it is as slow, find out what
    changed. Keep the figures of before until then.

        $ uptime
        $ python -m dsdoctor comm --json > again.json
        $ ethtool INTERFACE
        $ ibstat
        $ nvidia-smi topo -m

    Since: 0.1
    """
    found = compare(report, base)
    lines = [_collective(now, then) for now, then in found.slow] if found.agree else []
    places = list(_worst_places(report, base))
    if not lines and not found.slow_places:
        return
    gloo = report.backend == "gloo"
    look = step("uptime") if gloo else step("nvidia-smi")
    first = f"{lines[0]} of before" if lines else places.pop(0)
    count = [f"{len(lines)} of {found.collectives} timed collectives are slower"] if lines else []
    versions = _other_versions(report, base)
    yield Finding.warning(
        "slower-than-before",
        first,
        evidence=(*count, *lines[1:MOST], *places, *versions, *([LOAD] if gloo else [])),
        fix="see what else runs there, and run it again; if it is as slow then, find out what changed since",
        steps=(look, AGAIN, *_looks(report)),
    )


def _looks(report: Report) -> Iterator[Step]:
    """At what may have changed between these ranks."""
    if report.backend == "nccl":
        yield step("nvidia-smi topo -m")
    interfaces = {rank.interface for rank in report.ranks} - {"", "lo"}
    if len(set(report.hosts)) > 1 and len(interfaces) == 1:
        yield step("ethtool {interface|INTERFACE}", interface=interfaces.pop())


def baseline_not_comparable(report: Report, base: Report) -> Iterator[Finding]:
    """The test from before was of other ranks or timed other things, so its figures say nothing about these.

    Why it matters: times of collectives can be compared between tests with the same backend and as many ranks on as many
    hosts, and at the same sizes. Nothing was compared.

    How to fix it: compare with a test of the same job.

        $ python -m dsdoctor comm --json > base-of-this-job.json

    Since: 0.1
    """
    why = next(_differences(report, base), None)
    fix = "compare with a test of the same job, which had the same options"
    steps: tuple[Step, ...] = (OTHER_BASE,)
    if why is None and not report.speeds:
        why, fix, steps = "nothing was timed now", "run it without --quick", ()
    elif why is None and not base.speeds:
        why = "it holds no times: it was quick, or broken"
    elif why is None and not compare(report, base).collectives:
        known = {(speed.op, speed.size) for speed in base.speeds}
        common = any((speed.op, speed.size) in known for speed in report.speeds)
        why = "a time in it is 0" if common else "no collective of the same size was timed in both"
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
    for part, place in _kept(report, base)[:MOST_PLACES]:
        if part <= 1 - LEAST_LOSS:
            where = " - ".join(place) if len(place) > 1 else f"within {place[0]}"
            yield f"{where}: {now[place] / 1e6:,.0f} MB/s between two ranks, were {then[place] / 1e6:,.0f}"


def _kept(report: Report, base: Report) -> list[tuple[float, tuple[str, ...]]]:
    """The part of its bandwidth that is left between two hosts, the least first."""
    now, then = _rates(report), _rates(base)
    return sorted((now[place] / then[place], place) for place in now.keys() & then.keys())


def _rates(report: Report) -> dict[tuple[str, ...], float]:
    """Bytes a second between two ranks, by the hosts that they are on."""
    found: dict[tuple[str, ...], list[float]] = defaultdict(list)
    hosts = dict(enumerate(report.hosts))
    for pair in report.pairs:
        place = {hosts.get(pair.source, ""), hosts.get(pair.target, "")}
        if pair.seconds > 0 and pair.size > 0 and "" not in place:
            found[tuple(sorted(place))].append(pair.size / pair.seconds)
    return {place: median(rates) for place, rates in found.items()}


def _other_versions(report: Report, base: Report) -> Iterator[str]:
    for name, version in report.versions.items():
        if base.versions.get(name, version) != version:
            yield f"{name} is {version}, was {base.versions[name]}"


CHECKS = (slower_than_before, baseline_not_comparable)
