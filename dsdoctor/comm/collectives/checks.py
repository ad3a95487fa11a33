"""What came of an exchange -> whose data is wrong; which rank died, stopped, vanished or stayed behind. Judges, never looks.

When a single rank fails, all others fail too, at once or later, and their errors do not name it. So the causes are checked
in the order in which they explain each other; the errors of the others are only evidence.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from dsdoctor.comm.mesh.checks import CHECKS as MESH_CHECKS
from dsdoctor.comm.mesh.matrix import ConnectionMatrix
from dsdoctor.comm.models import Claim, named
from dsdoctor.comm.results import ConnectOutcome, Exchange, Reach, SkippedStep, Stuck
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.processes import LETTERS
from dsdoctor.core.text import and_more, and_more_lines
from dsdoctor.ranks.failure import is_peer_disconnect
from dsdoctor.ranks.nodelist import in_words
from dsdoctor.rules import book

MAX_RECORDED = 4
STOPPED = frozenset("Tt")
"""The kernel's letters for a process that a signal or a debugger has stopped."""
CONSEQUENCE = re.compile(
    r"connection (was |has been )?(closed|reset|refused|lost)|timed? ?out|"
    r"ncclRemoteError|ncclSystemError|socket|network error|op\.preamble|DistNetworkError|DistStoreError",
    re.IGNORECASE,
)
"""What a library raises when another rank is late, in another exchange, or disconnected (``ranks.failure`` knows the rest)."""
TRANSPORT = re.compile(
    r'File "[^"]*(/torch/(distributed|cuda)/|/deepspeed/comm/|/dsdoctor/comm/collectives/calls\.py")'
)
"""A frame in which a rank waits for others: torch's that communicate or synchronise, or ours that waits for what torch returned."""


