"""Trains small engines: their replay is not what was live, or rank 1 alone sees something, or a checkpoint is not there."""

from typing import Any

import deepspeed
import engines
import torch
from torch import Tensor, nn

from dsdoctor.overflow.watch.engine import watch

STEP = 1
CALLS: dict[str, int] = {}
"""How often each module was called in the planted step: outside of the model, where a replay does not put it back."""


class Once(nn.Module):
    """Makes inf in those calls of the planted step that are named."""

    bad_calls: tuple[int, ...] = ()
    name = ""

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self.name] = number = CALLS.get(self.name, -1) + 1
        return x / 0 if number in self.bad_calls else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.early, self.late = Once(), Once()
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.late(self.early(self.first(x))))
        return nn.functional.cross_entropy(logits.float(), labels)


def train(engine: Any, case: dict[str, Any], rank: int) -> None:
    for step in range(STEP + 1):
        if step == STEP and rank in case.get("ranks", (0, 1)):
            CALLS.clear()
            for name, calls in case.get("bad_calls", {}).items():
                module = engine.module.get_submodule(name)
                module.name, module.bad_calls = name, tuple(calls)
        x, labels = engines.batch_of(step, 0, rank, engines.live_dtype(case))
        if step == STEP and case.get("evaluates") and rank == 1:
            with torch.no_grad():
                engine(x, labels)
        engine.backward(engine(x, labels))
        engine.step()


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    CALLS.clear()
    engine = engines.build(case, Net())
    watching = watch(engine, level=case["level"])
    loaded = None
    if "load" in case:
        loaded = list(engine.load_checkpoint(case["load"]))
    train(engine, case, rank)
    torch.distributed.barrier()
    found = [[finding.rule, finding.severity.name, finding.title, *finding.evidence] for finding in watching.findings()]
    watching.detach()
    engines.close(engine)
    return {"findings": found, "loaded": loaded}


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("ERROR")
    engines.main(run)
