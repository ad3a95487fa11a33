"""Ranks -> words for a finding: with their hosts, consecutive ranks as a range."""

from collections.abc import Iterable, Sequence

from dsdoctor.comm.models import Claim
from dsdoctor.core.text import and_more
from dsdoctor.ranks.nodelist import in_words, ranges_of

MOST_NAMED = 12
MOST_HOSTS = 4
"""Hosts that are named one by one."""


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Ranks in words, with their hosts where these are known.

    >>> named((1,), ("a", "b")), named((1, 2, 3), ())
    ('rank 1 (b)', 'ranks 1-3')
    >>> named((0, 2, 3), ("a", "a", "b", "b"))
    'ranks 0 (a), 2-3 (b)'
    >>> named(tuple(range(4, 1000)), tuple(f"gpu{rank // 4:04d}" for rank in range(1000)))
    'ranks 4-999 (gpu[0001-0249])'
    """
    parts: list[tuple[int, int, str]] = []
    for rank in ranks:
        host = hosts[rank] if rank < len(hosts) else ""
        if parts and parts[-1][1] == rank - 1 and parts[-1][2] == host:
            parts[-1] = (parts[-1][0], rank, host)
        else:
            parts.append((rank, rank, host))
    if len(parts) > MOST_HOSTS:
        runs = [f"{a}-{b}" if b > a else str(a) for a, b in ranges_of(ranks)]
        places = in_words(host for _, _, host in parts if host)
        return f"ranks {and_more(runs, MOST_NAMED)}{f' ({places})' if places else ''}"
    spans = [f"{first}-{last}" if last > first else str(first) for first, last, _ in parts]
    shown = [span + (f" ({host})" if host else "") for span, (_, _, host) in zip(spans, parts, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {and_more(shown, MOST_NAMED)}"


def by_rank(claims: Iterable[Claim]) -> tuple[str, ...]:
    """The host of every rank up to the last that is here, "" where none is."""
    hosts = {claim.rank: claim.host for claim in claims}
    return tuple(hosts.get(rank, "") for rank in range(max(hosts, default=-1) + 1))
