"""A rank that did not reach the store of rank 0 -> why. Judges, never looks."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.models import Rank
from dsdoctor.comm.rendezvous.store import Unreached
from dsdoctor.comm.results import ConnectOutcome
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import instead, step


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that did not reach the board: itself, and why."""

    me: Rank
    host: str
    why: Unreached


def master_port_in_use(absent: Absent) -> Iterator[Finding]:
    """Another program listens on the master's port already.

    29500 is the default of every launcher: two jobs on one node collide, and a job that was killed may have left a
    process behind.

    Why it matters: rank 0 cannot listen there and stops with EADDRINUSE. Every other rank connects to that program and
    waits for an answer, with torch without any time limit.

    How to fix it: end that process if it is left over, or use another port.

        $ ss -ltnp sport = :29500
        $ export MASTER_PORT=29501
        $ deepspeed --master_port 29501 ...

    Since: 0.1
    """
    me, why = absent.me, absent.why
    if not why.taken and why.outcome not in {ConnectOutcome.STRANGER, ConnectOutcome.SILENT}:
        return
    if why.token_missing or (why.detail and not why.taken):
        return
    said = f'; it says "{why.banner}"' if why.banner else ""
    who = why.listener or "a program"
    yield Finding.error(
        "master-port-in-use",
        f"rank {me.rank} ({absent.host}): {who} already listens on {me.master}:{me.port} and is no store of torch{said}",
        evidence=(
            f"it {why.outcome.value}" if why.outcome is ConnectOutcome.STRANGER else "it accepts and does not answer",
        ),
        fix="end it, or take another port",
        steps=(
            step("ss -ltnp sport = :{port}", port=me.port),
            instead("export MASTER_PORT={port}", port=free_port_like(me.port)),
        ),
    )


def master_unreachable(absent: Absent) -> Iterator[Finding]:
    """A rank cannot reach the address of rank 0.

    Refused: the host is there and nothing listens, so rank 0 was not started, died, or listens elsewhere. Timed out: a
    firewall drops the packets, or the host is down. No route: the address is in no network that this host knows. Name
    not found: MASTER_ADDR is misspelt, or known on some hosts only.

    Why it matters: the rank cannot join the job, and all others wait for it.

    How to fix it: start rank 0, open the port, or set MASTER_ADDR to an address that all hosts can reach. Then try a
    plain connection.

        $ timeout 5 bash -c '</dev/tcp/MASTER/PORT' && echo reachable

    Since: 0.1
    """
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
    if why.taken or why.outcome not in causes:
        return
    what, fix = causes[why.outcome]
    yield Finding.error(
        "master-unreachable",
        f"rank {me.rank} ({absent.host}): {me.master}:{me.port}, where rank 0 should be, {what}",
        evidence=(f"a plain TCP connection: {why.outcome.value}, tried for {why.seconds:.1f} s",),
        fix=fix,
        steps=(
            step("timeout 5 bash -c '</dev/tcp/$0/$1' {host} {port} && echo reachable", host=me.master, port=me.port),
        ),
    )


def master_port_refused(absent: Absent) -> Iterator[Finding]:
    """Rank 0 is not allowed to listen on the master's port.

    Ports below 1024 are reserved for root; a sandbox may forbid others.

    Why it matters: without rank 0's store no rank can join.

    How to fix it: use another port.

        $ export MASTER_PORT=29500

    Since: 0.1
    """
    if absent.why.detail and not absent.why.taken:
        me = absent.me
        yield Finding.error(
            "master-port-refused",
            f"rank 0 ({absent.host}) cannot listen on {me.master}:{me.port}: {absent.why.detail}",
            fix="take another port",
            steps=(step("export MASTER_PORT={port}", port=max(free_port_like(me.port), 29500)),),
        )


def rank_zero_missing(absent: Absent) -> Iterator[Finding]:
    """A store answers at the master's address, and rank 0 of this test is not there.

    Why it matters: under torchrun the agent serves the store, so the other ranks connect and wait. Rank 0 died or was
    never started, or the port belongs to another job's store.

    How to fix it: look at the output of rank 0. If the port is another job's, use another one.

    Since: 0.1
    """
    if not absent.why.token_missing:
        return
    me = absent.me
    yield Finding.error(
        "rank-zero-missing",
        f"rank {me.rank} ({absent.host}): a store answers at {me.master}:{me.port}, and rank 0 of this job never came",
        evidence=(f"waited {absent.why.seconds:.0f} s",),
        fix="see the output of rank 0; if the port is another job's, take another one",
    )


def free_port_like(port: int) -> int:
    """Another port of the same kind, to be proposed.

    >>> free_port_like(29500), free_port_like(65535)
    (29501, 65534)
    """
    return port + 1 if port < 65535 else port - 1


CHECKS = (master_port_in_use, master_unreachable, master_port_refused, rank_zero_missing)
