"""Values that DeepSpeed refuses, or takes as they are where it wants something else. Generators of verdicts."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import Key, Path, Refusal, Section, dotted, lookup, walk
from dsdoctor.config.keys import CHOSEN_BY_NAME
from dsdoctor.config.names import nearest, plain
from dsdoctor.config.question import Correction, Question, Verdict, shown
from dsdoctor.core.finding import Finding
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
NUMBERS: dict[Path, str] = {
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


def _kind(question: Question, path: Path) -> str:
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


def _of_another_kind(path: Path, value: Any, kind: str, problem: str) -> Verdict:
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


def _as_kind(path: Path, value: Any, kind: str) -> Correction | None:
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


def _refused(question: Question, refusal: Refusal, path: Path) -> Verdict:
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


def _corrected(path: Path, value: Any, refusal: Refusal) -> Correction | None:
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
