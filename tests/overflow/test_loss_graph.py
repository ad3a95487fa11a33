"""Losses that scripts compute and that are nan or inf: what their graph proves of the operation that made them so."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dsdoctor.overflow.watch import graph_nodes, loss_graph
from dsdoctor.overflow.watch.loss_graph import made_the_loss
from dsdoctor.overflow.watch.loss_line import LossLines
from tests.each import each

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BAD = (float("nan"), float("inf"), float("-inf"))


def logits(dtype: torch.dtype, rows: int = 4) -> Tensor:
    """What a model gave: positive and negative numbers, and two zeros, with a gradient."""
    made = torch.tensor([[1.0, -2.0, 0.0, 3.0, -0.5]] * rows).to(dtype).requires_grad_()
    return made * 1


MADE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "log of 0": (lambda x: x.relu().log(), "the logarithm of 0: it was given"),
    "log of less": (lambda x: (x - 1).log(), "the logarithm of a negative number"),
    "0 / 0": (lambda x: x.relu() / x.relu(), "0 / 0: its divisor holds"),
    "x / 0": (lambda x: (x + 5) / x.relu(), "a division by 0: its divisor holds"),
    "masked mean": (lambda x: (x * 0).sum() / (x > 9).sum(), "its divisor holds 1 zero"),
    "sqrt": (lambda x: x.sqrt(), "the root of a negative number"),
    "rsqrt": (lambda x: x.relu().rsqrt(), "1 / 0: it was given"),
    "reciprocal": (lambda x: x.relu().reciprocal(), "1 / 0: it was given"),
    "exp": (lambda x: (x * 900).exp(), "an exponential beyond"),
    "pow": (lambda x: x.relu() ** -1, "0 to the power of -1"),
    "p log p": (lambda x: (lambda p: p * p.log())(x.relu()), "0 times inf is nan"),
    "inf - inf": (lambda x: (x * 900).exp() - (x * 900).exp(), "inf minus inf is nan"),
    "std of one": (lambda x: x[:1].std(0), "a statistic over too few values"),
    "empty": (lambda x: x[:0].mean(), "a mean over no value"),
}
ON_THE_WAY: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "-sum / 4": lambda x: -x.sum() / 4,
    "view": lambda x: x.reshape(-1).mean(),
    "with a part that is finite": lambda x: x.mean() + torch.ones((), dtype=x.dtype, requires_grad=True) * 2,
    "weighted": lambda x: (x * torch.full_like(x, 0.5)).mean() * 3,
}


# float16 makes inf of finite sums too, so that a mean that is not kept is not proven to be the first
PROVEN = [case for case in itertools.product(MADE, ON_THE_WAY, DTYPES) if case[::2] != ("empty", torch.float16)]


@pytest.mark.filterwarnings("ignore:std")
@each("name, way, dtype", PROVEN)
@pytest.mark.slow
def test_the_operation_is_named_with_why(name: str, way: str, dtype: torch.dtype) -> None:
    make, how = MADE[name]

    made = made_the_loss(ON_THE_WAY[way](make(logits(dtype))))

    assert made is not None
    assert how in made.how, made
    assert not made.op.startswith("what"), made


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "weighted": lambda x, y: (x * y).mean(),
    "offset": lambda x, y: (x - y).mean(),
    "kl": lambda x, y: (torch.softmax(y.nan_to_num(), -1) * (y - x.log_softmax(-1))).sum(-1).mean(),
}


@each("name, bad, dtype", itertools.product(LOSSES, BAD, DTYPES[:2]))
def test_a_target_that_is_bad_is_not_blamed_on_the_operation(name: str, bad: float, dtype: torch.dtype) -> None:
    target = torch.ones(4, 5, dtype=dtype)
    target[1, 2] = bad

    loss = LOSSES[name](logits(dtype), target)
    made = made_the_loss(loss)

    if not bool(torch.isfinite(loss)):
        assert made is not None
        assert made.op.startswith("what ") or made.op.endswith("before it"), made


@each("dtype", DTYPES)
def test_a_mean_over_no_target_is_told_as_one(dtype: torch.dtype) -> None:
    made = made_the_loss(F.cross_entropy(logits(dtype), torch.full((4,), -100)))

    assert made is not None
    assert (made.op, made.how[:21]) == ("nll_loss", "a mean over no target")


def test_a_masked_action_minus_itself_is_the_subtraction_and_not_the_mask() -> None:
    x = logits(torch.float32).masked_fill(torch.tensor([False, False, True, False, False]), float("-inf"))
    likelihood = x.log_softmax(-1).gather(-1, torch.full((4, 1), 2))[:, 0]

    made = made_the_loss((likelihood - likelihood.detach()).exp().clamp(0.8, 1.2).mean())

    assert made is not None
    assert made.op == "sub or what it was given"
    assert made.how.startswith("it was given 4 -inf of 4")


class Program:
    """Operations drawn by chance, with what each of them made of finite operands."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        x = torch.randn(3, 4).to(dtype).requires_grad_() * draw.choice((1, 100))
        constant = torch.randn(3, 4).to(dtype).relu()
        if draw.random() < 0.4:
            constant[0, 0] = draw.choice(BAD)
        self.pool, self.makers = [x, x.relu(), constant], set()
        for _ in range(draw.randint(2, 8)):
            self._add(draw)
        self.loss = sum((each.mean() for each in self.pool[3:]), torch.zeros((), dtype=dtype))

    def _add(self, draw: random.Random) -> None:
        name = draw.choice(
            ("log", "exp", "sqrt", "div", "mul", "sub", "add", "neg", "sigmoid", "softmax", "clamp", "sum")
        )
        one, other = draw.choice(self.pool), draw.choice(self.pool)
        given = [one, other] if name in ("div", "mul", "sub", "add") else [one]
        more: tuple[Any, ...] = {"softmax": (-1,), "clamp": (0.0,), "sum": (1, True)}.get(name, ())
        result = getattr(torch, name)(*given, *more)
        result = result if result.shape == (3, 4) else result * torch.ones(3, 4, dtype=result.dtype)
        if bool(torch.isfinite(result).all()) is False and all(bool(torch.isfinite(each).all()) for each in given):
            self.makers.add(name)
        inf_to_nan = bool(result.isnan().any()) and not any(bool(each.isnan().any()) for each in given)
        if inf_to_nan:
            self.makers.add(name)
        self.pool.append(result)


