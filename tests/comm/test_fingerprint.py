"""What should be the same everywhere: only the minority is named, and secrets never travel."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from dsdoctor.comm.local.fingerprint import CHECKS, RankDifference, differences, examine, fingerprint
from dsdoctor.comm.models import ChosenInterface, Claim, Interface, Local, RankGpu
from dsdoctor.core.finding import Severity

USUAL = {"torch": "2.8.0+cu128", "cuda": "12.8", "nccl": "2.27.3", "python": "3.11.7", "deepspeed": "0.19.8"}


def claims(world: int, odd: Mapping[int, Mapping[str, str]], *, per_host: int = 8) -> list[Claim]:
    """``world`` claims with the usual fingerprint, but for what ``odd`` gives to single ranks ("" takes a name away)."""
    made = []
    for rank in range(world):
        whole = {**USUAL, **odd.get(rank, {})}
        marks = {name: value for name, value in whole.items() if value and name != "backend"}
        made.append(
            Claim(
                rank=rank,
                world=world,
                local_rank=rank % per_host,
                host=f"node{rank // per_host}",
                pid=1,
                address="",
                port=1,
                backend=whole.get("backend", "nccl"),
                fingerprint=marks,
            )
        )
    return made


def told(world: int, odd: Mapping[int, Mapping[str, str]], *, per_host: int = 8) -> list[tuple[str, Severity, str]]:
    return [
        (finding.rule, finding.severity, finding.title) for finding in examine(claims(world, odd, per_host=per_host))
    ]


def test_ranks_that_are_alike_have_no_findings() -> None:
    assert told(16, {}) == []
    assert examine([]) == ()


def test_only_the_minority_is_named() -> None:
    assert told(16, {5: {"torch": "2.7.0"}}) == [
        ("version-differs", Severity.ERROR, "rank 5 (node0): torch 2.7.0, the 15 others 2.8.0+cu128")
    ]
    assert told(24, {rank: {"nccl": "2.26.2"} for rank in range(8, 16)})[0][2] == (
        "ranks 8-15 (node1): nccl 2.26.2, the 16 others 2.27.3"
    )


def test_a_tie_names_both() -> None:
    assert told(2, {1: {"torch": "2.7.0"}}, per_host=1)[0][2] == (
        "rank 0 (node0): torch 2.8.0+cu128, rank 1 (node1): 2.7.0"
    )


@pytest.mark.parametrize(
    ("odd", "rule", "severity"),
    [
        ({"backend": "gloo"}, "host-differs", Severity.ERROR),
        ({"cuda": "13.0"}, "version-differs", Severity.ERROR),
        ({"deepspeed": ""}, "version-differs", Severity.WARNING),
        ({"python": "3.11.9"}, "version-differs", Severity.NOTE),
        ({"python": "3.12.1"}, "version-differs", Severity.WARNING),
        ({"gpu": "NVIDIA A100"}, "host-differs", Severity.WARNING),
        ({"kernel": "6.1"}, "host-differs", Severity.NOTE),
        ({"NCCL_ALGO": "Ring"}, "communication-variable-differs", Severity.WARNING),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "communication-variable-differs", Severity.WARNING),
        ({"NCCL_DEBUG": "INFO"}, "communication-variable-differs", Severity.NOTE),
    ],
)
def test_how_much_a_difference_matters(odd: dict[str, str], rule: str, severity: Severity) -> None:
    assert [(judged[0], judged[1]) for judged in told(4, {2: odd})] == [(rule, severity)]


def test_other_names_of_devices_on_other_hosts_are_a_note() -> None:
    odd = {rank: {"NCCL_SOCKET_IFNAME": "eth0" if rank else "eno1"} for rank in range(4)}

    assert [judged[1] for judged in told(4, odd)] == [Severity.NOTE]


def test_every_difference_explains_itself() -> None:
    assert all(check.__doc__ and check.__name__.endswith("_differs") for check in CHECKS)


def test_secrets_and_what_each_rank_has_of_its_own_are_left_out() -> None:
    local = Local(
        hostname="node7",
        interfaces=(Interface(name="eth0", address="10.0.0.1", prefix=24, mtu=9000),),
        chosen=ChosenInterface(name="eth0", address="10.0.0.1", because="x"),
        kernel="6.8",
        gpus=(RankGpu(index=0, name="NVIDIA H100", uuid="GPU-1"), RankGpu(index=1, name="NVIDIA H100", uuid="GPU-2")),
        variables={
            "NCCL_ALGO": "Ring",
            "CUDA_VISIBLE_DEVICES": "3",
            "NCCL_API_KEY": "abc",
            "UCX_PROXY": "http://me:word@proxy",
            "NCCL_IB_PKEY": "1",
        },
    )

    found = fingerprint(local, {"torch": "2.8.0"})

    assert found == {
        "torch": "2.8.0",
        "kernel": "6.8",
        "gpu": "NVIDIA H100",
        "mtu": "9000",
        "interface": "eth0",
        "NCCL_ALGO": "Ring",
        "NCCL_API_KEY": "...",
        "NCCL_IB_PKEY": "1",
        "UCX_PROXY": "http://proxy",
    }


@pytest.mark.slow
def test_ten_thousand_claims_are_compared_in_a_moment() -> None:
    many = claims(10_000, {rank: {"kernel": str(rank)} for rank in range(10_000)} | {77: {"torch": "2.7.0"}})
    began = time.perf_counter()
    found = differences(many, ("torch", "kernel"))
    findings = examine(many)
    took = time.perf_counter() - began

    assert found[0] == RankDifference(name="torch", usual="2.8.0+cu128", count=9999, others=(("2.7.0", (77,)),))
    assert max(len(finding.title) for finding in findings) < 300
    assert took < 20, "0.2 s on an idle machine"


def proposed(values: Mapping[int, str]) -> tuple[str, tuple[str, ...]]:
    """The fix for a variable with these values by rank, of four ranks that come in another order each time."""
    odd = {rank: {"NCCL_ALGO": value} for rank, value in values.items()}
    fixes = {finding.fix for finding in (examine(claims(4, odd))[0], examine(claims(4, odd)[::-1])[0])}
    fix = fixes.pop()
    assert not fixes
    assert fix is not None
    return fix.text.split(", or ")[0], fix.commands


def test_the_value_that_is_proposed_is_that_of_most_ranks_and_in_a_tie_of_the_lowest() -> None:
    assert proposed({0: "Tree", 1: "Ring", 2: "Ring", 3: "Ring"}) == (
        "set it to the value of most ranks on every rank",
        ("printf '%s\\n' NCCL_ALGO=Ring >> ~/.deepspeed_env", "unset NCCL_ALGO"),
    )
    assert proposed({1: "Tree", 2: "Ring"})[0] == "set it to the value of rank 1 on every rank"
    assert proposed({1: "Tree", 2: "Ring"})[1][0] == "printf '%s\\n' NCCL_ALGO=Tree >> ~/.deepspeed_env"
    assert proposed({0: "Tree", 1: "Tree", 2: "Ring", 3: "Ring"})[0].startswith("set it to the value of rank 0 ")
    assert proposed({1: "Tree", 2: "Tree"})[0].startswith("set it to the most frequent value (rank 1) ")


def test_a_value_of_another_rank_is_one_word(tmp_path: Path) -> None:
    hostile = "Ring'; touch P; #"
    line = proposed({1: hostile})[1][0].replace("~", str(tmp_path))
    subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)

    assert [path.name for path in tmp_path.iterdir()] == [".deepspeed_env"]
    assert (tmp_path / ".deepspeed_env").read_text() == f"NCCL_ALGO={hostile}\n"
    assert "unset VARIABLE" in [
        command
        for finding in examine(claims(4, {1: {"A[$(TOUCH)]": "x"}}))
        for command in (finding.fix.commands if finding.fix else ())
    ]
