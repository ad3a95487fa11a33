"""The variables that a launcher set -> who this rank is. Looks at nothing but the mapping it is given."""

import contextlib
import re
import zlib
from collections.abc import Callable
from dataclasses import replace

from dsdoctor.comm.models import Rank
from dsdoctor.core.errors import UsageError
from dsdoctor.ranks.launchers import (
    DEEPSPEED,
    LOOPBACK,
    MVAPICH,
    OPEN_MPI,
    PMI,
    PMIX,
    SLURM,
    TORCHRUN,
    RankVariables,
    Variables,
    in_step,
    open_mpi_master,
    slurm_hosts,
    slurm_local_world,
    slurm_master,
)

ALONE_OR_ONE = (
    "to test this machine alone: unset RANK WORLD_SIZE LOCAL_RANK; "
    "as one rank of several: export MASTER_ADDR=HOST_OF_RANK_0"
)
USUAL_PORT = 29500
"""What torchrun and DeepSpeed use by default."""

FIRST_PORT, PORTS = 20_000, 9_000
"""Ports derived from a job's id: below the kernel's ephemeral range (32768 upwards), and below 29500."""


def rank_of(variables: Variables) -> Rank | None:
    """Who this process is, None outside of any launcher.

    RANK wins over all (torchrun, DeepSpeed's launcher, our own, by hand), then Open MPI, MVAPICH, a PMI of its own, and last a
    step of srun: mpirun starts its daemons with srun, so Slurm's variables then describe a daemon.
    Raises UsageError for variables that are malformed or contradict each other.
    """
    for read in LAUNCHERS:
        found = read(variables)
        if found is not None:
            return _consistent(found)
    return None


def _by_rank(variables: Variables) -> Rank | None:
    if TORCHRUN.rank not in variables:
        if "DSDOCTOR_COMM_RUN" in variables:
            raise _clash("DSDOCTOR_COMM_RUN is set", "RANK is not", "unset DSDOCTOR_COMM_RUN")
        return None
    rank, world = _place(variables, TORCHRUN)
    launcher = _launcher(variables)
    if launcher == "variables":
        _fits_the_launcher(variables, rank, world)
    master = _master(variables, LOOPBACK if world == 1 else slurm_master(variables), ALONE_OR_ONE)
    names = DEEPSPEED if launcher == "deepspeed" else TORCHRUN
    return Rank(
        rank=rank,
        world=world,
        local_rank=_local_rank(variables, rank, master),
        local_world=_maybe(variables, names.local_world),
        launcher=launcher,
        master=master,
        port=_port(variables, None),
        agent_store=launcher == "torchrun" and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        run=_run(variables, launcher),
        hosts=_told_hosts(variables, world) if launcher == "dsdoctor" else (),
    )


def _open_mpi(variables: Variables) -> Rank | None:
    """mpirun of Open MPI. PMIX_SERVER_URI is of no use: it names each host's own daemon, mostly on 127.0.0.1."""
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or "0"
    hint = "mpirun -x MASTER_ADDR=HOST_OF_RANK_0 ..."
    return _of_names(variables, OPEN_MPI, hint, job=job, master=open_mpi_master)


def _mvapich(variables: Variables) -> Rank | None:
    return _of_names(variables, MVAPICH, "mpirun -env MASTER_ADDR HOST_OF_RANK_0 ...")


def _pmi(variables: Variables) -> Rank | None:
    """MPICH's and Intel's mpirun; srun sets the same variables, and then knows more."""
    if PMI.rank not in variables and PMIX.rank not in variables:
        return None
    same = (PMI.rank, SLURM.rank), (PMI.world, SLURM.world), (PMIX.rank, SLURM.rank)
    if in_step(variables) and all(
        variables.get(pmi, variables.get(slurm)) == variables.get(slurm) for pmi, slurm in same
    ):
        return None
    names = PMI if PMI.rank in variables else PMIX
    return _of_names(variables, names, "mpirun -genv MASTER_ADDR HOST_OF_RANK_0 ...")


