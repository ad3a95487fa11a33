"""Claims -> who did not come, who came twice, who counts otherwise. Judges, never looks."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsdoctor.comm.nouns import Claim, Outcome, Rank
from dsdoctor.comm.store import Unreached
from dsdoctor.finding import Finding, Fix, Severity

MOST_NAMED = 12
LATE = 15.0
"""Seconds between the first and the last rank from which on their start is worth a word: imports take some."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Who came: ``me`` is rank 0 (or, where rank 0 was not reached, the one that looks), ``claims`` in the order in which they
    came. ``last_words`` are what a rank wrote to the common folder before it could reach the store."""

    me: Rank
    claims: tuple[Claim, ...]
    waited: float
    last_words: dict[int, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """The numbers that nobody claimed."""
        there = {claim.rank for claim in self.claims}
        return tuple(rank for rank in range(self.me.world) if rank not in there)


def rank_missing(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank did not come to the rendezvous.

    Every rank writes its number, host and process id to the store of rank 0 as soon as it runs. One that did not was never
    started, died before, or cannot reach the master. torch only says how many clients joined. Look at the launcher's output of
    that host first; run `python -m dsdoctor comm` there by itself; try the master's port from there."""
    missing = arrivals.missing
    if not missing:
        return
    me = arrivals.me
    here = len({claim.rank for claim in arrivals.claims if claim.rank < me.world})
    evidence = [f"{here} of {me.world} ranks came in {arrivals.waited:.1f} s: {_places(arrivals.claims)}"]
    evidence += [f"rank {rank} wrote: {words}" for rank, words in sorted(arrivals.last_words.items())]
    hosts = {me.hosts[rank] for rank in missing if rank < len(me.hosts)}
    commands = [f"ssh {host} python -m dsdoctor comm --quick" for host in sorted(hosts)[:3]]
    yield Finding(
        rule="rank-missing",
        severity=Severity.ERROR,
        title=f"{named(missing, me.hosts)} never came; waited {arrivals.waited:.0f} s at {me.master}:{me.port}",
        evidence=tuple(evidence),
        fix=Fix(
            text="see in the launcher's output whether it was started there; if it was, its own lines say why it cannot come",
            commands=tuple(commands) or (f"timeout 5 bash -c '</dev/tcp/{me.master}/{me.port}' && echo reachable",),
        ),
    )


def rank_duplicated(arrivals: Arrivals) -> Iterator[Finding]:
    """Two processes say that they are the same rank.

    Two jobs share one MASTER_ADDR and MASTER_PORT, or a launcher was started on every node with the same --node_rank, or RANK
    was exported in a shell and inherited. Give each job a port of its own and each node its own --node_rank."""
    claimed: dict[int, list[Claim]] = defaultdict(list)
    for claim in arrivals.claims:
        claimed[claim.rank].append(claim)
    for rank, several in sorted(claimed.items()):
        if len(several) > 1:
            yield Finding(
                rule="rank-duplicated",
                severity=Severity.ERROR,
                title=f"{len(several)} processes say that they are rank {rank}: "
                + ", ".join(f"pid {claim.pid} on {claim.host}" for claim in several[:MOST_NAMED]),
                evidence=(f"nobody is {named(arrivals.missing, ())}",) if arrivals.missing else (),
                fix=Fix(
                    text="give every process a RANK of its own: one --node_rank for each node, one port for each job",
                    commands=(
                        "env | grep -E '^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|SLURM_PROCID|OMPI_COMM_WORLD_RANK)'",
                    ),
                ),
            )


def world_size_differs(arrivals: Arrivals) -> Iterator[Finding]:
    """The ranks do not agree how many they are.

    One launcher was started with another --nnodes or --nproc_per_node, or WORLD_SIZE is left over in a shell. torch waits until
    its time is up and says how many clients joined."""
    by_world: dict[int, list[Claim]] = defaultdict(list)
    for claim in arrivals.claims:
        by_world[claim.world].append(claim)
    if len(by_world) < 2 and all(claim.world == arrivals.me.world for claim in arrivals.claims):
        return
    by_world.setdefault(arrivals.me.world, [])
    told = sorted(by_world.items(), key=lambda item: len(item[1]))
    yield Finding(
        rule="world-size-differs",
        severity=Severity.ERROR,
        title="; ".join(f"world size {world}: {_places(claims) or 'rank 0'}" for world, claims in told),
        fix=Fix(text="start every node's launcher with the same --nnodes and --nproc_per_node, and unset WORLD_SIZE"),
    )


