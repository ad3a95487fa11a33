"""What launchers and schedulers tell a process in its environment: which rank it is, on which hosts the ranks are, where rank 0 is.

Looks at nothing else. Standard library alone: a training script's process imports this before anything else.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dsdoctor.ranks.nodelist import expand, hosts_of_ranks, open_mpi_nodes, tasks_per_node

Variables = Mapping[str, str]
LOOPBACK = "127.0.0.1"
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's batch, interactive and external steps are numbered from here: none of them holds the ranks of a job."""


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


def in_step(variables: Variables) -> bool:
    """Whether srun started this as a task. The shell of salloc has no SLURM_PROCID, the script of sbatch has one and no step,
    and ``srun --pty`` is a person's shell."""
    step = variables.get("SLURM_STEP_ID", "")
    launched = "SLURM_LAUNCH_NODE_IPADDR" in variables or "SLURM_SRUN_COMM_HOST" in variables
    if SLURM.rank not in variables or not step.isdecimal() or not launched:
        return False
    alone = "SLURM_PTY_PORT" in variables and variables.get(SLURM.world) == "1"
    return int(step[:12]) < FIRST_SPECIAL_STEP and not alone


def _slurm_nodes(variables: Variables) -> str:
    return variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""


def slurm_hosts(variables: Variables) -> tuple[str, ...]:
    """The host of every rank of the step, () where the ranks do not fill one node after the other."""
    nodes = _slurm_nodes(variables)
    tasks = variables.get(SLURM.local_world) or variables.get("SLURM_TASKS_PER_NODE")
    block = variables.get("SLURM_DISTRIBUTION", "block").startswith("block")
    if not nodes or not tasks or not (block or len(expand(nodes)) == 1):
        return ()
    return hosts_of_ranks(nodes, tasks)


def slurm_local_world(variables: Variables) -> int | None:
    """The ranks on this node of the step."""
    tasks = variables.get(SLURM.local_world) or variables.get("SLURM_TASKS_PER_NODE")
    node = variables.get("SLURM_NODEID", "")
    counts = tasks_per_node(tasks) if tasks else ()
    return counts[int(node[:9])] if node.isdecimal() and int(node[:9]) < len(counts) else None


def slurm_master(variables: Variables) -> str | None:
    """Rank 0 is on the first node of the step, however the others are spread."""
    nodes = _slurm_nodes(variables)
    if not in_step(variables) or not nodes:
        return None
    hosts = expand(nodes)
    return hosts[0] if len(hosts) > 1 else LOOPBACK


def open_mpi_master(variables: Variables) -> str | None:
    """Where Open MPI 4 put rank 0.

    The host that runs mpirun is the first of its nodes. Where it holds ranks it holds rank 0, and its address is in
    ``orte_hnp_uri`` ("1692598272.0;tcp://192.0.2.2,10.0.0.2:35111"); else rank 0 is on the second node of the list, which then
    is one longer than the number of nodes in use. Seen with Open MPI 4.1.4.
    """
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    nodes = open_mpi_nodes(variables.get("OMPI_MCA_orte_node_regex", ""))
    beside_mpirun = variables.get("OMPI_MCA_orte_local_daemon_uri") == uri
    used = variables.get("OMPI_MCA_orte_num_nodes", "")
    if not beside_mpirun and used.isdecimal() and len(nodes) > max(1, int(used[:9])):
        return nodes[1]
    match = re.search(r";tcp://([0-9.]+)", uri)
    return match[1] if match else None