def _of_names(
    variables: Variables,
    names: RankVariables,
    hint: str,
    *,
    job: str | None = None,
    master: Callable[[Variables], str | None] = lambda _: None,
) -> Rank | None:
    """A rank that mpirun has started. ``job`` is the job's id, if its launcher has one; ``master`` finds where rank 0 is."""
    if names.rank not in variables:
        return None
    (rank, world), local_world = _place(variables, names), _maybe(variables, names.local_world)
    return Rank(
        rank=rank,
        world=world,
        local_rank=_needed(variables, names.local_rank, names.rank),
        local_world=local_world,
        launcher="mpirun",
        master=_master(variables, LOOPBACK if local_world == world else master(variables), hint),
        port=_port(variables, job),
        run=job or variables.get("PMI_JOBID") or variables.get("SLURM_JOB_ID") or "0",
    )


def _slurm(variables: Variables) -> Rank | None:
    if not in_step(variables):
        return None
    names = SLURM if SLURM.world in variables else replace(SLURM, world="SLURM_NTASKS")
    rank, world = _place(variables, names)
    job = f"{variables.get('SLURM_JOB_ID', '0')}.{variables['SLURM_STEP_ID']}"
    hosts = slurm_hosts(variables)
    return Rank(
        rank=rank,
        world=world,
        local_rank=_needed(variables, SLURM.local_rank, SLURM.rank),
        local_world=slurm_local_world(variables),
        launcher="srun",
        master=_master(variables, slurm_master(variables), "srun --export=ALL,MASTER_ADDR=HOST_OF_RANK_0 ..."),
        port=_port(variables, job),
        run=f"{job}.{variables.get('SLURM_RESTART_COUNT', '0')}",
        hosts=hosts if len(hosts) == world else (),
    )


def _fits_the_launcher(variables: Variables, rank: int, world: int) -> None:
    """RANK and WORLD_SIZE were set by hand: every task of mpirun or srun is one rank, or starts the same number of ranks itself, so
    fewer ranks than tasks were left in the shell. torchrun and DeepSpeed's launcher set them anew for each rank; a job of torchrun
    in each task is no contradiction. Raises UsageError."""
    task = next((found for read in LAUNCHERS[1:] if (found := _or_none(read, variables)) is not None), None)
    if task is None or task.world <= world:
        return
    tasks = SRUN if task.launcher == "srun" else MPIRUN
    name = next(names for names in tasks if names.rank in variables and names.world in variables)
    raise _clash(
        f"RANK={rank} of WORLD_SIZE={world}",
        f"{task.launcher} has started {task.world} tasks and this is number {task.rank} ({name.rank}, {name.world})",
        "unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
    )


def _or_none(read: Callable[[Variables], Rank | None], variables: Variables) -> Rank | None:
    """The rank by one launcher's variables; what is wrong in those is of no matter where RANK decides."""
    with contextlib.suppress(UsageError):
        return read({**variables, "MASTER_ADDR": LOOPBACK})
    return None


def _launcher(variables: Variables) -> str:
    """Which of the launchers that set RANK this is. Launchers may be nested in any order."""
    if "DSDOCTOR_COMM_RUN" in variables:
        return "dsdoctor"
    if "CROSS_RANK" in variables and DEEPSPEED.local_world in variables:
        return "deepspeed"
    return "torchrun" if "TORCHELASTIC_RUN_ID" in variables else "variables"


def _run(variables: Variables, launcher: str) -> str:
    if launcher == "dsdoctor":
        return variables["DSDOCTOR_COMM_RUN"]
    if launcher == "torchrun":
        return f"{variables['TORCHELASTIC_RUN_ID']}.{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return "0"


