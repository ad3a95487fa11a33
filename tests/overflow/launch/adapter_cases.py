"""Configurations, and what the adapter is to say in the three steps of each."""

from typing import Any

PLANTED = "blocks.1.down.weight"

YES = [False, True, False]
NOBODY_LOOKS: list[bool | None] = [None, None, None]
UNSCALED = [1.0, 1.0, 1.0]
HALVED = [256.0, 256.0, 128.0]


def _case(
    stage: int, dtype: str, kind: str, verdict: list[Any] = YES, scales: list[Any] = UNSCALED, **more: Any
) -> dict[str, Any]:
    return {"stage": stage, "dtype": dtype, "class": kind, "verdict": verdict, "scales": scales, **more}


TWO, THREE = "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}

CASES: dict[str, dict[str, Any]] = {
    "zero 0 fp32": _case(0, "fp32", "AdamW", NOBODY_LOOKS),
    "zero 0 fp32 clipped": _case(0, "fp32", "AdamW", NOBODY_LOOKS, clip=1.0),
    "zero 0 bf16": _case(0, "bf16", "FP16_UnfusedOptimizer"),
    "zero 0 fp16": _case(0, "fp16", "FP16_UnfusedOptimizer", scales=HALVED),
    "zero 0 fp16 fused": _case(0, "fp16", "FP16_Optimizer", scales=HALVED, optimizer="fused"),
    "zero 0 bf16 fused": _case(0, "bf16", "FP16_Optimizer", optimizer="fused"),
    "zero 0 autocast fp16": _case(0, "fp32", "AdamW", NOBODY_LOOKS, [None, None, None], config=AUTOCAST),
    "zero 0 autocast fp16 clipped": _case(0, "fp32", "AdamW", NOBODY_LOOKS, [None] * 3, config=AUTOCAST, clip=1.0),
    "bf16 optimizer": _case(1, "bf16", "BF16_Optimizer", config=FP32_SUMS),
    "bf16 optimizer at once": _case(
        1, "bf16", "BF16_Optimizer", config=FP32_SUMS, bf16={"immediate_grad_update": True}
    ),
    "zero 2 round robin": _case(2, "fp16", TWO, scales=HALVED, config={}, zero={"round_robin_gradients": True}),
    "zero 2 fp32 sums": _case(2, "bf16", TWO, config=FP32_SUMS, gas=2),
    "zero 2 bf16 unchecked": _case(2, "bf16", TWO, NOBODY_LOOKS, bf16={"check_grad_overflow": False}),
    "zero 1 autocast fp16": _case(1, "fp32", TWO, YES, [None, 256.0, None], config=AUTOCAST),
    "zero 3 fp16 persistent": _case(3, "fp16", THREE, scales=HALVED, persist=10**6),
    "zero 3 fp16 both offloaded": _case(3, "fp16", THREE, scales=HALVED, offload=True, offload_param=True),
    "zero 3 small groups": _case(3, "bf16", THREE, zero={"sub_group_size": 1500}),
}

PIPE = {"pipeline": True, "gas": 3, "planted": "2.down.weight"}
CASES |= {
    "pipeline fp32": _case(0, "fp32", "AdamW", NOBODY_LOOKS, **PIPE),
    "pipeline bf16": _case(0, "bf16", "BF16_Optimizer", **PIPE),
    "pipeline zero 1 fp16": _case(1, "fp16", TWO, scales=HALVED, **PIPE),
}

for _stage, _kind in ((1, TWO), (2, TWO), (3, THREE)):
    for _dtype in ("fp32", "bf16", "fp16"):
        _scales = HALVED if _dtype == "fp16" else UNSCALED
        CASES[f"zero {_stage} {_dtype}"] = _case(
            _stage, _dtype, _kind, scales=_scales, gas=2 if _dtype == "fp16" else 1
        )
        CASES[f"zero {_stage} {_dtype} offload"] = _case(_stage, _dtype, _kind, scales=_scales, offload=True)
