"""A rank that did not reach the store of rank 0 -> why. Judges, never looks."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.models import Claim, Rank
from dsdoctor.comm.rendezvous.notices import UNNAMED
from dsdoctor.comm.rendezvous.store import Unreached
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding, instead, step

APART = 10
"""Ports from one job's to the one that is proposed for another: more than those on which a rank 0 listens."""


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that did not reach the board: itself, and why. ``addresses`` are its host's, ``resolved`` what MASTER_ADDR is there;
    ``lookup`` is how many seconds the name server took for the name of that address, None where that was not asked."""

    me: Rank
    host: str
    why: Unreached
    addresses: tuple[str, ...] = ()
    resolved: tuple[str, ...] = ()
    lookup: float | None = None

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
    who = why.listener or ("a process" if why.outcome is ConnectOutcome.SILENT else "a program")
    silent = "accepts connections and does not answer"
    if why.above or me.agent_store:
        launcher = why.listener if why.above else "the store of torchrun's agent"
        yield Finding.error(
            "master-port-in-use",
            f"rank {me.rank} ({absent.host}): {launcher}, which started the ranks, listens on {me.master}:{me.port}; it {silent}",
            fix="see the launcher's own output, and start it again with another --master_port",
        )
        return
    said = f'; it says "{why.banner}"' if why.banner else ""
    what = silent if why.outcome is ConnectOutcome.SILENT else f"is no store of torch{said}"
    yield Finding.error(
        "master-port-in-use",
        f"rank {me.rank} ({absent.host}): {who} already listens on {me.master}:{me.port} and {what}",
        evidence=(f"tried for {why.seconds:.0f} s; a store of torch answers at once",),
        fix="take another port, or end that process if it is left over",
        steps=(
            step("ss -ltnp sport = :{port}", port=me.port),
            instead("export MASTER_PORT={port}", port=free_port_like(me.port)),
        ),
    )


def master_port_held(absent: Absent) -> Iterator[Finding]:
    """Another job's rank 0 serves the store at this address and port."""
    if absent.case != "held":
        return
    me, why = absent.me, absent.why
    who = [f"rank {claim.rank} is pid {claim.pid} on {claim.host}" for claim in why.holders]
    if why.rank_zero:
        who.append(
            f"its rank 0 is pid {why.rank_zero.pid} on {why.rank_zero.host}, with MASTER_PORT {why.rank_zero.port}"
        )
    who += [why.listener] if why.listener else []
    yield Finding.error(
        "master-port-held",
        f"rank {me.rank} ({absent.host}): {me.master}:{me.port} is held by another job"
        + (f": {who[0]}" if who else ""),
        evidence=(*who[1:], *(("it had begun when this rank came",) if why.holders else ())),
        fix="give this job another port, the same on all of its hosts",
        steps=(step("export MASTER_PORT={port}", port=free_port_like(me.port)),),
    )


def rank_claimed_again(absent: Absent) -> Iterator[Finding]:
    """This process says that it is a rank which another process of the same job is already."""
    if absent.case != "claimed" or (twin := absent.twin) is None:
        return
    yield Finding.error(
        "rank-claimed-again",
        f"rank {twin.rank} ({absent.host}): 2 processes say that they are rank {twin.rank}: pid {twin.pid} on {twin.host}, and "
        "this one, which came later",
        fix="give every process a RANK of its own: one --node_rank for each node",
        steps=(step("env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|SLURM_PROCID|OMPI_COMM_WORLD_RANK)'"),),
    )


def master_port_differs(absent: Absent) -> Iterator[Finding]:
    """A rank has another MASTER_PORT than rank 0."""
    other, me = absent.why.rank_zero, absent.me
    if absent.case != "port differs" or other is None:
        return
    if me.run == UNNAMED:
        yield Finding.error(
            "master-port-differs",
            f"rank {me.rank} ({absent.host}): MASTER_PORT is {me.port}, and no rank 0 serves a store there; one on {other.host} "
            f"has MASTER_PORT {other.port}: it is this job's with another port, or another job's",
            evidence=(f"that rank 0 is pid {other.pid} on {other.host}, of {other.world} ranks too",),
            fix="take a port for this job that no other has, the same on all of its hosts",
            steps=(step("export MASTER_PORT={port}", port=free_port_like(max(me.port, other.port))),),
        )
        return
    yield Finding.error(
        "master-port-differs",
        f"rank {absent.me.rank} ({absent.host}): MASTER_PORT is {absent.me.port}, and rank 0 ({other.host}) has {other.port}",
        evidence=(f"rank 0 is pid {other.pid} on {other.host}",),
        fix="set the same MASTER_PORT on all hosts",
        steps=(step("export MASTER_PORT={port}", port=other.port),),
    )


