"""A small real training: two ranks, gloo, ZeRO 1 with the optimizer's state on the host, CPUAdam from the wheel."""

import hashlib
import json
import os
from pathlib import Path

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
}

deepspeed.init_distributed("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

torch.manual_seed(100 + rank)
inputs = torch.randn(8, 16, dtype=torch.bfloat16)
target = inputs.sum(dim=1, keepdim=True) / 4
losses = []
for _ in range(60):
    loss = torch.nn.functional.mse_loss(engine(inputs), target)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())

state = b"".join(parameter.detach().float().numpy().tobytes() for parameter in model.parameters())
report = {
    "rank": rank,
    "first_loss": losses[0],
    "last_loss": losses[-1],
    "weights": hashlib.sha256(state).hexdigest(),
    "op": optimizer.ds_opt_adam.__file__,
}
Path(os.environ["REPORTS"], f"rank{rank}.json").write_text(json.dumps(report))
torch.distributed.destroy_process_group()
# at the interpreter's end torch's gloo threads now and then end in std::terminate, after all is said and done
os._exit(0)
