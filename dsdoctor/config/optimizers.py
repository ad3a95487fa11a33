"""The optimizer and the scheduler that a configuration names, as DeepSpeed itself made them of it. Generators of verdicts."""

import json
import math
import re
from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import Construction, Correction, KeyPath, Names, Question, Verdict, Warned, lookup, shown
from dsdoctor.config.keys import nearest
from dsdoctor.core.finding import Finding
from dsdoctor.core.text import and_more

OF_THE_ENGINE = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters that DeepSpeed's engine takes itself, and no optimizer's signature shows. Each is a flag."""
LACKING = re.compile(r"(\w+)\.(\w+)\(\) missing \d+ required positional arguments?: (.*)")
NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[+-]?\d+)?")
WANTED = {"float": "a number", "int": "a whole number", "bool": "true or false", "list": "a list"}
FORMER = {
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


def optimizer(question: Question) -> Iterator[Verdict]:
    """Its name and its parameters."""
    names = question.asked.names
    known = (*names.optimizers, *names.torch_optimizers)
    yield from _judge(question, "optimizer", question.asked.optimizer, known, "not supported")


def scheduler(question: Question) -> Iterator[Verdict]:
    """Its name and its parameters."""
    names = question.asked.names
    yield from _judge(
        question, "scheduler", question.asked.scheduler, (*names.schedulers, *names.torch_schedulers), "not known"
    )


def scheduler_by_metric(question: Question) -> Iterator[Verdict]:
    """A scheduler whose step() wants a measured value, which only the program can hand on."""
    made = question.asked.scheduler
    if made is None or not made.step_wants:
        return
    names = " and ".join(made.step_wants)
    title = f"{made.name} goes by {names}, and DeepSpeed hands it the train batch size in its place, without a word"
    said = ("engine.py, _take_model_step: where step() fails by a TypeError, it is called with train_batch_size()",)
    fix = (
        f'hand it on in the program, engine.step(lr_kwargs={{"{made.step_wants[0]}": loss}}); or name another scheduler'
    )
    found = Finding.warning("config-scheduler-metric", title, evidence=said, fix=fix)
    yield Verdict(finding=found, path=("scheduler", "type"))


def own_optimizer_with_offload(question: Question) -> Iterator[Verdict]:
    """No optimizer in the file, and one that is to step on the host: the program's own must then be DeepSpeed's."""
    facts = question.asked.facts
    forced = question.judged.get("zero_force_ds_cpu_optimizer", True)
    if facts is None or facts.offload_optimizer == "none" or question.judged.get("optimizer") or not forced:
        return
    if question.filled_by or question.in_training:
        # accelerate puts DeepSpeed's optimizer in the place of torch's; in a training the optimizer itself is at hand
        return
    title = (
        f"no optimizer is named, and its states go to {facts.offload_optimizer}: the program must bring DeepSpeed's own"
    )
    fix = (
        "give the file an optimizer, or the program deepspeed.ops.adam.DeepSpeedCPUAdam; another one needs "
        '"zero_force_ds_cpu_optimizer": false'
    )
    yield Verdict(finding=Finding.note("config-own-optimizer-offload", title, fix=fix), path=("optimizer",))


def _judge(
    question: Question, what: str, made: Construction | None, known: tuple[str, ...], unknown: str
) -> Iterator[Verdict]:
    if made is None:
        return
    if made.refused == unknown:
        yield _no_such(what, made.name, known, question.asked.names)
        return
    params = lookup(question.judged, (what, "params"))
    params = params if isinstance(params, dict) else {}
    for name in made.unknown:
        yield _unknown_parameter(
            question, what, made, name, f"{made.made or made.name} takes no such parameter, and refuses it"
        )
    for name in made.dropped:
        yield _unknown_parameter(question, what, made, name, "DeepSpeed leaves it out without a word")
    told = {verdict.path[-1]: verdict for verdict in _words(what, made, params)}
    yield from told.values()
    for warned in made.warned:
        yield _warned(what, warned, params.get(warned.parameter))
    for name in made.refused_by:
        if name not in told:
            yield _refused(what, made, name, params.get(name))
    if made.refused and not made.refused_by and not told:
        yield _refused_whole(question, what, made)


def _words(what: str, made: Construction, params: dict[str, Any]) -> Iterator[Verdict]:
    """Text where the class wants something else, or other words."""
    for name, value in params.items():
        kind = "bool" if what == "optimizer" and name in OF_THE_ENGINE else made.known.get(name, "")
        if not isinstance(value, str) or value == "auto":
            continue
        if kind in WANTED or (name == "lr" and name in made.known):
            yield _text(what, name, value, kind or "float")
        elif name in made.choices and value not in made.choices[name]:
            yield _no_such_word(what, name, value, made.choices[name], f"{made.name} does not know it")


def _no_such(what: str, name: str, known: tuple[str, ...], names: Names) -> Verdict:
    near = nearest(name, known)
    theirs = names.optimizers if what == "optimizer" else names.schedulers
    listed = and_more(theirs, 9)
    meant = f": did you mean {' or '.join(near)}?" if near else ""
    title = f"{name} is no {what} of DeepSpeed or torch{meant}"
    fix = f"write {near[0]}" if len(near) == 1 else f"name one of DeepSpeed's ({listed}) or a class of torch's"
    correction = Correction(path=(what, "type"), value=json.dumps(near[0])) if len(near) == 1 else None
    return Verdict(
        finding=Finding.error(f"config-{what}-unknown", title, fix=fix), path=(what, "type"), correction=correction
    )


def _unknown_parameter(question: Question, what: str, made: Construction, name: str, happens: str) -> Verdict:
    path: KeyPath = (what, "params", name)
    candidates = (*made.known, *(OF_THE_ENGINE if what == "optimizer" else ()))
    near = (FORMER[name],) if FORMER.get(name) in made.known else nearest(name, candidates)
    says = f": {' or '.join(near)} is one" if near else ""
    title = f"{'.'.join(path)}: {happens}{says}"
    fix = f"write {' or '.join(near)}" if near else f"take it out; it knows {and_more(sorted(made.known), 8)}"
    free = (
        len(near) == 1
        and lookup(question.config, (what, "params", near[0])) is None
        and not name.startswith("adam_beta")
    )
    correction = Correction(path=path, to=(what, "params", near[0])) if free else None
    make = Finding.error if name in made.unknown or near else Finding.warning
    finding = make(f"config-{what}-parameter", title, evidence=(shown(path, lookup(question.judged, path)),), fix=fix)
    return Verdict(finding=finding, path=path, correction=correction)


def _refused(what: str, made: Construction, name: str, value: Any) -> Verdict:
    path, message = (what, "params", name), made.refused
    when = "fails at the first step" if made.at_step else "is refused"
    title = f"{'.'.join(path)} {shown(path, value)} {when}: {message}"
    if name == "max_grad_norm":
        title = f"{'.'.join(path)} is refused: gradient_clipping, at the top, is what clips gradients"
        correction = Correction(path=path, to=("gradient_clipping",)) if value is not None else None
        found = Finding.error(f"config-{what}-parameter", title, evidence=(message,), fix="move it: gradient_clipping")
        return Verdict(finding=found, path=path, correction=correction)
    return Verdict(finding=Finding.error(f"config-{what}-parameter", title, fix="correct or remove it"), path=path)


def _refused_whole(question: Question, what: str, made: Construction) -> Verdict:
    path: KeyPath = (what, "params")
    correction: Correction | None = None
    title, fix = f"{what} {made.name} is refused: {made.refused}", "correct its params"
    lacking = LACKING.search(made.refused)
    if made.at_step:
        title = f"{what} {made.name} is made, and fails at its first step: {made.refused}"
        path = (what, "type")
        fix = f"name another {what}"
        if lacking and lacking[2] == "step":
            fix = f"DeepSpeed calls step() without {lacking[3]}: name another {what}"
    elif lacking:
        names = " and ".join(re.findall(r"'(\w+)'", lacking[3]))
        title = f"{what} {made.name} needs {names}, and {what}.params does not have it"
        fix = f"add {names} to {what}.params"
    elif made.refused == "no params":
        title = f'scheduler {made.name} has no "params", and DeepSpeed fails on that'
        beside = [name for name in lookup(question.judged, (what,)) or () if name not in {"type", "params"}]
        fix = f'put {and_more(beside, 6)} into "params"' if beside else 'add "params", an empty object for the defaults'
        correction = None if beside else Correction(path=path, value="{}")
    elif "zero_allow_untested_optimizer" in made.refused:
        title = f"{made.name} is an optimizer that DeepSpeed has not tried with ZeRO, and it refuses to start"
        fix = 'set "zero_allow_untested_optimizer": true, or take AdamW'
        path = ("zero_allow_untested_optimizer",)
        correction = Correction(path=path, value="true")
    found = Finding.error(f"config-{what}-refused", title, evidence=(made.refused,), fix=fix)
    return Verdict(finding=found, path=path, correction=correction)


def _no_such_word(what: str, name: str, value: str, words: tuple[str, ...], why: str) -> Verdict:
    path = (what, "params", name)
    near = nearest(value, words)
    fix = f"write {' or '.join(near or words)}" if words else "correct it"
    correction = Correction(path=path, value=json.dumps(near[0])) if len(near) == 1 else None
    title = f"{'.'.join(path)} is {shown(path, value)}: {why}"
    return Verdict(finding=Finding.error(f"config-{what}-parameter", title, fix=fix), path=path, correction=correction)


def _warned(what: str, warned: Warned, value: Any) -> Verdict:
    """A word is replaced by the default, so the training is another one; a number may be meant so."""
    if isinstance(value, str):
        why = f"DeepSpeed warns in its log, and goes on: {warned.message}"
        return _no_such_word(what, warned.parameter, value, warned.choices, why)
    path = (what, "params", warned.parameter)
    title = f"{'.'.join(path)} is {shown(path, value)}: DeepSpeed warns in its log, and goes on: {warned.message}"
    return Verdict(finding=Finding.warning(f"config-{what}-parameter", title, fix="correct it"), path=path)


def _text(what: str, name: str, value: str, kind: str) -> Verdict:
    path = (what, "params", name)
    right = _unquoted(value, kind)
    happens = "any text counts as true" if kind == "bool" else f"{WANTED[kind]} is wanted"
    title = f"{'.'.join(path)} is {shown(path, value)}, which is text: {happens}"
    fix = f"write {right} without quotes" if right else f"give it {WANTED[kind]}"
    correction = Correction(path=path, value=right) if right else None
    return Verdict(finding=Finding.error("config-value-type", title, fix=fix), path=path, correction=correction)


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
