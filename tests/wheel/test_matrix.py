"""Two torches, two environments that dsdoctor makes and keeps, two wheels: each loads in its own and in no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.wheel.conftest import dsdoctor

pytestmark = pytest.mark.wheel
TORCHES = ("2.13.0", "2.14.1")


def test_two_torches_give_two_wheels_that_load_each_in_its_own_environment(tmp_path: Path) -> None:
    wanted = [word for torch in TORCHES for word in ("--torch", torch)]
    out, index = str(tmp_path / "dist"), str(tmp_path / "index")

    status, document = dsdoctor(
        "build-wheel", *wanted, "--accelerator", "cpu", "--ops", "pin_memory", "-o", out, "--index", index
    )

    assert status == 0, document
    targets = document["targets"]
    assert [target["torch"] for target in targets] == list(TORCHES)
    assert len({target["sha256"] for target in targets}) == 2
    for target, other in (targets, reversed(targets)):
        site = tmp_path / target["torch"]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
        subprocess.run([*pip, target["wheel"]], check=True)
        loaded, seen = dsdoctor(
            "wheel", "verify", "--installed", "--load", "--python", target["python"], PYTHONPATH=str(site)
        )
        elsewhere, _ = dsdoctor("wheel", "verify", target["wheel"], "--python", other["python"])
        _, best = dsdoctor("wheel", "pick", index, "--python", target["python"])
        assert (loaded, seen["built"]["installed_ops"], elsewhere) == (0, ["pin_memory"], 1), seen["findings"]
        assert Path(best["wheel"]).name == Path(target["wheel"]).name
