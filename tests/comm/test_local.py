"""The local phase: what a rank sees of its host, which interface a backend takes, and what is the matter with either."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsdoctor.comm.local.checks import CHECKS, examine_all
from dsdoctor.comm.local.facts import look_local, read_config_files, read_fabric, read_iommu, read_variables, visible
from dsdoctor.comm.local.interfaces import bounded, choose
from dsdoctor.comm.models import ChosenInterface, Claim, FabricPort, Interface, Local, Rank, RankGpu
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from tests.comm.made_claims import findings_of
from tests.conftest import Disk
from tests.each import each
from tests.planted import IN_ADDRESSES

GIB = 1 << 30
LO = Interface(name="lo", address="127.0.0.1", prefix=8, mtu=65536, kind="loopback")
ETH = Interface(name="eth0", address="10.0.0.1", prefix=24, mtu=1500, speed=10_000)
FAST = Interface(name="ens9", address="10.1.0.1", prefix=24, mtu=9000, speed=100_000)
DOCKER = Interface(name="docker0", address="172.17.0.1", prefix=16, mtu=1500, kind="virtual")
IB = Interface(name="ib0", address="10.2.0.1", prefix=24, mtu=2044)
PORT = FabricPort(device="mlx5_0", port=1, state="ACTIVE", physical="LinkUp", rate=400.0, full=400.0)
H100 = RankGpu(index=0, name="NVIDIA H100", uuid="GPU-0", free=79 * GIB, total=80 * GIB, pcie=(1, 16), pcie_max=(5, 16))
BY_ETH = ChosenInterface(name="eth0", address="10.0.0.1", because="the kernel routes to 10.0.0.9 by it")
ME = Rank(rank=3, world=16, local_rank=0, local_world=8, launcher="srun", master="10.0.0.9", port=29500)


def healthy(**changes: Any) -> Local:
    """A host on which nothing is the matter; ``changes`` replace fields."""
    facts: dict[str, Any] = {
        "hostname": "node1",
        "resolves_to": ("10.0.0.1",),
        "interfaces": (LO, ETH),
        "chosen": ChosenInterface(name="eth0", address="10.0.0.1", because="the hostname resolves to 10.0.0.1"),
        "routed": BY_ETH,
        "shm_total": 64 * GIB,
        "shm_free": 64 * GIB,
        "nofile": 65536,
        "fabric": (PORT,),
        "gpus": (H100,),
    }
    return Local(**{**facts, **changes})


def judged(local: Local, backend: str = "nccl", *, several_hosts: bool = True) -> tuple[Finding, ...]:
    return findings_of(ME, local, backend=backend, several_hosts=several_hosts)


def taken(interface: Interface, because: str = "a rule") -> ChosenInterface:
    return ChosenInterface(name=interface.name, address=interface.address, because=because)


BARE = replace(H100, nvlink=None)
A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", nvlink=300e9)
WITH_PROBLEM = {
    "hostname-unusable": healthy(resolves_to=("10.7.7.7",), chosen=taken(LO)),
    "interface-named-absent": healthy(variables={"NCCL_SOCKET_IFNAME": "=eth7"}, chosen=None),
    "comm-shm-too-small": healthy(shm_total=64 << 20, shm_free=60 << 20),
    "tmp-full": healthy(tmp="/tmp", tmp_free=0),
    "memlock-limited": healthy(memlock=8 << 20),
    "nofile-low": healthy(nofile=256),
    "address-space-limited": healthy(address_space=2 * GIB),
    "fabric-port-down": healthy(fabric=(replace(PORT, state="INIT"),)),
    "pcie-link-degraded": healthy(gpus=(replace(H100, pcie=(1, 8)),)),
    "gpu-memory-taken": healthy(gpus=(replace(H100, free=9 * GIB),)),
    "nccl-variable-left-set": healthy(variables={"NCCL_P2P_DISABLE": "1"}),
    "p2p-through-processor": healthy(iommu="translating", gpus=(BARE, replace(BARE, uuid="GPU-1"))),
    "gpu-links-missing": healthy(gpus=(replace(A100, nvlink=275e9), replace(A100, uuid="GPU-1"))),
    "fabric-port-narrow": healthy(fabric=(replace(PORT, rate=200.0),)),
}


@each("rule", sorted(WITH_PROBLEM))
def test_a_check_finds_its_ill_and_names_rank_and_host(rule: str) -> None:
    finding = next(finding for finding in judged(WITH_PROBLEM[rule]) if finding.rule == rule)

    assert finding.title.startswith("rank 3 (node1)")
    assert finding.fix is not None or finding.severity is Severity.NOTE
    assert not any("{who}" in text or "None" in text for text in (finding.title, *finding.evidence))


@each("nvlink", [None, 450e9])
def test_a_bridge_that_redirects_is_named_where_gpus_have_no_link_of_their_own(nvlink: float | None) -> None:
    gpu = replace(H100, nvlink=nvlink)
    (finding,) = judged(healthy(acs=("17:00.0", "18:00.0"), gpus=(gpu, replace(gpu, uuid="GPU-1"))))

    assert finding.title == "rank 3 (node1): ACS redirects traffic between devices at 2 PCI bridges"
    assert finding.severity is (Severity.NOTE if nvlink else Severity.WARNING)
    assert "setpci -s 17:00.0" in (finding.fix or pytest.fail()).commands[-1]
    assert judged(healthy(acs=("not read: only root sees it",), gpus=(gpu, replace(gpu, uuid="GPU-1")))) == ()


def test_every_local_check_has_a_sick_host_and_explains_itself() -> None:
    assert set(WITH_PROBLEM) == {check.__name__.replace("_", "-") for check in CHECKS}
    assert all((check.__doc__ or "").strip() for check in CHECKS)


NVLINKS = {
    "Tesla V100-SXM2-32GB": 150,
    "NVIDIA A100-SXM4-80GB": 300,
    "NVIDIA A800-SXM4-80GB": 200,
    "NVIDIA GH200 480GB": 450,
    "NVIDIA H100 80GB HBM3": 450,
    "NVIDIA H200": 450,
    "NVIDIA B200": 900,
    "NVIDIA GB200": 900,
    "NVIDIA B300": 900,
    **dict.fromkeys(
        ("NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA A100-PCIE-40GB", "NVIDIA L40S", "Tesla V100-PCIE-16GB")
    ),
}
"""GB/s one way, by the driver's names; None: without links on the board."""


