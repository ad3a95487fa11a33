"""Nodes that never came to torchrun's rendezvous: told as such, with their number, and never as a watchdog of NCCL."""

from __future__ import annotations

from tests.diagnosis.mixtures import FAILURES
from tests.diagnosis.reading import NO_RULE, diagnose
from tests.each import each

SAID = "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"
NUMBERS = {
    "I0605 09:58:31.502 412 torch/distributed/launcher/api.py:188]   min_nodes        : 4": "4 nodes",
    "+ torchrun --nnodes=4 --nproc-per-node 8 train.py": "4 nodes",
    "+ torchrun --nnodes=1:4 --nproc-per-node 8 train.py": "several nodes",
}


@each("head", NUMBERS)
@each("tail", ["", ": Timed out waiting for nodes"])
def test_nodes_that_did_not_come_are_told(head: str, tail: str) -> None:
    first = diagnose(
        [head, "Traceback (most recent call last):", '  File "/v/a.py", line 655, in run', SAID + tail]
    ).findings[0]

    assert first.rule == "rendezvous-incomplete"
    assert NUMBERS[head] in first.title
    assert first.fix
    assert "srun" in first.fix.text
    assert "watchdog" not in first.title


TORCHRUN = "+ torchrun --nnodes={} --nproc-per-node 8 train.py"
AGENT = "[2024-01-01 10:00:01,101] torch.distributed.elastic.agent.server.api: [INFO] [default] "
STEPS = [f"step {number}/900 loss 1.{number}" for number in range(9)]
MET = {
    "restart": [*STEPS, f"{AGENT}Worker group FAILED. 3/3 attempts left; will restart worker group"],
    "restart without a step": [f"{AGENT}worker group FAILED. 3/3 attempts left; will restart worker group"],
    "lost": [*STEPS, "RuntimeError: [/g/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:58043"],
    "lost without a step": ["[W socket.cpp:464] recv failed: Connection reset by peer"],
    "steps": STEPS,
    "losses": ["{'loss': 1.5, 'epoch': 0.1}"] * 3,
    "ranks": ["[rank3]: the model has 7 billion parameters"],
}


@each("nodes", ["4", "1:4", "1"])
@each("met", MET)
@each("tail", ["", ": Timed out waiting for nodes"])
def test_nodes_that_had_come_are_not_told_to_be_missing(met: str, nodes: str, tail: str) -> None:
    traceback = ["Traceback (most recent call last):", '  File "/v/a.py", line 655, in run', SAID + tail]
    findings = diagnose([TORCHRUN.format(nodes), *MET[met], *traceback]).findings

    assert not any("did not join" in one.title or "one node" in one.title for one in findings)
    assert not any(one.fix and "srun" in one.fix.text for one in findings if one.rule == "rendezvous-incomplete")


def test_one_node_waits_for_no_other() -> None:
    first = diagnose([TORCHRUN.format(1), "Traceback (most recent call last):", SAID]).findings[0]

    assert first.rule == "rendezvous-incomplete"
    assert "--nnodes is 1" in first.title
    assert first.fix
    assert "--standalone" in first.fix.text


def test_it_follows_where_a_rank_had_failed() -> None:
    assert diagnose([*FAILURES["unknown"], SAID]).findings[0].rule in NO_RULE


@each(
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


UNRESOLVED = (
    "[W1205 04:40:31.118 socket.cpp:697] [c10d] The IPv6 network addresses of (alpha-0, 29500) cannot be retrieved."
)


@each(
    ("end", "rule"),
    [
        ("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10", "nccl-duplicate-gpu"),
        (
            "RuntimeError: The client socket has failed to connect to any network address of (alpha-0, 29500).",
            "nccl-network-interface",
        ),
    ],
)
def test_a_warning_of_one_way_comes_behind_an_error_that_does_not_name_its_host(end: str, rule: str) -> None:
    place = '  File "/v/site-packages/torch/distributed/x.py", line 7, in init_process_group'

    assert diagnose([UNRESOLVED, "Traceback (most recent call last):", place, "    f()", end]).findings[0].rule == rule
