"""Healthy configurations of the kinds that tools for training publish, written anew: nothing of them is to be alarmed."""

from typing import Any

AUTO = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
CLIPPED = {**AUTO, "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False}
FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
BOTH = {"fp16": FP16, "bf16": {"enabled": "auto"}}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")}
DECAY = {"type": "WarmupDecayLR", "params": {**WARMUP["params"], "total_num_steps": "auto"}}  # type: ignore[dict-item]
TWO = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}
THREE = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
HOST = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/tmp", "pin_memory": True}
TRAINER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "learning_rate": 2e-5, "max_steps": 1000}
BF16 = {**TRAINER, "bf16": True, "warmup_steps": 30}

PUBLIC: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Trainer, stage 2 with the optimizer on the host": (
        {
            **CLIPPED,
            **BOTH,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {**TWO, "offload_optimizer": HOST},
        },
        {**TRAINER, "fp16": True},
    ),
    "Trainer, stage 3 with both on the host": (
        {
            **CLIPPED,
            **BOTH,
            "optimizer": ADAMW,
            "scheduler": WARMUP,
            "zero_optimization": {**THREE, "offload_optimizer": HOST, "offload_param": HOST},
        },
        BF16,
    ),
    "Trainer, stage 3 with decay, for models with many tokens": (
        {**CLIPPED, "bf16": {"enabled": "auto"}, "optimizer": ADAMW, "scheduler": DECAY, "zero_optimization": THREE},
        BF16,
    ),
    "Trainer, the optimizer and scheduler of the arguments": ({**CLIPPED, **BOTH, "zero_optimization": THREE}, BF16),
    "a tool for fine-tuning, stage 0": (
        {**AUTO, "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, **BOTH}
        | {"zero_optimization": {**TWO, "stage": 0, "round_robin_gradients": False}},
        BF16,
    ),
    "a tool for fine-tuning, stage 2": (
        {**AUTO, "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, **BOTH}
        | {
            "zero_optimization": {
                **TWO,
                "allgather_bucket_size": 5e8,
                "reduce_bucket_size": 5e8,
                "round_robin_gradients": True,
            }
        },
        BF16,
    ),
    "a tool for alignment, a script of its own": (
        {
            "steps_per_print": 100,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "none"},
                "offload_optimizer": {"device": "cpu", "pin_memory": True},
                "sub_group_size": "auto",
                "stage3_max_live_parameters": "auto",
                "stage3_max_reuse_distance": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "reduce_bucket_size": "auto",
                "zero_hpz_partition_size": 1,
                "zero_quantized_weights": False,
                "zero_quantized_gradients": False,
            },
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "data_types": {"grad_accum_dtype": "fp32"},
            "train_micro_batch_size_per_gpu": 4,
            "train_batch_size": 128,
        },
        {},
    ),
    "a chat tutorial": (
        {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "cpu"},
                "offload_optimizer": {"device": "cpu"},
                "stage3_param_persistence_threshold": 1e4,
                "stage3_max_live_parameters": 3e7,
                "stage3_prefetch_bucket_size": 3e7,
                "memory_efficient_linear": False,
            },
            "fp16": {"enabled": True, "loss_scale_window": 100},
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "wall_clock_breakdown": False,
            "hybrid_engine": {
                "enabled": False,
                "max_out_tokens": 512,
                "inference_tp_size": 1,
                "release_inference_cache": False,
            },
            "tensorboard": {
                "enabled": False,
                "output_path": "step1/ds_tensorboard_logs/",
                "job_name": "step1_model_tensorboard",
            },
        },
        {},
    ),
    "Megatron's, with stage 1": (
        {
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "steps_per_print": 10,
            "zero_optimization": {"stage": 1},
            "gradient_clipping": 1.0,
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
            | {"initial_scale_power": 11},
            "wall_clock_breakdown": True,
        },
        {},
    ),
    "the tutorial for an image classifier": (
        {
            "train_batch_size": 16,
            "steps_per_print": 2000,
            "optimizer": {
                "type": "Adam",
                "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
            },
            "scheduler": {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
            },
            "gradient_clipping": 1.0,
            "prescale_gradients": False,
            "bf16": {"enabled": False},
            "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1}
            | {"initial_scale_power": 15},
            "wall_clock_breakdown": False,
            "zero_optimization": {
                **TWO,
                "allgather_bucket_size": 50000000,
                "reduce_bucket_size": 50000000,
                "cpu_offload": False,
            },
        },
        {},
    ),
    "BERT's example": (
        {
            "train_batch_size": 4096,
            "train_micro_batch_size_per_gpu": 64,
            "steps_per_print": 1000,
            "prescale_gradients": True,
            "optimizer": {
                "type": "Lamb",
                "params": {
                    "lr": 11e-3,
                    "weight_decay": 0.01,
                    "bias_correction": False,
                    "max_coeff": 0.3,
                    "min_coeff": 0.01,
                },
            },
            "gradient_clipping": 1.0,
            "wall_clock_breakdown": False,
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
        },
        {},
    ),
    "parameters and optimizer on NVMe": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {**NVME, "buffer_count": 4, "fast_init": False},
                "offload_param": {**NVME, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
            },
            "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False}
            | {"overlap_events": True},
            "bf16": {"enabled": True},
        },
        {},
    ),
    "partial offload": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-5}},
            "zero_optimization": {
                "stage": 3,
                "sub_group_size": 4e8,
                "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3},
            },
            "bf16": {"enabled": True},
        },
        {},
    ),
}
"""A configuration, and the TrainingArguments that fill it in, or none."""