@each("seed, dtype", itertools.product(range(30), (torch.float32, torch.float16)))
def test_of_any_program_the_operation_that_is_named_did_make_it(seed: int, dtype: torch.dtype) -> None:
    program = Program(seed, dtype)
    if bool(torch.isfinite(program.loss)) or program.loss.grad_fn is None:
        return

    made = made_the_loss(program.loss)

    if made is not None and not made.op.startswith("what ") and " or " not in made.op:
        assert made.op in program.makers, made


def test_what_a_checkpoint_would_compute_again_is_not_read() -> None:
    calls = []

    def part(x: Tensor) -> Tensor:
        calls.append(1)
        return x.relu().log()

    loss = checkpoint(part, logits(torch.float32), use_reentrant=False).mean()  # type: ignore[no-untyped-call]

    made_the_loss(loss)

    assert len(calls) == 1


def test_nothing_is_read_that_is_large_freed_or_has_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = logits(torch.float32).relu().log().mean()
    freed.backward()
    assert made_the_loss(torch.tensor(float("nan"))) is None
    assert (made := made_the_loss(freed)) is None or made.op.endswith("before it")

    monkeypatch.setattr(graph_nodes, "MAX_TENSOR_BYTES", 8)
    assert (made := made_the_loss(logits(torch.float32).relu().log().mean())) is None or made.op.endswith("before it")


def bytes_computed_again(loss: Tensor, patch: pytest.MonkeyPatch) -> int:
    """The bytes of all results that reading a loss's graph computes."""
    made = []

    def noting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noted(*given: Any) -> Tensor:
            made.append(result := function(*given))
            return result

        return noted

    for kind, function in graph_nodes.AGAIN.items():
        patch.setitem(graph_nodes.AGAIN, kind, noting(function))
    made_the_loss(loss)
    return sum(each.nbytes for each in made)


def chain(length: int) -> Tensor:
    h = torch.ones(1000, requires_grad=True) * 1
    for _ in range(length):
        h = h + h * 0
    return (h * torch.tensor(float("nan"))).sum()


def outer() -> Tensor:
    one, other = torch.ones(1000, 1, requires_grad=True) * 1, torch.ones(1, 1000, requires_grad=True) * 1
    return ((one + other) * torch.tensor(float("nan"))).sum()


@each("make", [lambda: chain(5), lambda: chain(9), outer])
def test_what_is_computed_again_is_bounded(make: Callable[[], Tensor]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_graph, "MAX_TENSOR_BYTES", 100_000)
        patch.setattr(loss_graph, "MAX_COMPUTED_BYTES", 8_000)
        assert bytes_computed_again(make(), patch) <= 8_000


def test_a_walk_that_takes_too_long_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_graph, "MAX_SECONDS", -1.0, raising=False)

    assert made_the_loss(logits(torch.float32).relu().log().mean()) is None


def test_the_gradients_are_what_they_are_without_the_look() -> None:
    def gradient(look: bool) -> Tensor:
        x = torch.tensor([0.0, 1.0], requires_grad=True)
        loss = (x.log() * x).sum()
        if look:
            made_the_loss(loss)
        loss.backward()
        return x.grad  # type: ignore[return-value]

    assert torch.equal(
        gradient(True),
        gradient(False),
    ) or bool(gradient(True).isnan().eq(gradient(False).isnan()).all())


def test_lines_are_noted_only_between_forward_and_backward_and_a_scripts_own_switch_is_left() -> None:
    LossLines.begin()
    made = made_the_loss(logits(torch.float32).relu().log().mean())
    LossLines.end()
    after = made_the_loss(logits(torch.float32).relu().log().mean())

    assert not torch.is_anomaly_enabled()
    assert made is not None and "made = made_the_loss" in made.line
    assert after is not None and after.line == ""
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        LossLines.begin()
        LossLines.end()
        assert torch.is_anomaly_enabled()


def nan_gradient() -> Tensor:
    """A finite loss whose gradient is nan."""
    return (torch.zeros(2, requires_grad=True).sqrt() * 0).sum()


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected")
@each("times", [1, 3])
def test_anomaly_mode_that_the_script_sets_around_its_backward_finds_its_nan_and_is_over_after_it(times: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossLines, "left_to_script", False, raising=False)
        for _ in range(times):
            LossLines.end()  # a forward begins
            assert not torch.is_anomaly_enabled()
            loss = nan_gradient()
            LossLines.begin()
            with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="returned nan"):
                LossLines.end()
                loss.backward()
        LossLines.end()  # the step is over

        assert not torch.is_anomaly_enabled()
        LossLines.begin()
        assert not torch.is_anomaly_enabled(), "a script that uses it by itself is left alone from then on"
        assert not LossLines.is_on
