"""Runs inside a rank: faults as users write them, each in the middle of a small model under a real engine; all cases in a loop.

A fault has one line marked as planted: where the first bad value is made, or for a gradient the line whose derivative is bad.
"""

import time
import traceback
from collections.abc import Callable
from typing import Any

import deepspeed
import engines
import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dsdoctor.overflow.watch.engine import watch

VOCABULARY, WIDTH, LENGTH, MARK = 32, 16, 6, 31
STEP, STEPS = 1, 3


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        nothing = x - x
        return gradient / nothing  # planted


class Expert(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, bad: bool) -> Tensor:
        x = self.up(x)
        if bad and self.number == 2:
            x = x / (x.detach() - x.detach())  # planted
        return x


class Frozen(nn.Module):
    """A batch normalisation whose statistics no longer move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.running_mean) * (self.running_var + 1e-5).rsqrt()).to(x.dtype)  # statistics


class Middle(nn.Module):
    """Where the fault is. All layers that some fault needs, so that every case has the same model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.active = kind, False
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = Frozen()
        self.experts = nn.ModuleList(Expert(number) for number in range(4))
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.register_buffer("average", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for expert in self.experts:
            x = x + 0.1 * expert(x, bad=self.active and self.kind == "one expert")
        hidden = torch.full(x.shape[:2], self.active and self.kind == "attention to nothing")
        x = x + 0.1 * self.attention(x, x, x, key_padding_mask=hidden)[0]  # attention
        x = x + 0.1 * self.recurrent(x)[0]
        x = x + 0.1 * self.norm(x)
        return FAULTS[self.kind](self, x) if self.active and self.kind in FAULTS else x


class Whole(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.active = kind, False
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = Middle(kind)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.active = self.middle.active = bool(input_ids[0, 0] == MARK)
        x = functional.gelu(self.first(self.embedding(input_ids)))
        if self.active and self.kind in BETWEEN:
            x = BETWEEN[self.kind](x)
        x = x + self.middle(x)
        logits = self.head(functional.gelu(self.last(x))).float().flatten(0, 1)
        if self.active and self.kind in LOSSES:
            return {"loss": LOSSES[self.kind](logits, labels.flatten()), "logits": logits}
        return {"loss": functional.cross_entropy(logits, labels.flatten()), "logits": logits}


# -- in a module's forward


def logsumexp(_: Middle, x: Tensor) -> Tensor:
    masked = x.masked_fill(torch.ones_like(x, dtype=torch.bool), float("-inf"))
    return x - torch.logsumexp(masked, -1, keepdim=True)  # planted


def std_of_one(_: Middle, x: Tensor) -> Tensor:
    first = x[:, :1]
    spread = first.std(dim=1, keepdim=True)  # planted
    return x / (spread + 1)


def uninitialised(_: Middle, x: Tensor) -> Tensor:
    scratch = torch.empty(x.shape, dtype=torch.float32)
    scratch.view(torch.int32).fill_(-1)  # planted
    return x + scratch.to(x.dtype)  # planted


def cumulative(_: Middle, x: Tensor) -> Tensor:
    most = torch.finfo(x.dtype).max
    return (x.abs() * 0 + most / 4).cumsum(-1) + x  # planted


def zero_norm(_: Middle, x: Tensor) -> Tensor:
    empty = x * torch.zeros(1, dtype=x.dtype)
    return empty / empty.norm(dim=-1, keepdim=True)  # planted


def no_count(_: Middle, x: Tensor) -> Tensor:
    weight = torch.zeros_like(x[..., :1])
    mean = (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True)  # planted
    return x + mean


def rsqrt_of_constant(_: Middle, x: Tensor) -> Tensor:
    constant = torch.ones_like(x)
    scale = constant.var(-1, keepdim=True).rsqrt()  # planted
    return x * scale


def exponential(_: Middle, x: Tensor) -> Tensor:
    return x + torch.exp(x.abs() + 1000)  # planted


def in_place(_: Middle, x: Tensor) -> Tensor:
    y = x.clone()
    y.div_(0)  # planted
    return y * 1.0


def from_numpy(_: Middle, x: Tensor) -> Tensor:
    with numpy.errstate(divide="ignore"):
        bias = torch.from_numpy(numpy.log(numpy.zeros(WIDTH, dtype=numpy.float32)))  # planted
    return x + bias.to(x.dtype)  # planted


def inverse_error(_: Middle, x: Tensor) -> Tensor:
    return x + torch.erfinv(torch.ones_like(x, dtype=torch.float32)).to(x.dtype)  # planted


def gumbel(_: Middle, x: Tensor) -> Tensor:
    drawn = torch.zeros_like(x, dtype=torch.float32)
    noise = -drawn.log()  # planted
    return x + (-noise.log()).to(x.dtype)


def buffer_grows(middle: Middle, x: Tensor) -> Tensor:
    middle.average.fill_(torch.finfo(middle.average.dtype).max)
    middle.average.mul_(4)  # planted
    return x + middle.average.to(x.dtype)


def in_checkpoint(_: Middle, x: Tensor, *, reentrant: bool) -> Tensor:
    def inside(value: Tensor) -> Tensor:
        shifted = value + 1
        return shifted / (shifted.detach() - shifted.detach())  # planted

    return checkpoint(inside, x, use_reentrant=reentrant)


def einsum(_: Middle, x: Tensor) -> Tensor:
    large = torch.full_like(x, torch.finfo(x.dtype).max / 2)
    scores = torch.einsum("bld,bmd->blm", large, large)  # planted
    return x + scores.mean(-1, keepdim=True)


def list_of_scores(_: Middle, x: Tensor) -> Tensor:
    parts = [x[:, place] for place in range(LENGTH)]
    parts[3] = parts[3] / 0  # planted
    return torch.stack(parts, dim=1)


# -- in a gradient alone


def function_backward(_: Middle, x: Tensor) -> Tensor:
    return BadBackward.apply(x)  # planted


def double_branch(_: Middle, x: Tensor) -> Tensor:
    negative = -x.abs()
    root = negative.sqrt()  # planted
    return torch.where(negative >= 1, root, x)


def safe_branch(_: Middle, x: Tensor) -> Tensor:
    zeros = x * 0
    root = zeros.sqrt()  # planted
    return torch.where(zeros > 0, root, x)


def root_of_squares(_: Middle, x: Tensor) -> Tensor:
    empty = x * 0
    length = (empty * empty).sum(-1, keepdim=True).sqrt()  # planted
    return x + length


def power(_: Middle, x: Tensor) -> Tensor:
    nothing = x * 0
    return x + nothing.pow(0.5)  # planted


def arc_cosine(_: Middle, x: Tensor) -> Tensor:
    edge = x * 0 + 1
    return x + torch.acos(edge)  # planted


def hook_of_the_user(_: Middle, x: Tensor) -> Tensor:
    y = x * 1.5
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / 0)  # planted
    return y


def checkpointed_root(_: Middle, x: Tensor, *, reentrant: bool) -> Tensor:
    def inside(value: Tensor) -> Tensor:
        nothing = value * 0
        return value + nothing.sqrt()  # planted

    return checkpoint(inside, x, use_reentrant=reentrant)


# -- between modules, and in the loss


def cast(x: Tensor) -> Tensor:
    large = x.float() * 0 + 1e6
    half = large.to(torch.float16)  # planted
    return half.to(x.dtype) * 1.0


def shifted_softmax(x: Tensor) -> Tensor:
    scores = x.float() * 0 + 200
    exponent = torch.exp(scores)  # planted
    return (exponent / exponent.sum(-1, keepdim=True)).to(x.dtype)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    masked = logits.clone()
    masked[:, 1] = float("-inf")
    return functional.cross_entropy(masked, labels, label_smoothing=0.1)  # planted


def no_class_weight(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.zeros(VOCABULARY)
    return functional.cross_entropy(logits, labels, weight=weight)  # planted


def divergence(logits: Tensor, _: Tensor) -> Tensor:
    chance = logits.softmax(-1) * 0
    target = torch.full_like(chance, 1 / VOCABULARY)
    logarithm = chance.log()  # planted
    return functional.kl_div(logarithm, target, reduction="batchmean")


def own_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    chance = (logits - 1000 * functional.one_hot(labels, VOCABULARY)).softmax(-1)
    picked = chance.gather(1, labels[:, None])
    return -picked.log().mean()  # planted


FAULTS: dict[str, Callable[[Middle, Tensor], Tensor]] = {
    "logsumexp of nothing": logsumexp,
    "std of one": std_of_one,
    "uninitialised memory": uninitialised,
    "cumulative sum": cumulative,
    "zero vector by its norm": zero_norm,
    "mean of none": no_count,
    "rsqrt of a constant": rsqrt_of_constant,
    "exp": exponential,
    "in place": in_place,
    "from numpy": from_numpy,
    "erfinv of one": inverse_error,
    "log of a drawn zero": gumbel,
    "buffer grows": buffer_grows,
    "reentrant checkpoint": lambda middle, x: in_checkpoint(middle, x, reentrant=True),
    "checkpoint": lambda middle, x: in_checkpoint(middle, x, reentrant=False),
    "einsum": einsum,
    "one of a list": list_of_scores,
    "function's backward": function_backward,
    "sqrt of negatives unused": double_branch,
    "sqrt of zero unused": safe_branch,
    "root of squares": root_of_squares,
    "power of zeros": power,
    "acos of one": arc_cosine,
    "hook of the user": hook_of_the_user,
    "sqrt in a reentrant checkpoint": lambda middle, x: checkpointed_root(middle, x, reentrant=True),
    "sqrt in a checkpoint": lambda middle, x: checkpointed_root(middle, x, reentrant=False),
}
BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {"cast": cast, "softmax by hand": shifted_softmax}
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "smoothed labels": smoothed,
    "no class weight": no_class_weight,
    "divergence": divergence,
    "cross entropy by hand": own_cross_entropy,
}


def batch_of(case: dict[str, Any], step: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, MARK, (2, LENGTH), generator=generator)
    if step == STEP and case["only"] in (None, rank):
        ids[0, 0] = MARK
    return {"input_ids": ids, "labels": torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)}


