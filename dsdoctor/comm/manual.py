"""Every rule of comm -> its manual page, which is its generator's docstring."""

import inspect

from dsdoctor.comm import groups
from dsdoctor.comm.collectives import nccl, result_checks, stuck_checks
from dsdoctor.comm.control import agent, phases, supervisor, test_state
from dsdoctor.comm.local import checks as local_checks
from dsdoctor.comm.local import counters, fingerprint
from dsdoctor.comm.mesh import checks as mesh_checks
from dsdoctor.comm.preflight import checks as preflight_checks
from dsdoctor.comm.preflight import left_out
from dsdoctor.comm.rendezvous import absent_checks
from dsdoctor.comm.rendezvous import checks as rendezvous_checks
from dsdoctor.comm.speed import rank_checks, speed_checks

WITHOUT_PAGE = {"link-cut"}
"""Generators that pass on the findings of others and have no rule of their own."""


def manual_pages() -> dict[str, str]:
    """The manual page of each rule by its id."""
    pages = {check.__name__.replace("_", "-"): inspect.getdoc(check) or "" for check in CHECKS}
    return {rule: page for rule, page in pages.items() if rule not in WITHOUT_PAGE}


CHECKS = (
    *preflight_checks.CHECKS,
    *left_out.CHECKS,
    *local_checks.CHECKS,
    *absent_checks.CHECKS,
    *rendezvous_checks.CHECKS,
    *fingerprint.CHECKS,
    *mesh_checks.CHECKS,
    *stuck_checks.CHECKS,
    stuck_checks.supervisor_stopped,
    *result_checks.CHECKS,
    *counters.CHECKS,
    *nccl.CHECKS,
    *speed_checks.CHECKS,
    *rank_checks.CHECKS,
    speed_checks.messages_late,
    *groups.ISOLATE_CHECKS,
    *groups.CHECKS,
    *supervisor.CHECKS,
    agent.torch_unusable,
    agent.nccl_unavailable,
    phases.exchanges_unfinished,
    test_state.time_used_up,
)
