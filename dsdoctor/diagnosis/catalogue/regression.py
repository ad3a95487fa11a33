"""A row of the tables of regressions: what a release broke, by which message, and which public thread says so. Data only."""

from dataclasses import dataclass

from dsdoctor.core.finding import Step
from dsdoctor.diagnosis.models import Tier

GITHUB = "https://github.com/"


@dataclass(frozen=True, kw_only=True)
class Regression:
    """One fault of a release. ``broken``: the releases, as a sentence says them. ``cure``: the release that mends it,
    or the last good.

    ``words``, ``pattern``, ``after``, ``tier`` and ``sample`` as in Signature. ``needs_version``: its symptom has other reasons
    too, so it counts only where the log names a version that has the fault. ``stages``: the ZeRO stages that have it, all if "".
    """

    package: str
    broken: str
    what: str
    cure: str
    sources: tuple[str, ...]
    words: str
    pattern: str
    sample: str
    first: str = ""
    last: str = ""
    after: str = ""
    tier: Tier = Tier.NAMED
    steps: tuple[Step, ...] = ()
    needs_version: bool = False
    stages: str = ""
