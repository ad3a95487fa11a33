"""A rank that did not reach the store of rank 0 -> why. Judges, never looks."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.models import Claim, Rank
from dsdoctor.comm.rendezvous.notices import UNNAMED
from dsdoctor.comm.rendezvous.store import StoreUnreachable
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

APART = 10
"""Ports from one job's to the one that is proposed for another: more than those on which a rank 0 listens."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that did not reach the board: itself, and why. ``addresses`` are its host's, ``resolved`` what MASTER_ADDR is there;
    ``lookup`` is how many seconds the name server took for the name of that address, None where that was not asked. ``named``:
    the titles begin with the rank; it is False where the reader knows who it is."""

    me: Rank
    host: str
    why: StoreUnreachable
    addresses: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    lookup: float | None = None
    named: bool = True

    @property
    def case(self) -> str:
        """Which of the checks says it: they exclude each other."""
        why, other = self.why, self.why.rank_zero
        named = {
            "starting": why.starting,
            "port differs": bool(other and (other.run, other.world) == (self.me.run, self.me.world)),
            "elsewhere": why.elsewhere,
            "claimed": self.twin is not None,
            "held": bool(other or why.holders or (why.taken and why.token_missing)),
            "slow": why.slow,
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


def store_slow(absent: Absent) -> Iterator[Finding]:
    """The store answers at once, and torch's own client was not through with it in time."""
    if absent.case != "slow":
        return
    me, took = absent.me, absent.lookup
    asked = (
        f"the name server took {took:.1f} s for the name of {absent.resolved[0]}" if took and absent.resolved else ""
    )
    yield book.finding(
        "store-slow",
        Severity.ERROR,
        evidence=(asked,) if asked else (),
        rank=me.rank,
        host=absent.host,
        where=f"{me.master}:{me.port}",
        seconds=f"{absent.why.seconds:.0f}",
        address=absent.resolved[0] if absent.resolved else me.master,
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


def rank_zero_starting(absent: Absent) -> Iterator[Finding]:
    """Rank 0 runs, and did not serve its store before the deadline."""
    zero = absent.why.rank_zero
    if absent.case == "starting" and zero is not None:
        yield book.finding(
            "rank-zero-starting",
            Severity.ERROR,
            evidence=(f"waited {absent.why.seconds:.0f} s for it, until the deadline",),
            rank=absent.me.rank,
            host=absent.host,
            other_host=zero.host,
            state=zero.at[:60],
            seconds=f"{zero.seconds:.0f}",
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


CHECKS = (
    *(
        master_port_in_use,
        master_port_held,
        rank_claimed_again,
        master_port_differs,
        master_address_not_here,
        store_slow,
    ),
    *(master_unreachable, master_port_refused, rank_zero_starting, rank_zero_missing),
)
