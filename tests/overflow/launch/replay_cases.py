"""Configurations in which a replay in every step must leave no trace; ten steps each in the first twelve, fewer elsewhere."""

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    f"zero {stage} {dtype}": {"stage": stage, "dtype": dtype, "gas": 2, "steps": 10, "poison": dtype == "fp16"}
    for stage in (0, 1, 2, 3)
    for dtype in ("fp32", "bf16", "fp16")
}

SHORT: dict[str, dict[str, Any]] = {
    "zero 2 fp16 offload": {"stage": 2, "dtype": "fp16", "offload": True, "poison": True},
    "zero 3 fp16 both offloaded": {"stage": 3, "dtype": "fp16", "offload": True, "offload_param": True, "poison": True},
    "zero 3 persistent weights": {"stage": 3, "dtype": "fp16", "persist": 10**6, "poison": True},
    "zero 3 one micro-batch": {"stage": 3, "dtype": "bf16", "gas": 1},
    "zero 3 forward only": {"stage": 3, "dtype": "bf16", "gas": 1, "backward": False},
    "zero 3 leaf modules": {"stage": 3, "dtype": "bf16", "leaf": True},
    "bf16 optimizer": {
        "stage": 1,
        "dtype": "bf16",
        "poison": True,
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
    },
    "bf16 optimizer at once": {
        "stage": 1,
        "dtype": "bf16",
        "config": {"data_types": {"grad_accum_dtype": "fp32"}},
        "bf16": {"immediate_grad_update": True},
    },
    "zero 0 autocast": {
        "stage": 0,
        "dtype": "fp32",
        "config": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
    },
    "zero 3 autocast": {
        "stage": 3,
        "dtype": "fp32",
        "config": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    },
    "zero 0 clipped": {"stage": 0, "dtype": "fp32", "clip": 0.1},
    "loss outside": {"stage": 1, "dtype": "fp16", "inner_loss": False},
    "zero 3 loss outside": {"stage": 3, "dtype": "fp16", "inner_loss": False},
    "torch style": {"stage": 2, "dtype": "fp16", "inner_loss": False, "torch_style": True},
    "zero 3 torch style": {"stage": 3, "dtype": "fp16", "torch_style": True},
    "compiled": {"stage": 0, "dtype": "fp32", "compile": True},
    "zero 3 compiled": {"stage": 3, "dtype": "fp32", "compile": True},
    "a backward inside the forward": {"stage": 0, "dtype": "fp32", "inner_backward": True},
    "zero 3 a backward inside the forward": {"stage": 3, "dtype": "bf16", "inner_backward": True},
    "pipeline fp32": {"stage": 0, "dtype": "fp32", "pipeline": True, "gas": 3},
    "pipeline bf16": {"stage": 0, "dtype": "bf16", "pipeline": True, "gas": 3},
    "pipeline zero 1 fp16": {"stage": 1, "dtype": "fp16", "pipeline": True, "gas": 3, "poison": True},
}
for _stage in (1, 3):
    for _kind in ("reentrant", "non-reentrant", "deepspeed"):
        SHORT[f"zero {_stage} {_kind} checkpointing"] = {"stage": _stage, "dtype": "bf16", "checkpointing": _kind}
CASES |= {name: {"gas": 2, "steps": 4, **case} for name, case in SHORT.items()}

HINDERED: dict[str, dict[str, Any]] = {
    "outputs' gradients too big": {"stage": 2, "dtype": "fp32", "inner_loss": False, "limits": {"gradient_limit": 16}},
    "inputs too big": {"stage": 2, "dtype": "fp32", "limits": {"input_limit": 200}},
    "a forward without a backward": {"stage": 1, "dtype": "bf16", "validates": True},
    "inputs written to": {"stage": 1, "dtype": "fp32", "writes_inputs": True},
    "rank 1 fails": {"stage": 0, "dtype": "fp16", "fails": 1},
    "rank 0 fails under zero 3": {"stage": 3, "dtype": "fp16", "fails": 0},
    "rank 0 fails under zero 3 and checkpointing": {
        "stage": 3,
        "dtype": "bf16",
        "fails": 0,
        "checkpointing": "reentrant",
    },
}
HINDERED = {name: {"gas": 2, "steps": 3, **case} for name, case in HINDERED.items()}
