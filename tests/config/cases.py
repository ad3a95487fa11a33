"""Configurations with a mistake, and healthy ones of the kinds that DeepSpeed's and transformers' documents show, written anew.

Each bad one names the rule that is to find it. What DeepSpeed does with it is not written here: it is tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SGD = {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
"""torch's AdamW: what needs a compiled op would be compiled for minutes."""
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
UNTESTED = {"zero_allow_untested_optimizer": True}


@dataclass(frozen=True, kw_only=True)
class Case:
    """``rule`` finds it; "" for a healthy one. ``arguments``: TrainingArguments that fill its "auto" in."""

    name: str
    config: dict[str, Any]
    rule: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


def base(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 4, "optimizer": SGD, **more}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return base(zero_optimization={"stage": stage, "reduce_bucket_size": 65536, **more}, **UNTESTED)


def with_optimizer(kind: str, params: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    holder = {"type": kind, "params": params if params is not None else {"lr": 1e-3}}
    return {"train_batch_size": 4, "optimizer": holder, **more}


def with_scheduler(kind: str, params: dict[str, Any] | None) -> dict[str, Any]:
    return base(scheduler={"type": kind} | ({} if params is None else {"params": params}))


def bad() -> Iterator[Case]:
    """Every configuration with a mistake."""
    for rule, cases in BAD.items():
        for name, config in cases.items():
            yield Case(name=name, config=config, rule=rule)


def healthy() -> Iterator[Case]:
    """Every healthy configuration."""
    for name, config in HEALTHY.items():
        yield Case(name=name, config=config)
    for name, (config, arguments) in FOR_TRAINER.items():
        yield Case(name=name, config=config, arguments=arguments)


BAD: dict[str, dict[str, dict[str, Any]]] = {
    "config-key-misspelt": {
        "zero_optimisation": base(zero_optimisation={"stage": 2}),
        "gradient_acumulation_steps": base(gradient_acumulation_steps=2),
        "gradient_clip": base(gradient_clipp=0.5),
        "bf_16": base(bf1={"enabled": True}),
        "fp16s": base(fp16s={"enabled": True}),
        "steps-per-print": base(**{"steps-per-print": 5}),
        "wallClockBreakdown": base(wallClockBreakdown=True),
        "activation_checkpointing.partition_activation": base(activation_checkpointing={"partition_activation": True}),
        "flops_profiler.profile_steps": base(flops_profiler={"profile_steps": 3}),
        "aio.queue_dept": base(aio={"queue_dept": 4}),
        "checkpoint.tag_validations": base(checkpoint={"tag_validations": "FAIL"}),
        "data_types.grad_accum_type": base(data_types={"grad_acum_dtype": "fp32"}),
        "zero_optimization.stge": base(zero_optimization={"stge": 2}, **UNTESTED),
        "zero_optimization.overlap_com": zero(2, overlap_com=True),
        "offload_optimizer.devise": zero(2, offload_optimizer={"devise": "cpu"}),
        "fp16.enable": base(fp16={"enable": True}),
        "tensorboard.out_path": base(tensorboard={"output_pat": "runs"}),
        "optimizer.parms": base(optimizer={"type": "SGD", "parms": {"lr": 0.5}}),
    },
    "config-key-misplaced": {
        "stage at the top": base(stage=2),
        "offload_optimizer at the top": base(offload_optimizer={"device": "cpu"}),
        "overlap_comm at the top": base(overlap_comm=True),
        "loss_scale at the top": base(loss_scale=128),
        "gradient_clipping in zero_optimization": zero(2, gradient_clipping=1.0),
        "train_micro_batch_size_per_gpu in zero_optimization": zero(2, gradient_accumulation_steps=4),
        "partition_activations at the top": base(partition_activations=True),
    },
    "config-key-ignored": {"something else": base(entirely_something_else=True)},
    "config-key-refused": {"bf16.loss_scale": base(bf16={"enabled": True, "loss_scale": 0})},
    "config-key-removed": {
        "sparse_attention": base(sparse_attention={"mode": "fixed"}),
        "elasticity": base(elasticity={"enabled": True}),
        "elasticity of version 0.2 that is off": base(
            elasticity={
                "enabled": False,
                "version": 0.2,
                "max_train_batch_size": 2000,
                "micro_batch_sizes": [2, 4],
                "num_gpus_per_node": 8,
                "model_parallel_size": 4,
            }
        ),
        "amp": base(amp={"enabled": True}),
        "compression_training": base(compression_training={}),
        "mics_shard_size": zero(3, mics_shard_size=2),
    },
    "config-key-deprecated": {
        "gather_fp16_weights": zero(3, stage3_gather_fp16_weights_on_model_save=True),
        "cpu_offload_use_pin_memory": zero(2, cpu_offload_use_pin_memory=False),
    },
    "config-value-type": {
        "steps_per_print in quotes": base(steps_per_print="10"),
        "gradient_clipping in quotes": base(gradient_clipping="1.0"),
        "wall_clock_breakdown in quotes": base(wall_clock_breakdown="false"),
        "prescale_gradients in quotes": base(prescale_gradients="false"),
        "flops_profiler.enabled in quotes": base(flops_profiler={"enabled": "false"}),
        "memory_breakdown in quotes": base(memory_breakdown="no"),
        "train_batch_size in quotes": {**base(), "train_batch_size": "8"},
        "gradient_clipping null": base(gradient_clipping=None),
        "reduce_bucket_size in words": zero(2) | {"zero_optimization": {"stage": 2, "reduce_bucket_size": "5e8"}},
        "fp16 as true": base(fp16=True),
        "zero_optimization as a number": base(zero_optimization=2),
        "optimizer as a name": base(optimizer="AdamW"),
        "lr in quotes": with_optimizer("Lion", {"lr": "1e-4"}),
    },
    "config-value-refused": {
        "stage 4": zero(4),
        "loss_scale -1": base(fp16={"enabled": False, "loss_scale": -1}),
        "reduce_bucket_size 0": zero(2) | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}},
        "device CPU": zero(2, offload_optimizer={"device": "CPU"}),
        "ratio 2": zero(3, offload_optimizer={"device": "none", "ratio": 2}),
        "communication_data_type fp8": base(communication_data_type="fp8"),
        "gradient_allreduce_op max": base(gradient_allreduce_op="max"),
        "tag_validation loud": base(checkpoint={"tag_validation": "loud"}),
    },
    "config-two-precisions": {"fp16 and bf16": base(fp16={"enabled": True}, bf16={"enabled": True})},
    "config-refused": {"sum at stage 3": zero(3) | {"gradient_allreduce_op": "sum"}},
    "config-batch-sizes-clash": {
        "8 is not 3 x 2": {
            **base(),
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 2,
        },
        "7 by 2": {**base(), "train_batch_size": 7, "train_micro_batch_size_per_gpu": 2},
        "smaller than a micro batch": {**base(), "train_batch_size": 2, "train_micro_batch_size_per_gpu": 4},
        "minus": {**base(), "train_batch_size": -4},
    },
    "config-batch-missing": {"no batch size": {"optimizer": SGD}},
    "config-auto-for-trainer": {
        "gradient_clipping auto": base(gradient_clipping="auto"),
        "stage auto": base(zero_optimization={"stage": "auto"}),
        "lr auto": with_optimizer("AdamW", {"lr": "auto", "torch_adam": True}),
        "bf16 auto": base(bf16={"enabled": "auto"}),
    },
    "config-auto-stays": {
        "steps_per_print auto": base(steps_per_print="auto"),
        "momentum auto": with_optimizer("SGD", {"lr": 0.1, "momentum": "auto"}),
    },
    "config-auto-dropped": {"sub_group_size auto": zero(3, sub_group_size="auto")},
    "config-optimizer-unknown": {
        "AdamWW": with_optimizer("AdamWW"),
        "sgd in small letters": with_optimizer("sgd"),
        "OneBitAdam": with_optimizer("OneBitAdam"),
    },
    "config-optimizer-parameter": {
        "learning_rate": with_optimizer("AdamW", {"learning_rate": 1e-3, "torch_adam": True}),
        "max_grad_norm": with_optimizer("AdamW", {"lr": 1e-3, "max_grad_norm": 1.0, "torch_adam": True}),
        "lr below 0": with_optimizer("SGD", {"lr": -1}),
        "beta for SGD": with_optimizer("SGD", {"lr": 0.1, "betas": [0.9, 0.99]}),
    },
    "config-optimizer-refused": {
        "untested with ZeRO": with_optimizer("Adafactor", zero_optimization={"stage": 2, "reduce_bucket_size": 65536}),
    },
    "config-scheduler-unknown": {"Cosine": with_scheduler("Cosine", {}), "warmuplr": with_scheduler("warmuplr", {})},
    "config-scheduler-parameter": {
        "warmup_steps": with_scheduler("WarmupLR", {"warmup_steps": 10}),
        "no warm-up": with_scheduler("WarmupLR", {"warmup_num_steps": 0}),
    },
    "config-scheduler-refused": {
        "WarmupDecayLR without total_num_steps": with_scheduler("WarmupDecayLR", {"warmup_num_steps": 10}),
        "without params": with_scheduler("WarmupLR", None),
    },
    "config-stage-ignores": {
        "stage3_max_live_parameters at 2": zero(2, stage3_max_live_parameters=1000),
        "round_robin_gradients at 3": zero(3, round_robin_gradients=True),
        "contiguous_gradients at 0": zero(0, contiguous_gradients=False),
    },
    "config-offload-ignored": {
        "offload_param at 2": zero(2, offload_param={"device": "cpu"}),
        "offload_optimizer at 0": zero(0, offload_optimizer={"device": "cpu"}),
        "nvme at 2": zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/tmp"}),
    },
    "config-nvme-without-path": {
        "optimizer": zero(3, offload_optimizer={"device": "nvme"}),
        "parameters": zero(3, offload_param={"device": "nvme"}),
    },
}

