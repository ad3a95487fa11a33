"""What DeepSpeed asserts about the number of ranks: pretended worlds against real ones."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.config.answer import ConfigContext, Refusal
from dsdoctor.config.judge import judge
from tests.config.many import ask_many
from tests.config.recorded import rules, verdicts
from tests.each import each

BASE = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
STAGE_3 = {"stage": 3, "reduce_bucket_size": 1000}
RANKS = 4
LIMIT_SECONDS = 120


def hpz(size: int) -> dict[str, Any]:
    return {"zero_optimization": {**STAGE_3, "zero_hpz_partition_size": size}}


def experts(size: int) -> dict[str, Any]:
    return {"expert_parallel": {"enabled": True, "autoep_size": size}}


def tensor(size: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": size}}


def mesh(data: int, sequence: int) -> dict[str, Any]:
    return {"data_parallel_size": data, "sequence_parallel_size": sequence}


FIT = [hpz(1), hpz(2), hpz(4), hpz(8), tensor(2), mesh(2, 2), mesh(4, 1)]
CLASH = [hpz(3), experts(3), mesh(2, 4), mesh(2, 1), tensor(3), tensor(8)]
TRIED = {
    "hpz 2": hpz(2),
    "tensor 2": tensor(2),
    "mesh 2 2": mesh(2, 2),
    "hpz 3": hpz(3),
    "mesh 2 1": mesh(2, 1),
    "tensor 3": tensor(3),
}
"""Those that real ranks try, too: each is four processes."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def real_world(config: dict[str, Any]) -> bool:
    """Whether every rank of a real world gets through."""
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        str(Path(__file__).with_name("real_rank.py")),
        json.dumps({**BASE, **config}),
    ]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "DS_ACCELERATOR": "cpu"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    try:
        until = time.monotonic() + LIMIT_SECONDS
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < until:
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.1)
        return all(rank.poll() == 0 for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def pretended(configs: list[dict[str, Any]]) -> list[bool]:
    """Whether nothing about ranks is told of each."""
    configs = [{**BASE, **config} for config in configs]
    answers = ask_many(configs, ranks=[RANKS] * len(configs))
    found = [judge(ConfigContext(config=config, asked=answer)) for config, answer in zip(configs, answers, strict=True)]
    return ["config-ranks-clash" not in rules(each) for each in found]


@pytest.mark.launch
def test_a_pretended_world_says_what_a_real_one_does() -> None:
    assert pretended([*FIT, *CLASH]) == [True] * len(FIT) + [False] * len(CLASH)
    real = {name: real_world(config) for name, config in TRIED.items()}
    assert real == {name: config in FIT for name, config in TRIED.items()}


@pytest.mark.launch
def test_ranks_that_nobody_counts_are_not_judged() -> None:
    configs = [{**BASE, **hpz(3)}, {**hpz(3), "train_batch_size": 6, "train_micro_batch_size_per_gpu": 1}]
    three = {**configs[1], "gradient_accumulation_steps": 1, "train_batch_size": 8}
    unknown, open_sizes, implied = ask_many([*configs, three])

    assert (unknown.refusals, open_sizes.refusals) == ((), ())
    assert [refusal.ranks for refusal in implied.refusals] == [8]


@each("ranks, rule", [(8, ["config-ranks-clash"]), (0, ["config-value-refused"])])
def test_what_is_about_the_ranks_is_told_so(ranks: int, rule: list[str]) -> None:
    path = ("zero_optimization", "zero_hpz_partition_size")
    refusal = Refusal(paths=(path,), kind="AssertionError", message="8 is not divisible by 3", ranks=ranks)

    assert rules(verdicts({**BASE, **hpz(3)}, answer={"refusals": (refusal,)}))[:1] == rule
