"""Values that DeepSpeed refuses, or takes as they are where it wants something else. Generators of verdicts."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import (
    Correction,
    Key,
    KeyPath,
    Question,
    Refusal,
    Section,
    Verdict,
    dotted,
    lookup,
    shown,
    walk,
)
from dsdoctor.config.keys import CHOSEN_BY_NAME, nearest, plain
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.text import and_more

ELSEWHERE = {"extra_forbidden", "no batch size"}
"""Kinds of refusals that ``keys.py`` and ``batch.py`` tell."""
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


def refused_values(question: Question) -> Iterator[Verdict]:
    """What DeepSpeedConfig itself refuses, in its words, with the keys that cause it."""
    for refusal in question.asked.refusals:
        if refusal.kind in ELSEWHERE or _is_batch(refusal) or _is_removed(refusal) or _by_type(question, refusal):
            continue
        if len(refusal.paths) == 1 and refusal.paths[0]:
            yield _refused(question, refusal, refusal.paths[0])
        elif set(refusal.paths) & PRECISIONS and len(refusal.paths) > 1:
            yield _two_precisions(refusal)
        else:
            yield _together(question, refusal)


def values_of_another_kind(question: Question) -> Iterator[Verdict]:
    """Keys that DeepSpeed reads without looking at their type: text for a number stays text until something is computed with it."""
    told = [refusal for refusal in question.asked.refusals if not _by_type(question, refusal)]
    refused = {path for refusal in told for path in refusal.paths}
    for path, value in walk(question.judged):
        kind = _kind(question, path)
        if value is None and path in NUMBERS:
            # what DeepSpeed takes where they are not there at all
            continue
        if path in refused or not kind or value == "auto" or (problem := _clash(kind, value)) is None:
            continue
        yield _of_another_kind(path, value, kind, problem)


def _kind(question: Question, path: KeyPath) -> str:
    """What a key is to be that DeepSpeed reads without a check; "" for others."""
    section = question.asked.section(path[:-1])
    if section is None or section.model or path[:-1] in CHOSEN_BY_NAME or question.asked.section(path):
        return ""
    key = section.key(path[-1])
    return NUMBERS.get(path) or (key.kind if key else "")


def _by_type(question: Question, refusal: Refusal) -> bool:
    """Whether it is no more than a value of another kind, with which Python could not compute."""
    values = [(path, lookup(question.judged, path)) for path in refusal.paths]
    clashing = [path for path, value in values if (kind := _kind(question, path)) and _clash(kind, value) is not None]
    return refusal.kind in {"TypeError", "AttributeError"} and bool(clashing)


def _of_another_kind(path: KeyPath, value: Any, kind: str, problem: str) -> Verdict:
    title = (
        f"{dotted(path)} is {shown(path, value)}, and DeepSpeed, which does not check it, wants {WANTED[kind]}{problem}"
    )
    if isinstance(value, str) and INFINITE.fullmatch(value):
        # without quotes hjson reads on to the end of the line
        number = value.strip(" ,")
        title = f"{dotted(path)} is {number}, which hjson, by which DeepSpeed reads its file, takes for text"
        found = Finding.error("config-value-type", title, fix="give it a number, or take it out")
        return Verdict(finding=found, path=path)
    correction = _as_kind(path, value, kind)
    fix = f"write {correction.value}" if correction else f"give it {WANTED[kind]}"
    # a float that is whole, a flag as 0 or 1: Python computes with them all the same
    make = Finding.error if isinstance(value, str | dict | list) or value is None else Finding.warning
    return Verdict(finding=make("config-value-type", title, fix=fix), path=path, correction=correction)


def _clash(kind: str, value: Any) -> str | None:
    """What goes wrong, "" where that depends; None where the value will do."""
    if value is None:
        return ": null is not its default, DeepSpeed gets None"
    if kind == "bool":
        if isinstance(value, str):
            return ": any text counts as true"
        return None if isinstance(value, bool) or value in (0, 1) else ""
    if kind in {"int", "float"}:
        if isinstance(value, bool) or isinstance(value, float | int) is False:
            return ""
        # accelerate writes infinity into steps_per_print
        return (
            ""
            if kind == "int" and isinstance(value, float) and math.isfinite(value) and not value.is_integer()
            else None
        )
    return None if isinstance(value, {"str": str, "dict": dict, "list": list}[kind]) else ""


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


def _refused(question: Question, refusal: Refusal, path: KeyPath) -> Verdict:
    value = lookup(question.judged, path)
    section = question.asked.section(path)
    if section is not None and not isinstance(value, dict) and value is not None:
        title = f"{dotted(path)} is {shown(path, value)}, and is to be an object: DeepSpeed refuses to start"
        found = Finding.error("config-value-type", title, evidence=(refusal.message,), fix=_as_object(section, value))
        return Verdict(finding=found, path=path)
    message = refusal.message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    key = question.asked.key(path)
    correction = _corrected(path, value, refusal)
    said = message if message[1:2].isupper() else f"{message[:1].lower()}{message[1:]}"
    title = f"{dotted(path)} is {shown(path, value)}, which DeepSpeed refuses: {said}"
    fix = f"write {correction.value}" if correction else _what_it_takes(key)
    rule = "config-value-type" if refusal.kind.endswith(("_parsing", "_type", "from_float")) else "config-value-refused"
    return Verdict(finding=Finding.error(rule, title, fix=fix), path=path, correction=correction)


def _as_object(section: Section, value: Any) -> str:
    """How a section is written that was given as a flag or a word."""
    names = section.names
    if "device" in names:
        device = value if isinstance(value, str) else "cpu"
        return f'write {{"device": "{device}"}}' if value is not False else 'take it out, or write {"device": "none"}'
    if "enabled" in names and isinstance(value, bool):
        return f'write {{"enabled": {json.dumps(value)}}}'
    if "stage" in names and isinstance(value, int):
        return f'write {{"stage": {int(value)}}}' if not isinstance(value, bool) else 'write {"stage": 1}, or 2 or 3'
    first = [f'"{key.name}": ...' for key in section.keys]
    return f"write {{{and_more(first, 2)}}}"


def _what_it_takes(key: Key | None) -> str:
    default = f"; its default is {key.default}" if key and key.default not in {"", "null"} else ""
    return f"correct the value{default}"


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
    names = " and ".join(sorted({dotted(path) for path in refusal.paths}))
    title = f"{names} are both true, and DeepSpeed refuses to start"
    fix = "keep bf16 where the GPUs have it (A100, H100 and newer), else fp16"
    return Verdict(
        finding=Finding.error("config-two-precisions", title, evidence=(refusal.message,), fix=fix),
        path=refusal.paths[0],
    )


def _together(question: Question, refusal: Refusal) -> Verdict:
    names = and_more([f"{dotted(path)} {shown(path, lookup(question.judged, path))}" for path in refusal.paths], 4)
    about = f"{names} together" if len(refusal.paths) > 1 else names or "the configuration"
    title = f"DeepSpeed refuses {about}: {refusal.message}"
    # what refused it: a section's class, the engine, or DeepSpeedConfig itself
    said = f"{refusal.kind} in {refusal.model}" if refusal.model else refusal.kind
    found = Finding.error(
        "config-refused", title, evidence=(said,), fix="change one of them" if names else "correct it"
    )
    return Verdict(finding=found, path=refusal.paths[0] if refusal.paths else ())


def _is_batch(refusal: Refusal) -> bool:
    return refusal.kind == "AssertionError" and any(path[-1:] and path[-1] in BATCH for path in refusal.paths)


def _is_removed(refusal: Refusal) -> bool:
    return refusal.kind == "DeepSpeedConfigError" and "removed" in refusal.message


# The three batch sizes against each other and against the number of ranks.


TRAIN, MICRO, ACCUMULATION = BATCH


def batch_sizes(question: Question) -> Iterator[Verdict]:
    """What DeepSpeed's own arithmetic says, for the number of ranks that is named, else for one that could be."""
    mismatched = {each.path for each in question.asked.filled.mismatches} if question.asked.filled else set()
    if mismatched & set(BATCH):
        # the values of the Trainer and of the file are mixed: what fits is told once they agree
        return
    for refusal in question.asked.refusals:
        if refusal.kind == "no batch size":
            title = f"neither {TRAIN} nor {MICRO} is given, and DeepSpeed refuses to start"
            fix = f"set {MICRO}: what one GPU takes at once"
            yield Verdict(finding=Finding.error("config-batch-missing", title, evidence=(refusal.message,), fix=fix))
        elif _is_batch(refusal):
            yield _batch_clash(question, refusal.message)


