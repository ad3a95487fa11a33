"""Trains a small engine for a few steps with a defect planted in one of them, watched, and writes down the findings."""

import time
from typing import Any

import deepspeed
import engines
import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from dsdoctor.overflow.watch.engine import watch

WIDTH = engines.WIDTH
STEP = 2
"""The step in which the defect is planted."""


class Gain(nn.Module):
    """Multiplies by a number and a buffer that are 1 until they are planted."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * self.scale.to(x.dtype)


class Block(nn.Module):
    problem = ""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gain = Gain()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.gain(self.up(self.norm(x))))
        if self.problem == "function":
            h = torch.log(h - h)
        if self.problem == "gradient":
            h = h + torch.sqrt(h * 0)
        return x + self.down(self.drop(h))


class Net(nn.Module):
    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for block in self.blocks:
            x = self._run(block, x)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing == "none":
            return block(x)
        if self.checkpointing == "deepspeed":
            return deepspeed.checkpointing.checkpoint(block, x)
        return torch_checkpoint.checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


def plant(engine: Any, case: dict[str, Any], rank: int) -> None:
    """Plant the defect in the engine; on one rank only where the case says so."""
    here = case.get("only") in (None, rank)
    block = engine.module.blocks[1]
    if case["plant"] == "activation" and here:
        block.gain.factor = 3e38 if case["dtype"] != "fp16" else 6e4
    if case["plant"] == "buffer" and here:
        block.gain.scale.fill_(float("nan"))
    if case["plant"] in ("function", "gradient") and here:
        block.problem = case["plant"]
    if case["plant"] == "weight":
        weight = engine.module.head.weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            weight[1, 1] = float("nan")


def batch(case: dict[str, Any], step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    x, labels = engines.batch_of(step, micro, rank, engines.live_dtype(case))
    if step >= STEP and case.get("only") in (None, rank):
        if case["plant"] == "loss":
            labels = torch.full_like(labels, -100)
        if case["plant"] == "data":
            x[0, 0] = float("nan")
    return x, labels


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    engine = engines.build(case, Net(case.get("checkpointing", "none")))
    watching = watch(engine, level=case.get("level", "guard"), on_overflow=case.get("answer", "report"))
    raised = ""
    planted = time.monotonic()
    try:
        for step in range(STEP + 1):
            if step == STEP:
                planted = time.monotonic()
                plant(engine, case, rank)
            for micro in range(case.get("gas", 1)):
                x, labels = batch(case, step, micro, rank)
                engine.backward(engine(x, labels)["loss"])
                engine.step()
    except ValueError as error:
        raised = f"{type(error).__name__}: {error}"
    stopped = time.monotonic()
    findings = engines.findings(watching)
    report = watching.report()
    watching.detach()
    engines.close(engine)
    return {"findings": findings, "report": report, "raised": raised, "seconds_to_stop": stopped - planted}


if __name__ == "__main__":
    engines.main(run)
