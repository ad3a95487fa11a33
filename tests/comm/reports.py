"""Reports of tests of communication, written out: two healthy ones, a missing rank, a slow node, a bad pair, and large ones."""

from collections.abc import Iterable

from dsdoctor.comm.models import Claim, CommPhase, Mode, PhaseState
from dsdoctor.comm.results import (
    ConnectOutcome,
    Limit,
    Pace,
    PairTime,
    PhaseResult,
    Reach,
    Report,
    Speed,
    Stuck,
    ended,
    verdict,
)
from dsdoctor.core.finding import Finding, Step, step

MIB = 1 << 20
FACTORS = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1.0}
"""nccl-tests' factors from algbw to busbw; (n-1)/n for the others."""


def claim(rank: int, host: str, local_rank: int = 0) -> Claim:
    return Claim(
        rank=rank,
        world=4,
        local_rank=local_rank,
        host=host,
        pid=4100 + rank,
        address=f"10.200.0.{1 + rank}",
        port=40000 + rank,
        interface="eth0",
    )


def phase(
    which: CommPhase, said: str, *findings: Finding, state: PhaseState = PhaseState.OK, seconds: float = 0.4
) -> PhaseResult:
    return PhaseResult(phase=which, state=state, seconds=seconds, said=said, findings=findings)


def error(rule: str, title: str, *evidence: str, fix: str, steps: tuple[Step, ...] = ()) -> Finding:
    return Finding.error(rule, title, evidence=evidence, fix=fix, steps=steps)


def mesh(world: int, *, fast: float = 1.9e9, bad: Iterable[Reach] = ()) -> tuple[Reach, ...]:
    """Every direction reached, at a bandwidth that wavers a little; ``bad`` replaces some."""
    instead = {(reach.source, reach.target): reach for reach in bad}
    return tuple(
        instead.get((a, b))
        or Reach(
            source=a,
            target=b,
            outcome=ConnectOutcome.REACHED,
            seconds=0.002,
            bandwidth=fast * (1 + (a * 7 + b * 3) % 5 / 10),
        )
        for a in range(world)
        for b in range(world)
        if a != b
    )


def pairs(hosts: tuple[str, ...], *, slow: dict[str, float] | None = None) -> tuple[PairTime, ...]:
    """Every pair timed with 4 MiB: 2.4 GB/s within a host, 1.2 between; ``slow`` divides that of all pairs of a host."""
    found = []
    for a, source in enumerate(hosts):
        for b, target in enumerate(hosts[a + 1 :], start=a + 1):
            bandwidth = (2.4e9 if source == target else 1.2e9) * (1 + (a * 5 + b * 3) % 4 / 10)
            for host in {source, target} if source != target else ():
                bandwidth /= (slow or {}).get(host, 1.0)
            found.append(PairTime(source=a, target=b, size=4 * MIB, seconds=4 * MIB / bandwidth))
    return tuple(found)


def speed(op: str, size: int, seconds: float, world: int, *, spread: float = 1.2) -> Speed:
    algbw = size / seconds
    return Speed(
        op=op,
        size=size,
        seconds=seconds,
        p50=seconds * 0.95,
        p99=seconds * spread,
        algbw=algbw,
        busbw=algbw * FACTORS.get(op, lambda n: (n - 1) / n)(world),
        slowest=world - 1,
        medians=tuple(seconds * (0.9 + 0.1 * (rank + 1) / world) for rank in range(world)),
    )


def speeds(world: int, *, times: float = 1.0) -> tuple[Speed, ...]:
    """Three ops at five sizes: 40 µs of latency, 1.5 GB/s; ``times`` makes all of it slower."""
    return tuple(
        speed(op, size, times * weight * (4e-5 + size / 1.5e9), world)
        for op, weight in (("all_reduce", 1.8), ("all_gather", 1.0), ("broadcast", 1.2))
        for size in (8, 1024, 64 * 1024, MIB, 16 * MIB)
    )


def paces(world: int, *, slow: Iterable[int] = ()) -> tuple[Pace, ...]:
    return tuple(
        Pace(
            rank=rank,
            compute=0.031 if rank in slow else 0.010 + rank % 3 * 0.0004,
            waited=0.0002 if rank in slow else 0.021,
        )
        for rank in range(world)
    )


def report(hosts: tuple[str, ...], phases: tuple[PhaseResult, ...], **changes: object) -> Report:
    """A whole report; the verdict follows from the phases."""
    at = dict.fromkeys(hosts, 0)
    claims = []
    for rank, host in enumerate(hosts):
        claims.append(claim(rank, host, at[host]))
        at[host] += 1
    facts: dict[str, object] = {
        "world": len(hosts),
        "backend": "gloo",
        "launcher": "torchrun",
        "mode": Mode.DEFAULT,
        "verdict": verdict(phases, world=len(hosts), hosts=hosts, backend="gloo"),
        "state": ended(phases),
        "seconds": 9.3,
        "phases": phases,
        "ranks": tuple(claims),
        "reaches": () if "reaches" in changes else mesh(len(hosts)),
        "exchanges": 120,
        "hosts": hosts,
        "versions": {"torch": "2.13.0", "python": "3.11.2"},
    }
    return Report(**{**facts, **changes})  # type: ignore[arg-type]


