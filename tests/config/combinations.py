"""Configurations that are made of parts: ZeRO stage x offload x type x optimizer, and each flag at each stage. Each key is
DeepSpeed's own and each value one that it knows: what does not go together shows only when an engine is made."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsdoctor.core.finding import Finding, Severity
from tests.config.many import judge_many
from tests.config.table import initialized

REFUSALS = {
    *("config-refused", "config-value-refused", "config-optimizer-refused", "config-two-precisions"),
    *("config-key-refused", "config-key-removed"),
}
"""Rules that say that no training begins."""
OF_THIS_MACHINE = ("CPU backend", "accelerator 'cpu'")
"""What DeepSpeed refuses here and not on a GPU."""
OF_THE_PROGRAM = "client provided optimizer"
"""What depends on an optimizer that no configuration names; the table's program brings torch's AdamW."""
SMALL = {"reduce_bucket_size": 65536}
OFFLOADS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "parameters": {"offload_param": {"device": "cpu"}},
    "both": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
TYPES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 8}},
}
# none that needs a compiled op
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "the program's": {},
    "AdamW": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
    "SGD": {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}},
    "NAdam": {"optimizer": {"type": "NAdam", "params": {"lr": 1e-3}}},
}
FLAGS: dict[str, dict[str, Any]] = {
    "clipping": {"gradient_clipping": 1.0},
    "accumulation": {"gradient_accumulation_steps": 2},
    "prescale": {"prescale_gradients": True},
    "predivide": {"gradient_predivide_factor": 2.0},
    "sum": {"gradient_allreduce_op": "sum"},
    "communication fp16": {"communication_data_type": "fp16"},
    "communication fp32": {"communication_data_type": "fp32"},
    "communication bf16": {"communication_data_type": "bf16"},
    "accumulate fp32": {"data_types": {"grad_accum_dtype": "fp32"}},
    "accumulate bf16": {"data_types": {"grad_accum_dtype": "bf16"}},
    "accumulate fp16": {"data_types": {"grad_accum_dtype": "fp16"}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "untested": {"zero_allow_untested_optimizer": True},
    "unforced": {"zero_force_ds_cpu_optimizer": False},
    "dynamic scale": {"fp16": {"initial_scale_power": 4}},
    "master": {"bf16": {"bf16_master_weights_and_grads": True}},
    "master fp16": {"fp16": {"fp16_master_weights_and_grads": True}},
    "immediate": {"bf16": {"immediate_grad_update": True}},
    "no tracking": {"bf16": {"check_grad_overflow": True}},
    "sparse": {"sparse_gradients": True},
    "profiler": {"flops_profiler": {"enabled": True, "profile_step": 1}},
    "comms": {"comms_logger": {"enabled": True}},
    "breakdown": {"wall_clock_breakdown": True},
    "memory": {"memory_breakdown": True},
    "dump": {"dump_state": True},
    "disable allgather": {"disable_allgather": True},
    "universal": {"checkpoint": {"load_universal": True}},
    "parallel write": {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
    "partitioned activations": {"activation_checkpointing": {"partition_activations": True}},
    "nebula": {"nebula": {"enabled": False}},
    "ratio": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
    "pinned": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
    "fast init": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "fast_init": True}}},
    "super offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}},
    **{
        f"{name} {value}": {"zero_optimization": {name: value}}
        for name, value in (
            *(("overlap_comm", True), ("overlap_comm", False), ("contiguous_gradients", False)),
            *(("reduce_scatter", False), ("use_multi_rank_bucket_allreduce", False), ("round_robin_gradients", True)),
            *(("allgather_partitions", False), ("elastic_checkpoint", True), ("ignore_unused_parameters", False)),
            *(("load_from_fp32_weights", False), ("sub_group_size", 100), ("stage3_max_live_parameters", 0)),
            *(("stage3_max_reuse_distance", 0), ("stage3_prefetch_bucket_size", 0)),
            *(("stage3_param_persistence_threshold", 0), ("stage3_gather_16bit_weights_on_model_save", True)),
            *(("stage3_use_all_reduce_for_fetch_params", True), ("stage3_module_granularity_threshold", 1000)),
            *(("zero_hpz_partition_size", 2), ("zero_quantized_weights", True), ("zero_quantized_gradients", True)),
            *(("zero_quantized_nontrainable_weights", True), ("memory_efficient_linear", False)),
            *(("pipeline_loading_checkpoint", True), ("override_module_apply", False), ("legacy_stage1", True)),
            *(("log_trace_cache_warnings", True), ("enable_sanity_checks", True), ("fetch_params", True)),
            *(("save_muon_momentum_buffer_in_memory", True), ("cpu_offload_use_pin_memory", True)),
        )
    },
}


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """All parts as one configuration, section by section."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            both = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = joined(found[name], value) if both else value
    return found


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with its name."""
    base = {"train_micro_batch_size_per_gpu": 2}
    for stage, offload, kind, optimizer in itertools.product(range(4), OFFLOADS, TYPES, OPTIMIZERS):
        zero = {"zero_optimization": {"stage": stage, **SMALL, **OFFLOADS[offload]}}
        name = f"stage {stage}, offload {offload}, {kind}, {optimizer}"
        yield name, joined(base, zero, TYPES[kind], OPTIMIZERS[optimizer])
    for stage, kind, flag in itertools.product(range(4), TYPES, FLAGS):
        zero = {"zero_optimization": {"stage": stage, **SMALL}}
        yield f"stage {stage}, {kind}, {flag}", joined(base, zero, TYPES[kind], OPTIMIZERS["AdamW"], FLAGS[flag])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A combination, what was said of it, and where a real engine failed ("" for nowhere)."""

    name: str
    said: tuple[str, ...]
    failed: str
    error: str
    verdict: str


def outcomes(cases: Sequence[tuple[str, dict[str, Any]]]) -> list[Outcome]:
    """What `config` says of each, beside a real deepspeed.initialize and two steps."""
    configs = [config for _, config in cases]
    told = [[verdict.finding for verdict in found] for found in judge_many(configs)]
    return [
        Outcome(
            name=name,
            said=tuple(finding.rule for finding in found),
            failed=real["failed"],
            error=real["error"],
            verdict=verdict(found, real),
        )
        for (name, _), found, real in zip(cases, told, initialized(configs), strict=True)
    ]


def verdict(found: Sequence[Finding], real: dict[str, Any]) -> str:
    """ "unseen" and "alarm" are mistakes of ours; the rest is as it should be, or nobody can know it here."""
    errors = {finding.rule for finding in found if finding.severity is Severity.ERROR}
    warnings = {finding.rule for finding in found if finding.severity is not Severity.NOTE} - errors
    if not real["failed"]:
        return "alarm" if errors & REFUSALS else "trains otherwise, named" if errors | warnings else "trains"
    if errors:
        return "refused, named"
    if any(words in real["error"] for words in OF_THIS_MACHINE):
        return "refused on a CPU only"
    noted = "config-own-optimizer-offload" in {finding.rule for finding in found}
    return "the program's optimizer decides, noted" if noted and OF_THE_PROGRAM in real["error"] else "unseen"
