"""Runs inside a rank: tiny transformers models under a real engine, one fault planted in each, watched; all cases in a loop."""

import time
import traceback
from collections.abc import Callable
from typing import Any

import deepspeed
import engines
import torch
import transformers
from fault_cases import STEP, TARGETS
from torch import Tensor, nn
from torch.nn import functional

from dsdoctor.overflow.watch.engine import watch

VOCABULARY, LENGTH, MARK = 64, 8, 63
"""``MARK``: the first token of a batch that has the fault; the number of the first pixel."""
GAS = 2
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


class AcrossRanks(torch.autograd.Function):
    """What one rank computed goes to the others: as a sum, or in equal parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return exchanged(x, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return exchanged(gradient, ctx.kind), None


def exchanged(x: Tensor, kind: str) -> Tensor:
    mine = x.contiguous().clone()
    if kind == "all_reduce":
        torch.distributed.all_reduce(mine)
        return mine
    theirs = torch.empty_like(mine)
    torch.distributed.all_to_all_single(theirs, mine)
    return theirs


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.SyncBatchNorm(32) if kind == "all_batch_norm" else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        made = self.first(hidden_states)
        if self.norm is not None:
            return hidden_states + self.second(self.norm(made.flatten(0, 1)).view_as(made))
        return hidden_states + self.second(AcrossRanks.apply(made, self.kind))


class Exchanging(nn.Module):
    """Hands activations to the other rank in the middle."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.inner = Inner(kind)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.inner(self.embedding(input_ids)))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def model_of(case: dict[str, Any]) -> nn.Module:
    """A tiny model of the architecture, with the attention of the case."""
    kind = case["architecture"]
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32}
        config: Any = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False)
        make: Any = transformers.GPT2LMHeadModel
    elif kind == "llama":
        config, make = transformers.LlamaConfig(**DECODER), transformers.LlamaForCausalLM
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**DECODER, num_local_experts=4)
        make = transformers.MixtralForCausalLM
    elif kind == "t5":
        sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0, use_cache=False)
        make = transformers.T5ForConditionalGeneration
    elif kind.startswith("all_"):
        return Exchanging(kind)
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=4)
        make = transformers.ViTForImageClassification
    return make._from_config(config, attn_implementation=case["attention"])