@dataclass(frozen=True, kw_only=True)
class FailedExchange:
    """An exchange that did not end well. ``stuck`` are the ranks that reported where they were, ``silent`` those that did
    not and how a connection to them ended; ``left_out`` the steps that a rank did not take part in; ``reaches`` are the
    connections that were tried again after it, ``before`` those of the mesh; ``waited`` is how long nothing moved; ``lossy``
    is what was found of lost packets before."""

    what: str
    claims: tuple[Claim, ...]
    stuck: tuple[Stuck, ...]
    silent: dict[int, ConnectOutcome]
    left_out: dict[int, tuple[SkippedStep, ...]] = field(default_factory=dict)
    reaches: tuple[Reach, ...] = ()
    before: tuple[Reach, ...] = ()
    waited: float = 0.0
    lossy: tuple[str, ...] = ()
    backend: str = "gloo"

    def who(self, rank: int) -> str:
        """A rank with host and pid."""
        claim = next((claim for claim in self.claims if claim.rank == rank), None)
        return claim.process if claim else f"rank {rank}"

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
        gone = {
            ConnectOutcome.TIMED_OUT,
            ConnectOutcome.NO_ROUTE,
            ConnectOutcome.UNREACHABLE,
            ConnectOutcome.NO_NAME,
        }
        return tuple(sorted(rank for rank, outcome in self.silent.items() if outcome in gone))

    @property
    def waiting(self) -> tuple[Stuck, ...]:
        """Living ranks that raised nothing."""
        return tuple(
            stuck for stuck in self.stuck if not stuck.ended and stuck.process not in STOPPED and not stuck.error
        )

    @property
    def raised(self) -> tuple[Stuck, ...]:
        """Ranks that raised an error of their own, or left out a step in which others took part, the first first. Where a rank
        died or vanished, only what came before that."""
        lost = {stuck.step for stuck in self.stuck if stuck.ended} | (set(self.silent) and {0})
        before = min(lost, default=math.inf)
        own = [
            stuck
            for stuck in self.stuck
            if stuck.error and not stuck.ended and stuck.step < before and not is_consequence(stuck.error)
        ]
        left = [
            Stuck(rank=rank, at=skipped.at, step=skipped.step, seconds=0.0, error=skipped.reason)
            for rank, steps in self.left_out.items()
            for skipped in steps
            if self._took_part(skipped.step)
        ]
        return tuple(sorted((*own, *left), key=lambda stuck: (stuck.step, stuck.rank)))

    def _took_part(self, step: int) -> bool:
        """Whether some rank that came as far did not leave a step out."""
        without = {rank for rank, steps in self.left_out.items() if step in {skipped.step for skipped in steps}}
        return any(stuck.rank not in without and stuck.step >= step for stuck in self.stuck)

    @property
    def lagging(self) -> tuple[Stuck, ...]:
        """Ranks that have not begun the exchange in which the others wait."""
        most = max((stuck.step for stuck in self.waiting), default=0)
        return tuple(stuck for stuck in self.waiting if stuck.step < most)

    @property
    def lagging_by_recorder(self) -> tuple[Stuck, ...]:
        """Ranks in the step of the others that have begun fewer collectives by torch's flight recorder, and whose stack was not
        to be seen: with a stack inside of the library a rank may wait in an earlier one for the others. Empty unless the
        recorders of all that wait were read."""
        if self.lagging or not all(stuck.sequence is not None for stuck in self.waiting):
            return ()
        most = max((stuck.sequence or 0 for stuck in self.waiting), default=0)
        return tuple(stuck for stuck in self.waiting if (stuck.sequence or 0) < most and not stuck.stack)

    @property
    def recorded(self) -> tuple[str, ...]:
        """What the flight recorders say, a line for each collective that ranks began last."""
        last: dict[tuple[int, str], list[int]] = {}
        for stuck in self.stuck:
            if stuck.sequence is not None:
                last.setdefault((stuck.sequence, stuck.operation), []).append(stuck.rank)
        return tuple(
            f"torch's flight recorder: {named(tuple(sorted(ranks)), ())} began {number} collectives, the last {operation}"
            for (number, operation), ranks in sorted(last.items())
        )[:MAX_RECORDED]

    @property
    def before_it(self) -> tuple[Stuck, ...]:
        """Ranks that stand in Python in the step in which others wait inside of the library."""
        inside = [stuck for stuck in self.waiting if stuck.stack and TRANSPORT.match(stuck.stack[0])]
        outside = [stuck for stuck in self.waiting if stuck.stack and not TRANSPORT.match(stuck.stack[0])]
        return tuple(outside) if inside else ()

    @property
    def explained(self) -> bool:
        """Whether a rank that died, stopped, vanished or raised explains what the others wait for."""
        return bool(self.dead or self.stopped or self.cut or self.raised)


def is_consequence(error: str) -> bool:
    """Whether an error only shows that another rank is gone, late, or in another exchange: it is no cause.

    >>> is_consequence("Connection closed by peer [10.0.0.1]:58043"), is_consequence("ValueError: batch 7 is empty")
    (True, False)
    """
    return is_peer_disconnect(error) or CONSEQUENCE.search(error) is not None


def rank_died(trouble: FailedExchange) -> Iterator[Finding]:
    """The process of a rank ended in the middle of the test."""
    by_end: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in () if trouble.raised else trouble.dead:
        told = next((stuck for stuck in trouble.stuck if stuck.rank == rank and stuck.ended), None)
        by_end[(told.at, told.ended or "", told.cause, told.perhaps) if told else ("", "", "", "")].append(rank)
    for (at, how, limit, perhaps), ranks in by_end.items():
        yield book.finding(
            "rank-died",
            Severity.ERROR,
            case="port-closed" if not how else "limit" if limit else "perhaps" if perhaps else "",
            evidence=_others(trouble, set(ranks)),
            ranks=_who(trouble, ranks),
            at=at,
            phase=trouble.what,
            how=how,
            limit=limit,
            perhaps=perhaps,
            hosts=in_words(trouble.host(rank) for rank in ranks),
        )


