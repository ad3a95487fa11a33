"""A training of seconds that shows whether the ranks of an image train: its ops, its torch, and the way between the ranks.

In: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun sets them; without them one process trains alone.
Out: rank 0's line of what was used and how the loss fell; exit status 1 on every rank when the training was not sound.
Compiles nothing: an op that the installed DeepSpeed does not hold is not used.
"""

import hashlib
import os
import sys
from dataclasses import dataclass
from datetime import timedelta

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import accelerator_name, installed_ops

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""A process that is told nothing trains alone, on a port that the kernel picks."""

DEVICE = get_accelerator().device_name()
SHARED_MEMORY = "deepspeed_shm_comm"
STEPS, BATCH, WIDTH = 40, 32, 16
PATIENCE = timedelta(seconds=120)
"""For the other ranks; a rank that is lost ends the training of all."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one rank came to: the loss on its own data before and after, and the digest of all weights."""

    first: float
    last: float
    weights: str


def holds(op: str) -> bool:
    """Whether the installed DeepSpeed has the op compiled in, for the accelerator that it runs on."""
    return bool(installed_ops.get(op)) and accelerator_name == DEVICE


def meet() -> str:
    """Bring the ranks together; the backend's name.

    On a CPU DeepSpeed compiles its shared memory exchange at this moment when it has not got it, and there is no switch for
    that. It does so for ops of its table of those that can be built here; gloo does all of the work for one that is not.
    """
    backend = "gloo" if DEVICE == "cpu" else get_accelerator().communication_backend_name()
    if DEVICE != "cpu":
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    elif not holds(SHARED_MEMORY):
        deepspeed.ops.__compatible_ops__[SHARED_MEMORY] = False
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=PATIENCE)
    return backend


def optimizer_for(model: torch.nn.Module) -> torch.optim.Optimizer:
    """The fastest Adam whose op is there: on the GPU, else on the CPU (from a GPU by ZeRO-Offload), else torch's."""
    if holds("fused_adam") and DEVICE != "cpu":
        kind = deepspeed.ops.adam.FusedAdam
    elif holds("cpu_adam"):
        kind = deepspeed.ops.adam.DeepSpeedCPUAdam
    else:
        kind = torch.optim.AdamW
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1e-2)
    return optimizer


def config_for(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """ZeRO 2: every rank keeps its part of the optimizer's state and of the gradients."""
    offload = isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam) and DEVICE != "cpu"
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2, **({"offload_optimizer": {"device": "cpu"}} if offload else {})},
        "bf16": {"enabled": get_accelerator().is_bf16_supported()},
    }


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> Trained:
    """Teach the model the sum of its inputs; every rank has numbers of its own."""
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config_for(optimizer))
    numbers = torch.Generator().manual_seed(1000 + rank)
    kind = next(engine.parameters()).dtype
    inputs = torch.randn(BATCH, WIDTH, generator=numbers).to(engine.device, kind)
    target = inputs.sum(dim=1, keepdim=True) / WIDTH**0.5
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.mse_loss(engine(inputs).float(), target.float())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = b"".join(weight.detach().float().cpu().numpy().tobytes() for weight in engine.parameters())
    return Trained(first=losses[0], last=losses[-1], weights=hashlib.sha256(state).hexdigest())


def trouble(trained: list[Trained]) -> str | None:
    """What is the matter with the training, in one sentence; None when it is sound. The same on every rank."""
    first, last = mean([one.first for one in trained]), mean([one.last for one in trained])
    strays = [str(rank) for rank, one in enumerate(trained) if one.weights != trained[0].weights]
    if strays:
        return (
            f"the ranks end with different weights: rank {', '.join(strays)} has others than rank 0 after {STEPS} steps"
        )
    # a loss that is not a number falls nowhere
    if not last < first / 2:
        return f"the loss did not fall to its half: {first:.4f} before and {last:.4f} after {STEPS} steps"
    return None


def mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def summary(trained: list[Trained], backend: str, optimizer: torch.optim.Optimizer) -> str:
    """The line of rank 0."""
    ops = ", ".join(sorted(op for op, held in installed_ops.items() if held)) or "none"
    return (
        f"{len(trained)} rank{'s' * (len(trained) > 1)} on {DEVICE} over {backend}, "
        f"{type(optimizer).__module__}.{type(optimizer).__qualname__}, ops installed for {accelerator_name}: {ops}; "
        f"loss {mean([one.first for one in trained]):.4f} -> {mean([one.last for one in trained]):.4f}"
    )


def main() -> int:
    """Train, compare, tell; the exit status, which every rank takes from what all of them came to."""
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    deepspeed.utils.logger.setLevel("WARNING")
    backend = meet()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # other weights on every rank: it is DeepSpeed that makes them equal
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = optimizer_for(model)
    told: list[Trained] = [None] * world  # type: ignore[list-item]
    torch.distributed.all_gather_object(told, train(model, optimizer, rank))
    wrong = trouble(told)
    if rank == 0:
        print(f"✗ {wrong}" if wrong else f"✓ trained: {summary(told, backend, optimizer)}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
