"""The claims of all ranks -> where they differ, and which ranks are the minority. Pure, and O(ranks)."""

from collections.abc import Sequence
from dataclasses import dataclass

from dsdoctor.comm.models import Claim
from dsdoctor.comm.rank_names import named

ABSENT = "(none)"
MOST_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class RankDifference:
    """A name whose value is not the same everywhere. ``usual`` is the value of most ranks, ``count`` of them, and
    ``others`` the other values with their ranks; where two values are equally frequent ``usual`` is None and ``others``
    names all ranks."""

    name: str
    usual: str | None
    count: int
    others: tuple[tuple[str, tuple[int, ...]], ...]


def differences(claims: Sequence[Claim], names: Sequence[str] | None = None) -> tuple[RankDifference, ...]:
    """The names (all, or those given) whose values are not the same on all ranks. O(ranks x names)."""
    if names is None:
        names = sorted({name for claim in claims for name in claim.fingerprint} | {"backend"})
    return tuple(found for name in names if (found := _difference(claims, name)) is not None)


def _difference(claims: Sequence[Claim], name: str) -> RankDifference | None:
    ranks: dict[str, list[int]] = {}
    for claim in claims:
        value = claim.backend if name == "backend" else claim.fingerprint.get(name, ABSENT)
        ranks.setdefault(value, []).append(claim.rank)
    if len(ranks) < 2:
        return None
    groups = sorted(ranks.items(), key=lambda group: (-len(group[1]), min(group[1])))
    tie = len(groups[0][1]) == len(groups[1][1])
    others = groups if tie else groups[1:]
    return RankDifference(
        name=name,
        usual=None if tie else groups[0][0],
        count=0 if tie else len(groups[0][1]),
        others=tuple((value, tuple(sorted(numbers))) for value, numbers in others),
    )


def said(difference: RankDifference, hosts: tuple[str, ...]) -> str:
    """A difference in words: the minority by rank and host, the others by their number.

    >>> odd = RankDifference(name="torch", usual="2.8.0", count=15, others=(("2.7.0", (1,)),))
    >>> said(odd, ("node0", "node3"))
    'rank 1 (node3): torch 2.7.0, the 15 others 2.8.0'
    >>> said(RankDifference(name="NCCL_ALGO", usual=None, count=0, others=(("Ring", (0,)), (ABSENT, (1,)))), ("a", "b"))
    'rank 0 (a): NCCL_ALGO=Ring, rank 1 (b): not set'
    """
    name, shown = difference.name, difference.others[:MOST_GROUPS]
    parts = [f"{named(ranks, hosts)}: {_value(name, value, whole=not at)}" for at, (value, ranks) in enumerate(shown)]
    left = difference.others[MOST_GROUPS:]
    if left:
        parts.append(f"{len(left)} more values on {sum(len(ranks) for _, ranks in left)} ranks")
    if difference.usual is not None:
        parts.append(f"the {difference.count} others {_value(name, difference.usual, whole=False)}")
    return ", ".join(parts)


def _value(name: str, value: str, *, whole: bool) -> str:
    absent = value == ABSENT
    text = ("not set" if name.isupper() else "not there") if absent else value
    return f"{name}{'=' if name.isupper() and not absent else ' '}{text}" if whole else text