@each("name", NVLINKS)
@each("part", [None, 0.5, 17 / 18, 1.0])
def test_links_are_held_against_those_of_the_kind(name: str, part: float | None) -> None:
    expected = NVLINKS[name]
    gpu = replace(H100, name=name, nvlink=None if part is None else (expected or 100) * 1e9 * part)
    pair = healthy(gpus=(gpu, replace(gpu, uuid="GPU-1")))

    less = expected is not None and part != 1.0
    assert ("gpu-links-missing" in {one.rule for one in judged(pair)}) is less
    assert "gpu-links-missing" not in {one.rule for one in judged(healthy(gpus=(gpu,)))}


@each("backend", ["nccl", "gloo"])
def test_a_healthy_host_and_an_unknown_one_have_no_ill(backend: str) -> None:
    assert judged(healthy(), backend) == ()
    assert judged(Local(hostname="x"), backend, several_hosts=False) == ()


def test_a_loopback_name_is_a_warning_and_nothing_on_one_host() -> None:
    local = healthy(resolves_to=("127.0.1.1",), chosen=taken(LO))

    assert [finding.severity for finding in (*judged(local, "gloo"), *judged(local))] == [Severity.WARNING] * 2
    assert judged(local)[0].title == "rank 3 (node1): the hostname resolves to 127.0.1.1, which no other host can reach"
    assert judged(local, "gloo", several_hosts=False) == ()
    assert judged(replace(local, variables={"GLOO_SOCKET_IFNAME": "eth0"}, chosen=taken(ETH)), "gloo") == ()
    assert "export GLOO_SOCKET_IFNAME=eth0" in (judged(local)[0].fix or pytest.fail()).commands


@each(
    ("resolves_to", "told"),
    [
        (("10.0.0.1", "127.0.1.1"), None),
        (("10.7.7.7", "10.0.0.1"), None),
        (("10.7.7.7",), "resolves to 10.7.7.7, not an address of this host; gloo falls back to 127.0.0.1"),
        ((), "does not resolve; gloo falls back to 127.0.0.1"),
    ],
)
def test_a_name_that_leads_nowhere_is_told(resolves_to: tuple[str, ...], told: str | None) -> None:
    titles = [finding.title for finding in judged(healthy(resolves_to=resolves_to))]

    assert titles == ([f"rank 3 (node1): the hostname {told}"] if told else [])


