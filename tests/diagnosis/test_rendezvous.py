"""Nodes that never came to torchrun's rendezvous: told as such, with their number, and never as a watchdog of NCCL."""

from __future__ import annotations

import pytest

from tests.diagnosis.mixtures import FAILURES
from tests.diagnosis.reading import diagnose

SAID = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
NUMBERS = {
    "I0605 09:58:31.502 412 torch/distributed/launcher/api.py:188]   min_nodes        : 4": "4 nodes",
    "+ torchrun --nnodes=4 --nproc-per-node 8 train.py": "4 nodes",
    "+ torchrun --nnodes=1:4 --nproc-per-node 8 train.py": "several nodes",
}


@pytest.mark.parametrize("head", NUMBERS)
@pytest.mark.parametrize("tail", ["", ": Timed out waiting for nodes"])
def test_nodes_that_did_not_come_are_told(head: str, tail: str) -> None:
    first = diagnose(
        [head, "Traceback (most recent call last):", '  File "/v/a.py", line 655, in run', SAID + tail]
    ).findings[0]

    assert first.rule == "rendezvous-incomplete"
    assert NUMBERS[head] in first.title
    assert first.fix
    assert "srun" in first.fix.text
    assert "watchdog" not in first.title


def test_it_follows_where_a_rank_had_failed() -> None:
    assert diagnose([*FAILURES["unknown"], SAID]).findings[0].rule == "unexplained-failure"


@pytest.mark.parametrize(
    ("line", "recorder"),
    [
        ("RuntimeError: [/g/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:58043", False),
        (
            "RuntimeError: [/g/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation",
            False,
        ),
        (
            "[rank1]:[E ProcessGroupNCCL.cpp:475] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)",
            True,
        ),
    ],
)
def test_the_recorder_of_nccl_is_named_where_nccl_waited(line: str, *, recorder: bool) -> None:
    fix = diagnose([line]).findings[0].fix

    assert fix
    assert any("TORCH_FR_BUFFER_SIZE" in step.line for step in fix.steps) is recorder
