"""Claims -> which ranks did not come, came twice, or have another number of ranks. Judges, never looks."""

import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dsdoctor.comm.local.interfaces import bounded, is_loopback
from dsdoctor.comm.models import MAX_NAMED, Claim, Rank, by_rank, named
from dsdoctor.comm.rendezvous.heartbeat import Heartbeat
from dsdoctor.comm.rendezvous.notices import Notice
from dsdoctor.core.finding import Finding, Severity, step
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

# MASTER_ADDR -> its addresses; an address -> how long the name server takes for its name. Bounded, and never an exception.


LOOKUP = 3.0
REVERSE = 10.0
"""Seconds at most for an address, and for a name."""


def addresses_of(master: str) -> tuple[str, ...]:
    """What the name is on this host, () where it is not found in time.

    >>> addresses_of("127.0.0.1")
    ('127.0.0.1',)
    """
    found = bounded(lambda: socket.getaddrinfo(master, None, type=socket.SOCK_STREAM), LOOKUP)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found or ()))


def reverse_lookup(address: str) -> float:
    """Seconds for the name of an address, found or not, as torch asks for it: an IPv4 one in IPv6's form."""
    began = time.monotonic()
    asked = address if ":" in address else f"::ffff:{address}"
    bounded(lambda: socket.getnameinfo((asked, 0), 0), REVERSE)
    return time.monotonic() - began


SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
LATE_SECONDS = 15.0
"""Seconds between the first and the last rank from which a late start is reported; imports alone take some."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The ranks that came: ``me`` is rank 0 (or, where rank 0 was not reached, the rank that looks), ``claims`` in the
    order in which they came. ``notices`` are what ranks that cannot come told rank 0; ``perhaps``
    are those of ranks that may be another job's; ``starting`` are ranks that had not come when the time was up and were heard of;
    ``resolved`` is what MASTER_ADDR is on the host of rank 0."""

    me: Rank
    claims: tuple[Claim, ...]
    waited: float
    notices: dict[int, Notice] = field(default_factory=dict)
    perhaps: dict[int, Notice] = field(default_factory=dict)
    starting: dict[int, Heartbeat] = field(default_factory=dict)
    resolved: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that did not come."""
        there = {claim.rank for claim in self.claims}
        return tuple(rank for rank in range(self.me.world) if rank not in there)

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks that did not come and did not say anything."""
        return tuple(rank for rank in self.missing if rank not in self.notices and rank not in self.starting)


