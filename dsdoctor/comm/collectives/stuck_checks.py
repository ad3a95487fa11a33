"""Where every rank was when an exchange was ended -> which rank died, stopped, vanished or stayed behind. Judges, never looks.

When a single rank fails, all others fail too, at once or later, and their errors do not name it. So the causes are checked
in the order in which they explain each other; the errors of the others are only evidence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.comm.mesh.checks import CHECKS as MESH_CHECKS
from dsdoctor.comm.mesh.matrix import Mesh
from dsdoctor.comm.models import Claim
from dsdoctor.comm.rank_names import named
from dsdoctor.comm.results import ConnectOutcome, Reach, Stuck
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import step
from dsdoctor.core.processes import LETTERS

STOPPED = frozenset("Tt")
"""The kernel's letters for a process that a signal or a debugger has stopped."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """An exchange that did not end well. ``stuck`` are the ranks that reported where they were, ``silent`` those that did
    not and how a connection to them ended; ``reaches`` are the connections that were tried again after it; ``waited`` is
    how long nothing moved."""

    what: str
    claims: tuple[Claim, ...]
    stuck: tuple[Stuck, ...]
    silent: dict[int, ConnectOutcome]
    reaches: tuple[Reach, ...] = ()
    waited: float = 0.0
    backend: str = "gloo"

    def who(self, rank: int) -> str:
        """A rank with host and pid."""
        claim = next((claim for claim in self.claims if claim.rank == rank), None)
        return f"rank {rank} ({claim.host}, pid {claim.pid})" if claim else f"rank {rank}"

    def host(self, rank: int) -> str:
        """The host of a rank."""
        return next((claim.host for claim in self.claims if claim.rank == rank), "that host")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return tuple(self.host(rank) for rank in range(max((claim.rank for claim in self.claims), default=-1) + 1))

    @property
    def dead(self) -> tuple[int, ...]:
        """Ranks whose process is gone: their own supervisor reports it, or their host refuses the port they listened on."""
        told = {stuck.rank for stuck in self.stuck if stuck.ended}
        return tuple(
            sorted(told | {rank for rank, outcome in self.silent.items() if outcome is ConnectOutcome.REFUSED})
        )

    @property
    def stopped(self) -> tuple[int, ...]:
        """Ranks whose process is stopped, or accepts a connection and does not answer."""
        told = {stuck.rank for stuck in self.stuck if stuck.process in STOPPED}
        quiet = {
            rank for rank, outcome in self.silent.items() if outcome in {ConnectOutcome.SILENT, ConnectOutcome.REACHED}
        }
        return tuple(sorted(told | quiet))

    @property
    def cut(self) -> tuple[int, ...]:
        """Ranks whose host does not answer any more."""
        gone = {ConnectOutcome.TIMED_OUT, ConnectOutcome.NO_ROUTE, ConnectOutcome.NO_NAME}
        return tuple(sorted(rank for rank, outcome in self.silent.items() if outcome in gone))

    @property
    def behind(self) -> tuple[Stuck, ...]:
        """Ranks that have not begun the exchange in which the others wait."""
        living = [stuck for stuck in self.stuck if not stuck.ended and stuck.process not in STOPPED]
        most = max((stuck.step for stuck in living), default=0)
        return tuple(stuck for stuck in living if stuck.step < most and not stuck.error)


def rank_died(trouble: Trouble) -> Iterator[Finding]:
    """The process of a rank ended in the middle of the test.

    Why it matters: the other ranks only see closed connections. SIGKILL is most often the kernel's out-of-memory killer
    or the scheduler; any other exit status means that a library gave up, and its last lines are in that rank's log.

    How to fix it: see on its host what ended it.

        $ dmesg -T | grep -iE 'killed process|oom|xid' | tail

    Since: 0.1
    """
    for rank in trouble.dead:
        told = next((stuck for stuck in trouble.stuck if stuck.rank == rank and stuck.ended), None)
        how = told.ended if told else "its host answers, and nothing listens on its port any more"
        where = f" in {told.at}" if told else ""
        yield Finding.error(
            "rank-died",
            f"{trouble.who(rank)} died{where} during {trouble.what}: {how}",
            evidence=_others(trouble, {rank}),
            fix=f"see on {trouble.host(rank)} what ended it",
            steps=(step("dmesg -T | grep -iE 'killed process|oom|xid' | tail"),),
        )


def rank_stopped(trouble: Trouble) -> Iterator[Finding]:
    """The process of a rank is there and does not run.

    It was stopped by a signal (Ctrl-Z in a terminal, a debugger, a scheduler that suspends jobs), or its host is
    frozen: the kernel still accepts connections, the process does not answer.

    Why it matters: all other ranks wait for it.

    How to fix it: let it continue, or find out what stopped it.

        $ ssh HOST 'ps -o pid,stat,wchan:32,args -C python; pkill -CONT -f dsdoctor.comm'

    Since: 0.1
    """
    for rank in trouble.stopped:
        told = next((stuck for stuck in trouble.stuck if stuck.rank == rank), None)
        how = LETTERS.get(told.process, "") if told else "its port accepts connections, and nothing answers"
        yield Finding.error(
            "rank-stopped",
            f"{trouble.who(rank)} does not run during {trouble.what}: {how}",
            evidence=_others(trouble, {rank}),
            fix="let it continue, or find out what stopped it",
            steps=(
                step(
                    "ssh {host} 'ps -o pid,stat,wchan:32,args -C python; pkill -CONT -f dsdoctor.comm'",
                    host=trouble.host(rank),
                ),
            ),
        )


def supervisor_stopped(who: dict[int, str], states: dict[int, str]) -> Iterator[Finding]:
    """The first process of a rank is stopped, while the rank itself exchanges well.

    It was stopped by Ctrl-Z, a debugger or a scheduler.

    Why it matters: that is the process that the launcher started. It will not end, so the launcher waits for it.

    How to fix it: let it continue, or find out what stopped it.

        $ pkill -CONT -f dsdoctor.comm

    Since: 0.1
    """
    for rank, letter in sorted(states.items()):
        if letter in STOPPED:
            yield Finding.error(
                "supervisor-stopped",
                f"{who[rank]}: the process that the launcher started is {LETTERS[letter]}; the launcher will wait for it",
                fix="let it continue, or find out what stopped it",
                steps=(step("pkill -CONT -f dsdoctor.comm"),),
            )


def host_vanished(trouble: Trouble) -> Iterator[Finding]:
    """A host that was reached before is not reached any more.

    The link went down in the middle of the test, a firewall began to drop, or the host died. Where the host of rank 0
    reaches none of several others any more, it is itself the one that is cut off.

    Why it matters: the ranks of that host are lost to the job, and all others wait for them.

    How to fix it: see whether the host is up, and look at its link and at the switch.

        $ ping -c 3 HOST
        $ ip -br link

    Since: 0.1
    """
    lost = sorted({trouble.host(rank) for rank in trouble.cut})
    if len(lost) > 1 and set(lost) == set(trouble.hosts) - {trouble.host(0)}:
        yield Finding.error(
            "host-vanished",
            f"{trouble.host(0)} with rank 0 reaches none of the other {len(lost)} hosts any more, during {trouble.what}",
            evidence=tuple(f"{host}: {trouble.silent[rank].value}" for rank, host in _one_each(trouble))[:4],
            fix=f"look at the link of {trouble.host(0)} and at the switch",
            steps=(step("ip -br link"),),
        )
        return
    for host in lost:
        ranks = tuple(rank for rank in trouble.cut if trouble.host(rank) == host)
        outcome = trouble.silent[ranks[0]]
        yield Finding.error(
            "host-vanished",
            f"{host} with {named(ranks, ())} was there and is not reached any more, during {trouble.what}: "
            f"{outcome.value}",
            evidence=_others(trouble, set(ranks)),
            fix="see whether it is up, and look at its link and at the switch",
            steps=(step("ping -c 3 {host}", host=host),),
        )


def _one_each(trouble: Trouble) -> list[tuple[int, str]]:
    """One rank of each host that is cut off."""
    return [(rank, host) for host, rank in {trouble.host(rank): rank for rank in trouble.cut}.items()]


def link_cut(trouble: Trouble) -> Iterator[Finding]:
    """An exchange hangs because two hosts do not reach each other any more.

    All ranks are alive; those of two hosts cannot connect. The findings of the repeated mesh say in which direction."""
    if trouble.dead or trouble.stopped or trouble.cut or not trouble.reaches:
        return
    mesh = Mesh(trouble.claims, trouble.reaches)
    for check in MESH_CHECKS:
        yield from check(mesh)


def rank_behind(trouble: Trouble) -> Iterator[Finding]:
    """A rank has not begun the exchange in which all the others wait for it.

    Why it matters: it computes, loads, or waits for a device, and no other rank can continue without it.

    How to fix it: read its stack in the finding: it says what the rank waits for. A device that does not answer shows
    as state D.

    Since: 0.1
    """
    if trouble.dead or trouble.stopped or trouble.cut:
        return
    for behind in trouble.behind:
        ahead = next(other for other in trouble.stuck if other.step > behind.step)
        yield Finding.error(
            "rank-behind",
            f"{trouble.who(behind.rank)} is still in {behind.at} ({LETTERS.get(behind.process, 'alive')}), while rank {ahead.rank} "
            f"waits in {ahead.at}",
            evidence=behind.stack[:6],
            fix="its stack says what it waits for; a device that does not answer shows as state D",
        )


def exchange_hangs(trouble: Trouble) -> Iterator[Finding]:
    """All ranks are alive and in the same exchange, plain TCP between them works, and nothing moves.

    Why it matters: the library's own transport is at fault: the interface it chose, InfiniBand, peer-to-peer copies
    through PCIe (IOMMU, ACS) or shared memory. The phase "where it breaks" switches them off one after the other.

    How to fix it: look at the interface that the library chose.

        $ python -m dsdoctor comm --full
        $ export NCCL_DEBUG=INFO

    Since: 0.1
    """
    if trouble.dead or trouble.stopped or trouble.cut or trouble.behind or any(link_cut(trouble)):
        return
    waiting = trouble.stuck
    if not waiting or any(stuck.error for stuck in waiting):
        # the others then wait for a rank whose exchange was refused
        return
    yield Finding.error(
        "exchange-hangs",
        f"{named(tuple(sorted(stuck.rank for stuck in waiting)), trouble.hosts)} hang in {waiting[0].at} "
        f"({trouble.backend}), and plain TCP between them works",
        evidence=(f"nothing moved for {trouble.waited:.0f} s",) + waiting[0].stack[:4],
        fix="look at the interface the library chose",
        steps=(step("python -m dsdoctor comm --full"), step("export NCCL_DEBUG=INFO")),
    )


def exchange_fails(trouble: Trouble) -> Iterator[Finding]:
    """A library refused or broke off an exchange, and no rank died or vanished.

    Why it matters: training would fail in the same place. The first error tells most.

    How to fix it: read that rank's log; `diagnose` knows the common messages.

        $ python -m dsdoctor comm --quick --out comm-out
        $ python -m dsdoctor diagnose comm-out/rank-00000.log

    Since: 0.1
    """
    if trouble.dead or trouble.stopped or trouble.cut or trouble.behind:
        return
    failed = [stuck for stuck in trouble.stuck if stuck.error]
    if not failed:
        return
    first = min(failed, key=lambda stuck: (stuck.step, "Connection closed" in (stuck.error or ""), stuck.rank))
    yield Finding.error(
        "exchange-fails",
        f"{trouble.who(first.rank)}: {first.at}: {_line(first.error)}",
        evidence=tuple(
            f"rank {stuck.rank} in {stuck.at}: {_line(stuck.error)}" for stuck in failed if stuck is not first
        )[:4],
        fix="the log of that rank holds the whole message",
        steps=(
            step("python -m dsdoctor comm --quick --out comm-out"),
            step("python -m dsdoctor diagnose {log}", log=f"comm-out/rank-{first.rank:05d}.log"),
        ),
    )


def _others(trouble: Trouble, named_already: set[int]) -> tuple[str, ...]:
    """What some of the other ranks saw meanwhile."""
    others = [stuck for stuck in trouble.stuck if stuck.rank not in named_already and not stuck.ended]
    waiting = [
        f"rank {stuck.rank} in {stuck.at}: {_line(stuck.error) if stuck.error else 'waiting'}" for stuck in others
    ]
    return tuple(waiting[:3])


def _line(error: str | None) -> str:
    """The first line of a library's message, with single spaces."""
    return " ".join((error or "").split("\n")[0].split())[:160]


CHECKS = (rank_died, rank_stopped, host_vanished, link_cut, rank_behind, exchange_hangs, exchange_fails)
