"""The connections between all ranks, arranged by hosts. Data only."""

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from dsdoctor.comm.models import Claim
from dsdoctor.comm.results import ConnectOutcome, Reach

HostPair = tuple[str, str]


@dataclass(frozen=True)
class Mesh:
    """Which ranks are there and which reached which. ``master`` is the host of rank 0; ``before`` are the attempts of an earlier
    mesh of the same ranks, ``fallen`` those to ranks that do not answer any more."""

    claims: tuple[Claim, ...]
    reaches: tuple[Reach, ...]
    before: tuple[Reach, ...] = ()
    fallen: tuple[Reach, ...] = ()

    @cached_property
    def by_rank(self) -> dict[int, Claim]:
        """The claim of each rank."""
        return {claim.rank: claim for claim in self.claims}

    def opens(self, source: str, target: str) -> bool:
        """Whether the backend opens connections from one host to another: NCCL both ways, gloo (tried with torch 2.13) from the
        higher address to the lower."""
        mine, theirs = self.first_of[source], self.first_of[target]
        return mine.backend != "gloo" or _number(mine.address) >= _number(theirs.address)

    @cached_property
    def first_of(self) -> dict[str, Claim]:
        """One rank of each host; the other ranks there have the same address."""
        return {claim.host: claim for claim in reversed(self.claims)}

    @cached_property
    def worked(self) -> set[HostPair]:
        """The directions between hosts that an earlier mesh found open."""
        return {self.hosts(reach) for reach in self.before if reach.outcome is ConnectOutcome.REACHED}

    @property
    def master(self) -> str:
        """The host of rank 0."""
        return self.by_rank[0].host if 0 in self.by_rank else ""

    @cached_property
    def outcomes(self) -> dict[HostPair, Counter[ConnectOutcome]]:
        """How the attempts from each host to each other ended."""
        found: dict[HostPair, Counter[ConnectOutcome]] = defaultdict(Counter)
        for reach in self.reaches:
            found[self.hosts(reach)][reach.outcome] += 1
        return found

    def hosts(self, reach: Reach) -> HostPair:
        """From which host to which."""
        return self.by_rank[reach.source].host, self.by_rank[reach.target].host

    def way(self, pair: HostPair) -> ConnectOutcome | None:
        """How *all* attempts from a host to another failed; None where an attempt got through, or none was made."""
        seen = self.outcomes.get(pair, Counter())
        if not seen or ConnectOutcome.REACHED in seen or ConnectOutcome.STALLED in seen:
            return None
        return seen.most_common(1)[0][0]

    def who(self, rank: int) -> str:
        """A rank with its host."""
        return f"rank {rank} ({self.by_rank[rank].host})"


def peers_of(pairs: Iterable[HostPair]) -> dict[str, set[str]]:
    """By host: the others with which it is in a pair."""
    peers: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        peers[one].add(other)
        peers[other].add(one)
    return peers


def _number(address: str) -> tuple[int, bytes]:
    """Addresses in the order in which gloo compares them."""
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return 0, b""
    return known.version, known.packed
