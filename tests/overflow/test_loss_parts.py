"""Losses of a part of what was computed: an operation whose bad elements were masked or sliced away is not blamed."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dsdoctor.overflow.watch.loss_graph import made_the_loss
from tests.each import each

SIZE = 8
Make = Callable[[Tensor, Tensor], Tensor]
MAKERS: dict[str, Make] = {
    "div": lambda x, where: x * where.logical_not() / where.logical_not(),
    "log": lambda x, where: (x - where * 9).log(),
    "sqrt": lambda x, where: (x - where * 9).sqrt(),
    "exp": lambda x, where: (x + where * 900).exp(),
    "reciprocal": lambda x, where: (x * where.logical_not()).reciprocal(),
}
"""What makes nan or inf of finite positive numbers where a mask says so, and keeps what is bad already."""
PARTS: dict[str, Make] = {
    "mask": lambda z, taken: z[taken],
    "masked_select": lambda z, taken: z.masked_select(taken),
    "index": lambda z, taken: z[taken.nonzero()[:, 0]],
    "index_select": lambda z, taken: z.index_select(0, taken.nonzero()[:, 0]),
    "gather": lambda z, taken: z.gather(0, taken.nonzero()[:, 0]),
    "slice": lambda z, taken: z[: int(taken.sum())],
    "slice from behind": lambda z, taken: z[-SIZE : int(taken.sum()) - SIZE],
    "select": lambda z, taken: z[0],
    "split": lambda z, taken: z.split(int(taken.sum()))[0],
    "where": lambda z, taken: torch.where(taken, z, torch.zeros(SIZE)),
    "where not": lambda z, taken: torch.where(~taken, torch.zeros(()), z),
    "masked_fill": lambda z, taken: z.masked_fill(~taken, 0.0),
    "nan_to_num": lambda z, taken: torch.cat([z[taken], z[~taken].nan_to_num(0, 0, 0)]),
    "max": lambda z, taken: torch.stack([z[taken].max(), z[taken].min()]),
    "all": lambda z, taken: z,
}
TAKEN = torch.arange(SIZE) < 3


def positions(*which: int) -> Tensor:
    return torch.isin(torch.arange(SIZE), torch.tensor(which))


WHERE = {"taken": (0,), "both": (0, 6), "left": (6,), "none": ()}
CASES = [case for case in itertools.product(MAKERS, WHERE, MAKERS, WHERE, PARTS) if "taken" in case or "both" in case]


def hidden(first: str, at: str, second: str, then: str, part: str) -> tuple[Tensor, set[str]]:
    """A loss over a part of what two operations gave one after the other, and those of them that made what is bad in the part."""
    x = torch.linspace(1, 2, SIZE).requires_grad_() * 1
    one = MAKERS[first](x, positions(*WHERE[at]))
    two = MAKERS[second](one, positions(*WHERE[then]))
    bad, taken = ~two.isfinite(), TAKEN if part != "all" else torch.ones(SIZE, dtype=torch.bool)
    if part == "select":
        taken = positions(0)
    made_first = ~one.isfinite() & bad & taken
    made_second = bad & one.isfinite() & taken
    of_inf = two.isnan() & one.isinf() & taken
    makers = {first} if bool(made_first.any()) else set()
    makers |= {second} if bool((made_second | of_inf).any()) else set()
    return PARTS[part](two, TAKEN).mean(), makers


@pytest.mark.slow
@each("first, at, second, then, part", CASES)
def test_what_is_named_made_an_element_that_is_in_the_loss(
    first: str, at: str, second: str, then: str, part: str
) -> None:
    loss, makers = hidden(first, at, second, then, part)

    made = None if bool(loss.isfinite()) else made_the_loss(loss)

    # a product on the way of a maker, or its subtraction, may make nan of an inf
    of_inf = {"mul", "sub", "add"}
    assert made is None or " or " in made.op or made.op in makers | of_inf, (made, makers)


NAMED = [
    (maker, part)
    for maker, part in itertools.product(("div", "log"), PARTS)
    if part not in ("nan_to_num", "max", "split")
]


@each("maker, part", NAMED)
def test_an_operation_all_of_whose_bad_elements_are_in_the_loss_is_still_named(maker: str, part: str) -> None:
    loss, _ = hidden("exp", "none", maker, "taken", part)

    made = made_the_loss(loss)

    assert made is not None
    assert made.op == maker, made


TARGET = torch.tensor([0, 1, -100])
ONE_MAKER: dict[str, Callable[[Tensor], Tensor]] = {
    "masked": lambda x: -(x.relu().log().gather(-1, torch.ones(3, 1, dtype=torch.long))).mean(),
    "nll": lambda x: torch.nn.functional.nll_loss(x.relu().log(), TARGET),
    "cross entropy": lambda x: torch.nn.functional.cross_entropy((x - 0.5).log(), TARGET),
}


@each("name", ONE_MAKER)
def test_where_all_bad_elements_are_of_one_operation_it_is_named_whichever_of_them_are_in_the_loss(name: str) -> None:
    made = made_the_loss(ONE_MAKER[name](torch.tensor([[1.0, -2.0, 0.0, 3.0]] * 3, requires_grad=True) * 1))

    assert made is not None
    assert made.op == "log" and made.how.startswith("the logarithm of"), made


def two_branches() -> Tensor:
    p, q = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True) * 1, torch.zeros(3, requires_grad=True) * 1
    return torch.where(p > 0, p.log(), q / q).mean()


def padding_and_log() -> Tensor:
    x, b = torch.tensor([1.0, 3.0, 5.0], requires_grad=True), torch.tensor([1.0, 1.0, 0.0])
    return (x * b / b - 2.5).log()[torch.tensor([True, True, False])].mean()


def ignored_row() -> Tensor:
    x, b = torch.ones(3, 4, requires_grad=True), torch.tensor([[1.0], [1.0], [0.0]])
    chances = (x * b / b - torch.tensor([[2.0], [0.0], [0.0]])).log()
    return torch.nn.functional.nll_loss(chances, torch.tensor([0, 1, -100]))


def clamped() -> Tensor:
    x = torch.tensor([0.0, 90.0], requires_grad=True) * 1
    return (x.log().clamp(max=4.0) * 1).exp().mean() + (-(x.log())).clamp(min=-9.0).mean() * 0


@each("make, innocent", [(two_branches, "log"), (padding_and_log, "div"), (ignored_row, "div"), (clamped, "exp")])
def test_what_made_other_elements_is_not_blamed(make: Callable[[], Tensor], innocent: str) -> None:
    made = made_the_loss(make())

    assert made is None or made.op != innocent, made


class Log(torch.autograd.Function):
    """A function of a script's own, with the name of one of torch's."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.abs().log()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_a_function_of_the_scripts_own_is_not_explained_as_torchs() -> None:
    made = made_the_loss(Log.apply(torch.tensor([-1.0, 0.0], requires_grad=True) * 1))  # type: ignore[no-untyped-call]

    assert made is None or ("logarithm" not in made.how and made.op != "log"), made
