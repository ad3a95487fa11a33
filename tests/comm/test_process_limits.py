"""Limits of a rank's process: advice where they are small, the cause where the test broke and they leave it hardly anything."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from dsdoctor.comm.control.messages import PhaseLog, Update
from dsdoctor.comm.local.checks import blamed, too_little
from dsdoctor.comm.models import CommPhase, PhaseState
from dsdoctor.core.finding import Severity
from tests.comm.made_claims import findings_of
from tests.comm.test_local import GIB, ME, healthy

FILES = {33: True, 35: True, 36: False, 65536: False}
SPACES = {600 << 20: True, 2 * GIB: False}


@pytest.mark.parametrize(("files", "space"), list(itertools.product((None, *FILES), (None, *SPACES))))
def test_a_limit_is_the_cause_only_where_it_leaves_hardly_anything(files: int | None, space: int | None) -> None:
    local, me = healthy(nofile=files, address_space=space, gpus=()), replace(ME, world=4)
    tiny = {"nofile-low": FILES.get(files or 0), "address-space-limited": SPACES.get(space or 0)}
    wanted = [rule for rule, is_tiny in tiny.items() if is_tiny]

    found = too_little(me, local, backend="gloo")
    advice = findings_of(me, local, backend="gloo", several_hosts=False)

    # where one is tiny the other, if it is small, stands beside it
    assert set(wanted) <= {finding.rule for finding in found}
    assert bool(found) is bool(wanted)
    assert all(finding.severity is Severity.ERROR for finding in found)
    assert all(finding.severity is not Severity.ERROR for finding in advice)


def test_advice_becomes_the_first_error_of_a_phase_that_was_well() -> None:
    said: list[Update] = []
    log = PhaseLog(said.append)
    with log.phase(CommPhase.LOCAL) as phase:
        phase.findings = findings_of(ME, healthy(nofile=20, memlock=1 << 20), backend="nccl", several_hosts=True)

    log.change(CommPhase.LOCAL, blamed)

    assert log.phases[0].state is PhaseState.BROKEN
    severities = {finding.rule: finding.severity for finding in log.phases[0].findings}
    assert severities["nofile-low"] is Severity.ERROR
    assert severities["memlock-limited"] is Severity.WARNING


@pytest.mark.launch
@pytest.mark.parametrize(
    ("limit", "status", "first"),
    [
        ("-n 13", 1, "the limit of open files is 13 (ulimit -n)"),
        ("-n 40", 0, "2 of 2 ranks reach each other"),
        ("-v 500000", 1, "the limit of address space is 488 MiB (ulimit -v)"),
    ],
)
def test_a_limit_that_breaks_a_real_test_is_the_first_thing_said(limit: str, status: int, first: str) -> None:
    command = f'ulimit {limit} && exec "$0" -m dsdoctor comm --quick --nproc 2 --backend gloo --deadline 20'
    clean = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}

    done = subprocess.run(
        ["bash", "-c", command, sys.executable],
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == status, done.stderr
    assert first in (done.stdout if status == 0 else done.stdout.splitlines()[0])
