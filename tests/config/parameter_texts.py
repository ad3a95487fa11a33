"""Every parameter of every optimizer and scheduler of torch and DeepSpeed that can be made here, with an unknown text."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.config.answer import Asked, KeyPath

NEEDED: dict[str, Any] = {
    "step_size": 10,
    "milestones": [10],
    "gamma": 0.9,
    "T_max": 10,
    "T_0": 10,
    "base_lr": 1e-4,
    "max_lr": 1e-3,
    "total_steps": 100,
    "cycle_min_lr": 1e-4,
    "cycle_max_lr": 1e-3,
    "total_num_steps": 100,
}
"""Parameters without a default, by name."""
FILLERS: dict[str, dict[str, Any]] = {
    "OneCycle": {"cycle_momentum": False},
    "CyclicLR": {"cycle_momentum": False},
    "OneCycleLR": {"total_steps": 100, "cycle_momentum": False},
    "AdamW": {"torch_adam": True},
}
"""What makes them work with SGD, and without a compiled op."""
TEXT = "dsdoctor"
BASE: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
}


@dataclass(frozen=True, kw_only=True)
class TextFor:
    """A parameter of a class, and a configuration in which it is a text that nobody knows."""

    config: dict[str, Any]
    path: KeyPath


def functions(kind: type) -> list[inspect.Parameter]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each for each in list(inspect.signature(kind).parameters.values())[1:] if each.kind in named]


def classes(asked: Asked) -> Iterator[tuple[str, str, type]]:
    """Section, name and class of every optimizer and scheduler that can be made here."""
    import torch
    from deepspeed.runtime import lr_schedules

    for name in asked.names.torch_optimizers:
        if name.lower() not in asked.names.optimizers or name in {"Adagrad", "SGD", "AdamW"}:
            yield "optimizer", name, getattr(torch.optim, name)
    for name in asked.names.schedulers:
        yield "scheduler", name, getattr(lr_schedules, name)
    for name in asked.names.torch_schedulers:
        kind = getattr(torch.optim.lr_scheduler, name)
        # what is made of other schedulers, no JSON can name
        if next(iter(inspect.signature(kind).parameters)) == "optimizer":
            yield "scheduler", name, kind


def texts(asked: Asked) -> Iterator[TextFor]:
    """Each parameter of each class with a text; and each class with what it needs and no text (``path`` is empty)."""
    for section, name, kind in classes(asked):
        parameters = functions(kind)
        lacking = {each.name for each in parameters if each.default is each.empty}
        if not lacking <= NEEDED.keys():
            continue
        params = {each: NEEDED[each] for each in lacking} | FILLERS.get(name, {})
        yield TextFor(config=_with(section, name, params), path=())
        for each in parameters:
            yield TextFor(config=_with(section, name, params | {each.name: TEXT}), path=(section, "params", each.name))


def _with(section: str, name: str, params: dict[str, Any]) -> dict[str, Any]:
    return BASE | {section: {"type": name, "params": params}}