def batch_size_for_one_world(question: Question) -> Iterator[Verdict]:
    """All three are given: they fit one number of ranks, which nobody named."""
    sizes = [question.judged.get(name) for name in BATCH]
    if (
        question.asked.world is not None
        or question.in_training
        or not all(type(size) is int and size > 0 for size in sizes)
    ):
        return
    train, micro, accumulation = (int(size or 0) for size in sizes)
    if train % (micro * accumulation) == 0 and train > micro * accumulation:
        ranks = train // (micro * accumulation)
        title = f"the batch sizes fit {ranks} data-parallel ranks, and no other number"
        fix = f"take {TRAIN} out to train on any number, or judge it with --world {ranks}"
        yield Verdict(finding=Finding.note("config-batch-one-world", title, fix=fix), path=(TRAIN,))


def _batch_clash(question: Question, message: str) -> Verdict:
    sizes = {name: question.judged.get(name) for name in BATCH if name in question.judged}
    said = ", ".join(f"{name} {size}" for name, size in sizes.items())
    if question.filled_by and ACCUMULATION not in question.config and ACCUMULATION in sizes:
        return _accumulation_of_accelerate(said, sizes[ACCUMULATION], message)
    world = question.asked.world
    title = f"{said} do not fit {_ranks(world)}{_would_fit(sizes)}"
    if any(size <= 0 for size in sizes.values() if type(size) is int):
        title = f"{said}: a batch size is greater than 0"
    elif len(sizes) == 1 and world:
        title = (
            f"{TRAIN} {sizes.get(TRAIN)} is smaller than the {world} ranks that share it, or does not divide by them"
        )
    whole = len(sizes) == len(BATCH) and all(type(size) is int and size > 0 for size in sizes.values())
    fix = f"set {MICRO} and {ACCUMULATION}, and leave {TRAIN} to DeepSpeed"
    if whole:
        fix = f"take {TRAIN} out: DeepSpeed computes it as {MICRO} x {ACCUMULATION} x ranks"
    found = Finding.error("config-batch-sizes-clash", title, evidence=(message,), fix=fix)
    return Verdict(finding=found, path=(TRAIN,), correction=Correction(path=(TRAIN,)) if whole else None)


