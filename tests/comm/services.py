"""What launchers need on a rig: sshd on every node, Slurm over all of them, Open MPI's arguments. Context managers; each
waits until the service answers and shows its log where it does not."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.comm.rig import Node, Rig, stop, wait_until

Process = subprocess.Popen[str]

SSHD = """\
Port 22
HostKey {folder}/host_key
AuthorizedKeysFile {keys}
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
MaxStartups 100
"""
SSH = """\
Host *
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  BatchMode yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SLURM = """\
ClusterName=rig
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd.spool
StateSaveLocation=/run/slurmctld.state
SlurmctldTimeout=30
SlurmdTimeout=60
KillWait=2
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def lacks(*programs: str) -> str | None:
    """Why a service cannot be had: the programs that are not installed; None if all are."""
    absent = [program for program in programs if not shutil.which(program)]
    return f"needs {', '.join(absent)}" if absent else None


def answers(node: Node, *argv: str) -> bool:
    """Whether a command of the node ends well within five seconds."""
    try:
        return node.run(argv, timeout=5).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def daemon(node: Node, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> tuple[Process, Path]:
    """Starts a service of a node in the foreground with a log of its own."""
    log = node.folder / f"{name}.log"
    with log.open("w") as file:
        return node.popen(argv, env=env, stdout=file, stderr=file), log


def wrapper(rig: Rig, name: str, line: str) -> None:
    """A program of every node's PATH."""
    script = rig.bin / name
    script.write_text(f"#!/bin/sh\n{line}\n")
    script.chmod(0o755)


@contextlib.contextmanager
def sshd(rig: Rig) -> Iterator[None]:
    """sshd on every node; ``ssh nodeb`` works from every node, and so do pdsh and all that call ``ssh`` from PATH."""
    key = rig.folder / "key"
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
    subprocess.run([*keygen, str(key)], check=True)
    (rig.folder / "ssh_config").write_text(SSH.format(key=key))
    wrapper(rig, "ssh", f'exec {shutil.which("ssh")} -F {rig.folder}/ssh_config "$@"')
    started = []
    for node in rig.nodes:
        subprocess.run([*keygen, str(node.folder / "host_key")], check=True)
        config = node.folder / "sshd_config"
        config.write_text(SSHD.format(folder=node.folder, keys=f"{key}.pub"))
        started.append(daemon(node, "sshd", ["/usr/sbin/sshd", "-D", "-e", "-f", str(config)]))
    try:
        for node, (_, log) in zip(rig.nodes, started, strict=True):
            wait_until(lambda name=node.name: answers(rig[0], "ssh", name, "true"), 10, "sshd does not answer", log)
        yield
    finally:
        for process, _ in started:
            stop(process)


def pdsh_environment() -> dict[str, str]:
    """What makes pdsh call ``ssh``."""
    return {"PDSH_RCMD_TYPE": "ssh"}


def deepspeed_hostfile(rig: Rig, slots: int = 1) -> Path:
    """A hostfile of all nodes, and a ``.deepspeed_env`` beside it (DeepSpeed reads that of its working directory) with what its
    launcher does not forward."""
    hostfile = rig.folder / "hosts"
    hostfile.write_text("".join(f"{node.name} slots={slots}\n" for node in rig.nodes))
    around = {**rig.environment(), "DS_ACCELERATOR": "cpu"}
    (rig.folder / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in around.items()))
    return hostfile


def deepspeed(rig: Rig, *rest: str, slots: int = 1) -> list[str]:
    """DeepSpeed's launcher over pdsh and ssh on all nodes; run it in ``rig.folder``, on the first node."""
    hostfile = str(deepspeed_hostfile(rig, slots))
    return ["deepspeed", "--hostfile", hostfile, "--master_addr", rig[0].address, "--launcher", "pdsh", *rest]


def mpirun(rig: Rig, ranks: int, *rest: str, oversubscribe: bool = True) -> list[str]:
    """Open MPI over all nodes with the rig's ssh, told the network to use; run it on the first node."""
    share = -(-ranks // len(rig.nodes))
    hosts = ",".join(f"{node.name}:{share}" for node in rig.nodes)
    where = {"plm_rsh_agent": "ssh", "btl_tcp_if_include": "eth0", "oob_tcp_if_include": "eth0"}
    where |= {"orte_tmpdir_base": "/run/tmp", "plm_rsh_no_tree_spawn": "1"}
    arguments = [part for name, value in where.items() for part in ("--mca", name, value)]
    forwarded = [part for name in ("PATH", "HOME", "OMP_NUM_THREADS") for part in ("-x", name)]
    return ["mpirun", "--allow-run-as-root", *arguments, *forwarded, "-np", str(ranks), "--host", hosts, *rest]


@contextlib.contextmanager
def slurm(rig: Rig, cpus: int = 4) -> Iterator[None]:
    """munged and slurmd on every node and slurmctld on the first, where ``srun`` then works."""
    config = rig.folder / "slurm"
    config.mkdir()
    nodes = "\n".join(
        f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} RealMemory=100 State=UNKNOWN" for node in rig.nodes
    )
    names = ",".join(rig.names)
    (config / "slurm.conf").write_text(
        SLURM.format(first=rig[0].name, address=rig[0].address, nodes=nodes, names=names)
    )
    (config / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    key = config / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    for node in rig.nodes:
        node.env = {**node.env, "SLURM_CONF": str(config / "slurm.conf")}
    started = list(_munge(rig, key))
    try:
        started.append(daemon(rig[0], "slurmctld", ["slurmctld", "-D"]))
        started += [daemon(node, "slurmd", ["slurmd", "-D", "-N", node.name]) for node in rig.nodes]
        every = ["srun", "--nodes", str(len(rig.nodes)), "--ntasks-per-node", "1", "true"]
        wait_until(lambda: answers(rig[0], *every), 40, "srun does not run", started[len(rig.nodes)][1])
        yield
    finally:
        for process, _ in started:
            stop(process)


def _munge(rig: Rig, key: Path) -> Iterator[tuple[Process, Path]]:
    paths = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{name}=/run/munge.{end}" for name, end in paths.items()]
    for node in rig.nodes:
        munged = ["munged", "--foreground", "--force", f"--key-file={key}", *options]
        yield daemon(node, "munged", munged)
    for node in rig.nodes:
        log = node.folder / "munged.log"
        wait_until(
            lambda node=node: answers(node, "munge", "--socket=/run/munge.socket", "-n"),
            10,
            "munged does not answer",
            log,
        )
