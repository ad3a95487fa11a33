"""Who is asked for a CUDA 12 compiler, and when nobody is."""

from pathlib import Path

import pytest

from dsdoctor.builder.toolkit.choose import toolkit_offers
from dsdoctor.core.machine import Cuda, Torch
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.snapshot import Snapshot
from dsdoctor.probe.observe import Observation
from tests.builder.redist_server import release, serving
from tests.conftest import machine, toolkit

TORCH_128 = Torch(version="2.8.0+cu128", location="", cuda=Cuda(12, 8))


def test_nobody_is_asked_where_a_toolkit_is_here_or_on_pypi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(release()) as server:
        monkeypatch.setenv("DSDOCTOR_CUDA_REDIST", server.address)
        for here in (machine(), machine(torch=TORCH_128, toolkits=(toolkit(Cuda(12, 8)),))):
            assert not toolkit_offers(Observation(machine=here, cache=str(tmp_path)), BuildRequest()).asked
        assert server.asked == []


def test_nvidias_archives_of_the_very_release_are_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(release()) as server:
        monkeypatch.setenv("DSDOCTOR_CUDA_REDIST", server.address)
        monkeypatch.setenv("no_proxy", "*")
        found = toolkit_offers(Observation(machine=machine(torch=TORCH_128), cache=str(tmp_path)), BuildRequest())

    assert found.nvidia is not None
    assert (found.nvidia.label, found.packages, list(tmp_path.iterdir())) == ("12.8.1", (), [])


def test_offline_and_of_a_snapshot_nobody_is_asked_and_that_is_told(tmp_path: Path) -> None:
    here = Observation(machine=machine(torch=TORCH_128), cache=str(tmp_path))
    elsewhere = Observation(machine=here.machine, cache=str(tmp_path), snapshot=Snapshot())

    offline = toolkit_offers(here, BuildRequest(offline=True))
    recorded = toolkit_offers(elsewhere, BuildRequest())

    assert offline.misses[0].startswith("--offline: ")
    assert recorded.misses[0].startswith("this is a snapshot: ")
