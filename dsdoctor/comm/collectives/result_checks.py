"""Judges the results of the collectives: every rank's exchanges -> whose data is wrong, what is not available. Looks at nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from dsdoctor.comm.models import named
from dsdoctor.comm.results import Exchange
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more, and_more_lines
from dsdoctor.rules import book

MAX_SHOWN = 6


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
    return tuple(finding for check in CHECKS for finding in check(results))


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
            senders=_joined(results, results.senders[:MAX_SHOWN]),
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
            evidence=calls[1 : 1 + MAX_SHOWN],
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
    return and_more_lines(lines, MAX_SHOWN)


def _joined(results: RankExchanges, ranks: Sequence[int]) -> str:
    return " and ".join(named((rank,), results.hosts) for rank in ranks)


def _value(got: float | None) -> str:
    return "nan or inf" if got is None else f"{got:.10g}"


CHECKS = (data_is_wrong, collective_not_available)
