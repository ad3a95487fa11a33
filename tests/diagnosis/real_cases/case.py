"""One run that is made to fail (or not), and the training script that all of them begin with."""

from __future__ import annotations

from dataclasses import dataclass, field

BEGINNING = """\
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import deepspeed

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
}


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.norm(torch.relu(self.embed(x)))).pow(2).mean()


def start(model=None, stage=2, **changes):
    model = model or Model()
    config = {**BASE, "zero_optimization": {"stage": stage}, **changes}
    config = {key: value for key, value in config.items() if value is not None}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def batch(engine):
    return torch.randn(2, 32).to(next(engine.module.parameters()).dtype)


def train(engine, steps, before=lambda step: None):
    for step in range(1, steps + 1):
        before(step)
        loss = engine(batch(engine))
        engine.backward(loss)
        engine.step()
        if RANK == 0:
            print(f"step {step}/{steps} loss {loss.item():.4f}", flush=True)


"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run: its script is BEGINNING and `code`, or `code` alone where `whole` is set. `cause` None: nothing is wrong with it."""

    name: str
    category: str
    code: str
    cause: str | None
    words: tuple[str, ...] = ()
    where: str | None = None
    launch: str = "torchrun"
    ranks: int = 2
    whole: bool = False
    arguments: tuple[str, ...] = ()
    launcher_arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    prepare: str = ""  # shell, in front of the command and in its own mount namespace
    limit: int = 90