def rank_stopped(trouble: FailedExchange) -> Iterator[Finding]:
    """The process of a rank is there and does not run."""
    by_state: dict[str | None, list[int]] = defaultdict(list)
    for rank in trouble.stopped:
        told = next((stuck for stuck in trouble.stuck if stuck.rank == rank), None)
        by_state[LETTERS.get(told.process, "") if told else None].append(rank)
    for state, ranks in by_state.items():
        yield book.finding(
            "rank-stopped",
            Severity.ERROR,
            case="silent" if state is None else "",
            evidence=_others(trouble, set(ranks)),
            ranks=_who(trouble, ranks),
            phase=trouble.what,
            state=state,
            host=trouble.host(ranks[0]),
        )


def supervisor_stopped(who: dict[int, str], states: dict[int, str]) -> Iterator[Finding]:
    """The first process of a rank is stopped, while the rank itself exchanges well."""
    for rank, letter in sorted(states.items()):
        if letter in STOPPED:
            yield book.finding("supervisor-stopped", Severity.ERROR, rank=who[rank], state=LETTERS[letter])


def host_vanished(trouble: FailedExchange) -> Iterator[Finding]:
    """A host that was reached before is not reached any more."""
    lost = sorted({trouble.host(rank) for rank in trouble.cut})
    if len(lost) > 1 and set(lost) == set(trouble.hosts) - {trouble.host(0)}:
        yield book.finding(
            "host-vanished",
            Severity.ERROR,
            case="rank-zero",
            evidence=tuple(f"{host}: {trouble.silent[rank].value}" for rank, host in _one_each(trouble))[:4],
            host=trouble.host(0),
            count=len(lost),
            phase=trouble.what,
        )
        return
    by_outcome: dict[str, list[str]] = defaultdict(list)
    for host in lost:
        first = next(rank for rank in trouble.cut if trouble.host(rank) == host)
        by_outcome[trouble.silent[first].value].append(host)
    for outcome, hosts in by_outcome.items():
        ranks = tuple(rank for rank in trouble.cut if trouble.host(rank) in hosts)
        yield book.finding(
            "host-vanished",
            Severity.ERROR,
            evidence=_others(trouble, set(ranks)),
            hosts=in_words(hosts),
            ranks=named(ranks, ()),
            phase=trouble.what,
            outcome=outcome,
            host=hosts[0],
        )


def _who(trouble: FailedExchange, ranks: Sequence[int]) -> str:
    """One rank with its process, several with their hosts."""
    return trouble.who(ranks[0]) if len(ranks) == 1 else named(tuple(ranks), trouble.hosts)


def _one_each(trouble: FailedExchange) -> list[tuple[int, str]]:
    """One rank of each host that is cut off."""
    return [(rank, host) for host, rank in {trouble.host(rank): rank for rank in trouble.cut}.items()]


def link_cut(trouble: FailedExchange) -> Iterator[Finding]:
    """An exchange hangs because two hosts do not reach each other any more.

    All ranks are alive; those of two hosts cannot connect. The findings of the repeated mesh say in which direction."""
    if trouble.explained or not trouble.reaches or trouble.lossy:
        # where packets are lost a single attempt may fail by that alone
        return
    mesh = ConnectionMatrix(trouble.claims, trouble.reaches, trouble.before)
    for check in MESH_CHECKS:
        yield from check(mesh)


def rank_raised(trouble: FailedExchange) -> Iterator[Finding]:
    """A rank raised an error of its own in an exchange. The others wait for it there, or lost their connection to it."""
    told: set[int] = set()
    for raised in trouble.raised:
        if raised.rank in told:
            continue
        told.add(raised.rank)
        yield book.finding(
            "rank-raised",
            Severity.ERROR,
            case="limit" if raised.cause else "",
            evidence=(*raised.stack[:4], *_others(trouble, {raised.rank})),
            blames=(raised.rank,),
            rank=trouble.who(raised.rank),
            at=raised.at,
            error=_line(raised.error),
            limit=raised.cause,
            log=_log(raised.rank),
        )


