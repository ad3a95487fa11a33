"""What NCCL writes is read, from several ranks and releases at once."""

from dataclasses import replace
from pathlib import Path

from dsdoctor.comm.collectives.nccl import CHECKS, NcclFacts, examine, parse_nccl_log, relevant_lines
from dsdoctor.comm.models import Claim, FabricPort, Local

INIT = (
    "NCCL INFO ncclCommInitRank comm {comm} rank {rank} nranks {world} cudaDev 0 nvmlDev 0 busId 1000 commId 0x5 - Init"
)
NODE_A = f"""\
[rank0]: n1:41:41 [0] NCCL INFO Bootstrap : Using ib0.0065:10.1.32.3<0>
n1:41:41 [0] NCCL INFO cudaDriverVersion 12040
NCCL version 2.21.5+cuda12.4
n1:41:67 [0] NCCL INFO NCCL_ALGO set by environment to Ring
n1:41:67 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_2:1/RoCE [RO]; OOB ib0.0065:10.1.32.3<0>
n1:41:67 [0] NCCL INFO Using network IB
n1:41:67 [0] {INIT.format(comm="0xa1", rank=0, world=4)} START
n1:41:67 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'
n1:41:67 [0] NCCL INFO GPU Direct RDMA Disabled for GPU 42000 / HCA 1 (distance 6 > 4)
n1:41:67 [0] NCCL INFO Could not enable P2P between dev 1(=81000) and dev 0(=41000)
n1:41:67 [0] NCCL INFO Channel 00 : 0[41000] -> 1[81000] via SHM/direct/direct
n1:41:67 [0] NCCL INFO Channel 00/0 : 0[0] -> 2[0] [send] via NET/IB/1/GDRDMA
n1:41:67 [0] NCCL INFO Channel 01/0 : 0[0] -> 2[0] [send] via NET/IB/0(1)/GDRDMA
n1:41:67 [0] {INIT.format(comm="0xa1", rank=0, world=4)} COMPLETE
"""
NODE_B = f"""\
[2025-09-01 10:00:00] n2:52:60 [2] {INIT.format(comm="0xb2", rank=2, world=4)} START
[2025-09-01 10:00:09] n2:52:60 [2] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.1.32.3<4711> failed
n2:99:99 [0] {INIT.format(comm="0xc3", rank=0, world=2)} START
n2:99:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC
"""


def claims() -> tuple[Claim, ...]:
    port = FabricPort(device="mlx5_0", port=1, state="ACTIVE", physical="LinkUp", rate=200.0)
    return tuple(
        Claim(
            rank=rank,
            world=4,
            local_rank=rank % 2,
            host=f"n{rank // 2 + 1}",
            pid=1,
            address="",
            port=1,
            local=Local(hostname="", fabric=(port,)),
        )
        for rank in range(4)
    )


def test_the_logs_of_two_ranks_and_a_smaller_group_are_told_apart() -> None:
    assert parse_nccl_log(NODE_A + NODE_B) == NcclFacts(
        bootstrap=("ib0.0065:10.1.32.3",),
        networks=("IB",),
        hcas=("mlx5_0:1/IB", "mlx5_2:1/RoCE"),
        direct=False,
        variables={"NCCL_ALGO": "Ring"},
        edges={"0 -> 1": "SHM/direct/direct", "0 -> 2": "NET/IB/GDRDMA + NET/IB/PXN/GDRDMA"},
        world=4,
        incomplete=(2,),
        no_p2p=("Could not enable P2P between dev 1(=81000) and dev 0(=41000)",),
        warnings=("n2:52: socketStartConnect: Connect to 10.1.32.3<4711> failed",),
    )


def test_every_ill_in_them_is_found_with_ranks_and_hosts() -> None:
    facts = replace(parse_nccl_log(NODE_A + NODE_B), networks=("Socket",), no_fabric=("NET/IB : No device found",))

    titles = {finding.rule: finding.title for finding in examine(facts, claims())}

    assert set(titles) == {check.__name__.replace("_", "-") for check in CHECKS}
    assert titles["nccl-init-incomplete"] == "rank 2 (n2) did not finish NCCL's init of 4 ranks"
    assert titles["nccl-network-is-socket"] == "NCCL uses TCP sockets, though mlx5_0 of n1 is active"
    assert titles["nccl-p2p-off"].endswith("without P2P: 0 -> 1 via SHM/direct/direct")


def test_a_log_of_a_healthy_pair_has_no_ill() -> None:
    log = "".join(
        f"n1:{rank}:9 [0] {INIT.format(comm='0x1', rank=rank, world=2)} {end}\n"
        f"n1:{rank}:9 [0] NCCL INFO Channel 00/0 : {rank}[0] -> {1 - rank}[1] via P2P/CUMEM\n"
        for end in ("START", "COMPLETE")
        for rank in (0, 1)
    )

    facts = parse_nccl_log(log)

    assert examine(facts, claims()) == ()
    assert facts.edges == {"0 -> 1": "P2P/CUMEM", "1 -> 0": "P2P/CUMEM"}


def test_what_a_rank_sends_of_its_log_tells_the_same_as_the_whole(tmp_path: Path) -> None:
    (tmp_path / "nccl.n1.41.log").write_text(NODE_A + "\nn1:41:41 [0] NCCL INFO cudaDriverVersion 13000\n" + NODE_A)
    (tmp_path / "nccl.n1.42.log").write_text(NODE_B)

    sent = relevant_lines(str(tmp_path), 41)

    assert parse_nccl_log(sent).edges == parse_nccl_log(NODE_A).edges
    assert "cudaDriverVersion" not in sent
    assert len(sent) <= len(NODE_A)
    assert relevant_lines(str(tmp_path), 43) == ""