def rank_unable(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank was started and cannot take part; it told rank 0 why over plain TCP."""
    by_why: dict[str, list[int]] = defaultdict(list)
    hosts = [""] * arrivals.me.world
    for rank in arrivals.missing:
        if notice := arrivals.notices.get(rank):
            by_why[" ".join(notice.why.split())[:300]].append(rank)
            hosts[rank] = notice.host
    for why, ranks in by_why.items():
        yield book.finding(
            "rank-unable",
            Severity.ERROR,
            evidence=("it reported this to rank 0, and did not join",),
            ranks=named(tuple(ranks), tuple(hosts)),
            why=why,
            host=hosts[ranks[0]],
        )


def rank_starting(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank runs, and had not come to the rendezvous at the deadline."""
    if not arrivals.starting or any(rank_duplicated(arrivals)) or any(world_size_differs(arrivals)):
        return
    by_at: dict[str, list[Heartbeat]] = defaultdict(list)
    for rank, beat in sorted(arrivals.starting.items()):
        if rank in arrivals.missing and rank not in arrivals.notices:
            by_at[beat.at[:60]].append(beat)
    for at, beats in by_at.items():
        hosts = [""] * arrivals.me.world
        for beat in beats:
            hosts[beat.rank] = beat.host
        yield book.finding(
            "rank-starting",
            Severity.ERROR,
            evidence=(f"waited {arrivals.waited:.0f} s; it runs, and rank 0 hears of it",),
            ranks=named([beat.rank for beat in beats], hosts),
            state=at,
            seconds=f"{max(beat.seconds for beat in beats):.0f}",
            host=beats[0].host,
        )


def rank_missing(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank did not come to the rendezvous."""
    missing, me = arrivals.silent, arrivals.me
    if not missing or any(rank_duplicated(arrivals)) or any(world_size_differs(arrivals)):
        # those findings explain it, and the wait for the others was given up
        return
    here = len({claim.rank for claim in arrivals.claims if claim.rank < me.world})
    evidence = [f"{here} of {me.world} ranks joined in {arrivals.waited:.1f} s: {_places(arrivals.claims)}"]
    if loopback := [address for address in arrivals.resolved if is_loopback(address)]:
        evidence.append(f"MASTER_ADDR {me.master} is {loopback[0]}, a loopback address: other hosts cannot reach it")
    elif means := [address for address in arrivals.resolved if address != me.master]:
        evidence.append(
            f"MASTER_ADDR {me.master} is {', '.join(means[:3])} here; hosts that resolve it differently cannot join"
        )
    evidence += [
        f"a rank {rank} on {notice.host} with MASTER_PORT {notice.port} connected here, from this job or another"
        for rank, notice in sorted(arrivals.perhaps.items())
        if rank in missing
    ][:3]
    hosts = {me.hosts[rank] for rank in missing if rank < len(me.hosts)}
    there = [step("ssh {host} python -m dsdoctor comm --quick", host=host) for host in sorted(hosts)[:3]]
    connect = step("timeout 5 bash -c '</dev/tcp/$0/$1' {host} {port} && echo reachable", host=me.master, port=me.port)
    yield book.finding(
        "rank-missing",
        Severity.ERROR,
        evidence=evidence,
        steps=there or [connect],
        ranks=named(missing, me.hosts),
        seconds=f"{arrivals.waited:.0f}",
        where=f"{me.master}:{me.port}",
    )


def rank_duplicated(arrivals: Arrivals) -> Iterator[Finding]:
    """Two processes say that they are the same rank."""
    claimed: dict[int, list[Claim]] = defaultdict(list)
    for claim in arrivals.claims:
        claimed[claim.rank].append(claim)
    for rank, several in sorted(claimed.items()):
        if len(several) > 1:
            yield book.finding(
                "rank-duplicated",
                Severity.ERROR,
                evidence=(f"no process is {named(arrivals.missing, ())}",) if arrivals.missing else (),
                count=len(several),
                rank=rank,
                processes=and_more([f"pid {claim.pid} on {claim.host}" for claim in several], MAX_NAMED),
            )


def world_size_differs(arrivals: Arrivals) -> Iterator[Finding]:
    """The ranks do not agree on how many they are."""
    by_world: dict[int, list[Claim]] = defaultdict(list)
    for claim in arrivals.claims:
        by_world[claim.world].append(claim)
    if len(by_world) < 2 and all(claim.world == arrivals.me.world for claim in arrivals.claims):
        return
    by_world.setdefault(arrivals.me.world, [])
    sizes = sorted(by_world.items(), key=lambda item: len(item[1]))
    yield book.finding(
        "world-size-differs",
        Severity.ERROR,
        sizes="; ".join(f"world size {world}: {_places(claims) or 'rank 0'}" for world, claims in sizes),
    )


def gpu_shared(arrivals: Arrivals) -> Iterator[Finding]:
    """Two ranks would use the same GPU."""
    by_gpu: dict[tuple[str, str], list[Claim]] = defaultdict(list)
    for claim in arrivals.claims:
        if claim.gpu and not (claim.local and claim.local.variables.get(SHARING) == "1"):
            by_gpu[claim.host, claim.gpu].append(claim)
    for (host, gpu), several in by_gpu.items():
        if len({claim.rank for claim in several}) > 1:
            ranks = [f"{claim.rank} (LOCAL_RANK {claim.local_rank})" for claim in several]
            yield book.finding("gpu-shared", Severity.ERROR, ranks=ranks, host=host, gpu=gpu)


def rank_arrives_late(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank came much later than the others."""
    came = sorted(arrivals.claims, key=lambda claim: claim.seen)
    if arrivals.missing or len(came) < 2 or came[-1].seen - came[0].seen < LATE_SECONDS:
        return
    last = came[-1]
    own = last.arrived - last.started
    yield book.finding(
        "rank-arrives-late",
        Severity.WARNING,
        case="" if own > LATE_SECONDS / 2 else "started-late",
        evidence=(f"it took {own:.1f} s from its own start to the rendezvous",),
        rank=last.rank,
        host=last.host,
        seconds=f"{last.seen - came[0].seen:.0f}",
    )


def _places(claims: Iterable[Claim]) -> str:
    claims = tuple(claims)
    return named(sorted({claim.rank for claim in claims}), by_rank(claims)) if claims else ""


CHECKS = (
    *(rank_unable, rank_duplicated, world_size_differs, gpu_shared, rank_starting, rank_missing),
    rank_arrives_late,
)
