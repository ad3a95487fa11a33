"""Who a rank is, by the variables that each launcher really sets (values as seen with torch 2.13, DeepSpeed 0.19.8, Slurm 22.05,
Open MPI 4.1.4)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.comm.launch.rank import rank_of
from dsdoctor.comm.launch.start import HostOrder, variables_of
from dsdoctor.comm.models import Rank
from dsdoctor.core.errors import UsageError
from dsdoctor.ranks.nodelist import expand, hosts_of_ranks, open_mpi_nodes, tasks_per_node

BY_HAND = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
TORCHRUN = {
    **BY_HAND,
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
DEEPSPEED = {**BY_HAND, "CROSS_RANK": "0", "CROSS_SIZE": "2", "LOCAL_SIZE": "2"}
ALLOCATION = {
    "SLURM_JOB_ID": "3",
    "SLURM_JOB_NODELIST": "nodea,nodeb",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_TASKS_PER_NODE": "2,1",
}
BATCH = {**ALLOCATION, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **ALLOCATION,
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.200.0.1",
    "SLURM_STEP_NODELIST": "nodea,nodeb",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1674641408.0;tcp://192.0.2.2:33873;tcp6://[fd00::2]:58069",
    "OMPI_MCA_orte_local_daemon_uri": "1674641408.1;tcp://192.0.2.3:38915",
    "OMPI_MCA_orte_node_regex": "vm,nodeb@0(2)",
    "OMPI_MCA_orte_num_nodes": "2",
    "PMIX_NAMESPACE": "1674641409",
    "PMIX_RANK": "1",
}
# what srun set for the daemon of mpirun on the second node of an allocation: no word of the rank
DAEMON = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}


def of(variables: dict[str, str], **changes: str) -> Rank:
    found = rank_of({**variables, **changes})
    assert found is not None
    return found


def test_torchrun_says_who_serves_the_store_and_which_start_this_is() -> None:
    assert rank_of(TORCHRUN) == Rank(
        rank=1,
        world=4,
        local_rank=1,
        local_world=2,
        launcher="torchrun",
        master="10.0.0.1",
        port=29500,
        agent_store=True,
        run="none.2",
    )
    assert not of(TORCHRUN, TORCHELASTIC_USE_AGENT_STORE="False").agent_store


def test_deepspeeds_launcher_and_variables_set_by_hand_are_told_apart() -> None:
    assert (of(DEEPSPEED).launcher, of(DEEPSPEED).local_world) == ("deepspeed", 2)
    assert of(BY_HAND).launcher == "variables"


def test_a_step_of_srun_tells_the_host_of_every_rank_and_a_port_all_agree_on() -> None:
    first = of(SRUN, SLURM_PROCID="0", SLURM_NODEID="0")
    last = of(SRUN)

    assert (last.rank, last.world, last.local_rank, last.local_world, last.launcher) == (2, 3, 0, 1, "srun")
    assert (last.master, last.hosts, last.run) == ("nodea", ("nodea", "nodea", "nodeb"), "3.0.0")
    assert (first.master, first.port) == (last.master, last.port)
    assert 20_000 <= last.port < 29_500
    assert of(SRUN, SLURM_DISTRIBUTION="cyclic").hosts == ()


def test_a_shell_or_script_of_slurm_is_no_rank() -> None:
    made_claim = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PTY_PORT": "39811"}
    interactive = {**SRUN, "SLURM_STEP_ID": "4294967290"}

    assert [rank_of(each) for each in ({}, ALLOCATION, BATCH, made_claim, interactive)] == [None] * 5


def test_open_mpi_wins_over_the_slurm_variables_of_its_daemon() -> None:
    inside = of({**DAEMON, **OPEN_MPI})

    assert (inside.rank, inside.world, inside.launcher, inside.run) == (1, 3, "mpirun", "1674641409")
    assert of(OPEN_MPI, RANK="1", WORLD_SIZE="3", MASTER_ADDR="a").launcher == "variables"


@pytest.mark.parametrize(
    ("changes", "master"),
    [
        ({}, "192.0.2.2"),
        ({"OMPI_MCA_orte_node_regex": "login,gpu[2:1-2]@0(3)"}, "gpu01"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "127.0.0.1"),
        ({"MASTER_ADDR": "10.1.1.1"}, "10.1.1.1"),
    ],
    ids=["beside mpirun", "mpirun on a login node", "one host", "told"],
)
def test_under_open_mpi_the_master_is_where_rank_0_is(changes: dict[str, str], master: str) -> None:
    assert of(OPEN_MPI, **changes).master == master


def test_pmi_speaks_for_itself_unless_srun_set_it() -> None:
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}

    assert (of(hydra).rank, of(hydra).master, of(hydra).launcher) == (1, "127.0.0.1", "mpirun")
    assert of({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "3"}).launcher == "srun"
    assert of({**DAEMON, **hydra}).launcher == "mpirun"


@pytest.mark.parametrize("hosts", ["a,b", "a*1,b*1"])
def test_a_rank_that_dsdoctor_starts_knows_itself(hosts: str) -> None:
    order = HostOrder(
        first=0, count=2, world=2, master="127.0.0.1", port=4711, token="t0k", seconds=9.0, arguments=("--quick",)
    )

    assert of({**SRUN, **variables_of(order, 1), "DSDOCTOR_COMM_HOSTS": hosts}) == Rank(
        rank=1,
        world=2,
        local_rank=1,
        local_world=2,
        launcher="dsdoctor",
        master="127.0.0.1",
        port=4711,
        run="t0k",
        hosts=("a", "b"),
    )


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5, and WORLD_SIZE=2"),
        ({"RANK": "5"}, "RANK=5 says that this is a rank, and WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "this is one of several ranks, and MASTER_ADDR is not set"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one', and a whole number is required"),
        ({**BY_HAND, "MASTER_PORT": "70000"}, "MASTER_PORT=70000, and a port is 1 to 65535"),
        ({**BY_HAND, "LOCAL_RANK": "4"}, "local rank 4, and 4 ranks are on this host"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node[a"}, "the node list 'node[a' cannot be read"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1 says that this is a rank, and PMI_SIZE is not set"),
        ({**BY_HAND, "DSDOCTOR_COMM_RUN": "t", "DSDOCTOR_COMM_HOSTS": "a"}, "names 1 hosts, and WORLD_SIZE is 4"),
        (
            {**BY_HAND, "DSDOCTOR_COMM_RUN": "t", "DSDOCTOR_COMM_HOSTS": "a*9999999999"},
            "names more ranks, and WORLD_SIZE",
        ),
    ],
)
def test_what_clashes_is_named_with_both_facts_and_a_next_step(variables: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        rank_of(variables)

    assert said in caught.value.message
    assert caught.value.hint


NAMES = st.sampled_from(sorted({*TORCHRUN, *DEEPSPEED, *SRUN, *OPEN_MPI, "PMI_RANK", "PMI_SIZE", "DSDOCTOR_COMM_RUN"}))
VALUES = st.one_of(
    st.integers(0, 5).map(str), st.text(max_size=6), st.sampled_from(["n[1-3]", "2(x2)", "True", "t;tcp://1.2"])
)


@given(st.dictionaries(NAMES, VALUES, max_size=12))
def test_any_variables_give_a_rank_or_none_or_a_usage_error(variables: dict[str, str]) -> None:
    try:
        found = rank_of(variables)
    except UsageError as error:
        assert error.hint
    else:
        assert found is None or (0 <= found.rank < found.world and 1 <= found.port <= 65535 and found.master)


@pytest.mark.parametrize("read", [expand, tasks_per_node, open_mpi_nodes, lambda text: hosts_of_ranks(text, text)])
@given(text=st.text(alphabet="n01279[]-,()x:@", max_size=20))
def test_any_list_of_hosts_is_read_or_refused(read: Any, text: str) -> None:
    try:
        assert isinstance(read(text), tuple)
    except UsageError as error:
        assert error.hint


def test_a_list_of_more_hosts_than_there_are_is_refused_and_not_expanded() -> None:
    with pytest.raises(UsageError, match="more than 131072 hosts"):
        expand("n[1-999999]r[0-999999]")


def step_of_srun(rank: int, world: int) -> dict[str, str]:
    counts = {
        "SLURM_STEP_NUM_TASKS": f"{world}",
        "SLURM_STEP_TASKS_PER_NODE": f"{world}",
        "SLURM_STEP_NODELIST": "nodea",
    }
    return {**SRUN, **counts, "SLURM_PROCID": f"{rank}", "SLURM_LOCALID": f"{rank}", "SLURM_NODEID": "0"}


def of_open_mpi(rank: int, world: int) -> dict[str, str]:
    local = {"OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}", "OMPI_COMM_WORLD_LOCAL_SIZE": f"{world}"}
    return {**OPEN_MPI, **local, "OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": f"{world}"}


def of_mvapich(rank: int, world: int) -> dict[str, str]:
    local = {"MV2_COMM_WORLD_LOCAL_RANK": f"{rank}", "MV2_COMM_WORLD_LOCAL_SIZE": f"{world}"}
    return {**local, "MV2_COMM_WORLD_RANK": f"{rank}", "MV2_COMM_WORLD_SIZE": f"{world}"}


def of_mpich(rank: int, world: int) -> dict[str, str]:
    local = {"MPI_LOCALRANKID": f"{rank}", "MPI_LOCALNRANKS": f"{world}"}
    return {**local, "PMI_RANK": f"{rank}", "PMI_SIZE": f"{world}"}


TASKS = (step_of_srun, of_open_mpi, of_mvapich, of_mpich)
MARKS: dict[str, dict[str, str]] = {
    "variables": {},
    "torchrun": {"TORCHELASTIC_RUN_ID": "none"},
    "deepspeed": {"CROSS_RANK": "0", "LOCAL_SIZE": "1"},
    "dsdoctor": {"DSDOCTOR_COMM_RUN": "7"},
}


@given(
    st.sampled_from(TASKS),
    st.sampled_from(sorted(MARKS)),
    st.integers(1, 9),
    st.integers(1, 4),
    st.data(),
    st.booleans(),
)
def test_variables_that_were_left_in_the_shell_contradict_every_launcher_and_nested_launchers_do_not(
    tasks: Any, launcher: str, world: int, each: int, data: Any, left: bool
) -> None:
    task = data.draw(st.integers(0, world - 1))
    own_world = data.draw(st.integers(1, max(world - 1, 1))) if left else world * each
    own = data.draw(st.integers(0, own_world - 1)) if left else task * each + data.draw(st.integers(0, each - 1))
    by_hand = {"RANK": f"{own}", "WORLD_SIZE": f"{own_world}", "LOCAL_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
    found = {**tasks(task, world), **by_hand, **MARKS[launcher]}
    if own_world < world and launcher == "variables":
        with pytest.raises(
            UsageError, match=f"WORLD_SIZE={own_world}, and (srun|mpirun) has started {world} tasks"
        ) as said:
            rank_of(found)
        assert said.value.hint and said.value.hint.startswith("unset RANK WORLD_SIZE LOCAL_RANK")
    else:
        assert of(found).rank == own


def test_the_daemons_of_mpirun_are_no_tasks_of_a_job_that_is_started_by_hand() -> None:
    inside = {**DAEMON, "SLURM_STEP_NUM_TASKS": "9", **of_open_mpi(1, 2), "RANK": "1", "WORLD_SIZE": "2"}

    assert of(inside, MASTER_ADDR="10.0.0.1").rank == 1