def master_address_not_here(absent: Absent) -> Iterator[Finding]:
    """MASTER_ADDR is the address of another host than the one on which rank 0 runs."""
    if absent.case != "elsewhere":
        return
    me, own = absent.me, ", ".join(absent.addresses[:4])
    name = f" ({', '.join(absent.resolved[:3])})" if absent.resolved not in ((), (me.master,)) else ""
    yield Finding.error(
        "master-address-not-here",
        f"rank 0 ({absent.host}): MASTER_ADDR {me.master}{name} is no address of this host, and rank 0 is here",
        evidence=(
            f"this host has {own or 'no address'}",
            f"connecting to {me.master}:{me.port}: {absent.why.outcome.value}",
        ),
        fix="set MASTER_ADDR to an address of this host on all hosts, or start rank 0 where that address is",
        steps=(step("export MASTER_ADDR={address}", address=absent.addresses[0]),) if absent.addresses else (),
    )


def store_slow(absent: Absent) -> Iterator[Finding]:
    """The store answers at once, and torch's own client was not through with it in time."""
    if absent.case != "slow":
        return
    me, took = absent.me, absent.lookup
    asked = (
        f"the name server took {took:.1f} s for the name of {absent.resolved[0]}" if took and absent.resolved else ""
    )
    yield Finding.error(
        "store-slow",
        f"rank {me.rank} ({absent.host}): the store at {me.master}:{me.port} answers, and torch was not through with it in "
        f"{absent.why.seconds:.0f} s",
        evidence=(asked,) if asked else (),
        fix="see whether the name server answers: torch asks it for the name of the address first",
        steps=(step("getent hosts {address}", address=absent.resolved[0] if absent.resolved else me.master),),
    )


def master_unreachable(absent: Absent) -> Iterator[Finding]:
    """A rank cannot reach the address of rank 0."""
    if absent.case != "unreachable":
        return
    me, why = absent.me, absent.why
    causes = {
        ConnectOutcome.REFUSED: ("refuses", "rank 0 does not run there, or not yet: see its output"),
        ConnectOutcome.TIMED_OUT: ("does not answer", "open the port in the firewall, or see whether that host is up"),
        ConnectOutcome.NO_ROUTE: ("cannot be routed to", "set MASTER_ADDR to an address in a network that all share"),
        ConnectOutcome.NO_NAME: (
            "is a name that is not found",
            "set MASTER_ADDR to an address, or name it in /etc/hosts",
        ),
    }
    what, fix = causes.get(why.outcome, causes[ConnectOutcome.TIMED_OUT])
    at = sorted({*absent.resolved} & {*absent.addresses, *filter(is_loopback, absent.resolved)})
    own = f"{at[0]} is this host itself" if at else ""
    if own and why.outcome is ConnectOutcome.REFUSED:
        what = f"{what}: {own}, and rank 0 is not on it"
        fix = "set MASTER_ADDR to an address of the host of rank 0, the same on all hosts"
    yield Finding.error(
        "master-unreachable",
        f"rank {me.rank} ({absent.host}): {absent.there}, where rank 0 should be, {what}",
        evidence=(f"a plain TCP connection: {why.outcome.value}, tried for {why.seconds:.1f} s",),
        fix=fix,
        steps=(
            step("timeout 5 bash -c '</dev/tcp/$0/$1' {host} {port} && echo reachable", host=me.master, port=me.port),
        ),
    )


def master_port_refused(absent: Absent) -> Iterator[Finding]:
    """Rank 0 is not allowed to listen on the master's port."""
    if absent.case == "refused":
        me = absent.me
        yield Finding.error(
            "master-port-refused",
            f"rank 0 ({absent.host}) cannot listen on {me.master}:{me.port}: {absent.why.detail}",
            fix="take another port",
            steps=(step("export MASTER_PORT={port}", port=max(free_port_like(me.port), 29500)),),
        )


def rank_zero_starting(absent: Absent) -> Iterator[Finding]:
    """Rank 0 runs, and did not serve its store before the deadline."""
    zero = absent.why.rank_zero
    if absent.case != "starting" or zero is None:
        return
    yield Finding.error(
        "rank-zero-starting",
        f"rank {absent.me.rank} ({absent.host}): rank 0 ({zero.host}) runs and is not ready: {zero.at[:60]}, {zero.seconds:.0f} s",
        evidence=(f"waited {absent.why.seconds:.0f} s for it, until the deadline",),
        fix="put the Python environment of that host on a local disk, or give the test more time",
        steps=(step("python -m dsdoctor comm --deadline 600"),),
    )


def rank_zero_missing(absent: Absent) -> Iterator[Finding]:
    """A store answers at the master's address, and rank 0 of this test is not there."""
    if absent.case != "no rank 0":
        return
    me = absent.me
    never = (
        "it ended before rank 0 of this job had written to it" if absent.why.ended else "rank 0 of this job never came"
    )
    yield Finding.error(
        "rank-zero-missing",
        f"rank {me.rank} ({absent.host}): a store answers at {me.master}:{me.port}, and {never}",
        evidence=(f"waited {absent.why.seconds:.0f} s",),
        fix="see the output of rank 0; if the port is another job's, take another one",
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
