"""The optimizer and the scheduler that a configuration names, as DeepSpeed itself made them of it. Generators of verdicts."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import (
    ConfigContext,
    Construction,
    Correction,
    KeyPath,
    Names,
    Verdict,
    Warned,
    lookup,
    shown,
)
from dsdoctor.config.keys import nearest
from dsdoctor.core.finding import Severity
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

ENGINE_PARAMETERS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters that DeepSpeed's engine takes itself, and no optimizer's signature shows. Each is a flag."""
LACKING = re.compile(r"(\w+)\.(\w+)\(\) missing \d+ required positional arguments?: (.*)")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d+)?")
WANTED = {"float": "a number", "int": "a whole number", "bool": "true or false", "list": "a list"}
OTHER_NAMES = {
    "learning_rate": "lr",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
    "epsilon": "eps",
    "warmup_steps": "warmup_num_steps",
    "total_steps": "total_num_steps",
    "num_training_steps": "total_num_steps",
    "min_lr": "warmup_min_lr",
    "max_lr": "warmup_max_lr",
}
"""How transformers and others call a parameter."""


def optimizer(context: ConfigContext) -> Iterator[Verdict]:
    """Its name and its parameters."""
    names = context.asked.names
    known = (*names.optimizers, *names.torch_optimizers)
    yield from _judge(context, "optimizer", context.asked.optimizer, known, "not supported")


def scheduler(context: ConfigContext) -> Iterator[Verdict]:
    """Its name and its parameters."""
    names = context.asked.names
    yield from _judge(
        context, "scheduler", context.asked.scheduler, (*names.schedulers, *names.torch_schedulers), "not known"
    )


def scheduler_by_metric(context: ConfigContext) -> Iterator[Verdict]:
    """A scheduler whose step() wants a measured value, which only the program can hand on."""
    made = context.asked.scheduler
    if made is None or not made.step_wants:
        return
    found = book.finding(
        "config-scheduler-metric",
        Severity.WARNING,
        evidence=(
            "engine.py, _take_model_step: if step() raises a TypeError, it is called again with train_batch_size()",
        ),
        name=made.name,
        metrics=" and ".join(made.step_wants),
        metric=made.step_wants[0],
    )
    yield Verdict(finding=found, path=("scheduler", "type"))


def own_optimizer_with_offload(context: ConfigContext) -> Iterator[Verdict]:
    """No optimizer in the file, and one that is to step on the host: the program's own must then be DeepSpeed's."""
    facts = context.asked.facts
    forced = context.judged.get("zero_force_ds_cpu_optimizer", True)
    if facts is None or facts.offload_optimizer == "none" or context.judged.get("optimizer") or not forced:
        return
    if context.filled_by or context.in_training:
        # accelerate puts DeepSpeed's optimizer in the place of torch's; in a training the optimizer itself is at hand
        return
    found = book.finding("config-own-optimizer-offload", Severity.NOTE, device=facts.offload_optimizer)
    yield Verdict(finding=found, path=("optimizer",))


def _judge(
    context: ConfigContext, what: str, made: Construction | None, known: tuple[str, ...], unknown: str
) -> Iterator[Verdict]:
    if made is None:
        return
    if made.refused == unknown:
        yield _no_such(what, made.name, known, context.asked.names)
        return
    params = lookup(context.judged, (what, "params"))
    params = params if isinstance(params, dict) else {}
    for name in (*made.unknown, *made.dropped):
        yield _unknown_parameter(context, what, made, name)
    by_name = {verdict.path[-1]: verdict for verdict in _words(what, made, params)}
    yield from by_name.values()
    for warned in made.warned:
        yield _warned(what, warned, params.get(warned.parameter))
    for name in made.refused_by:
        if name not in by_name:
            yield _refused(what, made, name, params.get(name))
    if made.refused and not made.refused_by and not by_name:
        yield _refused_whole(context, what, made)


def _words(what: str, made: Construction, params: dict[str, Any]) -> Iterator[Verdict]:
    """Text where the class wants something else, or other words."""
    for name, value in params.items():
        kind = "bool" if what == "optimizer" and name in ENGINE_PARAMETERS else made.known.get(name, "")
        if not isinstance(value, str) or value == "auto":
            continue
        if kind in WANTED or (name == "lr" and name in made.known):
            yield _text(what, name, value, kind or "float")
        elif name in made.choices and value not in made.choices[name]:
            path, near = (what, "params", name), nearest(value, made.choices[name])
            found = book.finding(
                "config-optimizer-parameter" if what == "optimizer" else "config-scheduler-parameter",
                Severity.ERROR,
                case="word",
                key=".".join(path),
                value=shown(path, value),
                made=made.name,
                words=" or ".join(near or made.choices[name]),
            )
            correction = Correction(path=path, value=json.dumps(near[0])) if len(near) == 1 else None
            yield Verdict(finding=found, path=path, correction=correction)


def _no_such(what: str, name: str, known: tuple[str, ...], names: Names) -> Verdict:
    near = nearest(name, known)
    found = book.finding(
        "config-optimizer-unknown" if what == "optimizer" else "config-scheduler-unknown",
        Severity.ERROR,
        case="near" if len(near) == 1 else "several" if near else "",
        name=name,
        near=" or ".join(near),
        known=and_more(names.optimizers if what == "optimizer" else names.schedulers, 9),
    )
    correction = Correction(path=(what, "type"), value=json.dumps(near[0])) if len(near) == 1 else None
    return Verdict(finding=found, path=(what, "type"), correction=correction)