def _ranks(world: int | None) -> str:
    return "any number of ranks" if world is None else "1 rank" if world == 1 else f"{world} ranks"


def _would_fit(sizes: dict[str, object]) -> str:
    """The number of ranks that they would fit: a launcher that starts another number is the usual cause.

    >>> _would_fit({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8})
    ': they would fit 8'
    """
    train, micro, accumulation = (sizes.get(name) for name in BATCH)
    if not (type(train) is int and type(micro) is int and type(accumulation) is int) or micro * accumulation <= 0:
        return ""
    return (
        f": they would fit {train // (micro * accumulation)}"
        if train > 0 and train % (micro * accumulation) == 0
        else ""
    )


def _accumulation_of_accelerate(said: str, steps: object, message: str) -> Verdict:
    """The file leaves the accumulation out: then accelerate's plugin does not take it from TrainingArguments."""
    title = f"{said} do not fit: the file has no {ACCUMULATION}, and accelerate puts {steps} there"
    fix = f'add "{ACCUMULATION}": "auto"'
    found = Finding.error("config-batch-sizes-clash", title, evidence=(message,), fix=fix)
    return Verdict(finding=found, path=(ACCUMULATION,), correction=Correction(path=(ACCUMULATION,), value='"auto"'))


# "auto": who fills it in, and what becomes of it where nobody does.


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


def autos_for_others(question: Question) -> Iterator[Verdict]:
    """ "auto" in a file of which nobody said who fills it in, although somebody could."""
    if question.filled_by or question.in_training:
        return
    left = [path for path, _ in left_autos(question) if dotted(path) in {*FILLED_BY_TRAINER, *FILLED_BY_ACCELERATE}]
    if not left:
        return
    names = and_more([dotted(path) for path in left], 4)
    title = f'{len(left)} values are "auto", which only transformers\' Trainer and accelerate fill in'
    if len(left) == 1:
        title = f'{names} is "auto", which only transformers\' Trainer and accelerate fill in'
    steps = (
        step("python -m dsdoctor config {file} --hf ARGUMENTS.json", file=question.file),
        instead("python -m dsdoctor config {file} --accelerate ACCELERATE.yaml", file=question.file),
    )
    fix = "say who fills them in, and their values are judged too; a script of your own needs numbers there"
    yield Verdict(
        finding=Finding.warning("config-auto-for-trainer", title, evidence=(names,), fix=fix, steps=steps), path=left[0]
    )


