"""Runs inside a rank: real DeepSpeed engines, one process group for all configurations of a script. On the CPU, unless
DS_ACCELERATOR says cuda.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import FusedAdam
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = os.environ["DS_ACCELERATOR"]
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.relu(self.up(self.norm(x)))))


class BatchNorm(nn.BatchNorm1d):
    """In the dtype that DeepSpeed left its buffers in."""

    def __init__(self) -> None:
        super().__init__(WIDTH, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.running_mean.dtype)).to(x.dtype)


class Net(nn.Module):
    """Dropout, a batch norm's buffers, a plain tensor and a plain number that each forward changes, draws of Python's
    and numpy's generators; checkpointed by the kind in ``checkpointing``."""

    def __init__(self, checkpointing: str = "none", inner_loss: bool = True) -> None:
        super().__init__()
        self.checkpointing, self.inner_loss = checkpointing, inner_loss
        self.first = nn.Linear(8, WIDTH)
        self.batch_norm = BatchNorm()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.side: nn.Module | None = None
        self.calls = 0
        self.plain = torch.zeros(WIDTH)
        self.seen: list[int] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        self.seen.append(self.calls)
        x = self.batch_norm(self.first(x)) + random.random() + float(numpy.random.rand())
        self.plain.add_(x.detach().float().mean(0).cpu())
        for block in self.blocks:
            x = self._run(block, x)
        if self.side is not None:
            # as losses do that work through a sequence in tiles
            self.side(x.detach()).float().sum().backward()
        logits = self.head(x)
        if not self.inner_loss:
            return logits
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing == "none" or not self.training:
            return block(x)
        if self.checkpointing == "deepspeed":
            return deepspeed.checkpointing.checkpoint(block, x)
        return torch_checkpoint.checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


class PlainFusedAdam(FusedAdam):
    """What DeepSpeed takes for its fused Adam, without the compiled op."""

    def __init__(self, parameters: Any, lr: float) -> None:
        torch.optim.Optimizer.__init__(self, parameters, {"lr": lr})

    def step(self, *_: Any, **__: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"])


def configuration(case: dict[str, Any]) -> dict[str, Any]:
    stage, kind = case["stage"], case["dtype"]
    zero: dict[str, Any] = {"stage": stage}
    if case.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    if case.get("offload_param"):
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = case.get("persist", 0)
    zero.update(case.get("zero", {}))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": case.get("gas", 1),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "gradient_clipping": case.get("clip", 0.0),
    }
    if kind == "fp16":
        config["fp16"] = {
            "enabled": True,
            "initial_scale_power": case.get("power", 8),
            "loss_scale_window": 3,
            "hysteresis": 1,
        }
    if kind == "bf16":
        config["bf16"] = {"enabled": True, **case.get("bf16", {})}
    return {**config, **case.get("config", {})}


def build(case: dict[str, Any], model: nn.Module | None = None) -> Any:
    seed(0)
    model = model or Net(case.get("checkpointing", "none"), case.get("inner_loss", True))
    if case.get("inner_backward"):
        model.side = nn.Linear(WIDTH, 4)
    if case.get("leaf"):
        deepspeed.utils.set_z3_leaf_modules(model, [Block])
    if case.get("pipeline"):
        model = pipeline()
    lr = 0.01
    optimizers: dict[str, Callable[..., Any]] = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=lr),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        "fused": lambda: PlainFusedAdam(model.parameters(), lr=lr),
    }
    optimizer = optimizers[case.get("optimizer", "adamw")]()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(case))
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None) or getattr(
        engine.optimizer, "torch_autocast_gradscaler", None
    )
    if scaler is not None:
        # torch begins at 65536, where this model overflows by itself
        scaler._init_scale = 256.0
    return engine


def pipeline() -> nn.Module:
    layers = [nn.Linear(8, WIDTH), Block(), Block(), nn.Linear(WIDTH, 4)]
    return PipelineModule(layers, num_stages=2, loss_fn=outer_loss, partition_method="uniform", seed_layers=True)


def outer_loss(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.float(), labels)


def seed(number: int) -> None:
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def batch_of(step: int, micro: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    x = torch.randn(4, 8, generator=generator).to(dtype)
    return x.to(DEVICE), torch.randint(0, 4, (4,), generator=generator).to(DEVICE)


def live_dtype(case: dict[str, Any]) -> torch.dtype:
    return DTYPES[case["dtype"]]


def loss_of(engine: Any, x: Tensor, labels: Tensor) -> Tensor:
    output = engine(x, labels=labels)
    if isinstance(output, dict):
        return output["loss"]
    return outer_loss(output, labels)


def weights(engine: Any) -> list[Tensor]:
    """What this rank keeps of the weights, master weights and optimizer states."""
    found = [getattr(each, "ds_tensor", each).detach().clone() for each in engine.module.parameters()]
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for group in inner.param_groups:
        for parameter in group["params"]:
            found.append(parameter.detach().clone())
            found += [each.clone() for each in inner.state[parameter].values() if isinstance(each, Tensor)]
    return found


def states(engine: Any) -> list[Tensor]:
    """``weights``, and what a forward changes in the module."""
    found = weights(engine) + [each.detach().clone() for each in engine.module.buffers()]
    for module in engine.module.modules():
        found += [torch.tensor(each) for each in (getattr(module, "seen", []), getattr(module, "calls", 0))]
        found += [module.plain.clone()] if hasattr(module, "plain") else []
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Bit for bit: nan equals nan, 0.0 does not equal -0.0."""
    bits = [[each.reshape(-1).view(torch.uint8) for each in tensors] for tensors in (first, second)]
    return len(first) == len(second) and all(torch.equal(mine, yours) for mine, yours in zip(*bits, strict=True))


def findings(watching: Any) -> list[dict[str, Any]]:
    """What a watch found, as rows that a worker writes down; None: there was no watch."""
    return [
        {
            "rule": finding.rule,
            "severity": finding.severity.name.lower(),
            "title": finding.title,
            "evidence": finding.evidence,
            "affects": finding.affects,
            "fix": finding.fix.text if finding.fix else "",
        }
        for finding in (() if watching is None else watching.findings())
    ]


def close(engine: Any) -> None:
    """As a process' end would: DeepSpeed keeps some things in module-level variables."""
    from deepspeed.utils import groups

    engine.destroy()
    autocast = sys.modules.get("deepspeed.runtime.torch_autocast")
    if autocast is not None:
        autocast.TORCH_AUTOCAST_INITIALIZED = False
    groups.mpu = None


def main(run: Callable[[dict[str, Any], int], Any]) -> None:
    """Run every case in the file of the first argument; write [result or error] to OUT.<rank>.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: list(DTYPES.values())
    torch.set_num_threads(1)
    # DeepSpeed compiles this op when it starts on a CPU; a worker that is killed meanwhile would leave a lock for the next
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if DEVICE == "cpu" else "nccl")
    rank = torch.distributed.get_rank()
    results = {name: run(case, rank) for name, case in json.loads(given.cases.read_text()).items()}
    given.out.with_suffix(f".{rank}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()
    # DeepSpeed leaves the groups of a hundred engines behind, whose gloo threads end the interpreter's exit by std::terminate
    # now and then ("terminate called without an active exception"). All that is tested has been written
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
