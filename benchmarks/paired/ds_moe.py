import sys

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.moe = MoE(
            16, expert=nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), num_experts=2, ep_size=2, k=1
        )
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        x, auxiliary, _ = self.moe(self.first(x))
        return self.last(x).pow(2).mean() + 0.01 * auxiliary


deepspeed.init_distributed("gloo")
torch.manual_seed(1)
model = Net()
groups = split_params_into_different_moe_groups_for_optimizer(
    {"params": list(model.parameters()), "name": "parameters"}
)
optimizer = torch.optim.AdamW(groups, lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": False}, "zero_allow_untested_optimizer": True}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
rank = torch.distributed.get_rank()
generator = torch.Generator().manual_seed(rank)
for _ in range(3):
    loss = engine(torch.rand(4, 8, 16, generator=generator))
    engine.backward(loss)
    engine.step()
    say(rank, loss.item().hex())
