"""Every fault that is made is named: which rank, which host, which problem; and every rank ends."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.comm import launched_faults
from tests.comm.conftest import need
from tests.comm.fault_table import FAULTS, Fault, played
from tests.comm.generated_faults import MISDEEDS, SAMPLE
from tests.comm.jobs import Job
from tests.comm.rig import missing

pytestmark = pytest.mark.launch

MARGIN = 60.0
"""Seconds after the deadline, for a machine that many share. How well it holds, benchmarks/comm_generated.py measures."""
ALIKE = "raises NotImplementedError"
"""Takes the way of another error that says that something is not supported, which the sample has too."""


def ours(deadline: float, mode: str = "--quick") -> list[str]:
    """The command under test, without what the launcher's variables tell."""
    modes = [mode] if mode in {"--quick", "--full"} else []
    return ["-m", "dsdoctor.comm", *modes, "--backend", "gloo", "--deadline", f"{deadline:g}", "--json"]


def findings(running: Job, teller: str) -> list[dict[str, Any]]:
    """The findings of the document that a rank printed."""
    try:
        found = json.loads(running.out(teller))["findings"]
    except (ValueError, KeyError) as error:
        pytest.fail(f"no document: {error}\n{running.told()}")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named_in_time(fault: Fault, tmp_path: Path) -> None:
    need(missing())
    deadline = 20 if fault.mode == "--quick" else 45
    with played(fault, tmp_path, ours(deadline, fault.mode), "dsdoctor.comm", hold_at=5) as running:
        told = running.wait(deadline + MARGIN, fault.teller)
        listened = [*(key for key in fault.whispers if key in running.processes)]
        whispered = not listened or running.wait(deadline + MARGIN, *listened)

    assert told, f"rank {fault.teller} does not end\n{running.told()}"
    assert whispered, f"ranks {listened} do not end\n{running.told()}"
    found = findings(running, fault.teller)
    named = [finding["title"] for finding in found if finding["rule"] in fault.rules]
    assert any(all(word in title for word in fault.says) for title in named), f"{found}\n{running.told()}"
    assert running.ends[fault.teller][0] == fault.status, running.told()
    for key, words in fault.whispers.items():
        assert words in running.out(key) + running.err(key)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.exhaustive] * (ALIKE in fault.name)) for fault in SAMPLE],
)
def test_the_first_error_is_what_the_rank_did(fault: Fault, tmp_path: Path) -> None:
    need(missing())
    with played(fault, tmp_path, ours(25.0), "dsdoctor.comm", hold_at=0) as running:
        ended = running.wait(25.0 + MARGIN)

    assert ended, running.told()
    first = next(finding for finding in findings(running, "0") if finding["severity"] == "error")
    assert first["rule"] in fault.rules and all(word in first["title"] for word in fault.says), first
    assert running.ends["0"][0] == 1


def test_the_one_of_sixteen_that_is_missing_is_named(tmp_path: Path) -> None:
    need(missing())
    fault = Fault(name="", world=16, absent=(15,), rules=("rank-missing",), says=())
    with played(fault, tmp_path, ours(60.0), "dsdoctor.comm", hold_at=0) as running:
        ended = running.wait(60.0 + MARGIN)

    assert ended, running.told()
    titles = [finding["title"] for finding in findings(running, "0") if finding["rule"] == "rank-missing"]
    assert len(titles) == 1
    assert titles[0].startswith("rank 15")


@pytest.mark.parametrize(("place", "launcher"), list(enumerate(launched_faults.LAUNCHERS)))
def test_a_generated_fault_is_named_under_every_launcher(place: int, launcher: str, tmp_path: Path) -> None:
    need(missing())
    misdeed, rank = MISDEEDS[3 * place], 1 + place % 2

    found = launched_faults.play(misdeed, rank, 2, launcher, "--quick", 25.0, tmp_path)

    assert launched_faults.complaint(found, misdeed, rank, 25.0 + MARGIN, launcher) == "", found