def _told_hosts(variables: Variables, world: int) -> tuple[str, ...]:
    text = variables.get("DSDOCTOR_COMM_HOSTS", "")
    parts = [part.partition("*") for part in text.split(",")] if text else []
    if sum(int(count) for _, _, count in parts if count.isdecimal()) > world:
        raise _clash("DSDOCTOR_COMM_HOSTS names more ranks", f"WORLD_SIZE is {world}", "name one for each rank")
    hosts = tuple(name for name, _, count in parts for _ in range(int(count) if count.isdecimal() else 1))
    if hosts and len(hosts) != world:
        raise _clash(
            f"DSDOCTOR_COMM_HOSTS names {len(hosts)} hosts", f"WORLD_SIZE is {world}", "name one for each rank"
        )
    return hosts


def _local_rank(variables: Variables, rank: int, master: str) -> int:
    for name in (names.local_rank for names in (TORCHRUN, OPEN_MPI, PMI, SLURM)):
        if name in variables:
            return _number(variables, name)
    if local_world := _maybe(variables, TORCHRUN.local_world):
        return rank % local_world
    return rank if master in (LOOPBACK, "localhost") else 0


def _master(variables: Variables, guess: str | None, hint: str) -> str:
    master = variables.get("MASTER_ADDR", "").strip() or guess
    if not master:
        raise _clash("this is one of several ranks", "MASTER_ADDR is not set", hint)
    return master


def _port(variables: Variables, job: str | None) -> int:
    """MASTER_PORT; else one that follows from the job's id, the same on all of its ranks; else the usual one."""
    port = _maybe(variables, "MASTER_PORT")
    if port is None:
        return USUAL_PORT if job is None else FIRST_PORT + zlib.crc32(job.encode()) % PORTS
    if not 1 <= port <= 65535:
        raise _clash(f"MASTER_PORT={port}", "a port is 1 to 65535", f"export MASTER_PORT={USUAL_PORT}")
    return port


def _place(variables: Variables, names: RankVariables) -> tuple[int, int]:
    """The rank and the number of ranks. Raises UsageError where they do not fit each other."""
    rank, world = _number(variables, names.rank), _needed(variables, names.world, names.rank)
    if not rank < world:
        hint = (
            f"ranks are counted from 0, so the last of {world} is {world - 1}: give the first one 0, or start {rank + 1} or more; "
            "or unset what was left in this shell"
        )
        raise _clash(f"{names.rank}={rank}", f"{names.world}={world}", hint)
    return rank, world


def _maybe(variables: Variables, name: str) -> int | None:
    return _number(variables, name) if name in variables else None


def _needed(variables: Variables, name: str, beside: str) -> int:
    if name not in variables:
        hint = f"set {name} too, or unset {beside} to test this machine alone"
        raise _clash(f"{beside}={variables[beside]} says that this is a rank", f"{name} is not set", hint)
    return _number(variables, name)


def _number(variables: Variables, name: str) -> int:
    text = variables[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise _clash(f"{name}={variables[name][:40]!r}", "a whole number is required", f"set it, or unset {name}")
    return int(text)


def _consistent(rank: Rank) -> Rank:
    """The rank itself, if its place on its host fits."""
    if rank.local_world is not None and not 1 <= rank.local_world <= rank.world:
        hint = "unset LOCAL_WORLD_SIZE, or set it to the number of ranks on this host"
        raise _clash(f"{rank.local_world} ranks on this host", f"the world has {rank.world}", hint)
    if rank.local_rank >= (rank.local_world or rank.world):
        hint = "set LOCAL_RANK to this rank's number on its host, from 0"
        raise _clash(f"local rank {rank.local_rank}", f"{rank.local_world or rank.world} ranks are on this host", hint)
    return rank


def _clash(fact: str, other: str, hint: str) -> UsageError:
    return UsageError(f"{fact}, and {other}", hint=hint)


SRUN, MPIRUN = (SLURM, replace(SLURM, world="SLURM_NTASKS")), (OPEN_MPI, MVAPICH, PMI, PMIX)
LAUNCHERS = (_by_rank, _open_mpi, _mvapich, _pmi, _slurm)
