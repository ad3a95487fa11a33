"""The statement of a script in which its loss became bad; nothing where that does not decide."""

import types
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.overflow.watch.loss_line import BackwardCall, backward_call, loss_line


class Engine:
    """Notes who called ``backward``, and asks in ``step``, as the watch does."""

    def __init__(self) -> None:
        self.module = nn.Identity()
        self.call: BackwardCall | None = None
        self.said, self.used = "", {}

    def __call__(self) -> Tensor:
        return torch.zeros(4)

    def backward(self, loss: Tensor) -> None:
        self.call = backward_call()

    def step(self) -> None:
        assert self.call is not None
        self.said, self.used = loss_line(self.call, self)


def in_one_statement(engine: Engine) -> None:
    logits = engine()
    loss = logits.log().mean()  # here
    engine.backward(loss)
    engine.step()


def in_several_statements(engine: Engine) -> None:
    logits = engine()
    likelihood = (logits * 0).log()  # here
    with torch.no_grad():
        mean = likelihood.mean()
    loss = -mean
    loss = loss / 4
    engine.backward(loss)
    engine.step()


def in_one_line(engine: Engine) -> None:
    logits = engine()
    loss = logits.log().mean(); engine.backward(loss); engine.step()  # noqa: E702  # fmt: skip  # here


def in_a_branch(engine: Engine) -> None:
    logits = engine()
    if logits.dim() == 1:
        logits = logits.log()
        loss = logits.mean()
    else:
        loss = logits.sum()
    engine.backward(loss)
    engine.step()


def in_the_model(engine: Engine) -> None:
    loss = engine().log().mean()  # here
    engine.backward(loss)
    engine.step()


def in_the_call_of_backward(engine: Engine) -> None:
    engine.backward(engine().log().mean())  # here
    engine.step()


def of_two_bad_parts(engine: Engine) -> None:
    one = engine().log().mean()
    two = engine().log().sum()
    loss = one + two
    engine.backward(loss)
    engine.step()


@pytest.mark.parametrize("script", [in_one_statement, in_several_statements, in_one_line])
def test_the_statement_whose_own_values_are_finite_is_named(script: Callable[[Engine], None]) -> None:
    engine = Engine()

    script(engine)

    assert engine.said.endswith("# here")
    assert f" in {script.__name__}: " in engine.said


@pytest.mark.parametrize("script", [in_a_branch, of_two_bad_parts])
def test_what_does_not_decide_is_not_said(script: Callable[[Engine], None]) -> None:
    engine = Engine()

    script(engine)

    assert engine.said == ""


@pytest.mark.parametrize("script", [in_the_model, in_the_call_of_backward])
def test_a_statement_that_runs_the_model_is_named_with_that(script: Callable[[Engine], None]) -> None:
    engine = Engine()

    script(engine)

    assert engine.said.endswith("# here, which runs the model too")


def test_a_function_that_has_returned_has_no_line() -> None:
    engine = Engine()
    inner = types.FunctionType(in_one_statement.__code__, globals())
    inner(engine)

    engine.step()

    assert engine.said == ""
