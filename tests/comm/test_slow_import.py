"""Ranks whose import of torch takes long: they run, and nobody says that they do not."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsdoctor.comm.control.phases import ARRIVAL
from dsdoctor.comm.launch.start import free_port
from tests.comm import faults
from tests.comm.jobs import PORT, job
from tests.comm.left_over import children
from tests.comm.rig import Rig, wait_until
from tests.each import each

pytestmark = pytest.mark.launch
HELD = Path(__file__).with_name("slow_import")
LIMIT = 150
DEADLINE = 25
NOT_TRUE = ("never joined", "not running", "has died", "not met", "rank-missing", "master-unreachable")


class Ranks:
    """Processes of this machine that are ranks of one job; those whose name ends in "slow" are held in their import of torch."""

    def __init__(self, folder: Path, port: int, *names: str, **variables: str) -> None:
        self.folder = folder
        self._place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._place |= variables
        self.processes = {name: self._start(name) for name in names}

    def _start(self, name: str) -> "subprocess.Popen[bytes]":
        rank = name.partition(" ")[0]
        environment = {**os.environ, **self._place, "RANK": rank, "LOCAL_RANK": rank}
        if name.endswith("slow"):
            environment["TORCH_IS_READ"] = str(self.folder / "read")
            environment["PYTHONPATH"] = os.pathsep.join([str(HELD), environment.get("PYTHONPATH", "")])
        with (self.folder / f"{name}.txt").open("w") as out:
            argv = [sys.executable, "-m", "dsdoctor.comm", "--quick", "--deadline", str(DEADLINE)]
            return subprocess.Popen(argv, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def said(self, name: str) -> str:
        """Its words, without line breaks, after it has ended."""
        self.processes[name].wait(LIMIT)
        return " ".join((self.folder / f"{name}.txt").read_text().split())


@contextlib.contextmanager
def ranks(folder: Path, port: int, *names: str, **variables: str) -> Iterator[Ranks]:
    started = Ranks(folder, port, *names, **variables)
    try:
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.wait()


RANK_1, RANK_0, OF_AN_AGENT = (
    "rank 1 imports torch",
    "rank 0 does",
    "rank 0 does, and torchrun's agent serves the store",
)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ranks]]:
    """Jobs with a rank that never comes out of its import: all wait for the same deadline, so they run beside each other."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    agent = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    own = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "7"}

    def folder() -> Path:
        return tmp_path_factory.mktemp("held")

    with (
        ranks(folder(), free_port(), "0", "1 slow") as one,
        ranks(folder(), free_port(), "0 slow", "1") as zero,
        ranks(folder(), agent.port, "0 slow", "1", **own) as of_an_agent,
    ):
        yield {RANK_1: one, RANK_0: zero, OF_AN_AGENT: of_an_agent}


def test_a_rank_that_imports_torch_is_waited_for_and_is_not_missing(held: dict[str, Ranks]) -> None:
    zero, one = held[RANK_1].said("0"), held[RANK_1].said("1 slow")

    assert "2 of 2 ranks are here" in zero
    assert "2 of 2 connections between ranks" in zero, "the mesh waits for no import"
    assert re.search(r"· rank 1 \(\S+\) is importing torch, \d+ s", zero), zero
    waited = re.search(r"rank 1 \(\S+\) still importing torch after (\d+) s \[rank-starting\]", zero)
    assert waited, zero
    assert int(waited[1]) > DEADLINE * ARRIVAL
    assert not [words for words in NOT_TRUE if words in zero + one], zero + one


@each("which", (RANK_0, OF_AN_AGENT))
def test_a_rank_0_that_imports_torch_leads_all_the_same(which: str, held: dict[str, Ranks]) -> None:
    zero, one = held[which].said("0 slow"), held[which].said("1")

    assert re.search(r"· rank 0 \(\S+\) is importing torch, \d+ s", zero), zero
    assert "2 of 2 connections between ranks" in zero
    assert re.search(r"rank 0 \(\S+\) still importing torch after \d+ s \[rank-starting\]", zero), zero
    assert held[which].processes["1"].returncode == 1
    assert not [words for words in NOT_TRUE if words in zero + one], zero + one


def test_a_second_process_of_a_rank_is_a_duplicate_before_it_has_imported_torch(tmp_path: Path) -> None:
    with ranks(tmp_path, free_port(), "0", "1 again slow", "1", DSDOCTOR_COMM_RUN="a-job") as running:
        zero, again, one = running.said("0"), running.said("1 again slow"), running.said("1")

    assert "2 processes claim rank 1: pid " in zero, zero + again + one


def test_an_import_that_is_killed_is_told_at_once(tmp_path: Path) -> None:
    with ranks(tmp_path, free_port(), "0", "1 slow") as running:
        first = running.processes["1 slow"].pid
        wait_until(lambda: "tcp mesh" in (tmp_path / "0.txt").read_text(), LIMIT, "the mesh is not tested")
        (control,) = children(first)
        (importer,) = children(control)
        os.kill(importer, signal.SIGKILL)
        zero, one = running.said("0"), running.said("1 slow")

    assert "cannot take part: killed by SIGKILL in 'importing torch' [rank-unable]" in zero, zero
    assert "ended without a verdict (killed by SIGKILL), in 'importing torch' [control-lost]" in one, one


def test_a_closed_port_is_told_although_no_rank_ever_imports_torch(rig: Rig, tmp_path: Path) -> None:
    own = {rank: {"PYTHONPATH": str(HELD), "TORCH_IS_READ": str(tmp_path / "never")} for rank in range(2)}
    argv = ["-m", "dsdoctor.comm", "--quick", "--deadline", "120"]
    with contextlib.ExitStack() as closed:
        for node in rig.nodes:
            closed.enter_context(faults.one_port_open(node, PORT))
        with job(rig, argv, own=own) as running:
            assert running.wait(60, "0"), "it waited for the import\n" + running.told()

    assert running.ends["0"][0] == 1
    assert "[mesh-only-master-port]" in running.err()
    assert "importing torch" not in running.err()


def test_an_import_that_ends_late_is_late_and_no_more(tmp_path: Path) -> None:
    with ranks(tmp_path, free_port(), "0", "1 slow") as running:
        seen = tmp_path / "0.txt"
        while "is importing torch, " not in seen.read_text() and running.processes["0"].poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                running.processes["0"].wait(0.1)
        (tmp_path / "read").touch()
        zero = running.said("0")

    assert "rank 1 (" in zero
    assert "2 of 2 ranks are here" in zero, zero
    assert not [words for words in NOT_TRUE if words in zero], zero
