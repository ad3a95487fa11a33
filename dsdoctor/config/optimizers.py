"""The optimizer and the scheduler that a configuration names, as DeepSpeed itself made them of it. Generators of verdicts."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from dsdoctor.config.answer import Construction, Names, Path, lookup
from dsdoctor.config.names import nearest
from dsdoctor.config.question import Correction, Question, Verdict, shown
from dsdoctor.core.finding import Finding
from dsdoctor.core.sentences import and_more

OF_THE_ENGINE = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
"""Parameters that DeepSpeed's engine takes itself, and no optimizer's signature shows."""
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
    refused = {*made.refused_by}
    for name in made.refused_by:
        yield _refused(what, name, params.get(name), made.refused)
    if made.refused and not refused:
        yield _refused_whole(what, made)
    for name, value in params.items():
        if name not in refused and isinstance(value, str) and value != "auto" and _wants_number(made, name):
            yield _text(what, name, value)


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
    path: Path = (what, "params", name)
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


def _refused(what: str, name: str, value: Any, message: str) -> Verdict:
    path = (what, "params", name)
    title = f"{'.'.join(path)} {shown(path, value)} is refused: {message}"
    if name == "max_grad_norm":
        title = f"{'.'.join(path)} is refused: gradient_clipping, at the top, is what clips gradients"
        correction = Correction(path=path, to=("gradient_clipping",)) if value is not None else None
        found = Finding.error(f"config-{what}-parameter", title, evidence=(message,), fix="move it: gradient_clipping")
        return Verdict(finding=found, path=path, correction=correction)
    return Verdict(finding=Finding.error(f"config-{what}-parameter", title, fix="correct or remove it"), path=path)


def _refused_whole(what: str, made: Construction) -> Verdict:
    path: Path = (what, "params")
    message = made.refused.replace("__init__() ", "")
    title, fix, correction = f"{what} {made.name} is refused: {message}", "correct its params", None
    if made.refused == "no params":
        title = f'scheduler {made.name} has no "params", and DeepSpeed fails on that'
        fix = 'add "params", an empty object for the defaults'
    elif "zero_allow_untested_optimizer" in made.refused:
        title = f"{made.name} is an optimizer that DeepSpeed has not tried with ZeRO, and it refuses to start"
        fix = 'set "zero_allow_untested_optimizer": true, or take AdamW'
        path = ("zero_allow_untested_optimizer",)
        correction = Correction(path=path, value="true")
    found = Finding.error(f"config-{what}-refused", title, evidence=(made.refused,), fix=fix)
    return Verdict(finding=found, path=path, correction=correction)


def _wants_number(made: Construction, name: str) -> bool:
    return made.known.get(name, "") in {"float", "int"} or (name == "lr" and name in made.known)


def _text(what: str, name: str, value: str) -> Verdict:
    path = (what, "params", name)
    correction = None
    with contextlib.suppress(ValueError):
        correction = Correction(path=path, value=json.dumps(float(value)))
    title = (
        f"{'.'.join(path)} is {shown(path, value)}, which is text: DeepSpeed keeps it, and the first step fails with it"
    )
    fix = f"write {correction.value}" if correction else "give it a number"
    return Verdict(finding=Finding.error("config-value-type", title, fix=fix), path=path, correction=correction)