class Plant:
    """The fault in the functions of a model: active while a batch with the mark goes through it, in a replay as well."""

    def __init__(self, engine: Any, case: dict[str, Any]) -> None:
        self.active = False
        self.kind = case["kind"]
        self.huge = 6e4 if case["dtype"] == "fp16" else 3e38
        target = TARGETS[case["architecture"]][0]
        self.module = engine.module.get_submodule(target)
        self.around = engine.module.get_submodule(target.rpartition(".")[0])
        engine.module.register_forward_pre_hook(self.look, with_kwargs=True)
        if self.kind == "range":
            self.module.register_forward_pre_hook(self.near_the_limit)
        if self.kind in ("output", "zero by zero", "backward", "flushed"):
            self.module.forward = self.wrapped(self.module.forward)
        if self.kind == "between":
            self.around.forward = self.before(self.around.forward)

    def look(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        first = ids[0, 0] if ids is not None else kwargs.get("pixel_values", kwargs.get("inputs_embeds")).flatten()[0]
        self.active = bool(first == MARK)

    def near_the_limit(self, _: Any, args: tuple[Tensor]) -> tuple[Tensor] | None:
        """Finite inputs that the module's weights, a hundred times larger since the step began, take over the limit."""
        if not self.active:
            return None
        most = 0.9 * torch.finfo(args[0].dtype).max
        return ((args[0] / args[0].detach().abs().max() * most).clamp(-most, most),)

    def wrapped(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def planted(*args: Any, **kwargs: Any) -> Tensor:
            made = forward(*args, **kwargs)
            if self.active and self.kind == "output":
                return made * self.huge * 1e4  # planted
            if self.active and self.kind == "flushed":
                return made * 1e-9  # planted
            if self.active and self.kind == "zero by zero":
                nothing = made - made
                return made + nothing / (made - made)  # planted
            if self.active and self.kind == "backward":
                nothing = made * 0
                return made + nothing.sqrt()  # planted
            return made

        return planted

    def before(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def planted(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.active:
                hidden_states = hidden_states / 0  # planted
            return forward(hidden_states, *args, **kwargs)

        return planted


@torch.no_grad()
def plant_in_weight(engine: Any, case: dict[str, Any], rank: int) -> None:
    """An inf in one rank's copy, or under ZeRO-3 in its shard; or weights so large that finite inputs overflow."""
    weight = engine.module.get_submodule(TARGETS[case["architecture"]][0]).weight
    held = getattr(weight, "ds_tensor", weight)
    if case["kind"] == "weight":
        held.view(-1)[3] = float("inf")
    if case["kind"] == "range":
        held.mul_(100)


def batch_of(case: dict[str, Any], step: int, micro: int, rank: int, dtype: torch.dtype) -> dict[str, Any]:
    """A batch: padded as the case says, marked where the fault is."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    bad = case["kind"] != "healthy" and step == STEP and case["only"] in (None, rank)
    bad = bad and (micro == case["micro"] or case["kind"] == "flushed")
    if case["architecture"] == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=generator).to(dtype)
        if bad:
            pixels[0, 0, 0, 0] = float("nan") if case["kind"] == "data" else MARK
        return on_device({"pixel_values": pixels, "labels": torch.randint(0, 4, (2,), generator=generator)})
    ids = torch.randint(3, MARK, (2, LENGTH), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    if case["padding"] != "none":
        places = slice(0, 3) if case["padding"] == "left" else slice(LENGTH - 3, LENGTH)
        mask[1, places], ids[1, places], labels[1, places] = 0, 0, -100
    if bad:
        ids[0, 0] = MARK
        if case["kind"] == "loss inside":
            labels[:] = -100
    batch: dict[str, Any] = {"input_ids": ids, "labels": labels}
    if case["padding"] != "none":
        batch["attention_mask"] = mask
    if case["kind"] == "data":
        values = torch.randn(2, LENGTH, 32, generator=generator).to(dtype)
        if bad:
            values[1, 4, 5] = float("nan")
        batch["inputs_embeds"] = values
        del batch["input_ids"]
    return on_device(batch)


def on_device(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.to(engines.DEVICE) for name, tensor in batch.items()}


def outside_loss(engine: Any, case: dict[str, Any], batch: dict[str, Any], bad: bool) -> None:
    """A loss that the script computes, and its step."""
    labels = batch.pop("labels")
    if case["architecture"] == "t5":
        batch["decoder_input_ids"] = labels.clamp(min=0)
    logits = engine(**batch).logits
    flat = logits.float().flatten(0, -2)
    labels = labels.flatten().masked_fill(torch.tensor(bad, device=labels.device), -100)
    loss = functional.cross_entropy(flat, labels)  # planted
    engine.backward(loss)
    engine.step()


def outside_log(engine: Any, case: dict[str, Any], batch: dict[str, Any], bad: bool) -> None:
    """A loss of several statements, and its step."""
    labels = batch.pop("labels")
    if case["architecture"] == "t5":
        batch["decoder_input_ids"] = labels.clamp(min=0)
    chance = engine(**batch).logits.float().softmax(-1) * (0.0 if bad else 1.0)
    likelihood = chance.log()  # planted
    loss = -likelihood.mean()
    engine.backward(loss)
    engine.step()


def train_step(engine: Any, case: dict[str, Any], step: int, rank: int) -> None:
    """One optimizer step of two micro-batches, as a user's loop writes it."""
    for micro in range(GAS):
        batch = batch_of(case, step, micro, rank, engines.live_dtype(case))
        bad = step == STEP and micro == case["micro"] and case["only"] in (None, rank)
        if case["kind"] == "loss outside":
            outside_loss(engine, case, batch, bad)
        elif case["kind"] == "log outside":
            outside_log(engine, case, batch, bad)
        else:
            loss = engine(**batch).loss
            engine.backward(loss * 1e-7 if case["kind"] == "underflow" and step == STEP else loss)
            engine.step()


def engine_of(case: dict[str, Any]) -> Any:
    """The engine of a case, with what some kinds need."""
    more: dict[str, Any] = {"gas": GAS, "optimizer": "sgd", **case}
    model = model_of(case)
    if case["kind"] == "underflow":
        more["config"] = {"fp16": {"enabled": True, "loss_scale": 1}}
    if case["kind"] == "small updates":
        more |= {"dtype": "fp32"}
        model = model.bfloat16()
    engine = engines.build(more, model)
    if case["kind"] == "small updates":
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-7
    return engine


def train_healthy(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train without and with a watch: what it found, and whether the weights are the same bit for bit."""
    ends, findings = [], []
    for level in (None, case.get("level", "guard")):
        engines.seed(0)
        engine = engines.build({"gas": GAS, **case}, model_of(case))
        watching = None if level is None else watch(engine, level=level)
        engines.seed(rank)
        for step in range(case["steps"]):
            train_step(engine, case, step, rank)
        ends.append(engines.states(engine))
        if watching is not None:
            torch.distributed.barrier()
            findings = [f"{finding.rule}: {finding.title}" for finding in watching.findings()]
            watching.detach()
        engines.close(engine)
    return {"findings": findings, "same": engines.same(*ends)}


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train, and give the findings of the planted step."""
    if case["kind"] == "healthy":
        return train_healthy(case, rank)
    started = time.monotonic()
    problem, watching, engine, before = "", None, None, 0
    try:
        engine = engine_of(case)
        Plant(engine, case)
        watching = watch(engine, level=case.get("level", "guard"))
        for step in range(STEP + 1):
            before = len(watching.findings())
            here = case["only"] in (None, rank) or case["kind"] == "range"
            if step == STEP and case["kind"] in ("weight", "range") and here:
                plant_in_weight(engine, case, rank)
            train_step(engine, case, step, rank)
    except Exception:
        problem = traceback.format_exc()[-1500:]
    torch.distributed.barrier()  # what the other rank found by itself is written by now
    findings = engines.findings(watching)
    report = watching.report() if watching is not None else ""
    if watching is not None:
        watching.detach()
    if engine is not None:
        engines.close(engine)
    healthy = [finding["title"] for finding in findings[:before] if finding["rule"] != "loss-not-scaled"]
    return {
        "healthy": healthy,
        "findings": [finding for finding in findings[before:] if finding["rule"] != "loss-not-scaled"],
        "problem": problem,
        "report": report,
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    deepspeed.utils.logger.setLevel("ERROR")
    engines.main(run)
