"""What the installed DeepSpeed makes of a configuration, where memory depends on it. Arguments: the file, a JSON object.

The object: ``world`` (ranks), ``batch`` (micro batch that is meant where the file says "auto", or null) and ``given``: values
for whole keys such as "bf16.enabled" that take the place of what the file says. Nothing is asked of a GPU; no rank is started.
"""

import contextlib
import io
import json
import logging
import os
import sys

AUTO = "auto"
NEUTRAL = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def answer(path, wish):
    import hjson

    with open(path, encoding="utf-8") as file:
        config = hjson.load(file)
    config = json.loads(hjson.dumpsJSON(config))
    if not isinstance(config, dict):
        return {"error": "it holds no object"}
    for name, value in wish["given"].items():
        put(config, name.split("."), value)
    if wish["batch"]:
        config["train_micro_batch_size_per_gpu"] = wish["batch"]
    automatic = sorted(without_auto(config, ""))
    micro, steps = batches(config, wish)
    for name in NEUTRAL:
        config.pop(name, None)
    config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"] = micro, steps
    return {"automatic": automatic, **effective(config)}


def put(config, names, value):
    for name in names[:-1]:
        config = config.setdefault(name, {})
    config[names[-1]] = value


def without_auto(part, prefix):
    """Take every "auto" out, and name it: the value that stands there then is DeepSpeed's default."""
    for name in list(part):
        if part[name] == AUTO:
            del part[name]
            yield prefix + name
        elif isinstance(part[name], dict):
            yield from without_auto(part[name], prefix + name + ".")


def batches(config, wish):
    """Micro batch and steps of accumulation, as DeepSpeed completes two of the three numbers (runtime/config.py,
    DeepSpeedConfig._set_batch_related_parameters)."""
    train, micro, steps = (
        config.get(name)
        for name in sorted(
            NEUTRAL, key=["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"].index
        )
    )
    world = wish["world"]
    if micro is None and train is not None:
        micro = max(1, train // world // (steps or 1))
    if steps is None:
        steps = max(1, train // world // (micro or 1)) if train is not None else 1
    return micro or 1, steps


def effective(config):
    from deepspeed.runtime.config import DeepSpeedConfig

    return values_of(DeepSpeedConfig(config))


COUNTS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "sub_group_size",
)
SWITCHES = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def values_of(read):
    """The values of a DeepSpeedConfig. dsdoctor.memory.engine takes them of a running engine's, too."""
    import deepspeed

    bf16, fp16 = read.bfloat16_config, read.float16_config
    dtype = "float16" if fp16.enabled else "bfloat16" if bf16.enabled else "float32"
    return {
        "version": deepspeed.__version__,
        "dtype": dtype,
        "accumulation_dtype": DTYPES.get(read.grad_accum_dtype, dtype),
        "communication_dtype": str(read.communication_data_type or dtype).replace("torch.", ""),
        "micro_batch": int(read.train_micro_batch_size_per_gpu),
        "accumulation_steps": int(read.gradient_accumulation_steps),
        "clipping": float(read.gradient_clipping or 0),
        "optimizer": read.optimizer_name,
        "torch_adam": bool((read.optimizer_params or {}).get("torch_adam", False)),
        "autocast": bool(read.torch_autocast_enabled),
        "checkpoint_activations_in_cpu": bool(read.activation_checkpointing_config.cpu_checkpointing),
        "gradients_in_master_dtype": bool(
            getattr(bf16, "bf16_master_weights_and_grads", False)
            or getattr(fp16, "fp16_master_weights_and_grads", False)
        ),
        **of_zero(read.zero_config),
    }


def of_zero(zero):
    """The values of its section zero_optimization."""
    return {
        "stage": int(zero.stage),
        "offload_optimizer": device(zero.offload_optimizer),
        "offload_param": device(zero.offload_param),
        "optimizer_pinned": bool(zero.offload_optimizer and zero.offload_optimizer.pin_memory),
        "param_pinned": bool(zero.offload_param and zero.offload_param.pin_memory),
        "offload_ratio": float(zero.offload_optimizer.ratio) if zero.offload_optimizer else 1.0,
        "max_in_cpu": int(zero.offload_param.max_in_cpu) if zero.offload_param else 0,
        "buffer_count": int(zero.offload_param.buffer_count) if zero.offload_param else 0,
        "buffer_size": int(zero.offload_param.buffer_size) if zero.offload_param else 0,
        "hpz_partition_size": int(zero.zero_hpz_partition_size),
        "quantized_weights": bool(zero.zero_quantized_weights),
        "gather_on_save": bool(zero.gather_16bit_weights_on_model_save),
        "zenflow": zero.zenflow is not None,
        **{name: int(getattr(zero, name)) for name in COUNTS},
        **{name: bool(getattr(zero, name)) for name in SWITCHES},
    }


def device(offload):
    name = offload.device if offload else "none"
    return str(getattr(name, "value", name))


def main():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no GPU is asked, and none is needed
    logging.disable(logging.WARNING)
    talk = io.StringIO()
    try:
        with contextlib.redirect_stdout(talk):
            result = answer(sys.argv[1], json.loads(sys.argv[2]))
    except ImportError as error:
        result = {"error": str(error), "missing": error.name or "deepspeed"}
    except Exception as error:
        result = {"error": "%s: %s" % (type(error).__name__, str(error)[:2000])}
    print("DSDOCTOR " + json.dumps(result))


if __name__ == "__main__":
    main()
