"""What the slowest link can do, as claims tell it."""

from dataclasses import replace
from typing import Any

import pytest

from dsdoctor.comm.local.interfaces import limit
from dsdoctor.comm.models import Claim, FabricPort, Interface, Local, RankGpu

A100 = RankGpu(index=0, name="A100", uuid="", pcie=(1, 16), pcie_max=(4, 16), nvlink=300e9)
ETH = Interface(name="eth0", address="10.0.0.1", prefix=24, mtu=9000, speed=25_000)
PORTS = tuple(FabricPort(device=f"mlx5_{n}", port=1, state="ACTIVE", physical="LinkUp", rate=200.0) for n in range(4))


def job(world: int, per_host: int, gpu: RankGpu | None = A100, **local: Any) -> list[Claim]:
    """``world`` ranks, ``per_host`` on each host, each with a GPU of its own."""
    made = []
    for rank in range(world):
        own = (replace(gpu, uuid=f"GPU-{rank}", index=rank % per_host),) if gpu else ()
        place = Local(hostname="", interfaces=(ETH,), gpus=own, **local)
        made.append(
            Claim(
                rank=rank,
                world=world,
                local_rank=rank % per_host,
                host=f"n{rank // per_host}",
                pid=1,
                address="",
                port=1,
                interface="eth0",
                gpu=f"GPU-{rank}" if gpu else None,
                local=place,
            )
        )
    return made


@pytest.mark.parametrize(
    ("claims", "backend", "gigabytes", "link"),
    [
        (job(8, 8), "nccl", 240, "NVLink of n0"),
        (job(8, 8, replace(A100, nvlink=None)), "nccl", 24, "PCIe Gen4 x16 of n0"),
        (job(8, 8, replace(A100, nvlink=None, pcie=(1, 8))), "nccl", 12, "PCIe Gen4 x8 of n0"),
        (job(16, 8, fabric=PORTS), "nccl", 100, "InfiniBand of n0"),
        (job(16, 8, fabric=PORTS, variables={"NCCL_IB_HCA": "=mlx5_1"}), "nccl", 25, "InfiniBand of n0"),
        (job(16, 8, fabric=PORTS, variables={"NCCL_IB_DISABLE": "1"}), "nccl", 3.125, "eth0 of n0"),
        (job(2, 1, fabric=PORTS), "nccl", 24, "PCIe of n0"),
        (job(4, 2, None), "gloo", 3.125, "eth0 of n0"),
    ],
)
def test_the_slowest_link_is_the_limit(claims: list[Claim], backend: str, gigabytes: float, link: str) -> None:
    found = limit(claims, backend)

    assert found is not None
    assert (found.bandwidth / 1e9, found.link) == (pytest.approx(gigabytes), link)


def test_what_has_no_limit_of_its_own_gets_none() -> None:
    same = [replace(claim, gpu="GPU-0", local=job(1, 1)[0].local) for claim in job(2, 2)]

    assert limit(job(4, 4, None), "gloo") is None
    assert limit(same, "nccl") is None
    assert limit([], "nccl") is None
