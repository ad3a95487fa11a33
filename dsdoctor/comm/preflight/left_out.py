"""Hosts that cannot take part -> which, why, what the test goes on with, and the lists for the next command. Starts nothing."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dsdoctor.comm.mesh.blocked_checks import hosts_in_words
from dsdoctor.comm.models import named
from dsdoctor.comm.preflight import checks
from dsdoctor.comm.preflight.facts import PreflightFacts
from dsdoctor.core.finding import Finding, Severity, Step, instead, step
from dsdoctor.core.text import and_more_lines
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.hosts.ssh import on_host
from dsdoctor.ranks.nodelist import fold, in_words

MOST_CAUSES = 12
MOST_IN_A_FLAG = 32
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
    found = {}
    for visit in facts.visits:
        alone = replace(facts, visits=(visit,))
        errors = (finding for check in checks.OF_ONE_HOST for finding in check(alone))
        why = next((finding.title for finding in errors if finding.severity is Severity.ERROR), None)
        if why is not None:
            found[visit.host] = why.removeprefix(visit.host).lstrip(": ")
    return found


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
    if not left.bad or not left.good:
        return
    whole, verb = len(left.bad) + len(left.good), "was" if len(left.bad) == 1 else "were"
    how = f"{verb} left out" if left.tested else "cannot take part; the others can be tested with --skip-bad"
    yield Finding.warning(
        "hosts-left-out",
        f"{len(left.bad)} of {whole} hosts {how}: {in_words(left.bad)}",
        evidence=_reasons(left),
        fix="start the job without them, and have them repaired",
        steps=_steps(left),
    )


def _reasons(left: LeftOut) -> tuple[str, ...]:
    by_why: dict[str, list[str]] = defaultdict(list)
    for host, why in left.bad.items():
        by_why[why].append(host)
    lines = [f"{in_words(hosts)}: {why}" for why, hosts in by_why.items()] if left.tested else []
    return (
        *and_more_lines(lines, MOST_CAUSES, of="causes"),
        f"good: {left.good_file}",
        f"bad: {left.bad_file}",
    )


def _steps(left: LeftOut) -> Iterator[Step]:
    if not left.tested:
        yield step("python -m dsdoctor comm --hostfile {file} --skip-bad", file=left.hostfile)
    yield step("deepspeed --hostfile {file} ...", file=left.good_file)
    if len(left.bad) <= MOST_IN_A_FLAG:
        names = "@".join(left.bad)
        yield instead("deepspeed --hostfile {file} --exclude {hosts} ...", file=left.hostfile, hosts=names)
    yield instead("sbatch --exclude {hosts} ...", hosts=fold(left.bad))


CHECKS = (hosts_left_out,)


# Ranks that we started over ssh and that never came to rank 0, with their own last words -> a finding. Judges, never looks.


WORDS = re.compile(
    r"(?P<where>\S+:\d+)(?: \([^)]*\))?, where rank 0 should be, "
    r"(?P<how>does not answer|refuses|cannot be routed to|is a name that is not found)(?!:)"
)
"""How a rank says that it did not reach rank 0 (master_unreachable in rendezvous/absent_checks.py). One that was led to its own
host ("refuses: ...") says nothing of rank 0's."""
NOT_FOUND = "is a name that is not found"
MOST_SHOWN = 4


def master_unreachable(words: Mapping[int, str], hosts: Sequence[str], came: set[int]) -> Iterator[Finding]:
    """Ranks were started on their hosts, and rank 0 ran, and did not answer them. The manual page of this rule is in
    rendezvous/absent_checks.py. ``words``: by rank, its last line; ``hosts``: of every rank; ``came``: the ranks that did."""
    said = {rank: match for rank, text in sorted(words.items()) if rank not in came and (match := WORDS.search(text))}
    for how in sorted({match["how"] for match in said.values()}):
        ranks = tuple(rank for rank, match in said.items() if match["how"] == how)
        where, master = said[ranks[0]]["where"], hosts[0]
        address, _, port = where.rpartition(":")
        others = {host for host in hosts if host != master}
        away = {hosts[rank] for rank in ranks}
        try_it = step("timeout 5 bash -c '</dev/tcp/$0/$1' {host} {port} && echo reachable", host=address, port=port)
        if how == NOT_FOUND:
            title = f"{named(ranks, hosts)} run, and {address}, where rank 0 should be, {how} there"
            fix = f"name {address} in /etc/hosts there, or see why the name server does not know it"
            try_it = step("getent hosts {host}", host=address)
        elif away == others:
            title = f"{master} with rank 0 lets no other host in: {named(ranks, hosts)} run, and {where} {how}"
            fix = f"open the ports between the hosts in {master}'s firewall: the master's, and the ephemeral ones"
        else:
            title = f"{named(ranks, hosts)} run, and {where} with rank 0 {how}, though other hosts reach it"
            fix = f"look at the firewall and the route between {hosts_in_words(away)} and {master}"
        yield Finding.error(
            "master-unreachable",
            title,
            evidence=tuple(words[rank].removeprefix("rendezvous: ") for rank in ranks[:MOST_SHOWN]),
            fix=fix,
            steps=(on_host(hosts[ranks[0]], try_it),),
        )
