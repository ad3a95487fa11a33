"""Who came to the rendezvous -> which ranks did not, came twice or differ; what kept one from the store. Judges, never looks."""

import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from dsdoctor.comm.local.interfaces import bounded, is_loopback
from dsdoctor.comm.models import MAX_NAMED, Claim, Rank, by_rank, named
from dsdoctor.comm.rendezvous.notices import UNNAMED, Notice
from dsdoctor.comm.rendezvous.store import StoreUnreachable
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding, Severity, step
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

LOOKUP = 3.0
"""Seconds at most for an address."""
LOOKING_UP = "resolving its own address"


def addresses_of(master: str) -> tuple[str, ...]:
    """What the name is on this host, () where it is not found in time.

    >>> addresses_of("127.0.0.1")
    ('127.0.0.1',)
    """
    found = bounded(lambda: socket.getaddrinfo(master, None, type=socket.SOCK_STREAM), LOOKUP)
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found or ()))


SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
LATE_SECONDS = 15.0
"""Seconds between the first and the last rank from which a late start is reported; imports alone take some."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """The ranks that came: ``me`` is rank 0 (or, where rank 0 was not reached, the rank that looks), ``claims`` in the
    order in which they came. ``notices`` are what ranks that cannot come told rank 0; ``perhaps``
    are those of ranks that may be another job's; ``resolved`` is what MASTER_ADDR is on the host of rank 0."""

    me: Rank
    claims: tuple[Claim, ...]
    waited: float
    notices: dict[int, Notice] = field(default_factory=dict)
    perhaps: dict[int, Notice] = field(default_factory=dict)
    resolved: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that did not come."""
        there = {claim.rank for claim in self.claims}
        return tuple(rank for rank in range(self.me.world) if rank not in there)

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks that did not come and did not say anything."""
        return tuple(rank for rank in self.missing if rank not in self.notices)


