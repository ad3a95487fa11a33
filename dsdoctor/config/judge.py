"""All checks of a configuration, and those of its ZeRO stage: keys that it does not read, offload, NVMe, buckets."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.config import huggingface, keys, optimizers, values
from dsdoctor.config.answer import Asked, ConfigContext, Correction, KeyPath, Verdict, lookup, shown
from dsdoctor.config.document import ReadConfig
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
FOR_NVME = {
    "offload_optimizer": ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
    "offload_param": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
"""Keys that are read where the device is NVMe: zero/stage3.py, _configure_tensor_swapping and params_in_nvme_and_cpu, and what
lies in swap_tensor/."""
FOR_STAGE_3 = ("super_offload", "cpuadam_cores_perc", "fast_init")
"""Keys of offload_optimizer that are handed to stage 3 alone: engine.py, _configure_zero_optimizer, and zero/stage3.py."""
AT_STAGE = {0: set[str](), 1: {"1 and 2", "any"}, 2: {"1 and 2", "any"}, 3: {"3", "any"}}
Check = Callable[[ConfigContext], Iterator[Verdict]]
ORDER = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


@dataclass(frozen=True, kw_only=True)
class ConfigJudged:
    """The verdicts, what was read, who answered, and each "auto" with its value as lines."""

    read: ReadConfig
    asked: Asked
    verdicts: tuple[Verdict, ...]
    filled: tuple[str, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings alone."""
        return tuple(verdict.finding for verdict in self.verdicts)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """A configuration before and after its corrections. ``in_place``: nothing else in the text was changed. ``refused``: why
    nothing was written."""

    before: ConfigJudged
    after: ConfigJudged
    corrections: tuple[Correction, ...]
    in_place: bool
    refused: Finding | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is left to correct by hand."""
        return self.after.findings if self.refused is None else (self.refused, *self.before.findings)


def judge(context: ConfigContext) -> tuple[Verdict, ...]:
    """Every verdict once, errors first."""
    found = dict.fromkeys(verdict for check in CHECKS for verdict in check(context))
    return tuple(sorted(found, key=lambda verdict: ORDER.index(verdict.finding.severity)))


def corrections_of(verdicts: tuple[Verdict, ...]) -> Iterator[Correction]:
    """The corrections that there are, in order, each once."""
    yield from dict.fromkeys(verdict.correction for verdict in verdicts if verdict.correction is not None)


def keys_ignored_by_stage(context: ConfigContext) -> Iterator[Verdict]:
    """Keys of zero_optimization that are set to something else than their default, and that this stage does not read."""
    facts, zero = context.asked.facts, context.judged.get(ZERO)
    if facts is None or not isinstance(zero, dict) or not context.asked.stages:
        return
    stage = facts.stage
    ignored = [
        name for name, value in zero.items() if name not in OFFLOADS and _is_ignored(context, name, value, stage)
    ]
    if ignored:
        wanted = sorted(
            {other for name in ignored for other in context.asked.stages.get(_name(context, name), ())} - {"any"}
        )
        found = book.finding(
            "config-stage-ignores",
            Severity.WARNING,
            case="" if stage else "stage-0",
            evidence=tuple(f"{ZERO}.{name}: {shown((name,), zero[name])}" for name in ignored[:6]),
            stage=stage,
            keys=and_more(ignored, 4),
            wanted=" and ".join(wanted),
        )
        yield Verdict(finding=found, path=(ZERO, ignored[0]))


def offload_at_the_wrong_stage(context: ConfigContext) -> Iterator[Verdict]:
    """Offload that the stage does not do."""
    facts = context.asked.facts
    if facts is None:
        return
    if facts.offload_param != "none" and facts.stage < 3:
        found = book.finding("config-offload-ignored", Severity.ERROR, stage=facts.stage)
        yield Verdict(finding=found, path=(ZERO, "offload_param"))
    if facts.offload_optimizer != "none" and facts.stage == 0:
        made = context.asked.optimizer.made if context.asked.optimizer else ""
        refuses = f"{made} is created anyway, and rejects parameters on a GPU in its first step"
        evidence = [refuses] if made.startswith("DeepSpeedCPU") else []
        found = book.finding("config-offload-ignored", Severity.ERROR, case="optimizer", evidence=evidence)
        yield Verdict(finding=found, path=(ZERO, "offload_optimizer"))
    if facts.offload_optimizer == "nvme" and facts.stage in {1, 2}:
        found = book.finding("config-offload-ignored", Severity.ERROR, case="nvme", stage=facts.stage)
        yield Verdict(finding=found, path=(ZERO, "offload_optimizer", "device"))


def offload_keys_without_effect(context: ConfigContext) -> Iterator[Verdict]:
    """Keys of an offload that is done, and that its device or its stage takes no notice of."""
    facts = context.asked.facts
    for name in OFFLOADS:
        if facts is None or facts.stage == 0 or getattr(facts, name) != "cpu":
            continue
        if unread := _set_to_something(context, name, FOR_NVME[name]):
            keys = and_more(unread, 4)
            found = book.finding("config-offload-ignored", Severity.NOTE, case="nvme-keys", section=name, keys=keys)
            yield Verdict(finding=found, path=(ZERO, name, unread[0]))
        if (
            name == "offload_optimizer"
            and facts.stage < 3
            and (unread := _set_to_something(context, name, FOR_STAGE_3))
        ):
            found = book.finding(
                "config-offload-ignored",
                Severity.WARNING,
                case="stage-3-keys",
                section=name,
                keys=and_more(unread, 4),
                stage=facts.stage,
            )
            yield Verdict(finding=found, path=(ZERO, name, unread[0]))


def nvme_path(context: ConfigContext) -> Iterator[Verdict]:
    """NVMe without a folder, or with one that is not there."""
    facts = context.asked.facts
    for name in OFFLOADS:
        if facts is None or facts.stage < 3 or getattr(facts, name) != "nvme":
            continue
        path: KeyPath = (ZERO, name, "nvme_path")
        folder = lookup(context.judged, path)
        if folder in (None, "", "none"):
            yield Verdict(finding=book.finding("config-nvme-without-path", Severity.ERROR, section=name), path=path)
        elif context.folders.get(str(folder)) is False:
            found = book.finding("config-nvme-folder-absent", Severity.NOTE, folder=shown(path, folder))
            yield Verdict(finding=found, path=path)


def large_buckets(context: ConfigContext) -> Iterator[Verdict]:
    """Buckets that are larger than the whole model: they are allocated in full."""
    facts, parameters = context.asked.facts, context.asked.parameters
    if facts is None or not parameters or facts.stage == 0 or facts.reduce_bucket_size <= parameters:
        return
    found = book.finding(
        "config-bucket-larger-than-model",
        Severity.WARNING,
        case="" if "reduce_bucket_size" in (lookup(context.judged, (ZERO,)) or {}) else "default",
        evidence=("stage 3 allocates all of it at startup, for each dtype; stages 1 and 2 with the first gradients",),
        size=f"{facts.reduce_bucket_size:,}",
        gigabytes=f"{facts.reduce_bucket_size * (2 if facts.fp16 or facts.bf16 else 4) / 1e9:.1f}",
        parameters=f"{parameters:,}",
        tenth=max(65536, parameters // 10),
    )
    yield Verdict(finding=found, path=(ZERO, "reduce_bucket_size"))


def _set_to_something(context: ConfigContext, section: str, names: tuple[str, ...]) -> list[str]:
    """Those of a section's keys that have another value than their default."""
    given = lookup(context.judged, (ZERO, section))
    known = {name: context.asked.key((ZERO, section, name)) for name in names}
    return [
        name
        for name, key in known.items()
        if key and isinstance(given, dict) and name in given and json.dumps(given[name]) != key.default
    ]


