"""The environment variables in which launchers tell a process which rank it is. Names only; reads nothing.

Standard library alone: a training script's process imports this before anything else.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankVariables:
    """What one launcher calls the rank, the number of ranks, the rank on this host, and the number of ranks on this host."""

    rank: str
    world: str
    local_rank: str
    local_world: str


TORCHRUN = RankVariables(rank="RANK", world="WORLD_SIZE", local_rank="LOCAL_RANK", local_world="LOCAL_WORLD_SIZE")
DEEPSPEED = RankVariables(rank="RANK", world="WORLD_SIZE", local_rank="LOCAL_RANK", local_world="LOCAL_SIZE")
OPEN_MPI = RankVariables(
    rank="OMPI_COMM_WORLD_RANK",
    world="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
)
MVAPICH = RankVariables(
    rank="MV2_COMM_WORLD_RANK",
    world="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_world="MV2_COMM_WORLD_LOCAL_SIZE",
)
PMI = RankVariables(rank="PMI_RANK", world="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world="MPI_LOCALNRANKS")
"""MPICH's and Intel's mpirun."""
PMIX = RankVariables(rank="PMIX_RANK", world="PMI_SIZE", local_rank="MPI_LOCALRANKID", local_world="MPI_LOCALNRANKS")
SLURM = RankVariables(
    rank="SLURM_PROCID",
    world="SLURM_STEP_NUM_TASKS",
    local_rank="SLURM_LOCALID",
    local_world="SLURM_STEP_TASKS_PER_NODE",
)
"""``local_world`` is a list for all nodes, such as "2(x3),1"."""

RANKS = (TORCHRUN.rank, SLURM.rank, OPEN_MPI.rank, PMI.rank, MVAPICH.rank, TORCHRUN.local_rank)
"""A process's number, the surest name first: Slurm's is there under torchrun too, where it is the node's number."""
