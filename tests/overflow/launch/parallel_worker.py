"""Runs inside a rank: models that hand values to other ranks in the middle, one fault planted in each, watched."""

import time
import traceback
from typing import Any

import deepspeed
import engines
import torch
import transformers
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from parallel_cases import STEP
from torch import Tensor, nn

from dsdoctor.overflow.watch.engine import watch

WIDTH, VOCABULARY = 32, 64


class Plant(nn.Module):
    """Passes on, and on the rank of the case makes inf or nan of finite values in one step, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "overflow":
            return x * 3e38 * 1e4  # planted
        if self.kind == "zero":
            return (x - x) / (x - x)  # planted
        if self.kind == "backward":
            return x + (x * 0).sqrt()  # planted
        return x


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.plant, self.down = nn.Linear(WIDTH, WIDTH), Plant(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.plant(self.up(x))))


class Experts(nn.Module):
    """A mixture whose two experts lie on two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.before = Plant()
        self.moe = MoE(WIDTH, Expert(), num_experts=2, ep_size=2, k=1, min_capacity=8, use_rts=False)
        self.after = Plant()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        mixed, _, _ = self.moe(self.before(self.embedding(ids)))
        logits = self.head(self.after(mixed))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


class Statistics(torch.autograd.Function):
    """A mean over all ranks' batches, as SyncBatchNorm takes it; that one runs on GPUs alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mine = x.mean(0)
        everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, mine)
        ctx.rows = x.shape[0]
        return torch.stack(everyone).mean(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        mine = gradient.contiguous().clone()
        torch.distributed.all_reduce(mine)
        return (mine / (ctx.rows * torch.distributed.get_world_size())).expand(ctx.rows, -1)


class SynchronNorm(nn.Module):
    kind = ""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        if self.kind == "sum":
            most = torch.full_like(flat, 0.7 * torch.finfo(x.dtype).max)
            torch.distributed.all_reduce(most)
            flat = flat + most * 0.5
        return (flat - Statistics.apply(flat)).view_as(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.before, self.norm, self.after = nn.Linear(WIDTH, WIDTH), Plant(), SynchronNorm(), Plant()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.after(self.norm(self.before(self.up(self.embedding(ids)))))
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), ids.flatten())


class Behind(nn.Module):
    """A module, and a plant behind it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.plant = module, Plant()

    def forward(self, x: Tensor) -> Tensor:
        return self.plant(self.module(x))


class Sliced(nn.Module):
    """A tiny Llama whose layers DeepSpeed slices over two ranks; a plant behind the activation of its second layer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False}
        self.llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        mlp = self.llama.model.layers[1].mlp
        mlp.act_fn = Behind(mlp.act_fn)

    def forward(self, ids: Tensor) -> Tensor:
        return self.llama(input_ids=ids, labels=ids).loss


def engine_of(case: dict[str, Any]) -> Any:
    engines.seed(0)
    if case["parallel"] == "experts":
        model: nn.Module = Experts()
        group = {"params": list(model.parameters()), "name": "all"}
        optimizer = torch.optim.SGD(split_params_into_different_moe_groups_for_optimizer(group), lr=0.01)
    elif case["parallel"] == "tensor":
        model = Sliced()
        optimizer = None
    else:
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = engines.configuration({**case, "gas": 1})
    if case["parallel"] == "tensor":
        config |= {"tensor_parallel": {"autotp_size": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def plant(module: nn.Module, kind: str) -> None:
    if kind == "weight":
        with torch.no_grad():
            module.weight.view(-1)[3] = float("inf")
    else:
        module.kind = kind  # type: ignore[assignment]


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    started, problem, watching, engine = time.monotonic(), "", None, None
    try:
        engine = engine_of(case)
        watching = watch(engine, level=case["level"])
        for step in range(STEP + 1):
            if step == STEP and case["only"] in (None, rank):
                plant(engine.module.get_submodule(case["module"]), case["kind"])
            seed = step if case["parallel"] == "tensor" else 10 * step + rank
            ids = torch.randint(3, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(seed))
            engine.backward(engine(ids))
            engine.step()
    except Exception:
        problem = traceback.format_exc()[-1500:]
    torch.distributed.barrier()
    findings = engines.findings(watching)
    report = watching.report() if watching is not None else ""
    if watching is not None:
        watching.detach()
    if engine is not None:
        engines.close(engine)
    return {"findings": findings, "problem": problem, "report": report, "seconds": time.monotonic() - started}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("ERROR")
    engines.main(run)
