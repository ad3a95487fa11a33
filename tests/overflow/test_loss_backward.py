"""Losses that are finite and whose backward is not: the operation that makes it so is named, and nothing where all is well."""

import gc
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from dsdoctor.overflow.frames.first_bad import BadKind, Cure, FirstBad, Origin, RankReport
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch.loss_graph import LossBackward
from tests.each import each
from tests.overflow.test_verdict import frame, tensor

MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "log": lambda p: torch.where(p > 0, torch.log(p), 0.0),
    "sqrt": lambda p: torch.where(p > 0, torch.sqrt(p), 0.0),
    "div": lambda p: torch.where(p > 0, 1 / p, 0.0),
    "reciprocal": lambda p: torch.reciprocal(p).masked_fill(p == 0, 0.0),
    "exp": lambda p: torch.where(p > 0, torch.exp(p - 1000 * (p == 0) * -1), 0.0),
    "pow": lambda p: torch.where(p > 0, p**0.5, 0.0),
}
UNMASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda p: torch.sqrt(p),
    "linalg_vector_norm": lambda p: p.norm(dim=1),
}
HEALTHY: dict[str, Callable[[Tensor], Tensor]] = {
    "masked before": lambda p: torch.where(p > 0, torch.log(torch.where(p > 0, p, 1.0)), 0.0),
    "indexed": lambda p: torch.log(p[p > 0]),
    "clamped": lambda p: torch.log(p.clamp(min=1e-6)),
    "squared": lambda p: p * p,
}


def test_a_backward_whose_gradients_cannot_be_asked_is_as_without_a_watch() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    output = table(torch.tensor([1, 2])) * 1.0
    watch = LossBackward()
    watch.forward_ends(torch.ones(1, requires_grad=True) * 1.0)
    loss = output.sum()
    watch.begin(loss)
    loss.backward()

    assert table.weight.grad is not None and table.weight.grad.is_sparse
    assert watch.made is None


def test_forwards_that_no_backward_follows_keep_few_graphs() -> None:
    watch = LossBackward()
    kept = []
    for _ in range(40):
        weight = torch.ones(1, requires_grad=True)
        kept.append(weakref.ref(weight))
        watch.forward_ends(weight * weight)
    del weight
    gc.collect()

    assert sum(each() is not None for each in kept) <= 17


def watched(loss_of: Callable[[Tensor], Tensor], *, lines: bool = False) -> tuple[Origin | None, Tensor]:
    """What is named of a loss, and the gradient of a weight below it."""
    weight = torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True)
    output = weight * 1.0
    watch = LossBackward()
    watch.forward_ends({"logits": output})
    with torch.autograd.set_detect_anomaly(lines, check_nan=False):
        loss = loss_of(output).sum()
        assert bool(torch.isfinite(loss))
        watch.begin(loss)
        loss.backward()
    made = watch.made
    watch.forget()
    assert weight.grad is not None
    assert watch.made is None
    return made, weight.grad


@each("name", MASKED)
def test_an_operation_whose_result_is_masked_is_named(name: str) -> None:
    made, gradient = watched(MASKED[name])

    assert bool(gradient.isnan().any())
    assert made is not None
    assert made.how.startswith("a gradient of 0"), made
    assert made.cure is not None and made.cure.remedy == "mask-before"


@each("name", UNMASKED)
def test_an_infinite_derivative_is_named(name: str) -> None:
    loss = UNMASKED[name]
    made, gradient = watched(loss if name == "sqrt" else lambda p: loss(p * 0))

    if bool(gradient.isfinite().all()):  # torch gives the norm of zeros a derivative of 0
        assert made is None
    else:
        assert made is not None and made.op == f"the backward of {name}"
        assert "not finite there" in made.how


def test_the_line_is_told_where_autograd_kept_it() -> None:
    made, _ = watched(lambda p: torch.where(p > 0, torch.log(p), 0.0), lines=True)

    assert made is not None
    assert made.op == "the backward of log"
    assert made.line.startswith("test_loss_backward.py:")
    assert "torch.log(p)" in made.line


@each("name", HEALTHY)
def test_a_healthy_loss_names_nothing(name: str) -> None:
    made, gradient = watched(HEALTHY[name])

    assert (made, bool(gradient.isfinite().all())) == (None, True)


def test_what_the_model_does_is_not_read() -> None:
    weight = torch.tensor([0.0, 1.0], requires_grad=True)
    output = torch.where(weight > 0, torch.log(weight), 0.0)
    watch = LossBackward()
    watch.forward_ends(output)
    loss = (output * 2).sum()
    watch.begin(loss)
    loss.backward()

    assert weight.grad is not None and bool(weight.grad.isnan().any())
    assert watch.made is None


def report(**fields: object) -> RankReport:
    bad = frame(3, "down", tensor("grad output", nan=1))
    found = FirstBad(kind=BadKind.GRADIENT, frame=bad, tensor=bad.tensors[0])
    given = {"first_bad": found, "losses": (0.5,), "step": 7, "replayed": "forward and backward", "local": bad.tensors}
    return RankReport(rank=0, **{**given, **fields})  # type: ignore[arg-type]


def test_a_gradient_that_was_bad_when_it_came_to_the_model_is_the_scripts_own() -> None:
    made = Origin(
        op="the backward of log", line="train.py:9 in loss: log(p)", how="0 times inf", cure=Cure("mask-before", "log")
    )
    (first,) = judge([report(began_bad=True)])
    (second,) = judge([report(began_bad=True, loss_backward=made)])

    assert "what the script computes between the model and its loss made 1 nan" in first.title
    assert first.fix is not None
    assert "float32" not in first.fix.text
    assert "the backward of log in train.py:9" in second.title
    assert "why: 0 times inf" in second.evidence
    assert second.fix is not None and second.fix.text.startswith("Mask the input of log, ")
    # so that the announcer tells it in full
    assert first.affects != second.affects


@each(("dtype", "advised"), (("float32", False), ("bfloat16", True), ("float16", True)))
def test_float32_is_advised_where_it_is_wider(dtype: str, advised: bool) -> None:
    (found,) = judge([report(dtype=dtype)])

    assert found.fix is not None
    assert ("float32" in found.fix.text) is advised