def _unknown_parameter(context: ConfigContext, what: str, made: Construction, name: str) -> Verdict:
    path: KeyPath = (what, "params", name)
    candidates = (*made.known, *(ENGINE_PARAMETERS if what == "optimizer" else ()))
    near = (OTHER_NAMES[name],) if OTHER_NAMES.get(name) in made.known else nearest(name, candidates)
    is_refused = name in made.unknown
    found = book.finding(
        "config-optimizer-parameter" if what == "optimizer" else "config-scheduler-parameter",
        Severity.ERROR if is_refused or near else Severity.WARNING,
        case=("" if near else "unknown") if is_refused else ("dropped-near" if near else "dropped"),
        evidence=(shown(path, lookup(context.judged, path)),),
        key=".".join(path),
        made=made.made or made.name,
        near=" or ".join(near),
        known=and_more(sorted(made.known), 8),
    )
    free = (
        len(near) == 1
        and lookup(context.config, (what, "params", near[0])) is None
        and not name.startswith("adam_beta")
    )
    correction = Correction(path=path, to=(what, "params", near[0])) if free else None
    return Verdict(finding=found, path=path, correction=correction)


def _refused(what: str, made: Construction, name: str, value: Any) -> Verdict:
    path, message = (what, "params", name), made.refused
    if name == "max_grad_norm" and what == "optimizer":
        correction = Correction(path=path, to=("gradient_clipping",)) if value is not None else None
        found = book.finding(
            "config-optimizer-parameter", Severity.ERROR, case="max-grad-norm", evidence=(message,), key=".".join(path)
        )
        return Verdict(finding=found, path=path, correction=correction)
    found = book.finding(
        "config-optimizer-parameter" if what == "optimizer" else "config-scheduler-parameter",
        Severity.ERROR,
        case="at-step" if made.at_step else "refused",
        key=".".join(path),
        value=shown(path, value),
        message=message,
    )
    return Verdict(finding=found, path=path)


def _refused_whole(context: ConfigContext, what: str, made: Construction) -> Verdict:
    path: KeyPath = (what, "params")
    lacking = LACKING.search(made.refused)
    if made.refused == "no params" and not lacking and not made.at_step:
        beside = [name for name in lookup(context.judged, (what,)) or () if name not in {"type", "params"}]
        found = book.finding(
            "config-scheduler-refused",
            Severity.ERROR,
            case="params-beside" if beside else "no-params",
            evidence=(made.refused,),
            name=made.name,
            beside=and_more(beside, 6),
        )
        return Verdict(finding=found, path=path, correction=None if beside else Correction(path=path, value="{}"))
    if "zero_allow_untested_optimizer" in made.refused and not lacking and not made.at_step:
        path = ("zero_allow_untested_optimizer",)
        found = book.finding(
            "config-optimizer-refused", Severity.ERROR, case="untested", evidence=(made.refused,), name=made.name
        )
        return Verdict(finding=found, path=path, correction=Correction(path=path, value="true"))
    missing = ""
    if lacking:
        missing = lacking[3] if made.at_step else " and ".join(re.findall(r"'(\w+)'", lacking[3]))
    without_argument = made.at_step and lacking and lacking[2] == "step"
    found = book.finding(
        "config-optimizer-refused" if what == "optimizer" else "config-scheduler-refused",
        Severity.ERROR,
        case=("step-argument" if without_argument else "at-step") if made.at_step else ("missing" if lacking else ""),
        evidence=(made.refused,),
        name=made.name,
        reason=made.refused,
        missing=missing,
    )
    return Verdict(finding=found, path=(what, "type") if made.at_step else path)


def _warned(what: str, warned: Warned, value: Any) -> Verdict:
    """A word is replaced by the default, so the training is another one; a number may be meant so."""
    path = (what, "params", warned.parameter)
    near = nearest(value, warned.choices) if isinstance(value, str) else ()
    found = book.finding(
        "config-optimizer-parameter" if what == "optimizer" else "config-scheduler-parameter",
        Severity.ERROR if isinstance(value, str) else Severity.WARNING,
        case="warned-word" if isinstance(value, str) and warned.choices else "warned",
        key=".".join(path),
        value=shown(path, value),
        message=warned.message,
        words=" or ".join(near or warned.choices),
    )
    correction = Correction(path=path, value=json.dumps(near[0])) if len(near) == 1 else None
    return Verdict(finding=found, path=path, correction=correction)


def _text(what: str, name: str, value: str, kind: str) -> Verdict:
    path = (what, "params", name)
    right = _unquoted(value, kind)
    found = book.finding(
        "config-value-type",
        Severity.ERROR,
        case=("quoted-flag" if right else "flag") if kind == "bool" else ("quoted" if right else "text"),
        key=".".join(path),
        value=shown(path, value),
        wanted=WANTED[kind],
        right=right,
    )
    return Verdict(finding=found, path=path, correction=Correction(path=path, value=right) if right else None)


def _unquoted(value: str, kind: str) -> str:
    """What a text says as JSON; "" where that is nothing of the kind.

    >>> _unquoted("1e-5", "float"), _unquoted(".5", "float"), _unquoted("False", "bool"), _unquoted("much", "int")
    ('1e-5', '0.5', 'false', '')
    """
    text = value.strip().lower()
    if kind == "bool":
        return text if text in {"true", "false"} else ""
    try:
        number = float(text)
    except ValueError:
        return ""
    if kind == "list" or not math.isfinite(number):
        return ""
    return text if NUMBER.fullmatch(text) else json.dumps(int(number) if kind == "int" else number)
