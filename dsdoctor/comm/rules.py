"""Every rule of this room -> its manual page, which is its generator's docstring."""

import inspect

from dsdoctor.comm.course import control, course, exchanging, lost_checks
from dsdoctor.comm.exchange import isolate, nccl_checks, right_checks, stuck_checks
from dsdoctor.comm.local import fingerprint, local_checks, memory
from dsdoctor.comm.reach import absent_checks, arrival_checks, mesh_checks
from dsdoctor.comm.speed import baseline, speed_checks
from dsdoctor.comm.static import static_checks

TOLD_BY_ANOTHER = {"link-cut"}
"""Generators that hand on the findings of others and have none of their own."""


def manual_pages() -> dict[str, str]:
    """The manual page of each rule by its id."""
    pages = {check.__name__.replace("_", "-"): inspect.getdoc(check) or "" for check in CHECKS}
    return {rule: page for rule, page in pages.items() if rule not in TOLD_BY_ANOTHER}


CHECKS = (
    *static_checks.CHECKS,
    *local_checks.CHECKS,
    *absent_checks.CHECKS,
    *arrival_checks.CHECKS,
    *fingerprint.CHECKS,
    *mesh_checks.CHECKS,
    *stuck_checks.CHECKS,
    stuck_checks.supervisor_stopped,
    *right_checks.CHECKS,
    *memory.CHECKS,
    *nccl_checks.CHECKS,
    *speed_checks.CHECKS,
    *isolate.CHECKS,
    *baseline.CHECKS,
    *lost_checks.CHECKS,
    control.torch_unusable,
    control.nccl_unavailable,
    exchanging.deadline_too_short,
    course.time_used_up,
)
