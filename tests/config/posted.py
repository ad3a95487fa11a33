"""Mistakes that users posted in public issues of DeepSpeed, transformers, accelerate, Lightning and others, written anew and small.

``keys``: each is to be named, in a title or its evidence, by the rule that stands beside it. ``arguments`` and ``world``: where the
post was about the Trainer or a number of ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ADAMW = {"type": "AdamW", "params": {"lr": 1e-4}}
MICRO = {"train_micro_batch_size_per_gpu": 1}
TRAINER = {"per_device_train_batch_size": 1, "learning_rate": 1e-4, "bf16": True, "max_steps": 260}


@dataclass(frozen=True, kw_only=True)
class Posted:
    """A configuration, what is to be named of it (key -> rule), and where such a one was posted."""

    what: str
    config: dict[str, Any]
    named: dict[str, str]
    arguments: dict[str, Any] = field(default_factory=dict)
    world: int | None = None
    place: str = ""


def zero(stage: Any, **more: Any) -> dict[str, Any]:
    return {**MICRO, "optimizer": ADAMW, "zero_optimization": {"stage": stage, **more}}


def of_optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {**MICRO, "optimizer": {"type": kind, "params": {"lr": 1e-4, **params}}}


def of_scheduler(kind: str, **params: Any) -> dict[str, Any]:
    return {**MICRO, "optimizer": ADAMW, "scheduler": {"type": kind, "params": params}}


def posted() -> Iterator[Posted]:
    """All of them."""
    yield from POSTED


NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
POSTED = (
    Posted(
        what="offload_optimizer beside zero_optimization",
        config={**zero(2), "offload_optimizer": {"device": "cpu", "pin_memory": True, "fast_init": False}},
        named={"offload_optimizer": "config-key-misplaced"},
        place="deepspeedai/DeepSpeed#1935",
    ),
    Posted(
        what="offload_optimizer as a flag",
        config=zero(2, offload_optimizer=True),
        named={"zero_optimization.offload_optimizer": "config-value-type"},
        place="Lightning-AI/pytorch-lightning#17790",
    ),
    Posted(
        what="aio inside zero_optimization",
        config=zero(3, offload_param=NVME, offload_optimizer=NVME, aio={"block_size": 262144, "queue_depth": 32}),
        named={"zero_optimization.aio": "config-key-misplaced"},
        place="deepspeedai/DeepSpeed#2721",
    ),
    Posted(
        what="a loss scale for bf16",
        config={**zero(1), "bf16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 10, "hysteresis": 2}},
        named=dict.fromkeys(("bf16.loss_scale", "bf16.initial_scale_power", "bf16.hysteresis"), "config-key-refused"),
        place="FlagOpen/FlagEmbedding#1487",
    ),
    Posted(
        what="a bucket that is no whole number",
        config=zero(3, stage3_prefetch_bucket_size=15099494.4),
        named={"zero_optimization.stage3_prefetch_bucket_size": "config-value-type"},
        place="hustvl/Senna#14",
    ),
    Posted(
        what="parameters offloaded at stage 2",
        config=zero(2, offload_param={"device": "cpu"}),
        named={"offload_param": "config-offload-ignored"},
        place="wenet-e2e/wenet#2499",
    ),
    Posted(
        what="cpu_offload of earlier versions",
        config=zero(2, cpu_offload=True),
        named={"zero_optimization.cpu_offload": "config-key-deprecated"},
        place="deepspeedai/DeepSpeed#610",
    ),
    Posted(
        what="Auto with a capital",
        config=of_scheduler("WarmupLR", warmup_num_steps="Auto"),
        named={"scheduler.params.warmup_num_steps": "config-value-type"},
        place="LianjiaTech/BELLE#558",
    ),
    Posted(
        what="auto where nobody fills it in",
        config={**zero(2, sub_group_size="auto", reduce_bucket_size="auto"), "bf16": {"enabled": "auto"}},
        named={"zero_optimization.sub_group_size": "config-auto-stays"},
        arguments=TRAINER,
        place="huggingface/accelerate#1644",
    ),
    Posted(
        what="batch sizes for eight ranks on one",
        config={
            **MICRO,
            "train_batch_size": 256,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
        },
        named={"train_batch_size": "config-batch-sizes-clash"},
        world=1,
        place="bigcode-project/starcoder#41",
    ),
    Posted(
        what="batch sizes that seven ranks cannot share",
        config={"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 18},
        named={"train_batch_size": "config-batch-sizes-clash"},
        world=7,
        place="OpenRLHF/OpenRLHF#346",
    ),
    Posted(
        what="steps of a schedule that are not the Trainer's",
        config={
            **zero(1),
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 0, "warmup_num_steps": "auto"}},
        },
        named={"scheduler.params.total_num_steps": "config-trainer-mismatch"},
        arguments=TRAINER,
        place="huggingface/transformers#29348",
    ),
    Posted(
        what="a learning rate that is not the Trainer's",
        config={**zero(1), "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}}},
        named={"optimizer.params.lr": "config-trainer-mismatch"},
        arguments=TRAINER,
        place="huggingface/transformers, forum",
    ),
    Posted(
        what="zero_force_ds_cpu_optimizer inside zero_optimization",
        config=zero(2, offload_optimizer={"device": "cpu"}, zero_force_ds_cpu_optimizer=False),
        named={"zero_optimization.zero_force_ds_cpu_optimizer": "config-key-misplaced"},
        place="bitsandbytes-foundation/bitsandbytes#596",
    ),
    Posted(
        what="zero_allow_untested_optimizer inside zero_optimization",
        config={
            **zero(2, zero_allow_untested_optimizer=True),
            "optimizer": {"type": "Adafactor", "params": {"lr": 1e-4}},
        },
        named={
            "zero_optimization.zero_allow_untested_optimizer": "config-key-misplaced",
            "Adafactor": "config-optimizer-refused",
        },
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="the key of a section for checkpointing activations",
        config={**zero(2), "activation_checkpointing": {"enabled": True}},
        named={"activation_checkpointing.enabled": "config-key-ignored"},
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="gradient_checkpointing, which is the model's",
        config={**zero(2), "gradient_checkpointing": True},
        named={"gradient_checkpointing": "config-key-ignored"},
        place="huggingface/transformers, forum",
    ),
    Posted(
        what="the Trainer's name of an optimizer",
        config=of_optimizer("adamw_torch"),
        named={"adamw_torch": "config-optimizer-unknown"},
        place="huggingface/transformers, forum",
    ),
    Posted(
        what="the Trainer's name of a schedule",
        config=of_scheduler("cosine", warmup_num_steps=10),
        named={"cosine": "config-scheduler-unknown"},
        place="huggingface/transformers, forum",
    ),
    Posted(
        what="parameters of WarmupLR for WarmupCosineLR",
        config=of_scheduler("WarmupCosineLR", total_num_steps=100, warmup_max_lr=1e-4, warmup_num_steps=10),
        named={"scheduler.params.warmup_max_lr": "config-scheduler-parameter"},
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="the size of offload_param's buffers for the optimizer's",
        config=zero(3, offload_optimizer={"device": "cpu", "buffer_size": 1e8}),
        named={"zero_optimization.offload_optimizer.buffer_size": "config-key-misplaced"},
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="gpu as a device to offload to",
        config=zero(3, offload_optimizer={"device": "gpu"}),
        named={"zero_optimization.offload_optimizer.device": "config-value-refused"},
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="prescaled gradients at stage 2",
        config={**zero(2), "prescale_gradients": True},
        named={"prescale_gradients": "config-refused"},
        place="DeepSpeed's example for BERT, with ZeRO added",
    ),
    Posted(
        what="keys of NVMe for the host's memory",
        config=zero(3, offload_optimizer={"device": "cpu", "nvme_path": "/local_nvme", "pipeline_read": True}),
        named={"pipeline_read": "config-offload-ignored"},
        place="huggingface/transformers#11044",
    ),
    Posted(
        what="text for a size",
        config=zero(3, stage3_max_live_parameters="1e9"),
        named={"zero_optimization.stage3_max_live_parameters": "config-value-type"},
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="mixture of experts as a section",
        config={**zero(1), "moe": {"enabled": True, "num_experts": 8}},
        named={"moe": "config-key-ignored"},
        place="deepspeedai/DeepSpeed, discussions",
    ),
    Posted(
        what="fp16 and bf16 for every GPU",
        config={**zero(2), "fp16": {"enabled": True}, "bf16": {"enabled": True}},
        named={"bf16.enabled": "config-two-precisions"},
        place="huggingface/transformers, forum",
    ),
)
"""The posts say what became of it; the versions since have changed some of that."""