def good_phases(world: int, hosts: int) -> tuple[PhaseResult, ...]:
    ranks, on = f"{world} of {world} ranks", f"{hosts} host{'s' if hosts > 1 else ''}"
    return (
        phase(CommPhase.LOCAL, f"{world} ranks looked around", seconds=0.12),
        phase(CommPhase.RENDEZVOUS, f"{ranks} on {on}, 0.4 s apart", seconds=1.2),
        phase(CommPhase.SAME, "torch 2.13.0, Python 3.11.2 and 14 more are the same", seconds=0.01),
        phase(CommPhase.MESH, f"{world * (world - 1)} of {world * (world - 1)} directions", seconds=0.3),
        phase(CommPhase.RIGHT, "120 exchanges of 14 kinds are right", seconds=1.9),
        phase(CommPhase.SPEED, "all_reduce of 16 MiB at 0.8 GB/s", seconds=4.1),
        phase(CommPhase.DEEPSPEED, "deepspeed is not installed", state=PhaseState.SKIPPED, seconds=0.0),
    )


LOOPBACK = Limit(bandwidth=4.1e9, link="loopback", because="a copy of 64 MiB in memory, timed here")
TWO_HOSTS = ("nodea", "nodea", "nodeb", "nodeb")
FOUR_HOSTS = ("nodea", "nodeb", "nodec", "noded")


def healthy_2() -> Report:
    """Two ranks on one host, quick: nothing was timed."""
    hosts = ("nodea", "nodea")
    return report(hosts, good_phases(2, 1)[:5], mode=Mode.QUICK, seconds=3.4)


def healthy_4() -> Report:
    """Four ranks on two hosts, all of it timed."""
    return report(
        TWO_HOSTS,
        good_phases(4, 2),
        speeds=speeds(4),
        pairs=pairs(TWO_HOSTS),
        paces=paces(4),
        limit=LOOPBACK,
    )


def missing_rank() -> Report:
    """Rank 3 never came; everything after the rendezvous was skipped."""
    gone = error(
        "rank-missing",
        "rank 3 (nodeb) never arrived within 30 s; 3 of 4 are here",
        "ranks 0-2 arrived 0.4 s apart, on nodea and nodeb",
        "nodeb: the other rank of this host, 2, is here: the host is up and reaches nodea:29500",
        fix="look at what rank 3 wrote before it died",
        steps=(step("ssh nodeb ps -ef | grep dsdoctor.comm"),),
    )
    phases = (
        phase(CommPhase.LOCAL, "3 ranks looked around"),
        phase(CommPhase.RENDEZVOUS, "3 of 4 ranks within 30 s", gone, state=PhaseState.BROKEN, seconds=30.1),
        phase(CommPhase.MESH, "not all ranks are here", state=PhaseState.SKIPPED),
    )
    whole = report(TWO_HOSTS, phases, reaches=(), exchanges=0, seconds=31.0)
    return Report(**{**vars(whole), "ranks": whole.ranks[:3]})


def slow_node() -> Report:
    """nodec's link is 60 times slower than the others', and nodec computes slowly too."""
    slow = Finding.warning(
        "slow-node",
        "all pairs of nodec (rank 2) are slow: 21 MB/s, the others' median is 1320 MB/s",
        evidence=("pairs (0,2) (1,2) (2,3); no other pair is slow, so it is the node and not a path",),
        fix="look at the link of nodec",
        steps=(step("ssh nodec ethtool eth0"),),
    )
    phases = (
        *good_phases(4, 4)[:5],
        phase(CommPhase.SPEED, "nodec is slow", slow, state=PhaseState.SLOW, seconds=4.1),
    )
    return report(
        FOUR_HOSTS,
        phases,
        speeds=speeds(4, times=30),
        pairs=pairs(FOUR_HOSTS, slow={"nodec": 60.0}),
        paces=paces(4, slow=(2,)),
        limit=Limit(bandwidth=1.25e9, link="eth0 at 10000 Mbit/s", because="the slowest of 4 hosts, by its driver"),
    )


def bad_pair(why: str = "rank 1 (nodeb) cannot reach rank 3 (noded): timed out") -> Report:
    """One direction of one pair does not get through, and a rank is stuck because of it."""
    cut = error(
        "path-cut",
        why,
        "10.200.0.2 -> 10.200.0.4 port 40003 timed out after 3.0 s; the way back works",
        fix="let every port between the nodes through, both ways",
        steps=(step("sudo iptables -I INPUT -s 10.200.0.0/24 -j ACCEPT"),),
    )
    lost = Reach(source=1, target=3, outcome=ConnectOutcome.TIMED_OUT, address="10.200.0.4", seconds=3.0)
    phases = (
        *good_phases(4, 4)[:3],
        phase(CommPhase.MESH, "11 of 12 directions", cut, state=PhaseState.BROKEN, seconds=3.2),
        phase(CommPhase.RIGHT, "ranks do not all reach each other", state=PhaseState.SKIPPED),
    )
    stuck = Stuck(rank=0, at="all_reduce", step=3, seconds=12.0, process="T", stack=('File "a.py", line 1 in f',))
    return report(FOUR_HOSTS, phases, reaches=mesh(4, bad=[lost]), stuck=(stuck,), wrong=(2,))


def many(hosts: int, each: int = 8, *, bad_nodes: bool = True) -> Report:
    """``hosts`` x ``each`` ranks; where ``bad_nodes``, one node is slow and one host cannot be reached by another."""
    names = tuple(f"node{number:02d}" for number in range(hosts) for _ in range(each))
    lost = [
        Reach(source=a, target=b, outcome=ConnectOutcome.REFUSED, address=f"10.0.0.{b}", seconds=0.001)
        for a in range(each)
        for b in range(2 * each, 3 * each)
    ]
    return report(
        names,
        good_phases(len(names), hosts),
        reaches=mesh(len(names), bad=lost if bad_nodes else ()),
        pairs=pairs(names, slow={f"node{hosts - 2:02d}": 30.0} if bad_nodes else None),
        paces=paces(len(names), slow=range(each * (hosts - 2), each * (hosts - 1)) if bad_nodes else ()),
        speeds=speeds(len(names)),
        limit=LOOPBACK,
    )
