"""What a log says of its run decides between causes with the same message: the ZeRO stage, experts, attention, versions, vLLM."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from dsdoctor.core.finding import Finding, Severity
from tests.diagnosis.reading import diagnose
from tests.diagnosis.test_regressions import version
from tests.each import each

STEPS = [f"{{'loss': 1.{number}, 'grad_norm': 0.5, 'epoch': 0.0{number}}}" for number in range(1, 6)]
STAGES = {
    "engine": "[INFO] [logging.py:96:log_dist] [Rank 0] Creating torch.bfloat16 ZeRO stage {stage} optimizer",
    "printed": "[INFO] [config.py:988:print]   zero_optimization_stage ...... {stage}",
    "json": '        "stage": {stage}, ',
    "argument": "deepspeed main.py --zero_stage {stage} --bf16",
}
EXPERTS = (
    "",
    "model.class is <class 'transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM'>",
    "loading Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite",
)
WAITED = (
    "[rank{rank}]:[E ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=6117, OpType={operation}, NumelIn={size}, NumelOut=1, Timeout(ms)=1800000) ran for 1800172 milliseconds"
)
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.45 GiB. GPU 1 has a total capacity of 79.11 GiB"
)


def first(log: list[str]) -> Finding:
    """The first verdict."""
    return next(finding for finding in diagnose(log).findings if finding.severity is not Severity.NOTE)


def waited(operation: str, *, other: str = "", size: int = 4) -> list[str]:
    """Two ranks whose watchdogs fire."""
    return [
        WAITED.format(rank=0, operation=operation, size=4),
        WAITED.format(rank=1, operation=other or operation, size=size),
    ]


@each("form", STAGES)
def test_ranks_that_wait_under_zero_3_are_asked_for_the_modules_that_run(form: str) -> None:
    for experts, operation in itertools.product(EXPERTS, ("_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE")):
        finding = first([STAGES[form].format(stage=3), experts, *STEPS, *waited(operation)])

        assert finding.rule == "nccl-collective-timeout"
        assert "under ZeRO-3" in finding.title
        assert ("with a mixture of experts" in finding.title) == bool(experts), finding.title
        assert finding.fix and "set_z3_leaf_modules" in finding.fix.text


@each(
    ("before", "operation"),
    [
        ([STAGES["engine"].format(stage=2), *STEPS], "ALLREDUCE"),
        ([STAGES["engine"].format(stage=3)], "_ALLGATHER_BASE"),
        ([STAGES["engine"].format(stage=3), *STEPS], "ALLREDUCE"),
        ([*STEPS], "_ALLGATHER_BASE"),
    ],
    ids=["stage 2", "before the first step", "an operation that no module calls", "no word of a stage"],
)
def test_no_module_is_blamed_where_the_log_does_not_speak_of_one(before: list[str], operation: str) -> None:
    finding = first([*before, *waited(operation)])

    assert "ZeRO-3" not in finding.title
    assert finding.fix and "set_z3_leaf_modules" not in finding.fix.text


def test_ranks_in_collectives_of_other_kind_or_size_took_other_paths() -> None:
    other = first([*STEPS, *waited("_ALLGATHER_BASE", other="_REDUCE_SCATTER_BASE")])
    larger = first([*STEPS, *waited("_ALLGATHER_BASE", size=99)])
    same = first([*STEPS, *waited("_ALLGATHER_BASE")])

    assert "the ranks took different paths: at work 6117 rank 0 in _ALLGATHER_BASE" in other.title
    assert "rank 0 in _ALLGATHER_BASE of 4 elements, rank 1 in _ALLGATHER_BASE of 99 elements" in larger.title
    assert "different paths" not in same.title


@each("stage", ["3", "2", ""])
def test_different_collectives_are_modules_under_zero_3_and_the_script_s_elsewhere(stage: str) -> None:
    said = "CollectiveFingerPrint(SequenceNumber=2373, OpType=_ALLGATHER_BASE, TensorShape=[256])"
    finding = first(
        [
            STAGES["engine"].format(stage=stage) if stage else "",
            f"RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: {said}, but Rank 1",
        ]
    )

    assert finding.rule == "collectives-differ"
    assert ("did not run the same modules" in finding.title) == (stage == "3")


@each("attention", ["Using torch SDPA for faster training", "attn_implementation='eager'", ""])
@each("loss", ["0.8728", "11.2", "0.001"])
def test_a_nan_gradient_of_a_loss_that_was_a_number_is_the_backward_s(attention: str, loss: str) -> None:
    nan = [f"{{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.0{number}}}" for number in range(2, 8)]
    finding = first([attention, f"{{'loss': {loss}, 'grad_norm': nan, 'epoch': 0.01}}", *nan])

    assert finding.rule == "losses-are-nan"
    assert "comes from the backward pass" in finding.title
    assert ("SDPA" in finding.title or "eager" in finding.title) == bool(attention)


@each("loss", ["0.69", "0.0421", "1.3"])
def test_nan_gradients_beside_losses_that_are_numbers_are_a_search_for_the_loss_scale(loss: str) -> None:
    skipped = [f"{{'loss': {loss}, 'grad_norm': nan, 'epoch': 0.0{number}}}" for number in range(1, 6)]

    assert diagnose(skipped).findings == ()


def test_gathering_for_vllm_is_told_from_gathering_for_a_forward() -> None:
    gather = [
        "Traceback (most recent call last):",
        '  File "/v/deepspeed/runtime/zero/partition_parameters.py", line 1984, in _allgather_params_coalesced',
        "    flat_tensor = torch.empty(tensor_size)",
        OUT_OF_MEMORY,
    ]
    moved = [gather[0], '  File "/v/trl/trainer/grpo_trainer.py", line 900, in _move_model_to_vllm', *gather[1:]]

    assert "vLLM" in first(moved).title
    assert "ZeRO-3 gathers a module's parameters" in first(gather).title


def test_the_version_in_the_log_tells_which_package_is_too_old() -> None:
    refused = "TypeError: Accelerator.__init__() got an unexpected keyword argument 'use_seedable_sampler'"

    assert "accelerate is too old" in first(["accelerate    0.23.0", refused]).title
    assert "older Trainer" in first(["accelerate    1.1.0", refused]).title
    assert "check yours first" in first([refused]).title


def test_a_release_of_deepspeed_tells_the_reason_for_a_gradient_that_is_none() -> None:
    lost = [
        "    self.async_accumulate_grad_in_cpu_via_gpu(param)",
        "AttributeError: 'NoneType' object has no attribute 'data'",
    ]

    assert first([version("0.10.1"), *lost]).rule == "known-regression"
    assert first([version("0.14.0"), *lost]).rule == "zero-gradient-lost"


EMPTY_WEIGHTS = """
import json, torch, torch.nn.functional as F
empty, images, rows = torch.empty(0), torch.randn(2, 4, 8, 8), torch.randn(2, 3, 4)
calls = {
    "conv1d": lambda: F.conv1d(images[0], empty), "conv2d": lambda: F.conv2d(images, empty),
    "conv_transpose": lambda: F.conv_transpose2d(images, empty), "bias": lambda: F.conv2d(images, torch.randn(5, 4, 3, 3), empty),
    "layer_norm": lambda: F.layer_norm(rows, (4,), empty), "bias of a norm": lambda: F.layer_norm(rows, (4,), torch.ones(4), empty),
    "group_norm": lambda: F.group_norm(images, 2, empty), "rms_norm": lambda: F.rms_norm(rows, (4,), empty),
    "batch_norm": lambda: F.batch_norm(images, torch.zeros(4), torch.ones(4), empty),
    "running mean": lambda: F.batch_norm(images, empty, empty), "embedding": lambda: F.embedding(torch.tensor([1]), empty),
    "linear": lambda: F.linear(rows, empty), "prelu": lambda: F.prelu(rows, empty),
}
said = {}
for name, call in calls.items():
    try:
        call()
    except Exception as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""


@pytest.mark.slow
def test_whatever_torch_says_of_an_empty_weight_is_known_as_partitioned() -> None:
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", EMPTY_WEIGHTS], capture_output=True, text=True, timeout=60, check=True)
    said: dict[str, str] = json.loads(done.stdout)

    assert len(said) == 13
    assert {
        name: text for name, text in said.items() if first(text.split("\n")).rule != "zero3-partitioned-weight"
    } == {}