def rank_behind(trouble: FailedExchange) -> Iterator[Finding]:
    """A rank has not begun the exchange in which the others wait for it."""
    if trouble.explained:
        return
    late = trouble.lagging or trouble.before_it or trouble.lagging_by_recorder
    others = [other for other in trouble.waiting if other not in late]
    inside = [other for other in others if other not in trouble.before_it] or others
    ahead = max(inside, key=lambda other: (other.step, other.sequence or 0), default=None)
    if ahead is None:
        return
    by_where: dict[tuple[object, ...], list[Stuck]] = defaultdict(list)
    for one in late:
        earlier = one.step < ahead.step
        place = one.at if earlier else _frame(one) if one.stack else one.sequence
        by_where[earlier, one.process, place].append(one)
    for those in by_where.values():
        first = those[0]
        yield book.finding(
            "rank-behind",
            Severity.ERROR,
            case="" if first.step < ahead.step else "outside" if first.stack else "fewer-begun",
            evidence=(*first.stack[:6], *trouble.recorded),
            blames=[one.rank for one in those],
            ranks=_who(trouble, [one.rank for one in those]),
            at=first.at,
            state=LETTERS.get(first.process, "alive"),
            frame=_frame(first) if first.stack else None,
            count=first.sequence,
            ahead=ahead.rank,
            ahead_count=ahead.sequence,
            exchange=ahead.at,
        )


def exchange_hangs(trouble: FailedExchange) -> Iterator[Finding]:
    """All ranks are alive and in the same exchange, and nothing moves."""
    waiting = trouble.waiting
    if (
        trouble.explained
        or trouble.lagging
        or trouble.before_it
        or trouble.lagging_by_recorder
        or any(link_cut(trouble))
    ):
        return
    if not waiting or any(stuck.error for stuck in trouble.stuck):
        # the others then wait for a rank whose exchange was broken off
        return
    inside = all(stuck.stack and TRANSPORT.match(stuck.stack[0]) for stuck in waiting)
    tried = bool(trouble.reaches)
    yield book.finding(
        "exchange-hangs",
        Severity.ERROR,
        case="packets-lost"
        if trouble.lossy
        else ("" if tried else "tcp-untried")
        if inside
        else ("unseen" if tried else "tcp-untried-unseen"),
        evidence=(f"nothing moved for {trouble.waited:.0f} s", *waiting[0].stack[:4], *trouble.recorded),
        loss=next(iter(trouble.lossy), None),
        ranks=named(tuple(sorted(stuck.rank for stuck in waiting)), trouble.hosts),
        at=waiting[0].at,
        backend=trouble.backend,
    )


def exchange_fails(trouble: FailedExchange) -> Iterator[Finding]:
    """A library broke off an exchange, and no rank died, vanished or raised an error of its own."""
    if trouble.explained or trouble.lagging:
        return
    failed = sorted((stuck for stuck in trouble.stuck if stuck.error), key=lambda stuck: (stuck.step, stuck.rank))
    if not failed:
        return
    first = failed[0]
    yield book.finding(
        "exchange-fails",
        Severity.ERROR,
        case="packets-lost" if trouble.lossy else "",
        evidence=tuple(f"rank {stuck.rank} in {stuck.at}: {_line(stuck.error)}" for stuck in failed[1:5]),
        loss=next(iter(trouble.lossy), None),
        rank=trouble.who(first.rank),
        at=first.at,
        error=_line(first.error),
        log=_log(first.rank),
    )


def _log(rank: int) -> str:
    """Where the command of the step before it writes the log of a rank."""
    return f"comm-out/rank-{rank:05d}.log"


def _frame(stuck: Stuck) -> str:
    """The innermost frame of a stack, as a sentence holds it.

    >>> _frame(Stuck(rank=0, at="", step=1, seconds=0.0, stack=('File "/site/loader.py", line 3 in read',)))
    'read (/site/loader.py, line 3)'
    """
    found = re.match(r'File "([^"]*)", line (\d+) in (.+)', stuck.stack[0])
    return f"{found[3]} ({found[1]}, line {found[2]})" if found else stuck.stack[0]


def _others(trouble: FailedExchange, named_already: set[int]) -> tuple[str, ...]:
    """What some of the other ranks saw meanwhile."""
    others = [stuck for stuck in trouble.stuck if stuck.rank not in named_already and not stuck.ended]
    waiting = [
        f"rank {stuck.rank} in {stuck.at}: {_line(stuck.error) if stuck.error else 'waiting'}" for stuck in others
    ]
    return tuple(waiting[:3])


