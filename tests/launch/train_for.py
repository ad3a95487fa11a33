"""A small real training under any configuration: five steps, a checkpoint, and what was loaded of DeepSpeed's ops.

`train_for.py CONFIG REPORTS`: CONFIG is a ds_config.json; each rank writes REPORTS/RANK.json.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch

config, reports = sys.argv[1], Path(sys.argv[2])
deepspeed.init_distributed("gloo", verbose=False)
rank = torch.distributed.get_rank()
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16))
own = None if "optimizer" in Path(config).read_text() else torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=own, model_parameters=model.parameters(), config=config)

torch.manual_seed(100 + rank)
inputs = torch.randn(4, 16, dtype=torch.bfloat16 if engine.bfloat16_enabled() else torch.float32)
losses = []
for _ in range(5):
    loss = torch.nn.functional.mse_loss(engine(inputs), inputs)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
engine.save_checkpoint(str(reports / "checkpoint"))

names = (
    name.rpartition(".")[2] for name, module in sys.modules.items() if str(vars(module).get("__file__")).endswith(".so")
)
loaded = sorted(name.removesuffix("_op") for name in names if name.endswith("_op"))
(reports / f"{rank}.json").write_text(json.dumps({"losses": losses, "loaded": loaded}))
torch.distributed.destroy_process_group()
# at the interpreter's end torch's gloo threads now and then end in std::terminate, after all is said and done
sys.stdout.flush()
os._exit(0)
