"""What DeepSpeed will train with, of a DeepSpeedConfig that it made. Imported by ask_config.py; changes nothing of DeepSpeed."""


def of(made):
    """What DeepSpeed will train with."""
    zero = made.zero_config
    offload = {"optimizer": zero.offload_optimizer, "param": zero.offload_param}
    return {
        "stage": int(made.zero_optimization_stage),
        "train_batch_size": made.train_batch_size,
        "micro_batch_size": made.train_micro_batch_size_per_gpu,
        "accumulation": made.gradient_accumulation_steps,
        **{
            f"offload_{what}": str(getattr(section, "device", "none") or "none").split(".")[-1]
            for what, section in offload.items()
        },
        "fp16": bool(enabled(made, "float16_config", "fp16_enabled")),
        "bf16": bool(enabled(made, "bfloat16_config", "bfloat16_enabled")),
        "reduce_bucket_size": int(zero.reduce_bucket_size),
        "allgather_bucket_size": int(zero.allgather_bucket_size),
    }


def enabled(made, section, older):
    holder = getattr(made, section, None)
    return getattr(holder, "enabled", False) if holder is not None else getattr(made, older, False)
