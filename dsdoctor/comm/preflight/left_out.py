"""Hosts that cannot take part -> which, why, what the test goes on with, and the lists for the next command. Starts nothing."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsdoctor.comm.mesh.checks import hosts_in_words
from dsdoctor.comm.models import named
from dsdoctor.comm.preflight.checks import why_bad
from dsdoctor.comm.preflight.facts import PreflightFacts
from dsdoctor.core.finding import Finding, Severity, Step, instead, step
from dsdoctor.core.text import and_more_lines
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.ranks.nodelist import fold, in_words
from dsdoctor.rules import book

MAX_CAUSES = 12
MAX_EXCLUDED_HOSTS = 32
"""Hosts that DeepSpeed's --exclude, which knows no brackets, can still be given on a line."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Hosts that were left out of a test, each with its reason, and the hosts that are left; the files that list them."""

    hostfile: str
    bad: Mapping[str, str]
    good: tuple[Slots, ...]
    good_file: str
    bad_file: str
    tested: bool


def bad_hosts(facts: PreflightFacts) -> dict[str, str]:
    """The hosts that cannot take part, by what they answered over ssh, and why."""
    whys = ((visit.host, why_bad(facts, visit)) for visit in facts.visits)
    return {host: why.title for host, why in whys if why is not None}


def without(facts: PreflightFacts, bad: Mapping[str, str]) -> PreflightFacts:
    """The facts as if these hosts were not in the hostfile."""
    assert facts.hosts is not None
    left = tuple(entry for entry in facts.hosts.hosts if entry.name not in bad)
    visits = tuple(visit for visit in facts.visits if visit.host not in bad)
    return replace(facts, hosts=replace(facts.hosts, hosts=left), visits=visits)


def files_of(left: LeftOut) -> tuple[tuple[str, str], ...]:
    """The path and the text of each list: a hostfile of the good ones, and the names of the bad ones."""
    good = "".join(f"{host.name} slots={host.slots}\n" for host in left.good)
    return (left.good_file, good), (left.bad_file, "".join(f"{name}\n" for name in left.bad))


def hosts_left_out(left: LeftOut) -> Iterator[Finding]:
    """Hosts of the hostfile cannot take part, and the others were tested without them (--skip-bad), or can be."""
    if left.bad and left.good:
        yield book.finding(
            "hosts-left-out",
            Severity.WARNING,
            case="" if left.tested else "not-tested",
            evidence=_reasons(left),
            steps=_steps(left),
            count=len(left.bad),
            total=len(left.bad) + len(left.good),
            hosts=in_words(left.bad),
        )


def _reasons(left: LeftOut) -> tuple[str, ...]:
    by_why: dict[str, list[str]] = defaultdict(list)
    for host, why in left.bad.items():
        by_why[why].append(host)
    lines = [f"{in_words(hosts)}: {why}" for why, hosts in by_why.items()] if left.tested else []
    return (
        *and_more_lines(lines, MAX_CAUSES, of="causes"),
        f"good: {left.good_file}",
        f"bad: {left.bad_file}",
    )


def _steps(left: LeftOut) -> Iterator[Step]:
    if not left.tested:
        yield step("python -m dsdoctor comm --hostfile {file} --skip-bad", file=left.hostfile)
    yield step("deepspeed --hostfile {file} ...", file=left.good_file)
    if len(left.bad) <= MAX_EXCLUDED_HOSTS:
        names = "@".join(left.bad)
        yield instead("deepspeed --hostfile {file} --exclude {hosts} ...", file=left.hostfile, hosts=names)
    yield instead("sbatch --exclude {hosts} ...", hosts=fold(left.bad))


CHECKS = (hosts_left_out,)


# Ranks that we started over ssh and that never came to rank 0, with their own last words -> a finding. Judges, never looks.


WORDS = re.compile(
    r"(?P<where>\S+:\d+)(?: \([^)]*\))?, where rank 0 should be, "
    r"(?P<how>does not answer|refuses|cannot be routed to|is a name that is not found)(?!:)"
)
"""How a rank says that it did not reach rank 0 (master_unreachable in rendezvous.checks.py). One that was led to its own
host ("refuses: ...") says nothing of rank 0's."""
NOT_FOUND = "is a name that is not found"
MAX_SHOWN = 4


def master_unreachable(words: Mapping[int, str], hosts: Sequence[str], came: set[int]) -> Iterator[Finding]:
    """Ranks were started on their hosts, and rank 0 ran, and did not answer them: see ``rendezvous.checks`` too.
    ``words``: by rank, its last line; ``hosts``: of every rank; ``came``: the ranks that did."""
    said = {rank: match for rank, text in sorted(words.items()) if rank not in came and (match := WORDS.search(text))}
    others = {host for host in hosts if host != hosts[0]}
    for how in sorted({match["how"] for match in said.values()}):
        ranks = tuple(rank for rank, match in said.items() if match["how"] == how)
        where, away = said[ranks[0]]["where"], {hosts[rank] for rank in ranks}
        master, _, port = where.rpartition(":")
        evidence = tuple(words[rank].removeprefix("rendezvous: ") for rank in ranks[:MAX_SHOWN])
        if how == NOT_FOUND:
            yield book.finding(
                "master-unreachable",
                Severity.ERROR,
                case="no-name-there",
                evidence=evidence,
                ranks=named(ranks, hosts),
                master=master,
                host=hosts[ranks[0]],
            )
        elif away == others:
            yield book.finding(
                "master-unreachable",
                Severity.ERROR,
                case="lets-nobody-in",
                evidence=evidence,
                rank_0=hosts[0],
                ranks=named(ranks, hosts),
                where=where,
                how=how,
                host=hosts[ranks[0]],
                master=master,
                port=port,
            )
        else:
            yield book.finding(
                "master-unreachable",
                Severity.ERROR,
                case="some-hosts",
                evidence=evidence,
                rank_0=hosts[0],
                ranks=named(ranks, hosts),
                hosts=hosts_in_words(away),
                where=where,
                how=how,
                host=hosts[ranks[0]],
                master=master,
                port=port,
            )
