"""A pipeline of two stages with a defect planted in a layer of one of them, watched; writes down the findings."""

from typing import Any

import deepspeed
import engines
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from verdict_worker import STEP, WIDTH, Gain

from dsdoctor.overflow.watch.engine import watch


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(torch.tanh(self.linear(x)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Steep(nn.Module):
    """Finite forward, nan backward, once planted."""

    planted = False

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sqrt(x * 0) if self.planted else x


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels)


def data(case: dict[str, Any]) -> Any:
    step = 0
    while True:
        yield engines.batch_of(step, 0, 0, engines.live_dtype(case))
        step += 1


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    engines.seed(0)
    layers = [LayerSpec(nn.Linear, 8, WIDTH), *(LayerSpec(Layer) for _ in range(4)), LayerSpec(Steep), LayerSpec(Head)]
    module = PipelineModule(layers=layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=engines.configuration(case))
    watching = watch(engine, level=case.get("level", "guard"), on_overflow=case.get("answer", "report"))
    raised = ""
    batches = data(case)
    try:
        for step in range(STEP + 1):
            if step == STEP:
                for name, module in engine.module.named_modules():
                    if name == case["plant"] and isinstance(module, Gain):
                        module.factor = float("inf")
                    if name == case["plant"] and isinstance(module, Steep):
                        module.planted = True
            engine.train_batch(data_iter=batches)
    except ValueError as error:
        raised = f"{type(error).__name__}: {error}"
    findings = engines.findings(watching)
    report = watching.report()
    names = [name for name, _ in engine.module.named_modules()]
    watching.detach()
    engines.close(engine)
    return {"findings": findings, "report": report, "raised": raised, "names": names}


if __name__ == "__main__":
    engines.main(run)