def autos_for_nobody(question: Question) -> Iterator[Verdict]:
    """ "auto" where it is no value, and nobody fills it in."""
    for path, in_model in left_autos(question):
        fillable = dotted(path) in {*FILLED_BY_TRAINER, *FILLED_BY_ACCELERATE}
        if fillable and not question.filled_by and not question.in_training:
            continue
        yield _left(question, path, in_model=in_model)
    for name in question.asked.filled.unfilled if question.asked.filled else ():
        title = f'{name} is "auto", and accelerate, which makes the engine, refuses it: nobody fills that key in'
        path = tuple(name.split("."))
        yield Verdict(finding=Finding.error("config-auto-stays", title, fix=_number(question, path)), path=path)


def left_autos(question: Question) -> Iterator[tuple[KeyPath, bool]]:
    """Each key that DeepSpeed gets as "auto", and whether its section drops it (else it stays text).

    None where whoever fills them in refused the whole before: that is told, and what would be left is not known.
    """
    if question.asked.filled and question.asked.filled.refused and not question.asked.filled.filled:
        return
    later = question.asked.filled.unknown if question.asked.filled else ()
    for path, value in walk(question.judged):
        if value != "auto" or dotted(path) in later:
            continue
        section, key = question.asked.section(path[:-1]), question.asked.key(path)
        if path[:-1] in CHOSEN_BY_NAME:
            yield path, False
        elif section is not None and not section.open and key is not None and key.default != '"auto"':
            yield path, bool(section.model)


def _left(question: Question, path: KeyPath, *, in_model: bool) -> Verdict:
    key = question.asked.key(path)
    default = key.default if key and key.default else "null"
    if in_model:
        title = f'{dotted(path)} is "auto", which nobody fills in: DeepSpeed drops it and takes its default, {default}'
        return Verdict(finding=Finding.warning("config-auto-dropped", title, fix=_number(question, path)), path=path)
    title = f'{dotted(path)} is "auto", which nobody fills in: for DeepSpeed that is text, not a number'
    return Verdict(finding=Finding.error("config-auto-stays", title, fix=_number(question, path)), path=path)


def _number(question: Question, path: KeyPath) -> str:
    key = question.asked.key(path)
    default = f", its default is {key.default}" if key and key.default not in {"", "null"} else ""
    return f"give {dotted(path)} a value{default}"


# The configuration against the GPUs and the DeepSpeed it will run with. Generators of verdicts.


def precision_of_gpus(question: Question) -> Iterator[Verdict]:
    """fp16 and bf16 against what the GPUs compute in."""
    facts = question.asked.facts
    if facts is None or not question.capabilities:
        return
    least = min(question.capabilities, key=_numbers)
    if facts.fp16 and _numbers(least) < (7, 0):
        title = f"fp16 is switched on, and DeepSpeed refuses it on a GPU of capability {least}: it wants 7.0"
        fix = "train in fp32, or on newer GPUs; DS_ALLOW_DEPRECATED_FP16=1 lets 6.x through"
        yield Verdict(finding=Finding.error("config-precision-unsupported", title, fix=fix), path=("fp16", "enabled"))
    if facts.bf16 and _numbers(least) < (8, 0):
        title = (
            f"bf16 is switched on, and a GPU of capability {least} has no arithmetic for it: torch emulates it, slowly"
        )
        fix = "take fp16 on these GPUs; bf16 is from capability 8.0 on"
        yield Verdict(finding=Finding.warning("config-precision-unsupported", title, fix=fix), path=("bf16", "enabled"))


def ops_not_built(question: Question) -> Iterator[Verdict]:
    """Ops that this configuration loads, and that the installed DeepSpeed holds no compiled form of."""
    if not question.missing_ops:
        return
    names = list(question.missing_ops)
    are = "is" if len(names) == 1 else "are"
    title = f"{and_more(names)} {are} not built into the installed DeepSpeed, and compiled when the training starts"
    said = tuple(f"{op}: {why}" for op, why in question.missing_ops.items())
    found = Finding.note(
        "config-ops-not-built",
        title,
        evidence=said,
        affects=names,
        fix="install a DeepSpeed that has them, before all ranks compile at once",
        steps=(step("python -m dsdoctor install --for {file}", file=question.file),),
    )
    yield Verdict(finding=found)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split(".") if part.isdigit())
