"""Recipes are scripts that run as they are: bash reads and runs the one for Slurm, a YAML reader reads the one for Kubernetes."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.comm.launch.recipes import Site, look_site, recipe
from dsdoctor.core.errors import UsageError
from tests.conftest import Disk

ECHO = '#!/bin/bash\nprintf "%s\\n" "${0##*/} $*"\n'
"""Says what it was started with."""


@pytest.mark.parametrize("gpus", [True, False])
def test_the_slurm_script_starts_the_ranks_and_reads_what_rank_0_wrote(tmp_path: Path, *, gpus: bool) -> None:
    for name in ("srun", "my python"):
        (tmp_path / name).write_text(ECHO)
        (tmp_path / name).chmod(0o755)
    script = recipe("slurm", Site(python=str(tmp_path / "my python"), per_node=8, gpus=gpus, nodes=16))
    asked = {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")}

    around = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "-c", script, "recipe", "--quick"], cwd=tmp_path, env=around, capture_output=True, text=True
    )

    assert {"nodes=16", "ntasks-per-node=8"} <= asked
    assert ("gpus-per-node=8" in asked) is gpus
    ranks = f"srun --kill-on-bad-exit=0 {tmp_path}/my python -m dsdoctor.comm --json --quick\n"
    assert (tmp_path / "dsdoctor-comm-7.json").read_text() == ranks
    assert (done.stdout, done.stderr) == ("my python -m dsdoctor comm --read dsdoctor-comm-7.json\n", "")


@pytest.mark.parametrize("gpus", [True, False])
def test_the_kubernetes_recipe_is_a_service_and_a_job(*, gpus: bool) -> None:
    yaml = pytest.importorskip("yaml")

    service, job = yaml.safe_load_all(recipe("k8s", Site(python="/p", per_node=8, gpus=gpus, nodes=16)))

    pod: Any = job["spec"]["template"]["spec"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (16, "Indexed")
    assert pod["containers"][0]["resources"]["limits"] == ({"nvidia.com/gpu": 8} if gpus else {"cpu": 8})
    assert "--nproc_per_node 8 --node_rank" in pod["containers"][0]["args"][0]


def test_a_recipe_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        recipe("pbs", Site(python="/p", per_node=2, gpus=False))

    assert caught.value.hint == "take one of: slurm, k8s"


def test_a_site_is_an_allocation_a_hostfile_or_two_nodes(disk: Disk) -> None:
    files = {
        "/dev/nvidia0": "",
        "/dev/nvidia1": "",
        "/job/hosts": "n1 slots=4\n$(reboot) slots=9\nn2 slots=4\nn3 slots=2\n",
    }
    host = disk(files, SLURM_JOB_NODELIST="n[1-40]")

    assert look_site(host, python="/p") == Site(python="/p", per_node=2, gpus=True, nodes=40)
    assert look_site(host, python="/p", hostfile="/job/hosts") == Site(python="/p", per_node=4, gpus=True, nodes=3)
    assert look_site(disk({}), python="/p", nproc=3) == Site(python="/p", per_node=3, gpus=True, nodes=2)
