"""Configurations, the defect that is planted in step 2, and what the verdict is to name."""

from typing import Any

SAID = {
    "activation": ("overflow-in-module", "blocks.1.gain (Gain) made"),
    "function": (
        "overflow-between-modules",
        "first appeared between blocks.1.gain (Gain) and blocks.1.drop (Dropout), by aten.log",
    ),
    "weight": ("weight-not-finite", "the weight head.weight holds 1 nan of 64"),
    "buffer": ("weight-not-finite", "the buffer blocks.1.gain.scale holds 1 nan of 1"),
    "loss": ("loss-not-finite", "the loss is nan"),
    "gradient": ("gradient-stays-at-scale-one", "in the gradient of blocks.1.gain (Gain) output"),
    "data": ("nan-in-the-batch", "in input[0] of the model (Net)"),
    "scale": ("gradient-above-scale", "overflows at a loss scale of 2^22"),
}


def case(stage: int, dtype: str, plant: str, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "dtype": dtype, "plant": plant, **more}


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
CASES: dict[str, dict[str, Any]] = {
    "zero 0 fp32 activation": case(0, "fp32", "activation"),
    "zero 0 fp32 function raise": case(0, "fp32", "function", only=1, answer="raise"),
    "zero 0 bf16 gradient": case(0, "bf16", "gradient"),
    "zero 0 fp16 activation": case(0, "fp16", "activation", only=0),
    "zero 1 fp32 gradient": case(1, "fp32", "gradient", only=1),
    "zero 1 bf16 weight": case(1, "bf16", "weight"),
    "zero 1 fp16 function": case(1, "fp16", "function", gas=2),
    "zero 2 fp32 data": case(2, "fp32", "data", only=1),
    "zero 2 bf16 activation": case(2, "bf16", "activation", level="frames"),
    "zero 2 fp16 gradient": case(2, "fp16", "gradient"),
    "zero 2 fp16 loss": case(2, "fp16", "loss", only=0),
    "zero 2 fp16 scale": case(2, "fp16", "scale", power=24),
    "zero 3 fp32 function": case(3, "fp32", "function"),
    "zero 3 bf16 activation raise": case(3, "bf16", "activation", only=1, answer="raise"),
    "zero 3 fp16 buffer": case(3, "fp16", "buffer", only=1, gas=2),
    "zero 1 bf16 buffer frames": case(1, "bf16", "buffer", level="frames"),
    "zero 3 fp16 weight": case(3, "fp16", "weight"),
    "zero 3 fp16 frames": case(3, "fp16", "activation", only=0, level="frames", gas=2),
    "zero 2 fp16 offload": case(2, "fp16", "activation", offload=True),
    "zero 3 bf16 both offloaded": case(3, "bf16", "function", offload=True, offload_param=True),
    "bf16 optimizer": case(1, "bf16", "activation", config={"data_types": {"grad_accum_dtype": "fp32"}}),
    "zero 0 torch autocast": case(0, "fp32", "gradient", config=AUTOCAST),
    "zero 1 torch autocast": case(1, "fp32", "activation", config=AUTOCAST),
    "reentrant": case(2, "bf16", "activation", checkpointing="reentrant"),
    "reentrant gradient": case(1, "bf16", "gradient", checkpointing="reentrant", gas=2),
    "not reentrant zero 3": case(3, "bf16", "function", checkpointing="non"),
    "deepspeed checkpointing": case(1, "fp16", "gradient", checkpointing="deepspeed"),
    "reentrant frames": case(2, "bf16", "activation", checkpointing="reentrant", level="frames"),
}
PIPELINES: dict[str, dict[str, Any]] = {
    "zero 1 bf16, second stage": case(1, "bf16", "4.gain", gas=3),
    "zero 0 fp16 frames, first stage": case(0, "fp16", "1.gain", gas=2, level="frames", power=4),
    "zero 0 bf16 backward": case(0, "bf16", "5", gas=3),
}