def _line(error: str | None) -> str:
    """The first line of a library's message, with single spaces."""
    return " ".join((error or "").split("\n")[0].split())[:160]


STUCK_CHECKS = (
    rank_raised,
    rank_died,
    rank_stopped,
    host_vanished,
    link_cut,
    rank_behind,
    exchange_hangs,
    exchange_fails,
)


MAX_WRONG_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class RankExchanges:
    """The exchanges of each rank that came to the end (the notable ones are enough), and the host of every rank."""

    exchanges: Mapping[int, Sequence[Exchange]]
    hosts: Sequence[str] = ()

    @property
    def wrong(self) -> tuple[tuple[int, Exchange], ...]:
        """The ranks that saw a wrong result, and the exchange; those whose origin is known come first."""
        found = [
            (rank, exchange) for rank in sorted(self.exchanges) for exchange in self.exchanges[rank] if exchange.wrong
        ]
        return tuple(sorted(found, key=lambda seen: not (seen[1].wrong and seen[1].wrong.whose)))

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks whose contribution was wrong."""
        return tuple(
            sorted({*chain.from_iterable(exchange.wrong.whose for _, exchange in self.wrong if exchange.wrong)})
        )


def examine(exchanges: Mapping[int, Sequence[Exchange]], hosts: Sequence[str] = ()) -> tuple[Finding, ...]:
    """All findings on what the ranks exchanged."""
    results = RankExchanges(exchanges=exchanges, hosts=hosts)
    return tuple(finding for check in RESULT_CHECKS for finding in check(results))


def data_is_wrong(results: RankExchanges) -> Iterator[Finding]:
    """A collective ended well and its result is wrong."""
    if results.wrong:
        first_rank, first = results.wrong[0]
        yield book.finding(
            "data-is-wrong",
            Severity.ERROR,
            case="" if results.senders else "unknown-sender",
            evidence=_told(results),
            steps=() if len(results.senders) == 1 else None,
            senders=_joined(results, results.senders[:MAX_WRONG_SHOWN]),
            op=first.op,
            dtype=first.dtype,
            rank=named((first_rank,), results.hosts),
        )


def collective_not_available(results: RankExchanges) -> Iterator[Finding]:
    """The backend cannot do a collective at all, so it was not tested."""
    lacking: dict[str, list[str]] = {}
    for exchange in chain.from_iterable(results.exchanges.values()):
        if exchange.skipped:
            lacking.setdefault(exchange.skipped, []).append(f"{exchange.op} of {exchange.dtype}")
    for reason, what in lacking.items():
        calls = list(dict.fromkeys(what))
        yield book.finding(
            "collective-not-available",
            Severity.NOTE,
            case="skipped",
            evidence=calls[1 : 1 + MAX_WRONG_SHOWN],
            call=and_more(calls, 1),
            reason=reason,
        )


def _told(results: RankExchanges) -> tuple[str, ...]:
    """A line for each of the first wrong results."""
    lines = []
    for rank, exchange in results.wrong:
        assert exchange.wrong is not None
        wrong = exchange.wrong
        came = {None: "", True: ", again when repeated", False: ", right when repeated"}[wrong.again]
        where, whose = named((rank,), results.hosts), _joined(results, wrong.whose) or "not known"
        lines.append(
            f"on {where}: {exchange.op} {exchange.dtype} x {exchange.elements}: first wrong at index {wrong.index},"
            f" {_value(wrong.got)} for {wrong.want:.10g}, {wrong.count} wrong{came}; whose: {whose}"
        )
    return and_more_lines(lines, MAX_WRONG_SHOWN)


def _joined(results: RankExchanges, ranks: Sequence[int]) -> str:
    return " and ".join(named((rank,), results.hosts) for rank in ranks)


def _value(got: float | None) -> str:
    return "nan or inf" if got is None else f"{got:.10g}"


RESULT_CHECKS = (data_is_wrong, collective_not_available)
