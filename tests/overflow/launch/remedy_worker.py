"""Trains a small fp16 engine into an overflow; then does what the verdict advises, and gives it the same batch again."""

import re
from typing import Any

import deepspeed
import engines
import torch
from torch import Tensor, nn

from dsdoctor import fp32_forward
from dsdoctor.overflow.watch.engine import watch

WIDTH = engines.WIDTH
STEP = 2


class Squares(nn.Module):
    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.weight
        if self.plant == "half":
            return (scaled.half() ** 2).mean(-1, keepdim=True).to(x.dtype).sqrt()
        squares = scaled**2
        return squares if self.plant == "leaks" else squares.mean(-1, keepdim=True).sqrt()


class Block(nn.Module):
    def __init__(self, plant: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.squares = Squares(plant)

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        squares = self.squares(torch.tanh(self.up(x)) * factor)
        return torch.tanh(x + squares / (1 + factor) ** 2)


class Net(nn.Module):
    def __init__(self, plant: str) -> None:
        super().__init__()
        self.plant = plant
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Block(plant) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, factor: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x, factor if number == 1 and self.plant != "log" else torch.ones_like(factor))
        logits = self.head(x)
        if self.plant == "log":
            spread = logits * factor / 40
            chance = (spread - spread.detach().amax(-1, keepdim=True)).exp()
            return {"loss": -chance.log().mean(), "logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def train(engine: Any, case: dict[str, Any], step: int, rank: int) -> Tensor:
    x, labels = engines.batch_of(step, 0, rank, torch.float16)
    large = step == STEP and case["only"] in (None, rank)
    factor = torch.tensor(2000.0 if large else 1.0, dtype=torch.float16)
    loss = engine(x, factor, labels)["loss"]
    engine.backward(loss)
    engine.step()
    return loss


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    engine = engines.build(case, Net(case["plant"]))
    watching = watch(engine)
    for step in range(STEP + 1):
        train(engine, case, step, rank)
    found = [finding for finding in watching.findings() if finding.severity.name == "ERROR"]
    told = watching.report()
    watching.detach()
    skipped = engine.skipped_steps
    fix = found[0].fix.text if rank == 0 and found and found[0].fix is not None else ""
    box = [fix]
    torch.distributed.broadcast_object_list(box)
    advised = re.search(r'fp32_forward\(model(?:\.get_submodule\("([\w.]+)"\))?\)', box[0])
    finite = None
    if advised is not None:
        with fp32_forward(engine.module.get_submodule(advised[1] or "")):
            loss = train(engine, case, STEP, rank)
        finite = bool(torch.isfinite(loss)) and engine.skipped_steps == skipped
    engines.close(engine)
    module = None if advised is None else advised[1] or ""
    return {"fix": box[0], "module": module, "finite": finite, "report": told}


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("ERROR")
    engines.main(run)
