"""`python -m dsdoctor.comm` under the four launchers: gloo on the CPU, here or over the two nodes of a rig."""

import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsdoctor.comm.launch.start import free_port
from tests.builder.test_build_targets import Lab
from tests.comm import services
from tests.comm.conftest import need
from tests.comm.rig import Rig

pytestmark = pytest.mark.launch

QUICK = ("dsdoctor.comm", "--quick", "--backend", "gloo")
Done = subprocess.CompletedProcess[str]


def well(done: Done, hosts: Sequence[str]) -> bool:
    """Whether it ended with 0 and said that each rank, in this order of hosts, is OK; shows everything where not."""
    said = re.findall(r"\[(\S+)-(\d+)\] is OK", done.stdout + done.stderr)
    expected = {(host, str(rank)) for rank, host in enumerate(hosts)}
    if done.returncode == 0 and {*said} == expected:
        return True
    pytest.fail(f"ended with {done.returncode}, said {said}\n{done.stdout}\n{done.stderr}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun(ranks: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", str(ranks)]
    around = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*torchrun, "--master_port", port, "-m", *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=around, cwd=tmp_path)

    assert well(done, [socket.gethostname()] * ranks)


def test_torchruns_own_summary_shows_the_verdict(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "2"]
    command = [*torchrun, "--master_port", str(free_port()), "-m", "dsdoctor.comm", "--quick", "--backend", "nccl"]
    around = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=around, cwd=tmp_path)

    summary = done.stderr.rpartition("Root Cause")[2]
    assert done.returncode == 1
    assert re.search(r"traceback : ✗ .*rank 0", summary), done.stderr


def test_deepspeed_over_ssh_and_pdsh(rig: Rig) -> None:
    need(services.lacks("sshd", "ssh", "ssh-keygen", "pdsh"))
    need(None if importlib.util.find_spec("deepspeed") else "needs DeepSpeed")
    with services.sshd(rig):
        command = services.deepspeed(rig, "--module", *QUICK)
        done = rig[0].run(command, env=services.pdsh_environment(), cwd=rig.folder, timeout=120)

    assert well(done, ["nodea", "nodeb"])


@pytest.mark.slurm
def test_srun(rig: Rig) -> None:
    need(services.lacks("srun", "slurmctld", "slurmd", "munged", "munge"))
    with services.slurm(rig):
        command = ["srun", "--nodes", "2", "--ntasks-per-node", "2", sys.executable, "-m", *QUICK]
        done = rig[0].run(command, timeout=120)

    assert well(done, ["nodea", "nodea", "nodeb", "nodeb"])


@pytest.mark.slurm
def test_an_array_job_builds_a_target_each_and_one_index_joins_them(rig: Rig, tmp_path: Path) -> None:
    """README's recipe, with environments that play torch's part and ops of one line."""
    need(services.lacks("sbatch", "slurmctld", "slurmd", "munged", "munge"))
    (tmp_path / "lab").mkdir()
    lab = Lab(tmp_path / "lab")
    wanted = lab.arguments(lab.environment("2.13.0", "one"), lab.environment("2.14.1", "one"))
    build = shlex.join([sys.executable, "-m", "dsdoctor", *wanted])
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --array=0-1\n#SBATCH --output={tmp_path}/%a.log\nexport DSDOCTOR_CACHE={lab.cache}\n"
        f'{build} --target "$SLURM_ARRAY_TASK_ID" --out "{tmp_path}/wheels/$SLURM_ARRAY_TASK_ID"\n'
    )
    with services.slurm(rig):
        done = rig[0].run(["sbatch", "--wait", str(script)], timeout=120)
        logs = "".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
        assert done.returncode == 0, done.stderr + logs
    merged = [sys.executable, "-m", "dsdoctor", "index", "merge", tmp_path / "public", *(tmp_path / "wheels").iterdir()]
    subprocess.run(merged, check=True, capture_output=True)

    names = [path.name for path in (tmp_path / "public" / "deepspeed").glob("*.whl")]
    assert sorted(name.partition("+")[2][:13] for name in names) == ["cpu.torch2.13", "cpu.torch2.14"]


def test_mpirun_of_open_mpi(rig: Rig) -> None:
    need(services.lacks("sshd", "ssh", "ssh-keygen", "mpirun"))
    with services.sshd(rig):
        done = rig[0].run(services.mpirun(rig, 4, sys.executable, "-m", *QUICK), timeout=120)

    assert well(done, ["nodea", "nodea", "nodeb", "nodeb"])


def test_a_hostfile_is_looked_at_and_then_tested_over_ssh(rig: Rig) -> None:
    need(services.lacks("sshd", "ssh", "ssh-keygen"))
    with services.sshd(rig):
        hosts = str(services.deepspeed_hostfile(rig, slots=2))
        command = [sys.executable, "-m", "dsdoctor", "comm", "--quick", "--hostfile", hosts]
        done = rig[0].run(command, cwd=rig.folder, timeout=120)
        with Path(hosts).open("a") as file:
            file.write("nodex slots=2\n")
        failed = rig[0].run(command, cwd=rig.folder, timeout=60)

    assert well(done, ["nodea", "nodea", "nodeb", "nodeb"])
    assert failed.returncode == 1
    assert failed.stdout.startswith("✗ static: ssh to nodex failed: its name does not resolve here  [ssh-fails]")
