"""Ranks that we started over ssh and that never came to rank 0, with their own last words -> a finding. Judges, never looks."""

import re
from collections.abc import Iterator, Mapping, Sequence

from dsdoctor.comm.mesh.blocked_checks import hosts_in_words
from dsdoctor.comm.rank_names import named
from dsdoctor.core.finding import Finding, step
from dsdoctor.hosts.ssh import on_host

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
