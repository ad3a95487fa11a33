"""A running DeepSpeed engine -> its settings and its model's shape, for a prediction of what it should hold. Changes nothing."""

import importlib.util
from dataclasses import replace
from typing import Any

import msgspec

from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.memory.models import Layout, ModelShape, Owner, ZeroSettings

SCRIPT = CHILD_SCRIPTS / "ask_zero_config.py"


def settings_of(engine: Any) -> ZeroSettings:
    """What the configuration of an engine says, by the reader that asks DeepSpeed for a file's; its optimizer is the real one."""
    spec = importlib.util.spec_from_file_location("dsdoctor_zero_config", SCRIPT)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(SCRIPT)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    settings = msgspec.convert(reader.values_of(engine._config), ZeroSettings)
    basic = getattr(engine, "basic_optimizer", None)
    if basic is None:
        return settings
    return replace(
        settings, optimizer=type(basic).__name__.lower(), torch_adam=type(basic).__module__.startswith("torch.")
    )


def shape_of(module: Any) -> ModelShape:
    """The parameters of a module, whole also where ZeRO-3 has divided them (``ds_numel``)."""
    named = list(module.named_parameters())
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    owners = []
    for name, part in module.named_modules():
        own = tuple(numbers[id(parameter)] for parameter in part.parameters(recurse=False))
        if own:
            owners.append(Owner(name=name, parameters=own))
    return ModelShape(
        parameters=tuple((name, int(getattr(p, "ds_numel", p.numel())), int(p.requires_grad)) for name, p in named),
        modules=tuple(owners),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        name=type(module).__name__,
    )


def layout_of(engine: Any) -> Layout:
    """The ranks that share the engine's parameters, and which of them this is."""
    import torch

    together = torch.device(engine.device).type == "cpu"
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world = int(getattr(engine, "dp_world_size", 1))
    return Layout(world=world, rank=rank % world, together=together)
