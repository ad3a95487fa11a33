"""Recipes are scripts that run as they are: bash reads them, a YAML reader reads the one for Kubernetes."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.comm.launch.recipes import RECIPES, Site, look_site, recipe
from dsdoctor.core.errors import UsageError
from tests.conftest import Disk

KNOWN = Site(
    python="/my env/bin/python",
    per_node=8,
    gpus=True,
    hosts=(("gpu01", 8), ("gpu02", 8)),
    interface="eth1",
    fabric=("mlx5_0",),
    partition="long",
)
BARE = Site(python="/p", per_node=2, gpus=False)
SCRIPTS = [name for name, _ in RECIPES if name != "k8s"]

# writes down what it was started with
ECHO = '#!/bin/bash\nprintf "%s\\n" "${0##*/} $*" "$MASTER_ADDR $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME"\n'


def run(script: str, folder: Path, *arguments: str, **env: str) -> list[str]:
    """Runs a recipe with what stands for Slurm and Python; what it said, by lines."""
    for name in ("srun", "python"):
        (folder / name).write_text(ECHO)
        (folder / name).chmod(0o755)
    (folder / "scontrol").write_text("#!/bin/sh\necho gpu01\necho gpu02\n")
    (folder / "scontrol").chmod(0o755)
    around = {"PATH": f"{folder}:{os.environ['PATH']}", **env}
    done = subprocess.run(
        ["bash", "-c", script, "recipe", *arguments], cwd=folder, env=around, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("site", [KNOWN, BARE], ids=["known", "bare"])
@pytest.mark.parametrize("kind", SCRIPTS)
def test_bash_reads_every_script(kind: str, site: Site) -> None:
    done = subprocess.run(["bash", "-n"], input=recipe(kind, site), capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")


def test_the_slurm_script_starts_a_rank_for_each_gpu(tmp_path: Path) -> None:
    script = recipe("slurm", KNOWN)
    asked = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]

    said = run(script, tmp_path, "--quick", SLURM_JOB_ID="7", SLURM_JOB_NODELIST="gpu[01-02]")

    assert {"nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=long"} <= set(asked)
    assert said == ["srun --kill-on-bad-exit=0 /my env/bin/python -m dsdoctor.comm --quick", "gpu01 eth1 =eth1"]
    assert "gpu" not in recipe("slurm", BARE)


def test_the_torchrun_script_takes_the_nodes_number(tmp_path: Path) -> None:
    site = Site(python=str(tmp_path / "python"), per_node=2, gpus=False, hosts=(("n1", 2), ("n2", 2)))

    said = run(recipe("torchrun", site), tmp_path, "1", "--quick")[0]

    assert said == (
        "python -m torch.distributed.run --nnodes 2 --nproc_per_node 2 --node_rank 1"
        " --master_addr n1 --master_port 29500 -m dsdoctor.comm --quick"
    )


def test_the_hostfile_script_writes_what_deepspeed_would_not_forward_once(tmp_path: Path) -> None:
    site = Site(python=str(tmp_path / "python"), per_node=2, gpus=False, hosts=(("n1", 2), ("n2", 2)), interface="eth1")

    run(recipe("hostfile", site), tmp_path)
    said = run(recipe("hostfile", site), tmp_path)[0]

    assert (tmp_path / "dsdoctor.hosts").read_text() == "n1 slots=2\nn2 slots=2\n"
    assert (tmp_path / ".deepspeed_env").read_text() == "GLOO_SOCKET_IFNAME=eth1\nNCCL_SOCKET_IFNAME==eth1\n"
    assert said == "python -m deepspeed.launcher.runner --hostfile dsdoctor.hosts --module dsdoctor.comm"


@pytest.mark.parametrize("site", [KNOWN, BARE], ids=["known", "bare"])
def test_the_kubernetes_recipe_is_a_service_and_a_job(site: Site) -> None:
    yaml = pytest.importorskip("yaml")

    service, job = yaml.safe_load_all(recipe("k8s", site))

    pod: Any = job["spec"]["template"]["spec"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (2, "Indexed")
    assert pod["containers"][0]["resources"]["limits"] == ({"nvidia.com/gpu": 8} if site.gpus else {"cpu": 2})
    assert f"--nproc_per_node {site.per_node} --node_rank" in pod["containers"][0]["args"][0]


def test_a_recipe_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError) as caught:
        recipe("pbs", BARE)

    assert caught.value.hint == "take one of: slurm, hostfile, torchrun, k8s"


def test_a_site_shows_its_gpus_hosts_fabric_and_partition(disk: Disk) -> None:
    files = {
        "/usr/bin/sinfo": "#!/bin/sh\necho debug\necho 'long*'\n",
        "/dev/nvidia0": "",
        "/dev/nvidia1": "",
        "/dev/nvidiactl": "",
        "/sys/class/infiniband/mlx5_0/x": "",
        "/job/hosts": "n1 slots=4\n$(reboot) slots=4\n",
    }
    host = disk(files, PATH="/usr/bin", SLURM_JOB_NODELIST="n[1-2]")

    allocated = look_site(host, python="/p")

    assert (allocated.per_node, allocated.gpus, allocated.partition) == (2, True, "long")
    assert (allocated.hosts, allocated.fabric) == ((("n1", 2), ("n2", 2)), ("mlx5_0",))
    assert look_site(host, python="/p", nproc=4, hostfile="/job/hosts").hosts == (("n1", 4),)