def _is_ignored(context: ConfigContext, name: str, value: Any, stage: int) -> bool:
    known = _name(context, name)
    stages = context.asked.stages.get(known)
    if not stages or name == "stage" or value == "auto":
        return False
    key = context.asked.key((ZERO, name))
    if key is not None and key.default == json.dumps(value):
        return False
    return "any" not in stages and not AT_STAGE[stage] & set(stages)


def _name(context: ConfigContext, name: str) -> str:
    key = context.asked.key((ZERO, name))
    return key.name if key else name


CHECKS: tuple[Check, ...] = (
    huggingface.plain_json,
    keys.removed_keys,
    keys.refused_keys,
    keys.unread_keys,
    values.refused_values,
    values.values_of_another_kind,
    values.batch_sizes,
    huggingface.mismatches,
    huggingface.refusals,
    huggingface.accelerate_file,
    values.autos_for_nobody,
    values.autos_for_others,
    optimizers.optimizer,
    optimizers.scheduler,
    optimizers.scheduler_by_metric,
    offload_at_the_wrong_stage,
    offload_keys_without_effect,
    nvme_path,
    values.precision_of_gpus,
    keys_ignored_by_stage,
    large_buckets,
    keys.deprecated_keys,
    optimizers.own_optimizer_with_offload,
    values.batch_size_for_one_world,
    values.ops_not_built,
    huggingface.not_filled,
    huggingface.not_asked,
)