HEALTHY: dict[str, dict[str, Any]] = {
    "the least": {"train_micro_batch_size_per_gpu": 2},
    "optimizer only": {"train_batch_size": 4, "optimizer": ADAM},
    "batch sizes of one rank": base(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2),
    "micro batch with accumulation": {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "optimizer": SGD,
    },
    "bf16": base(bf16={"enabled": True}),
    "fp16 off with a scale": base(fp16={"enabled": False, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}),
    "clipping off": base(gradient_clipping=0.0),
    "clipping": base(gradient_clipping=1, prescale_gradients=False, gradient_predivide_factor=1.0),
    "WarmupLR": base(scheduler=WARMUP),
    "WarmupDecayLR": with_scheduler(
        "WarmupDecayLR", {"total_num_steps": 100, "warmup_num_steps": 10, "warmup_type": "linear"}
    ),
    "WarmupCosineLR": with_scheduler("WarmupCosineLR", {"total_num_steps": 100, "warmup_num_steps": 10}),
    "OneCycle": with_scheduler("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_momentum": False}),
    "a scheduler of torch": with_scheduler("StepLR", {"step_size": 10, "gamma": 0.5}),
    "an optimizer of torch": with_optimizer("RMSprop", {"lr": 1e-3, "alpha": 0.9}),
    "stage 1": zero(1),
    "stage 1 in bf16": zero(1) | {"bf16": {"enabled": True}},
    "stage 2": zero(
        2, contiguous_gradients=True, overlap_comm=True, reduce_scatter=True, allgather_bucket_size=200000000
    ),
    "stage 2 with 5e5": zero(2)
    | {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e5, "round_robin_gradients": True}},
    "stage 3": zero(
        3, stage3_max_live_parameters=1e6, stage3_prefetch_bucket_size=5000, stage3_param_persistence_threshold=100
    ),
    "stage 3 saved whole": zero(3, stage3_gather_16bit_weights_on_model_save=True) | {"bf16": {"enabled": True}},
    "stage 3 by their other names": zero(3, prefetch_bucket_size=5000, max_live_parameters=1000000, sub_group_size=1e6),
    "offload switched off": zero(3, offload_optimizer={"device": "none"}, offload_param={"device": "none"}),
    "parameters on the host": zero(3, offload_param={"device": "cpu", "pin_memory": False}),
    "activation checkpointing": base(
        activation_checkpointing={
            "partition_activations": False,
            "cpu_checkpointing": False,
            "number_checkpoints": None,
        }
    ),
    "monitors": base(
        tensorboard={"enabled": False, "output_path": "runs", "job_name": "a"}, csv_monitor={"enabled": False}
    ),
    "flops profiler": base(flops_profiler={"enabled": False, "profile_step": 1, "module_depth": -1, "detailed": True}),
    "comms logger": base(comms_logger={"enabled": False, "verbose": False, "prof_all": True, "debug": False}),
    "aio": base(aio={"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}),
    "data types": base(data_types={"grad_accum_dtype": "fp32"}),
    "printing": base(steps_per_print=2000, wall_clock_breakdown=False, dump_state=False, memory_breakdown=False),
    "torch autocast": base(torch_autocast={"enabled": False, "dtype": "bfloat16"}),
    "data efficiency": base(data_efficiency={"enabled": False, "data_routing": {"enabled": False}}),
    "a remark": base(_comment="the small model", **{"//": "see the wiki"}),
    "the whole tutorial": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 100,
        "optimizer": ADAM,
        "scheduler": WARMUP,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "reduce_bucket_size": 50000,
            "overlap_comm": False,
        },
    },
}