def gpu_shared(arrivals: Arrivals) -> Iterator[Finding]:
    """Two ranks would use the same GPU.

    NCCL refuses that, and does not name the ranks. LOCAL_RANK is the same for both, or CUDA_VISIBLE_DEVICES shows both the same
    device."""
    by_gpu: dict[tuple[str, str], list[Claim]] = defaultdict(list)
    for claim in arrivals.claims:
        if claim.gpu:
            by_gpu[claim.host, claim.gpu].append(claim)
    for (host, gpu), several in by_gpu.items():
        if len({claim.rank for claim in several}) > 1:
            ranks = ", ".join(f"{claim.rank} (LOCAL_RANK {claim.local_rank})" for claim in several)
            yield Finding(
                rule="gpu-shared",
                severity=Severity.ERROR,
                title=f"ranks {ranks} on {host} would use the same GPU {gpu}",
                fix=Fix(text="start as many ranks as there are GPUs, each with a LOCAL_RANK of its own"),
            )


def rank_arrives_late(arrivals: Arrivals) -> Iterator[Finding]:
    """A rank came much later than the others.

    Slow file systems (imports over a network), a node that is busy, or a launcher that starts nodes one by one. Training
    starts when the last one is there."""
    times = sorted((claim.arrived, claim) for claim in arrivals.claims) if not arrivals.missing else []
    if len(times) < 2 or times[-1][0] - times[0][0] < LATE:
        return
    last = times[-1][1]
    yield Finding(
        rule="rank-arrives-late",
        severity=Severity.WARNING,
        title=f"rank {last.rank} ({last.host}) came {times[-1][0] - times[0][0]:.0f} s after the first",
        evidence=(f"it took {last.arrived - last.started:.1f} s from its own start to the rendezvous",),
        fix=Fix(text="put the Python environment on a local disk, and see what else runs on that host"),
    )


def named(ranks: tuple[int, ...], hosts: tuple[str, ...]) -> str:
    """Ranks in words, with hosts where these are known.

    >>> named((1,), ("a", "b")), named((1, 2, 3), ())
    ('rank 1 (b)', 'ranks 1-3')
    >>> named((0, 2, 3), ("a", "a", "b", "b"))
    'ranks 0 (a), 2-3 (b)'
    """
    parts: list[tuple[int, int, str]] = []
    for rank in ranks:
        host = hosts[rank] if rank < len(hosts) else ""
        if parts and parts[-1][1] == rank - 1 and parts[-1][2] == host:
            parts[-1] = (parts[-1][0], rank, host)
        else:
            parts.append((rank, rank, host))
    spans = [f"{first}-{last}" if last > first else str(first) for first, last, _ in parts]
    shown = [span + (f" ({host})" if host else "") for span, (_, _, host) in zip(spans, parts, strict=True)]
    more = [f"and {len(shown) - MOST_NAMED} more"] if len(shown) > MOST_NAMED else []
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join(shown[:MOST_NAMED] + more)


def _places(claims: tuple[Claim, ...] | list[Claim]) -> str:
    hosts = {claim.rank: claim.host for claim in claims}
    if not hosts:
        return ""
    by_rank = tuple(hosts.get(rank, "") for rank in range(max(hosts) + 1))
    return named(tuple(sorted(hosts)), by_rank)


CHECKS = (rank_duplicated, world_size_differs, gpu_shared, rank_missing, rank_arrives_late)


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A rank that did not reach the board: itself, and why."""

    me: Rank
    host: str
    why: Unreached


def master_port_occupied(absent: Absent) -> Iterator[Finding]:
    """Another program listens on the master's port.

    Rank 0 cannot listen there, and the other ranks talk to a stranger that never answers: torch waits without any limit. 29500
    is everybody's default, so the second job on a node meets the first one."""
    me, why = absent.me, absent.why
    if not why.taken and why.outcome not in {Outcome.STRANGER, Outcome.SILENT}:
        return
    if why.token_missing:
        return
    said = f'; it says "{why.banner}"' if why.banner else ""
    who = why.listener or "a program"
    yield Finding(
        rule="master-port-occupied",
        severity=Severity.ERROR,
        title=f"rank {me.rank} ({absent.host}): {who} already listens on {me.master}:{me.port} and is no store of torch{said}",
        evidence=(f"it {why.outcome.value}" if why.outcome is Outcome.STRANGER else "it accepts and does not answer",),
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
        Outcome.REFUSED: ("refuses", "rank 0 does not run there, or not yet: see its output"),
        Outcome.TIMED_OUT: ("does not answer", "open the port in the firewall, or see whether that host is up"),
        Outcome.NO_ROUTE: ("cannot be routed to", "set MASTER_ADDR to an address in a network that all hosts share"),
        Outcome.NO_NAME: (
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


ABSENT_CHECKS = (master_port_occupied, master_unreachable, rank_zero_missing)
