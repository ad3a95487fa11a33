"""The hosts of all ranks -> findings. Looks at nothing; a problem that many ranks share is one finding that names them."""

from collections.abc import Iterable

from dsdoctor.comm.local import expected, limit_checks, network_checks, node_checks
from dsdoctor.comm.local.rank_view import Check, RankView, merged
from dsdoctor.comm.models import Claim, Local, Rank
from dsdoctor.comm.rank_names import by_rank
from dsdoctor.core.finding import Finding, Severity


def too_little(rank: Rank, local: Local, *, backend: str) -> tuple[Finding, ...]:
    """The limits of a rank that broke, as errors, where they leave it hardly anything."""
    if not limit_checks.is_tiny(local, rank.world, backend):
        return ()
    place = RankView(local=local, world=rank.world, backend=backend, several_hosts=False)
    found = merged(limit_checks.CHECKS, [(rank.rank, place)], (*("",) * rank.rank, local.hostname))
    return tuple(finding for finding in limit_checks.blamed(found) if finding.severity is Severity.ERROR)


def examine_all(claims: Iterable[Claim]) -> tuple[Finding, ...]:
    """The findings about the hosts of all ranks, each problem once, with the ranks that have it."""
    known = [(claim, claim.local) for claim in claims if claim.local is not None]
    several = len({claim.host for claim, _ in known}) > 1
    places = []
    for claim, local in known:
        gpu = next((gpu for gpu in local.gpus if gpu.uuid == claim.gpu), None)
        place = RankView(local=local, world=claim.world, backend=claim.backend, several_hosts=several, gpu=gpu)
        places.append((claim.rank, place))
    return merged(CHECKS, places, by_rank(claim for claim, _ in known))


CHECKS: tuple[Check, ...] = (*network_checks.CHECKS, *limit_checks.CHECKS, *node_checks.CHECKS, *expected.CHECKS)