ARGUMENTS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 20, "learning_rate": 1e-3}
AUTO_SIZES = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
)
AUTO_ADAM = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
}
AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
AUTO_DECAY = {"type": "WarmupDecayLR", "params": {**AUTO_WARMUP["params"], "total_num_steps": "auto"}}  # type: ignore[dict-item]
AUTO_PRECISION = {"fp16": {"enabled": "auto", "loss_scale_window": 1000}, "bf16": {"enabled": "auto"}}

FOR_TRAINER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Trainer, stage 0": ({**AUTO_SIZES, "zero_optimization": {"stage": 0}, "gradient_clipping": "auto"}, ARGUMENTS),
    "Trainer, stage 2": (
        {
            **AUTO_SIZES,
            **AUTO_PRECISION,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e5},
            "optimizer": AUTO_ADAM,
        },
        {**ARGUMENTS, "bf16": True},
    ),
    "Trainer, stage 2, WarmupLR": (
        {
            **AUTO_SIZES,
            **AUTO_PRECISION,
            "gradient_clipping": "auto",
            "optimizer": AUTO_ADAM,
            "scheduler": AUTO_WARMUP,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e5, "overlap_comm": True},
        },
        ARGUMENTS,
    ),
    "Trainer, stage 3, WarmupDecayLR": (
        {
            **AUTO_SIZES,
            **AUTO_PRECISION,
            "optimizer": AUTO_ADAM,
            "scheduler": AUTO_DECAY,
            "steps_per_print": 2000,
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": 65536,
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        },
        {**ARGUMENTS, "bf16": True, "warmup_steps": 5},
    ),
    "Trainer, numbers that agree": (
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1}},
        ARGUMENTS,
    ),
}
