"""Values that DeepSpeed refuses, or takes as they are where it wants something else: batch sizes, "auto" and precisions too.

Generators of verdicts.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import (
    ConfigContext,
    Correction,
    KeyPath,
    Refusal,
    Section,
    Verdict,
    dotted,
    lookup,
    shown,
    walk,
)
from dsdoctor.config.keys import CHOSEN_BY_NAME, nearest, plain
from dsdoctor.core.finding import Severity
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

JUDGED_ELSEWHERE = {"extra_forbidden", "no batch size"}
"""Kinds of refusals that ``keys.py`` and the batch sizes' check tell."""
PRECISIONS = {("fp16", "enabled"), ("bf16", "enabled"), ("bfloat16", "enabled")}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
WANTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "an object",
    "list": "a list",
}
NUMBERS: dict[KeyPath, str] = {
    ("steps_per_print",): "int",
    ("vocabulary_size",): "int",
    **{(name,): "int" for name in BATCH},
}
"""Keys without a default in DeepSpeed that can only be numbers: it divides, multiplies or compares them."""
INFINITE = re.compile(r"-?(?:Infinity|NaN) *,?")
CHOICES = re.compile(r"'([^']*)'")
TRAIN, _, ACCUMULATION = BATCH
FILLED_BY_TRAINER = (
    *("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps"),
    *("scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size"),
    *("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold"),
)
"""The keys of transformers' integrations/deepspeed.py, trainer_config_process and trainer_config_finalize."""
FILLED_BY_ACCELERATE = (
    *(
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    ),
    *("zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Those that only accelerate fills, for the Trainer too: plugin_to_config_mapping in its utils/dataclasses.py."""


def refused_values(context: ConfigContext) -> Iterator[Verdict]:
    """What DeepSpeedConfig itself refuses, in its words, with the keys that cause it."""
    for refusal in context.asked.refusals:
        if refusal.kind in JUDGED_ELSEWHERE or _is_batch(refusal) or _is_removed(refusal) or _by_type(context, refusal):
            continue
        if refusal.ranks:
            yield _not_for_ranks(context, refusal)
        elif len(refusal.paths) == 1 and refusal.paths[0]:
            yield _refused(context, refusal, refusal.paths[0])
        elif set(refusal.paths) & PRECISIONS and len(refusal.paths) > 1:
            yield _two_precisions(refusal)
        else:
            yield _together(context, refusal)


def values_of_another_kind(context: ConfigContext) -> Iterator[Verdict]:
    """Keys that DeepSpeed reads without looking at their type: text for a number stays text until something is computed with it."""
    others = [refusal for refusal in context.asked.refusals if not _by_type(context, refusal)]
    refused = {path for refusal in others for path in refusal.paths}
    for path, value in walk(context.judged):
        kind = _kind(context, path)
        if value is None and path in NUMBERS:
            # what DeepSpeed takes where they are not there at all
            continue
        if path not in refused and kind and value != "auto" and _clashes(kind, value):
            yield _of_another_kind(path, value, kind)


def batch_sizes(context: ConfigContext) -> Iterator[Verdict]:
    """What DeepSpeed's own arithmetic says, for the number of ranks that is named, else for one that could be."""
    mismatched = {each.path for each in context.asked.filled.mismatches} if context.asked.filled else set()
    if mismatched & set(BATCH):
        # the values of the Trainer and of the file are mixed: what fits is judged once they agree
        return
    for refusal in context.asked.refusals:
        if refusal.kind == "no batch size":
            yield Verdict(finding=book.finding("config-batch-missing", Severity.ERROR, evidence=(refusal.message,)))
        elif _is_batch(refusal):
            yield _batch_clash(context, refusal.message)


def batch_size_for_one_world(context: ConfigContext) -> Iterator[Verdict]:
    """All three are given: they fit one number of ranks, which nobody named."""
    sizes = [context.judged.get(name) for name in BATCH]
    if (
        context.asked.world is not None
        or context.in_training
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        return
    train, micro, accumulation = (int(size or 0) for size in sizes)
    if train % (micro * accumulation) == 0 and train > micro * accumulation:
        ranks = train // (micro * accumulation)
        yield Verdict(finding=book.finding("config-batch-one-world", Severity.NOTE, ranks=ranks), path=(TRAIN,))


def autos_for_others(context: ConfigContext) -> Iterator[Verdict]:
    """ "auto" in a file of which nobody said who fills it in, although somebody could."""
    if context.filled_by or context.in_training:
        return
    left = [path for path, _ in left_autos(context) if dotted(path) in {*FILLED_BY_TRAINER, *FILLED_BY_ACCELERATE}]
    if not left:
        return
    keys = and_more([dotted(path) for path in left], 4)
    found = book.finding(
        "config-auto-for-trainer",
        Severity.WARNING,
        case="one" if len(left) == 1 else "",
        evidence=(keys,),
        key=keys,
        count=len(left),
        file=context.file,
    )
    yield Verdict(finding=found, path=left[0])


def autos_for_nobody(context: ConfigContext) -> Iterator[Verdict]:
    """ "auto" where it is no value, and nobody fills it in."""
    for path, in_model in left_autos(context):
        fillable = dotted(path) in {*FILLED_BY_TRAINER, *FILLED_BY_ACCELERATE}
        if fillable and not context.filled_by and not context.in_training:
            continue
        yield _left(context, path, in_model=in_model)
    for name in context.asked.filled.unfilled if context.asked.filled else ():
        path = tuple(name.split("."))
        default = _default(context, path)
        found = book.finding(
            "config-auto-stays",
            Severity.ERROR,
            case="accelerate-default" if default else "accelerate",
            key=name,
            default=default,
        )
        yield Verdict(finding=found, path=path)


def precision_of_gpus(context: ConfigContext) -> Iterator[Verdict]:
    """fp16 and bf16 against what the GPUs compute in."""
    facts = context.asked.facts
    if facts is None or not context.capabilities:
        return
    least = min(context.capabilities, key=_numbers)
    if facts.fp16 and _numbers(least) < (7, 0):
        found = book.finding("config-precision-unsupported", Severity.ERROR, capability=least)
        yield Verdict(finding=found, path=("fp16", "enabled"))
    if facts.bf16 and _numbers(least) < (8, 0):
        found = book.finding("config-precision-unsupported", Severity.WARNING, case="bf16", capability=least)
        yield Verdict(finding=found, path=("bf16", "enabled"))


def ops_not_built(context: ConfigContext) -> Iterator[Verdict]:
    """Ops that this configuration loads, and that the installed DeepSpeed holds no compiled form of."""
    if context.missing_ops:
        names = list(context.missing_ops)
        found = book.finding(
            "config-ops-not-built",
            Severity.NOTE,
            evidence=tuple(f"{op}: {why}" for op, why in context.missing_ops.items()),
            affects=names,
            ops=and_more(names),
            file=context.file,
        )
        yield Verdict(finding=found)


def left_autos(context: ConfigContext) -> Iterator[tuple[KeyPath, bool]]:
    """Each key that DeepSpeed gets as "auto", and whether its section drops it (else it stays text).

    None where whoever fills them in refused the whole before: that is told, and what would be left is not known.
    """
    if context.asked.filled and context.asked.filled.refused and not context.asked.filled.filled:
        return
    later = context.asked.filled.unknown if context.asked.filled else ()
    for path, value in walk(context.judged):
        if value != "auto" or dotted(path) in later:
            continue
        section, key = context.asked.section(path[:-1]), context.asked.key(path)
        if path[:-1] in CHOSEN_BY_NAME:
            yield path, False
        elif section is not None and not section.open and key is not None and key.default != '"auto"':
            yield path, bool(section.model)


def _kind(context: ConfigContext, path: KeyPath) -> str:
    """What a key is to be that DeepSpeed reads without a check; "" for others."""
    section = context.asked.section(path[:-1])
    if section is None or section.model or path[:-1] in CHOSEN_BY_NAME or context.asked.section(path):
        return ""
    key = section.key(path[-1])
    return NUMBERS.get(path) or (key.kind if key else "")


def _by_type(context: ConfigContext, refusal: Refusal) -> bool:
    """Whether it is no more than a value of another kind, with which Python could not compute."""
    values = [(path, lookup(context.judged, path)) for path in refusal.paths]
    clashing = [path for path, value in values if (kind := _kind(context, path)) and _clashes(kind, value)]
    return refusal.kind in {"TypeError", "AttributeError"} and bool(clashing)


def _of_another_kind(path: KeyPath, value: Any, kind: str) -> Verdict:
    if isinstance(value, str) and INFINITE.fullmatch(value):
        # without quotes hjson reads on to the end of the line
        number = value.strip(" ,")
        found = book.finding("config-value-type", Severity.ERROR, case="infinite", key=dotted(path), number=number)
        return Verdict(finding=found, path=path)
    correction = _as_kind(path, value, kind)
    found = book.finding(
        "config-value-type",
        # a float that is whole, a flag as 0 or 1: Python computes with them all the same
        Severity.ERROR if isinstance(value, str | dict | list) or value is None else Severity.WARNING,
        case=("true-corrected" if correction else "true")
        if kind == "bool" and isinstance(value, str)
        else ("null" if value is None else "corrected" if correction else ""),
        key=dotted(path),
        value=shown(path, value),
        wanted=WANTED[kind],
        right=correction.value if correction else None,
    )
    return Verdict(finding=found, path=path, correction=correction)


def _clashes(kind: str, value: Any) -> bool:
    """Whether a value will not do where one of this kind is wanted."""
    if value is None:
        return True
    if kind == "bool":
        return not (isinstance(value, bool) or value in (0, 1))
    if kind in {"int", "float"}:
        if isinstance(value, bool) or not isinstance(value, float | int):
            return True
        # accelerate writes infinity into steps_per_print
        return kind == "int" and isinstance(value, float) and math.isfinite(value) and not value.is_integer()
    return not isinstance(value, {"str": str, "dict": dict, "list": list}[kind])


def _as_kind(path: KeyPath, value: Any, kind: str) -> Correction | None:
    """The same value as what is wanted, where there is no doubt about it."""
    if not isinstance(value, str):
        return None
    text = value.strip().lower()
    if kind == "bool" and text in {"true", "false"}:
        return Correction(path=path, value=text)
    if kind in {"int", "float"}:
        try:
            number = float(text)
        except ValueError:
            return None
        whole = number.is_integer() and abs(number) < 1 << 53
        return Correction(path=path, value=json.dumps(int(number) if whole and kind == "int" else number))
    return None


def _refused(context: ConfigContext, refusal: Refusal, path: KeyPath) -> Verdict:
    value = lookup(context.judged, path)
    section = context.asked.section(path)
    if section is not None and not isinstance(value, dict) and value is not None:
        found = book.finding(
            "config-value-type",
            Severity.ERROR,
            case="object-off"
            if "device" in section.names and value is False
            else "object-stage"
            if "device" not in section.names and "stage" in section.names and isinstance(value, bool)
            else "object",
            evidence=(refusal.message,),
            key=dotted(path),
            value=shown(path, value),
            right=_as_object(section, value),
        )
        return Verdict(finding=found, path=path)
    message = refusal.message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    key = context.asked.key(path)
    correction = _corrected(path, value, refusal)
    has_default = key is not None and key.default not in {"", "null"}
    found = book.finding(
        "config-value-type" if refusal.kind.endswith(("_parsing", "_type", "from_float")) else "config-value-refused",
        Severity.ERROR,
        case="refused-corrected" if correction else "refused-default" if has_default else "refused",
        key=dotted(path),
        value=shown(path, value),
        message=message if message[1:2].isupper() else f"{message[:1].lower()}{message[1:]}",
        right=correction.value if correction else None,
        default=key.default if key else None,
    )
    return Verdict(finding=found, path=path, correction=correction)


def _as_object(section: Section, value: Any) -> str:
    """How a section is written that was given as a flag or a word."""
    names = section.names
    if "device" in names:
        return f'{{"device": "{value if isinstance(value, str) else "cpu"}"}}'
    if "enabled" in names and isinstance(value, bool):
        return f'{{"enabled": {json.dumps(value)}}}'
    if "stage" in names and isinstance(value, int):
        return f'{{"stage": {int(value)}}}'
    first = [f'"{key.name}": ...' for key in section.keys]
    return f"{{{and_more(first, 2)}}}"


def _corrected(path: KeyPath, value: Any, refusal: Refusal) -> Correction | None:
    if refusal.kind in {"enum", "literal_error"} and isinstance(value, str):
        # gpu is no mistake in typing for cpu
        near = [
            each for each in nearest(value, CHOICES.findall(refusal.message)) if len(each) > 3 or plain(value) == each
        ]
        return Correction(path=path, value=json.dumps(near[0])) if len(near) == 1 else None
    wanted = {"int_parsing": "int", "float_parsing": "float", "bool_parsing": "bool"}.get(refusal.kind)
    return _as_kind(path, value, wanted) if wanted else None


def _two_precisions(refusal: Refusal) -> Verdict:
    keys = " and ".join(sorted({dotted(path) for path in refusal.paths}))
    found = book.finding("config-two-precisions", Severity.ERROR, evidence=(refusal.message,), keys=keys)
    return Verdict(finding=found, path=refusal.paths[0])


def _together(context: ConfigContext, refusal: Refusal) -> Verdict:
    keys = and_more([f"{dotted(path)} {shown(path, lookup(context.judged, path))}" for path in refusal.paths], 4)
    found = book.finding(
        "config-refused",
        Severity.ERROR,
        case="" if len(refusal.paths) > 1 else "one" if keys else "whole",
        # what refused it: a section's class, the engine, or DeepSpeedConfig itself
        evidence=(f"{refusal.kind} in {refusal.model}" if refusal.model else refusal.kind,),
        keys=keys,
        message=refusal.message,
    )
    return Verdict(finding=found, path=refusal.paths[0] if refusal.paths else ())


def _not_for_ranks(context: ConfigContext, refusal: Refusal) -> Verdict:
    found = book.finding(
        "config-ranks-clash",
        Severity.ERROR,
        evidence=(f"{refusal.kind}: {refusal.message}",),
        keys=and_more([f"{dotted(path)} {shown(path, lookup(context.judged, path))}" for path in refusal.paths], 4),
        ranks=refusal.ranks,
    )
    return Verdict(finding=found, path=refusal.paths[0])


def _is_batch(refusal: Refusal) -> bool:
    return refusal.kind == "AssertionError" and any(path[-1:] and path[-1] in BATCH for path in refusal.paths)


def _is_removed(refusal: Refusal) -> bool:
    return refusal.kind == "DeepSpeedConfigError" and "removed" in refusal.message


def _batch_clash(context: ConfigContext, message: str) -> Verdict:
    sizes = {name: context.judged.get(name) for name in BATCH if name in context.judged}
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if context.filled_by and ACCUMULATION not in context.config and ACCUMULATION in sizes:
        return _accumulation_of_accelerate(said, sizes[ACCUMULATION], message)
    world, fitting = context.asked.world, _fitting_ranks(sizes)
    whole = len(sizes) == len(BATCH) and all(type(size) is int and size > 0 for size in sizes.values())
    if len(sizes) == 1 and world and not any(size <= 0 for size in sizes.values() if type(size) is int):
        found = book.finding(
            "config-batch-sizes-clash",
            Severity.ERROR,
            case="train-only",
            evidence=(message,),
            train=str(sizes.get(TRAIN)),
            world=world,
        )
        return Verdict(finding=found, path=(TRAIN,))
    found = book.finding(
        "config-batch-sizes-clash",
        Severity.ERROR,
        case="not-positive"
        if any(size <= 0 for size in sizes.values() if type(size) is int)
        else "other-ranks"
        if fitting
        else "whole"
        if whole
        else "",
        evidence=(message,),
        sizes=said,
        ranks="any number of ranks" if world is None else "1 rank" if world == 1 else f"{world} ranks",
        fitting=fitting,
    )
    # which of the three is meant is nobody's guess
    return Verdict(finding=found, path=(TRAIN,))


def _fitting_ranks(sizes: dict[str, object]) -> int | None:
    """The number of ranks that they would fit: a launcher that starts another number is the usual cause.

    >>> _fitting_ranks({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})
    8
    """
    train, micro, accumulation = (sizes.get(name) for name in BATCH)
    if not (type(train) is int and type(micro) is int and type(accumulation) is int) or micro * accumulation <= 0:
        return None
    return train // (micro * accumulation) if train > 0 and train % (micro * accumulation) == 0 else None


def _accumulation_of_accelerate(said: str, steps: object, message: str) -> Verdict:
    """The file leaves the accumulation out: then accelerate's plugin does not take it from TrainingArguments."""
    found = book.finding(
        "config-batch-sizes-clash",
        Severity.ERROR,
        case="accelerate",
        evidence=(message,),
        sizes=said,
        steps_filled=str(steps),
    )
    return Verdict(finding=found, path=(ACCUMULATION,), correction=Correction(path=(ACCUMULATION,), value='"auto"'))


def _left(context: ConfigContext, path: KeyPath, *, in_model: bool) -> Verdict:
    default = _default(context, path)
    if in_model:
        found = book.finding(
            "config-auto-dropped",
            Severity.WARNING,
            case="" if default else "null",
            key=dotted(path),
            default=default,
        )
        return Verdict(finding=found, path=path)
    found = book.finding(
        "config-auto-stays", Severity.ERROR, case="default" if default else "", key=dotted(path), default=default
    )
    return Verdict(finding=found, path=path)


def _default(context: ConfigContext, path: KeyPath) -> str:
    """The default of a key as JSON, "" where it has none."""
    key = context.asked.key(path)
    return key.default if key and key.default not in {"", "null"} else ""


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())
