"""Every fault that is made is named: which rank, which host, which problem; and every rank ends."""

import json
from collections.abc import Callable, Iterable
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
REPEATED = {
    "a rank never comes": "one of four never comes",
    "another torch on one rank": "tests/comm/test_fingerprint.py; every other fault compares versions, and finds none",
    "raises": "under torchrun, below",
    "raises NotImplementedError": "another error that says that something is not supported",
    "exits with 0": "under dsdoctor's own launcher, below",
    "is killed": "rank killed (-9)",
    "is stopped": "under a hostfile, below, and rank stopped (SIGSTOP)",
}
"""Faults that CI does not make, and where what they show is shown."""


def cases(faults: Iterable[Fault], name_of: Callable[[Fault], str]) -> list[Any]:
    """The faults as parameters; those that repeat another are exhaustive."""
    return [
        pytest.param(one, id=one.name, marks=[pytest.mark.exhaustive] * (name_of(one) in REPEATED)) for one in faults
    ]


def misdeed_of(fault: Fault) -> str:
    """What the rank of a generated fault does."""
    return fault.name.partition(" before ")[0].split(" ", 2)[2]


def ours(deadline: float, mode: str = "--quick") -> list[str]:
    """The command under test, without what the launcher's variables tell."""
    modes = [mode] if mode in {"--quick", "--full"} else []
    return ["-m", "dsdoctor.comm", *modes, "--backend", "gloo", "--deadline", f"{deadline:g}", "--json"]


def test_what_is_repeated_is_a_fault_that_there_is() -> None:
    assert set(REPEATED) <= {fault.name for fault in FAULTS} | {misdeed_of(fault) for fault in SAMPLE}


def findings(running: Job, teller: str) -> list[dict[str, Any]]:
    """The findings of the document that a rank printed."""
    try:
        found = json.loads(running.out(teller))["findings"]
    except (ValueError, KeyError) as error:
        pytest.fail(f"no document: {error}\n{running.told()}")
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("fault", cases(FAULTS, lambda fault: fault.name))
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


@pytest.mark.parametrize("fault", cases(SAMPLE, misdeed_of))
def test_the_first_error_is_what_the_rank_did(fault: Fault, tmp_path: Path) -> None:
    need(missing())
    with played(fault, tmp_path, ours(25.0), "dsdoctor.comm", hold_at=0) as running:
        ended = running.wait(25.0 + MARGIN)

    assert ended, running.told()
    first = next(finding for finding in findings(running, "0") if finding["severity"] == "error")
    assert first["rule"] in fault.rules and all(word in first["title"] for word in fault.says), first
    assert running.ends["0"][0] == 1


@pytest.mark.exhaustive
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