def rank_unable(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank was started and cannot take part; it told rank 0 why."""
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
            evidence=("it reported this to rank 0",),
            blames=ranks,
            ranks=named(tuple(ranks), tuple(hosts)),
            why=why,
            host=hosts[ranks[0]],
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
                blames=(rank,),
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
            those = [claim.rank for claim in several]
            yield book.finding("gpu-shared", Severity.ERROR, blames=those, ranks=ranks, host=host, gpu=gpu)


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
        blames=(last.rank,),
        rank=last.rank,
        host=last.host,
        seconds=f"{last.seen - came[0].seen:.0f}",
    )


def _places(claims: Iterable[Claim]) -> str:
    claims = tuple(claims)
    return named(sorted({claim.rank for claim in claims}), by_rank(claims)) if claims else ""


CHECKS = (
    *(rank_unable, rank_duplicated, world_size_differs, gpu_shared, rank_missing),
    rank_arrives_late,
)


@dataclass(frozen=True, kw_only=True)
class Importing:
    """A rank that came and had not imported torch when the time was up: what it was ``doing``, for how many seconds."""

    claim: Claim
    doing: str
    seconds: float


def rank_starting(importing: Iterable[Importing], me: Rank) -> Iterator[Finding]:
    """A rank runs, and could not take part in an exchange before the deadline."""
    by_doing: dict[str, list[Importing]] = defaultdict(list)
    for one in importing:
        by_doing[one.doing].append(one)
    for doing, several in by_doing.items():
        ranks, seconds = [one.claim.rank for one in several], max(one.seconds for one in several)
        first = several[0].claim
        if doing == LOOKING_UP:
            yield book.finding(
                "store-slow",
                Severity.ERROR,
                rank=first.rank,
                host=first.host,
                where=f"{me.master}:{me.port}",
                seconds=f"{seconds:.0f}",
                address=first.address,
            )
            continue
        yield book.finding(
            "rank-starting",
            Severity.ERROR,
            evidence=(f"waited {seconds:.0f} s; it is running, and answers rank 0",),
            blames=ranks,
            ranks=named(ranks, by_rank(one.claim for one in several)),
            state=doing,
            seconds=f"{seconds:.0f}",
            host=first.host,
        )


APART = 10
"""Ports from one job's to the one that is proposed for another: more than those on which a rank 0 listens."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that did not reach the board: itself, and why. ``addresses`` are its host's, ``resolved`` what MASTER_ADDR is there.
    ``named``: the titles begin with the rank; it is False where the reader knows who it is."""

    me: Rank
    host: str
    why: StoreUnreachable
    addresses: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    named: bool = True

    @property
    def case(self) -> str:
        """Which of the checks says it: they exclude each other."""
        why, other = self.why, self.why.rank_zero
        named = {
            "port differs": bool(other and (other.run, other.world) == (self.me.run, self.me.world)),
            "elsewhere": why.elsewhere,
            "claimed": self.twin is not None,
            "held": bool(other or why.holders or (why.taken and why.token_missing)),
            "no rank 0": why.token_missing or why.ended,
            "refused": bool(why.detail),
            "in use": why.taken or why.outcome in {ConnectOutcome.STRANGER, ConnectOutcome.SILENT},
        }
        return next((case for case, true in named.items() if true), "unreachable")

    @property
    def twin(self) -> Claim | None:
        """The process that is this rank already, where the job has a name of its own: it is no other job's then."""
        same = (claim for claim in self.why.holders if claim.rank == self.me.rank)
        return next(same, None) if self.me.run != UNNAMED else None

    @property
    def who(self) -> str:
        """How a title begins."""
        return f"rank {self.me.rank} ({self.host}): " if self.named else ""

    @property
    def there(self) -> str:
        """MASTER_ADDR and its port, with what a name stands for on this host."""
        means = [address for address in self.resolved if address != self.me.master]
        is_a = f" ({self.me.master} is {', '.join(means[:3])} here)" if means else ""
        return f"{self.me.master}:{self.me.port}{is_a}"


def master_port_in_use(absent: Absent) -> Iterator[Finding]:
    """Another program listens on the master's port already."""
    if absent.case != "in use":
        return
    me, why = absent.me, absent.why
    where = f"{me.master}:{me.port}"
    if why.above or me.agent_store:
        listener = why.listener if why.above else None
        yield book.finding(
            "master-port-in-use",
            Severity.ERROR,
            case="launcher",
            rank=me.rank,
            host=absent.host,
            listener=listener,
            where=where,
        )
        return
    silent = why.outcome is ConnectOutcome.SILENT
    yield book.finding(
        "master-port-in-use",
        Severity.ERROR,
        case="silent" if silent else "banner" if why.banner else "",
        evidence=(f"tried for {why.seconds:.0f} s; a store of torch answers at once",),
        rank=me.rank,
        host=absent.host,
        listener=why.listener,
        where=where,
        banner=why.banner,
        port=me.port,
        other_port=free_port_like(me.port),
    )


def master_port_held(absent: Absent) -> Iterator[Finding]:
    """Another job's rank 0 serves the store at this address and port."""
    if absent.case != "held":
        return
    me, why = absent.me, absent.why
    holders = [f"rank {claim.rank} is pid {claim.pid} on {claim.host}" for claim in why.holders]
    if zero := why.rank_zero:
        holders.append(f"its rank 0 is pid {zero.pid} on {zero.host}, with MASTER_PORT {zero.port}")
    holders += [why.listener] if why.listener else []
    yield book.finding(
        "master-port-held",
        Severity.ERROR,
        case="holder" if holders else "",
        evidence=(*holders[1:], *(("it had started before this rank joined",) if why.holders else ())),
        rank=me.rank,
        host=absent.host,
        where=f"{me.master}:{me.port}",
        holder=next(iter(holders), None),
        other_port=free_port_like(me.port),
    )


def rank_claimed_again(absent: Absent) -> Iterator[Finding]:
    """This process says that it is a rank which another process of the same job is already."""
    if absent.case == "claimed" and (twin := absent.twin) is not None:
        yield book.finding(
            "rank-claimed-again",
            Severity.ERROR,
            rank=twin.rank,
            host=absent.host,
            pid=twin.pid,
            other_host=twin.host,
        )


def master_port_differs(absent: Absent) -> Iterator[Finding]:
    """A rank has another MASTER_PORT than rank 0."""
    other, me = absent.why.rank_zero, absent.me
    if absent.case != "port differs" or other is None:
        return
    if me.run == UNNAMED:
        yield book.finding(
            "master-port-differs",
            Severity.ERROR,
            case="unnamed",
            evidence=(f"that rank 0 is pid {other.pid} on {other.host}, of {other.world} ranks too",),
            who=absent.who,
            port=me.port,
            other_host=other.host,
            other_port=other.port,
            free_port=free_port_like(max(me.port, other.port)),
        )
        return
    yield book.finding(
        "master-port-differs",
        Severity.ERROR,
        evidence=(f"rank 0 is pid {other.pid} on {other.host}",),
        who=absent.who,
        port=me.port,
        other_host=other.host,
        other_port=other.port,
    )


def master_address_not_here(absent: Absent) -> Iterator[Finding]:
    """MASTER_ADDR is the address of another host than the one on which rank 0 runs."""
    if absent.case != "elsewhere":
        return
    me, own = absent.me, ", ".join(absent.addresses[:4])
    means = f" ({', '.join(absent.resolved[:3])})" if absent.resolved not in ((), (me.master,)) else ""
    yield book.finding(
        "master-address-not-here",
        Severity.ERROR,
        case="" if absent.addresses else "no-address",
        evidence=(
            f"this host has {own or 'no address'}",
            f"connecting to {me.master}:{me.port}: {absent.why.outcome.value}",
        ),
        host=absent.host,
        master=f"{me.master}{means}",
        address=next(iter(absent.addresses), None),
    )


def master_unreachable(absent: Absent) -> Iterator[Finding]:
    """A rank cannot reach the address of rank 0."""
    if absent.case != "unreachable":
        return
    me, why, outcome = absent.me, absent.why, absent.why.outcome
    own = sorted({*absent.resolved} & {*absent.addresses, *filter(is_loopback, absent.resolved)})
    yield book.finding(
        "master-unreachable",
        Severity.ERROR,
        case="own-host"
        if own and outcome is ConnectOutcome.REFUSED
        else "refused"
        if outcome is ConnectOutcome.REFUSED
        else "no-route"
        if outcome is ConnectOutcome.NO_ROUTE
        else "no-name"
        if outcome is ConnectOutcome.NO_NAME
        else "",
        evidence=(f"a plain TCP connection: {outcome.value}, tried for {why.seconds:.1f} s",),
        rank=me.rank,
        host=absent.host,
        where=absent.there,
        address=next(iter(own), None),
        master=me.master,
        port=me.port,
    )


def master_port_refused(absent: Absent) -> Iterator[Finding]:
    """Rank 0 is not allowed to listen on the master's port."""
    if absent.case == "refused":
        me = absent.me
        yield book.finding(
            "master-port-refused",
            Severity.ERROR,
            host=absent.host,
            where=f"{me.master}:{me.port}",
            why=absent.why.detail,
            other_port=max(free_port_like(me.port), 29500),
        )


def rank_zero_missing(absent: Absent) -> Iterator[Finding]:
    """A store answers at the master's address, and rank 0 of this test is not there."""
    if absent.case == "no rank 0":
        yield book.finding(
            "rank-zero-missing",
            Severity.ERROR,
            case="ended" if absent.why.ended else "",
            evidence=(f"waited {absent.why.seconds:.0f} s",),
            rank=absent.me.rank,
            host=absent.host,
            where=f"{absent.me.master}:{absent.me.port}",
        )


def free_port_like(port: int) -> int:
    """Another port of the same kind, to be proposed: beyond those on which a rank 0 beside it hears notices.

    >>> free_port_like(29500), free_port_like(65535)
    (29510, 65525)
    """
    return port + APART if port + APART < 1 << 16 else port - APART


ABSENT_CHECKS = (
    *(master_port_in_use, master_port_held, rank_claimed_again, master_port_differs, master_address_not_here),
    *(master_unreachable, master_port_refused, rank_zero_missing),
)
