"""What a scheduler says of a job's end -> whether it ended a run that was well, or only cleared up behind a rank."""

import re

from dsdoctor.diagnosis.models import Hit, Line, Tier
from dsdoctor.diagnosis.origin import FROM_OUTSIDE, Origin
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.successes import went_on_after

ENDS = {"job-time-limit", "job-preempted", "pod-evicted"}
"""Rules of a scheduler that ends a whole job."""

SOON = 200
"""Within so many lines after a scheduler's end its processes say what became of them."""

OF_A_SIGNAL = re.compile(r"[Ss]ignal|SIG[A-Z]{3,6}|KeyboardInterrupt|[Tt]erminat|[Pp]reempt|[Cc]ancel|[Tt]ime ?limit")
"""Words of an exception by which a script itself answers a signal of its scheduler."""


def clears_up(hit: Hit, read: Scan, origin: Origin) -> bool:
    """Whether a job or a step was cancelled only because one of its ranks had ended badly before.

    That a step was cancelled is what Slurm prints behind every rank that fails. A reason (a time limit, a preemption) is the
    cause, unless a rank had failed before it and the rest of the job waited for it until then.
    """
    if hit.rule.id not in {"job-time-limit", "job-preempted"}:
        return False
    plain = hit.tier is Tier.GENERIC
    by_itself = [one for one in read.timeline.exits if one.line < hit.line and one.signal not in FROM_OUTSIDE]
    if any(plain or not one.signal for one in by_itself):
        return True
    failure = origin.failure
    if failure is None or failure.line >= hit.line or (OF_A_SIGNAL.search(failure.text) and not plain):
        return False
    ended = failure.rooted or failure.native
    return ended or (plain and not went_on_after(Line(failure.line, failure.text), read))


def comes_after_its_end(hit: Hit, causes: list[Hit]) -> bool:
    """Whether the scheduler had ended the job just before a line that says little by itself: a killed worker, a lost rank."""
    if hit.tier is not Tier.GENERIC or hit.rule.id in ENDS:
        return False
    return any(one.rule.id in ENDS and 0 < hit.line - one.line <= SOON and not one.aside for one in causes)