@each(
    ("total", "free", "told"),
    [
        (64 * GIB, 64 << 20, "(65536 MiB) is full;"),
        (64 * GIB, 65 << 20, None),
        (64 << 20, 64 << 20, "has only 64 MiB;"),
    ],
)
def test_shared_memory_that_is_small_or_full_is_told(total: int, free: int, told: str | None) -> None:
    titles = [finding.title for finding in judged(healthy(shm_total=total, shm_free=free))]

    assert len(titles) == bool(told)
    assert (told or "") in "".join(titles)


def test_what_many_ranks_share_is_said_once() -> None:
    def claim(rank: int, local: Local) -> Claim:
        host = f"node{rank // 4}"
        return Claim(rank=rank, world=8, local_rank=rank % 4, host=host, pid=1, address="", port=1, local=local)

    small = replace(WITH_PROBLEM["comm-shm-too-small"], gpus=())
    findings = examine_all([claim(rank, small if rank > 3 else healthy(gpus=())) for rank in range(8)])

    assert [(finding.rule, finding.title.split(":")[0]) for finding in findings] == [
        ("comm-shm-too-small", "ranks 4-7 (node1)")
    ]


@each(
    ("backend", "variables", "name"),
    [
        ("nccl", {}, "ib0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "^ib,docker,lo"}, "eth0"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "ens"}, "ens9"),
        ("nccl", {"NCCL_SOCKET_IFNAME": "=ens"}, None),
        ("gloo", {}, "eth0"),
        ("gloo", {"GLOO_SOCKET_IFNAME": "ens9"}, "ens9"),
        ("gloo", {"GLOO_SOCKET_IFNAME": "ens"}, None),
    ],
)
def test_each_backend_takes_the_interface_of_its_own_rule(backend: str, variables: dict[str, str], name: str) -> None:
    chosen = choose(backend, (LO, DOCKER, ETH, IB, FAST), ("10.0.0.1",), variables)

    assert (chosen.name if chosen else None) == name


def test_nccl_takes_docker_only_after_all_others_and_the_subnet_of_its_hint_before_them() -> None:
    assert choose("nccl", (LO, DOCKER, ETH), (), {}) == taken(
        ETH, "NCCL uses the first interface that is not docker*, lo* or virbr*"
    )
    assert (choose("nccl", (LO, DOCKER), (), {}) or BY_ETH).name == "docker0"
    assert (choose("nccl", (ETH, FAST), (), {"NCCL_COMM_ID": "10.1.0.9:4000"}) or BY_ETH).name == "ens9"
    assert (choose("nccl", (replace(ETH, up=False), LO), (), {}) or BY_ETH).name == "lo"


def test_gloo_falls_back_to_the_loopback_where_the_name_leads_elsewhere() -> None:
    chosen = choose("gloo", (LO, ETH), ("10.7.7.7",), {})

    assert chosen is not None
    assert (chosen.address, chosen.because) == (
        "127.0.0.1",
        "the hostname resolves to 10.7.7.7, which is not here: torch falls back to the loopback",
    )


def test_this_host_is_read_at_once_and_has_a_loopback() -> None:
    rank = replace(ME, master="127.0.0.1")
    began = time.perf_counter()
    local = look_local(LocalHost(env={"NCCL_ALGO": "Ring", "NCCL_TOKEN": "s", "HOME": "/nowhere"}), rank, "gloo")
    took = time.perf_counter() - began

    assert local.routed is not None
    assert any(
        interface.kind == "loopback" and interface.address == "127.0.0.1" and interface.prefix == 8
        for interface in local.interfaces
    )
    assert (local.routed.address, local.variables) == ("127.0.0.1", {"NCCL_ALGO": "Ring", "NCCL_TOKEN": "..."})
    assert took < 20, "50 ms on an idle machine"


def test_a_resolver_that_hangs_does_not_hang_us() -> None:
    began, answers, left = time.perf_counter(), threading.Event(), threading.Event()

    def resolve() -> None:
        answers.wait(30)
        left.set()

    assert bounded(resolve, 0.02) is None
    assert time.perf_counter() - began < 20
    answers.set()
    assert left.wait(30), "its thread would be one of the tests that look at all threads"


def test_nccls_files_are_below_the_environment(disk: Disk) -> None:
    host = disk(
        {"/etc/nccl.conf": "NCCL_IB_DISABLE=1\nNCCL_ALGO=Tree\n", "/home/u/.nccl.conf": "#x\nNCCL_ALGO=Ring\n"},
        HOME="/home/u",
        NCCL_IB_DISABLE="0",
        PATH="/bin",
    )

    assert read_variables(host) == {"NCCL_ALGO": "Ring", "NCCL_IB_DISABLE": "0"}
    assert read_config_files(host)[0] == "/home/u/.nccl.conf: NCCL_ALGO=Ring"


def test_no_token_of_an_address_is_told_to_other_ranks(disk: Disk) -> None:
    addresses = [text.format("Zq7Secret") for text in IN_ADDRESSES.values()]
    told = {f"NCCL_PLACE_{number}": text for number, text in enumerate(addresses)}
    conf = "".join(f"NCCL_FILE_{number}={text}\n" for number, text in enumerate(addresses))
    host = disk({"/etc/nccl.conf": conf}, HOME="/home/u", NCCL_NET="http://h/plain", **told)

    variables, files = read_variables(host), read_config_files(host)

    assert "Zq7Secret" not in f"{variables} {files}"
    assert variables["NCCL_NET"] == "http://h/plain"
    assert {"https://h/simple", "https://h"} <= set(variables.values())


def test_ports_and_iommu_are_read_from_files(disk: Disk) -> None:
    port = "/sys/class/infiniband/mlx5_0/ports/1"
    files = {
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        f"{port}/link_layer": "InfiniBand\n",
        "/sys/kernel/iommu_groups/0/type": "DMA-FQ\n",
    }

    assert read_fabric(disk(files)) == (PORT,)
    assert read_iommu(disk(files)) == "translating"
    assert read_iommu(disk({"/sys/kernel/iommu_groups/0/type": "identity\n"})) == "passthrough"


NVML = """
from types import SimpleNamespace as Made
class NVMLError(Exception): pass
NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED = 18, 1
CAPABILITIES, LINKS = ((9, 0), (10, 0), (8, 9)), (18, 17, 0)
nvmlInit = lambda: None
nvmlSystemGetDriverVersion = lambda: b"570.1"
nvmlDeviceGetCount = lambda: 3
nvmlDeviceGetHandleByIndex = lambda index: index
nvmlDeviceGetName = lambda index: f"GPU {index}"
nvmlDeviceGetUUID = lambda index: f"GPU-{index}"
nvmlDeviceGetMemoryInfo = lambda index: Made(free=1, total=2)
nvmlDeviceGetCudaComputeCapability = lambda index: CAPABILITIES[index]
nvmlDeviceGetCurrPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkGeneration = lambda index: 5
nvmlDeviceGetCurrPcieLinkWidth = nvmlDeviceGetMaxPcieLinkWidth = lambda index: 16
def nvmlDeviceGetNvLinkState(index, link):
    if not LINKS[index]: raise NVMLError
    return int(link < LINKS[index])
"""


def test_links_are_counted_at_the_rate_of_their_generation(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(NVML)

    done = subprocess.run(
        [sys.executable, CHILD_SCRIPTS / "ask_links.py"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    gpus = msgspec.convert(json.loads(done.stdout.removeprefix("DSDOCTOR "))["gpus"], type=list[RankGpu])

    assert [gpu.nvlink for gpu in gpus] == [450e9, 850e9, None]
    assert gpus[0] == replace(H100, name="GPU 0", free=1, total=2, pcie=(5, 16), nvlink=450e9)


def test_cuda_sees_the_gpus_before_the_first_that_is_none() -> None:
    gpus = tuple(replace(H100, index=index, uuid=f"GPU-{index}") for index in range(3))

    assert [gpu.index for gpu in visible(gpus, "2,0,9,1")] == [2, 0]
    assert visible(gpus, "") == ()
    assert visible(gpus, None) == gpus
