"""An engine of the tests that need none of DeepSpeed: a model whose forwards are recorded and replayed."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn


class Engine(nn.Module):
    """As much of a DeepSpeed engine as a replay asks for."""

    global_steps = micro_steps = 0
    device = torch.device("cpu")

    def __init__(self, module: nn.Module, *, half: bool = False) -> None:
        super().__init__()
        self.half_precision = half
        self.module = module
        self.optimizer = SimpleNamespace()

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)

    def zero_optimization_stage(self) -> int:
        return 0

    def gradient_accumulation_steps(self) -> int:
        return 1

    def fp16_enabled(self) -> bool:
        return self.half_precision

    def bfloat16_enabled(self) -> bool:
        return False
