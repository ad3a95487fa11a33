"""Run by the training's Python: deepspeed.initialize for real on each configuration of stdin, in one process, and a step.

A rank of its own (gloo). Each line of the answer: where it failed ("config", "initialize", "step", "" for nowhere), how, and what
the engine says it trains with.
"""

import contextlib
import copy
import gc
import importlib
import io
import json
import logging
import os
import sys


def facts_of(engine):
    return {
        "stage": int(engine.zero_optimization_stage()),
        "accumulation": engine.gradient_accumulation_steps(),
        "train_batch_size": engine.train_batch_size(),
        "clipping": repr(engine.gradient_clipping()),
        "fp16": bool(engine.fp16_enabled()),
        "bf16": bool(engine.bfloat16_enabled()),
        "optimizer": type(engine.basic_optimizer).__name__,
        "scheduler": type(engine.lr_scheduler).__name__ if engine.lr_scheduler is not None else "",
        "lr": repr(engine.basic_optimizer.param_groups[0].get("lr")),
    }


def tried(config, torch, deepspeed):
    """What became of one configuration."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    outcome = {"failed": "initialize", "error": "", "facts": None}
    more = {} if "optimizer" in config else {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}
    try:
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=copy.deepcopy(config), **more
        )
        outcome["facts"] = facts_of(engine)
        outcome["failed"] = "step"
        dtype = next(engine.module.parameters()).dtype
        for _ in range(2 * max(1, int(engine.gradient_accumulation_steps()))):
            loss = engine(torch.randn(engine.train_micro_batch_size_per_gpu(), 8, dtype=dtype)).float().pow(2).mean()
            engine.backward(loss)
            engine.step()
        outcome["failed"] = ""
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        with contextlib.suppress(Exception):
            engine.destroy()
        gc.collect()
    return outcome


def main():
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]})
    configs = json.load(sys.stdin)
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed
        import torch

        torch.set_num_threads(1)
        # DeepSpeed refuses fp16 on CPUs, where torch computes it slowly: what else it says of fp16 is wanted
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
        # gloo does without the op for shared memory, whose compilation other trainings of this user may hold up
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        deepspeed.init_distributed("gloo")
    for config in configs:
        with contextlib.redirect_stdout(io.StringIO()):
            outcome = tried(config, torch, deepspeed)
        print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main()
