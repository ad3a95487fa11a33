"""Plain DeepSpeed: ds.py --stage N [--dtype bf16|fp16] [--accumulate N] [--save] [--compile] [--offload]."""

import argparse
import hashlib
import os
import sys

import deepspeed
import torch
from torch import nn


def say(*words):
    """One write: the lines of two ranks must not be mixed."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=0)
parser.add_argument("--dtype", default="fp32")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save", action="store_true")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--fail", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": args.accumulate,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}},
    "bf16": {"enabled": args.dtype == "bf16"},
    "fp16": {"enabled": args.dtype == "fp16", "initial_scale_power": 16},
}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 64)

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main():
    deepspeed.init_distributed("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(42)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, optimizer, _, scheduler = deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=config)
    if args.compile:
        engine.compile(backend="aot_eager")
    say(rank, type(engine).__name__, type(optimizer).__name__, type(scheduler).__name__)
    before = sorted(name for name in vars(engine))
    generator = torch.Generator().manual_seed(rank)
    for step in range(4 * args.accumulate):
        ids = torch.randint(0, 64, (4, 8), generator=generator)
        loss = engine(ids, labels=ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        if step == 2 and args.fail == rank:
            raise RuntimeError(f"rank {rank} fails on purpose")
        norm = engine.get_global_grad_norm()
        say(
            rank,
            step,
            loss.item().hex(),
            None if norm is None else float(norm).hex(),
            engine.get_lr(),
            engine.skipped_steps,
        )
    engine.eval()
    with torch.no_grad():
        say(rank, engine(torch.arange(8)[None]).float().sum().item().hex())
    say(
        rank,
        torch.rand(1).item(),
        sorted(set(vars(engine)) - set(before)),
        engine.global_steps,
        engine.was_step_applied(),
    )
    say("hooks", rank, [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in engine.module.modules()])
    say(
        rank,
        list(engine.module.state_dict()),
        engine.module.blocks[0].forward.__qualname__,
        type(engine).step.__qualname__,
    )
    if args.save:
        engine.save_checkpoint("out", tag="last", client_state={"step": step})
        path, state = engine.load_checkpoint("out")
        say(rank, path, state)
        engine.save_16bit_model("out16", "model.bin")
    digest = hashlib.sha256()
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            digest.update(parameter.detach().float().numpy().tobytes())
    say(rank, digest.hexdigest(), os.getcwd() == os.environ.get("PWD", os.getcwd()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
