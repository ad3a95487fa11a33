import argparse
import sys

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed("gloo")
torch.manual_seed(3)
layers = [LayerSpec(nn.Linear, 16, 16), nn.functional.relu, LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.Linear, 16, 4)]
model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform")
config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 1}
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
engine, *_ = deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=config)
generator = torch.Generator().manual_seed(0)
data = [(torch.rand(4, 16, generator=generator), torch.randint(0, 4, (4,), generator=generator)) for _ in range(10)]
batches = iter(data)
for _ in range(3):
    loss = engine.train_batch(data_iter=batches)
    say(torch.distributed.get_rank(), loss.item().hex())
say(engine.is_first_stage(), engine.global_steps, len(list(engine.module.parameters())))
engine.save_checkpoint("pipe")
