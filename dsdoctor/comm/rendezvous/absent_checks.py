"""A rank that did not reach the store of rank 0 -> why. Judges, never looks."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.models import Rank
from dsdoctor.comm.rendezvous.store import Unreached
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding, Fix, Severity


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that did not reach the board: itself, and why."""

    me: Rank
    host: str
    why: Unreached


def master_port_in_use(absent: Absent) -> Iterator[Finding]:
    """Another program listens on the master's port.

    Rank 0 cannot listen there, and the other ranks talk to a stranger that never answers: torch waits without any limit. 29500
    is everybody's default, so the second job on a node meets the first one."""
    me, why = absent.me, absent.why
    if not why.taken and why.outcome not in {ConnectOutcome.STRANGER, ConnectOutcome.SILENT}:
        return
    if why.token_missing or (why.detail and not why.taken):
        return
    said = f'; it says "{why.banner}"' if why.banner else ""
    who = why.listener or "a program"
    yield Finding(
        rule="master-port-in-use",
        severity=Severity.ERROR,
        title=f"rank {me.rank} ({absent.host}): {who} already listens on {me.master}:{me.port} and is no store of torch{said}",
        evidence=(
            f"it {why.outcome.value}" if why.outcome is ConnectOutcome.STRANGER else "it accepts and does not answer",
        ),
        fix=Fix(
            text="end it, or take another port",
            commands=(f"ss -ltnp sport = :{me.port}", f"export MASTER_PORT={free_port_like(me.port)}"),
        ),
    )


def master_unreachable(absent: Absent) -> Iterator[Finding]:
    """A rank cannot reach the address of rank 0.

    Refused: the host is there and nobody listens, so rank 0 was not started, died, or listens elsewhere. Timed out: a firewall
    drops the packets, or the host is down. No route: the address is not of a network that this host knows. A name that is not
    found: MASTER_ADDR is misspelt, or known on some hosts only."""
    me, why = absent.me, absent.why
    causes = {
        ConnectOutcome.REFUSED: ("refuses", "rank 0 does not run there, or not yet: see its output"),
        ConnectOutcome.TIMED_OUT: ("does not answer", "open the port in the firewall, or see whether that host is up"),
        ConnectOutcome.NO_ROUTE: (
            "cannot be routed to",
            "set MASTER_ADDR to an address in a network that all hosts share",
        ),
        ConnectOutcome.NO_NAME: (
            "is a name that is not found",
            "set MASTER_ADDR to an address, or put the name into /etc/hosts",
        ),
    }
    if why.taken or why.outcome not in causes:
        return
    what, fix = causes[why.outcome]
    yield Finding(
        rule="master-unreachable",
        severity=Severity.ERROR,
        title=f"rank {me.rank} ({absent.host}): {me.master}:{me.port}, where rank 0 should be, {what}",
        evidence=(f"a plain TCP connection: {why.outcome.value}, tried for {why.seconds:.1f} s",),
        fix=Fix(text=fix, commands=(f"timeout 5 bash -c '</dev/tcp/{me.master}/{me.port}' && echo reachable",)),
    )


def master_port_refused(absent: Absent) -> Iterator[Finding]:
    """Rank 0 may not listen on the master's port.

    Ports below 1024 are root's; a sandbox may forbid others."""
    if absent.why.detail and not absent.why.taken:
        me = absent.me
        yield Finding(
            rule="master-port-refused",
            severity=Severity.ERROR,
            title=f"rank 0 ({absent.host}) cannot listen on {me.master}:{me.port}: {absent.why.detail}",
            fix=Fix(text="take another port", commands=(f"export MASTER_PORT={max(free_port_like(me.port), 29500)}",)),
        )


def rank_zero_missing(absent: Absent) -> Iterator[Finding]:
    """A store answers at the master's address, and rank 0 of this test is not there.

    Under torchrun the agent serves the store, so the others come and wait: rank 0 died or was never started. Or the port belongs
    to another job's store."""
    if not absent.why.token_missing:
        return
    me = absent.me
    yield Finding(
        rule="rank-zero-missing",
        severity=Severity.ERROR,
        title=f"rank {me.rank} ({absent.host}): a store answers at {me.master}:{me.port}, and rank 0 of this job never came",
        evidence=(f"waited {absent.why.seconds:.0f} s",),
        fix=Fix(text="see the output of rank 0; if the port is another job's, take another one"),
    )


def free_port_like(port: int) -> int:
    """Another port of the same kind, to be proposed.

    >>> free_port_like(29500), free_port_like(65535)
    (29501, 65534)
    """
    return port + 1 if port < 65535 else port - 1


CHECKS = (master_port_in_use, master_unreachable, master_port_refused, rank_zero_missing)
