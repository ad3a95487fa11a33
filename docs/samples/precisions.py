"""Two batches through a model in the precision that is named, with a trace of them: python precisions.py fp16|fp32."""

import sys

import torch
from torch import nn

import dsdoctor


class Block(nn.Module):
    """A residual block whose second matrix is far too large."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        nn.init.constant_(self.down.weight, 9000.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


torch.manual_seed(0)
precision = sys.argv[1]
body = nn.Sequential(Block(), nn.LayerNorm(16))
model = nn.Sequential()
for name, module in (("embed", nn.Linear(8, 16)), ("body", body), ("head", nn.Linear(16, 1))):
    model.add_module(name, module)
dtype = {"fp16": torch.float16, "fp32": torch.float32}[precision]
engine, *_ = dsdoctor.initialize(
    model=model.to(dtype),
    optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
    config={"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True},
    overflow="trace",
    watch_options={"trace_batch_nums": [0, 1], "trace_dir": precision},
)
for batch in range(2):
    with torch.no_grad():
        engine(torch.ones(4, 8, dtype=dtype) * (batch + 1))
