"""A DeepSpeed engine -> how it is configured and where it is: precision, loss scale, ZeRO stage, pipeline, step.

Reads attributes only, because their names differ between releases of DeepSpeed; changes nothing.
"""

import contextlib
import sys
from typing import Any

import torch


def is_plain(engine: Any) -> bool:
    """Whether the engine steps a torch optimizer as it is: ZeRO-0 in fp32 or under torch autocast."""
    return isinstance(engine.optimizer, torch.optim.Optimizer)


def keeps_whole_sums(engine: Any) -> bool:
    """BF16_Optimizer: every rank holds all gradients, summed in fp32."""
    return hasattr(engine.optimizer, "fp32_groups_gradients")


def looks(engine: Any) -> bool:
    """Whether this DeepSpeed looks for non-finite gradients in this configuration at all."""
    optimizer = engine.optimizer
    if is_plain(engine):
        return False
    if hasattr(optimizer, "overflow_checker"):
        return True
    # releases from 0.19.7 on have this function, and check the norm in every dtype
    checks_norm = hasattr(sys.modules.get(type(optimizer).__module__), "is_invalid_grad_norm")
    if keeps_whole_sums(engine):
        return checks_norm
    kind = getattr(optimizer, "dtype", None)
    if kind == torch.float16:
        return True
    if zero_stage(engine) == 3:
        return checks_norm
    asked = bool(getattr(optimizer, "check_grad_overflow", False))
    norm = checks_norm and bool(getattr(optimizer, "compute_grad_norm", True))
    return asked or (norm and kind != torch.bfloat16)


def replicated(engine: Any) -> bool:
    """Whether all ranks of the world hold the same reduced gradients. Experts, pipeline stages, shards differ."""
    whole = zero_stage(engine) == 0 or keeps_whole_sums(engine)
    split = is_pipeline(engine) or getattr(engine, "mpu", None) is not None or getattr(engine, "has_moe_layers", False)
    return whole and not split


def loss_scale(engine: Any) -> float | None:
    """The scale in force: 1.0 without one, ``None`` without an optimizer. Waits for the device under torch's scaler."""
    optimizer = engine.optimizer
    scaler = torch_scaler(engine)
    if scaler is not None:
        return float(scaler.get_scale())
    if optimizer is None or is_plain(engine):
        return None if optimizer is None else 1.0
    for owner, name in ((getattr(optimizer, "loss_scale_config", None), "cur_scale"), (optimizer, "loss_scale")):
        value = getattr(owner, name, None)
        if value is not None:
            return float(value)
    value = getattr(optimizer, "cur_scale", None)
    return 1.0 if value is None else float(value)


def loss_scale_floor(engine: Any) -> float | None:
    """The lowest scale that the dynamic scaler goes down to; ``None`` without one or where it has no bound."""
    if not is_dynamic(engine):
        return None
    optimizer = engine.optimizer
    for owner in (getattr(optimizer, "loss_scale_config", None), getattr(optimizer, "loss_scaler", None), optimizer):
        for name in ("min_loss_scale", "min_scale"):
            value = getattr(owner, name, None)
            if value is not None:
                return float(value)
    return None


def is_dynamic(engine: Any) -> bool:
    """Whether the loss scale moves by itself."""
    optimizer = engine.optimizer
    if torch_scaler(engine) is not None:
        return True
    for owner in (getattr(optimizer, "loss_scale_config", None), optimizer):
        value = getattr(owner, "dynamic_loss_scale", None)
        if value is not None:
            return bool(value)
    return bool(getattr(getattr(optimizer, "loss_scaler", None), "dynamic", False))


def torch_scaler(engine: Any) -> Any:
    """The GradScaler that scales the loss under torch autocast; None without one."""
    mine = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return mine if mine is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def gradient_accumulation(engine: Any) -> int:
    """Micro-batches in an optimizer step."""
    return int(engine.gradient_accumulation_steps())


def position(engine: Any) -> tuple[int, int]:
    """0-based optimizer step and the micro-step in it, of the micro-batch that runs now."""
    if is_pipeline(engine):
        return int(engine.global_steps), -1
    return int(engine.global_steps), int(engine.micro_steps) % max(1, gradient_accumulation(engine))


def zero_stage(engine: Any) -> int:
    """0 to 3, as configured."""
    return int(engine.zero_optimization_stage())


def dtype(engine: Any) -> torch.dtype:
    """What the engine made of the parameters: fp32, bf16 or fp16."""
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else torch.float32


def is_pipeline(engine: Any) -> bool:
    """Whether this is a PipelineEngine: its ranks hold different layers, its forward is ``train_batch``."""
    return bool(getattr(engine, "is_pipe_parallel", False)) or hasattr(engine, "pipe_buffers")


def pipeline_stage(engine: Any) -> tuple[int, int]:
    """This rank's stage and the number of stages; (0, 1) without a pipeline."""
    with contextlib.suppress(AttributeError):
        return int(engine.stage_id), int(engine.num_stages)
    return 0, 1
