"""One rank's host as the checks see it; and the findings of many ranks -> each problem once, with the ranks that have it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dsdoctor.comm.models import Local, RankGpu
from dsdoctor.comm.rank_names import named
from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.core.text import and_more_lines

WHO = "{who}"
"""A placeholder for the ranks, until it is known which ranks have the same finding."""

MOST_EVIDENCE = 8


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What a check looks at. ``several_hosts``: the job spans more than one host; on a single host a loopback does no harm."""

    local: Local
    world: int
    backend: str
    several_hosts: bool
    gpu: RankGpu | None = None

    @property
    def name_it(self) -> Step:
        """The step that makes the backend use the interface that reaches the master."""
        exact, gloo = step("export NCCL_SOCKET_IFNAME=={interface}"), step("export GLOO_SOCKET_IFNAME={interface}")
        name = {"interface": self.local.routed.name} if self.local.routed else {}
        return (exact if self.backend == "nccl" else gloo).filled(name)


Check = Callable[[RankView], Iterator[Finding]]


def merged(
    checks: Sequence[Check], places: Sequence[tuple[int, RankView]], hosts: tuple[str, ...]
) -> tuple[Finding, ...]:
    """The findings of all ranks; those that differ only in the rank are joined."""
    same: dict[tuple[str, Severity, str], list[tuple[int, Finding]]] = {}
    for check in checks:
        for rank, place in places:
            for finding in check(place):
                same.setdefault((finding.rule, finding.severity, finding.title), []).append((rank, finding))
    return tuple(_merge(found, hosts) for found in same.values())


def _merge(found: Sequence[tuple[int, Finding]], hosts: tuple[str, ...]) -> Finding:
    who, first = named(tuple(sorted({rank for rank, _ in found})), hosts), found[0][1]
    said: dict[str, None] = {}
    for rank, finding in found:
        said.update(dict.fromkeys(text.replace(WHO, named((rank,), hosts)) for text in finding.evidence))
    evidence = and_more_lines(list(said), MOST_EVIDENCE, of="lines")
    return replace(first, title=first.title.replace(WHO, who), evidence=evidence)
