"""The trainings whose memory is measured: architectures, ZeRO stages, offload, types, buckets; and one more thing at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

BATCH, SEQUENCE = 2, 32
BUCKETS = (20_000, 1_000_000)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "GPT-2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": 3,
        "n_embd": 64,
        "n_head": 2,
        "vocab_size": 503,
        "n_positions": 48,
    },
    "Llama": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 503,
    },
    "T5": {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_ff": 130,
        "d_kv": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 503,
        "decoder_start_token_id": 0,
    },
    "Mixtral": {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 503,
    },
    "ViT": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 64,
        "intermediate_size": 130,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    },
}
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 503,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "vocab_size": 503,
    },
}
"""Measured with activation checkpointing on and off: views of an expert's parameters are saved for the backward pass."""
ARCHITECTURES |= EXPERTS
OVERFLOWS = ("DeepSeek-V3", "float16")
"""Its random weights make gradients that are not finite: every step is skipped, and no state is made."""
OFFLOADS = {0: ("none",), 1: ("none", "optimizer"), 2: ("none", "optimizer"), 3: ("none", "optimizer", "both")}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training of two steps. ``world``: ranks; ``accumulation``: micro batches of a step."""

    architecture: str
    stage: int
    offload: str
    dtype: str
    bucket: int
    world: int = 2
    accumulation: int = 1
    checkpointing: bool = False

    @property
    def name(self) -> str:
        training = f"{self.architecture} stage {self.stage} offload {self.offload} {self.dtype} bucket {self.bucket}"
        more = " checkpointing" if self.checkpointing else ""
        return f"{training} world {self.world} accumulation {self.accumulation}{more}"

    def configuration(self) -> dict[str, Any]:
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
        }
        if self.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload == "both":
            zero["offload_param"] = {"device": "cpu"}
        if self.stage == 3:
            # the larger bucket comes with DeepSpeed's default of reuse, which keeps all of a small model gathered
            small = self.bucket == BUCKETS[0]
            zero |= {"stage3_param_persistence_threshold": 500, "stage3_prefetch_bucket_size": self.bucket}
            zero |= {"stage3_max_reuse_distance": 10_000} if small else {}
        return {
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": zero,
            "gradient_accumulation_steps": self.accumulation,
            "bf16": {"enabled": self.dtype == "bfloat16"},
            # a scale that is not found first: a step that overflows makes no optimizer states
            "fp16": {"enabled": self.dtype == "float16", "loss_scale": 8},
            "zero_force_ds_cpu_optimizer": False,
        }


VARIED: tuple[dict[str, Any], ...] = (
    {"dtype": "float16"},
    {"world": 1},
    {"world": 4},
    {"accumulation": 3},
    {"accumulation": 2, "dtype": "float32"},
    {"checkpointing": True},
    {"checkpointing": True, "accumulation": 2, "dtype": "float16", "world": 4},
)
"""One more thing at a time, and at last all of them."""


def places() -> Iterator[Case]:
    """Each architecture at each stage with each offload, in bf16 with the smaller bucket."""
    for architecture in ARCHITECTURES:
        for stage, offloads in OFFLOADS.items():
            for offload in offloads:
                yield Case(architecture=architecture, stage=stage, offload=offload, dtype="bfloat16", bucket=BUCKETS[0])


def all_cases() -> Iterator[Case]:
    """Two types and two buckets at each place; then each variation."""
    for case in places():
        for dtype in ("bfloat16", "float32"):
            for bucket in BUCKETS:
                yield replace(case, dtype=dtype, bucket=bucket)
    yield from varied_cases()


def varied_cases() -> Iterator[Case]:
    """Each variation at each place."""
    for varied in VARIED:
        for case in places():
            if (case.architecture, varied.get("dtype")) != OVERFLOWS:
                yield replace(case, **varied)
