import argparse
import sys

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.utils import set_seed


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed", type=int, default=-1)
args = parser.parse_args()
plugin = None
if args.deepspeed >= 0:
    config = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": args.deepspeed},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
accelerator = Accelerator(cpu=plugin is None, deepspeed_plugin=plugin)
set_seed(4)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rows = torch.utils.data.TensorDataset(torch.rand(16, 4), torch.rand(16, 1))
loader = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    say(accelerator.process_index, accelerator.gather(loss.detach()).mean().item().hex())
accelerator.save_state("state")
accelerator.wait_for_everyone()
accelerator.load_state("state")
accelerator.print(type(model).__name__, accelerator.distributed_type)
accelerator.end_training()