def before_step(engine: Any, case: dict[str, Any], step: int, rank: int) -> None:
    """Faults that are in no function."""
    here = step == STEP and case["only"] in (None, rank)
    if case["kind"] == "running variance" and here:
        engine.module.middle.norm.running_var.fill_(float("nan"))
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if case["kind"] == "learning rate" and step == STEP:
        for group in inner.param_groups:
            group["lr"] = float("nan")
    if case["kind"] == "no epsilon" and step == STEP:
        for group in inner.param_groups:
            group["eps"] = 0.0
            for parameter in group["params"]:
                # as a weight that never had a gradient: 0 / (sqrt(0) + 0)
                inner.state[parameter]["exp_avg_sq"].zero_()


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train, and give the findings from the planted step on."""
    started = time.monotonic()
    problem, watching, engine, before = "", None, None, 0
    try:
        engines.seed(0)
        engine = engines.build({**case}, Whole(case["kind"]))
        watching = watch(engine, level=case.get("level", "guard"))
        for step in range(STEPS):
            if step == STEP:
                before = len(watching.findings())
            before_step(engine, case, step, rank)
            loss = engine(**batch_of(case, step, rank))["loss"]
            engine.backward(loss)
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
    healthy = [finding["title"] for finding in findings[:before] if finding["rule"] != "loss-not-scaled"]
    told = [finding for finding in findings[before:] if finding["rule"] != "loss-not-scaled"]
    seconds = time.monotonic() - started
    return {"healthy": healthy, "findings": told, "problem": problem, "report": report, "seconds": seconds}


if __name__ == "__main__":
    deepspeed.utils.logger.setLevel("ERROR")
    engines.main(run)
