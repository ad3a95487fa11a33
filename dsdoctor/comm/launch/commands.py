"""How many ranks, and where -> the command and the variables of each; and the command of each launcher. Starts nothing."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsdoctor.core.rank_variables import TORCHRUN
from dsdoctor.hosts.hostfile import Slots

MODULE = "dsdoctor.comm"
SSH = (
    "-T",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=5",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)


@dataclass(frozen=True, kw_only=True)
class Started:
    """One rank that is to be started: ``argv``, and the variables to be added to this process's. ``host`` "" is this one.

    ``open_stdin``: its stdin must be a pipe that stays open as long as the rank may live. The rank ends when the pipe closes, so it
    ends with the process that holds the other end, however that one ends.
    """

    rank: int
    host: str
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    open_stdin: bool = False


def local_ranks(
    count: int,
    *,
    port: int,
    token: str,
    python: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> tuple[Started, ...]:
    """``count`` ranks on this machine. ``token`` is random and tells this run from others; ``variables`` are added to all."""
    argv = (python, "-m", MODULE, *arguments)
    return tuple(
        Started(
            rank=rank,
            host="",
            argv=argv,
            environment={**(variables or {}), **_who(rank, count, rank, count, "127.0.0.1", port, token)},
        )
        for rank in range(count)
    )


def ssh_ranks(
    hosts: Sequence[Slots],
    *,
    master: str,
    port: int,
    token: str,
    python: str,
    folder: str,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    ssh: str = "ssh",
) -> tuple[Started, ...]:
    """One ssh for each rank of a hostfile, ranks in its order; every rank starts in ``folder`` with ``variables``.

    sshd drops connections above its MaxStartups (10 at once that have not logged in, by default): start a host's in small groups.
    """
    places = [(host, local) for host in hosts for local in range(host.slots)]
    names = ",".join(host.name for host, _ in places)
    started = []
    for rank, (host, local) in enumerate(places):
        who = _who(rank, len(places), local, host.slots, master, port, token)
        every = {**(variables or {}), **who, "DSDOCTOR_COMM_HOSTS": names}
        command = remote_command((python, "-m", MODULE, *arguments), folder, every)
        started.append(Started(rank=rank, host=host.name, argv=(ssh, *SSH, host.name, command), open_stdin=True))
    return tuple(started)


def remote_command(argv: Sequence[str], folder: str, variables: Mapping[str, str]) -> str:
    """One command for any login shell: ``argv`` in ``folder`` with ``variables``, ended when its stdin closes.

    sshd closes the stdin when the connection goes, and does nothing else: without a terminal a remote process would live on.
    """
    script = REMOTE.format(
        folder=shlex.quote(folder),
        exports="".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()),
        command=shlex.join(argv),
    )
    return "exec sh -c " + shlex.quote(script)


def torchrun(
    per_node: int,
    *,
    python: str,
    arguments: Sequence[str] = (),
    nodes: int = 1,
    node_rank: int = 0,
    master: str | None = None,
    port: int | None = None,
) -> tuple[str, ...]:
    """torchrun's command for one node."""
    where = (*(("--node_rank", str(node_rank)) if nodes > 1 else ()), *_master(master, port))
    counts = ("--nproc_per_node", str(per_node), "--nnodes", str(nodes))
    return (python, "-m", "torch.distributed.run", *counts, *where, "-m", MODULE, *arguments)


def deepspeed(
    hostfile: str, *, python: str, arguments: Sequence[str] = (), master: str | None = None, port: int | None = None
) -> tuple[str, ...]:
    """The command of DeepSpeed's launcher, on the host that starts all others."""
    runner = (python, "-m", "deepspeed.launcher.runner", "--hostfile", hostfile)
    return (*runner, *_master(master, port), "--module", MODULE, *arguments)


def srun(per_node: int, *, nodes: int, python: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """srun's command. The ranks that are left report when one has failed: Slurm is told not to end them."""
    counts = ("--nodes", str(nodes), "--ntasks-per-node", str(per_node))
    return ("srun", *counts, "--kill-on-bad-exit=0", python, "-m", MODULE, *arguments)


def mpirun(count: int, *, python: str, arguments: Sequence[str] = (), options: Sequence[str] = ()) -> tuple[str, ...]:
    """Open MPI's command; ``options`` are its own (hosts, variables)."""
    return ("mpirun", "-np", str(count), *options, python, "-m", MODULE, *arguments)


def _master(address: str | None, port: int | None) -> tuple[str, ...]:
    """torchrun's and DeepSpeed's options for the master."""
    return (*(("--master_addr", address) if address else ()), *(("--master_port", str(port)) if port else ()))


def _who(rank: int, world: int, local: int, local_world: int, master: str, port: int, token: str) -> dict[str, str]:
    """What ``rank_of`` reads."""
    return {
        TORCHRUN.rank: str(rank),
        TORCHRUN.world: str(world),
        TORCHRUN.local_rank: str(local),
        TORCHRUN.local_world: str(local_world),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "DSDOCTOR_COMM_RUN": token,
    }


REMOTE = """\
cd {folder} || exit
{exports}exec 3<&0
{command} </dev/null 3<&- & rank=$!
(while read -r _ <&3; do :; done; kill -TERM $rank; sleep 5; kill -KILL $rank) >/dev/null 2>&1 & watch=$!
exec 3<&-
wait $rank; status=$?
kill $watch 2>/dev/null
exit $status
"""
