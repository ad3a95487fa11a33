"""A training of four steps that runs out of memory in the last one where --fail names its rank; knows nothing of dsdoctor.

`--say FILE`: what dsdoctor reads of this engine goes there.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import deepspeed
import torch


def train(config: str, fail: int, say: Path | None) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(128, 1))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    if say is not None and torch.distributed.get_rank() == 0:
        from dsdoctor.memory.engine import layout_of, settings_of, shape_of

        told = {"settings": settings_of(engine), "shape": shape_of(engine.module), "layout": layout_of(engine)}
        say.write_text(json.dumps({name: asdict(each) for name, each in told.items()}))
    for step in range(4):
        loss = engine(torch.ones(4, 128, dtype=torch.bfloat16)).mean()
        engine.backward(loss)
        engine.step()
        if step == 3 and fail == torch.distributed.get_rank():
            held = [torch.empty(500_000)]
            held.append(torch.empty(1 << 46))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--fail", type=int, default=-1)
    parser.add_argument("--say", type=Path)
    given = parser.parse_args()
    train(given.config, given.fail, given.say)
