"""A real model in float16 whose middle has nothing left: found by its forward, replayed in float32. Without DeepSpeed."""

import torch
from torch import Tensor, nn

from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.replay import BatchRecorder
from dsdoctor.overflow.replay.underflow import has_lost_gradient, underflowed_activation
from tests.overflow.engine import Engine


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.times = nn.Linear(8, 8), Times(factor)
        self.inner, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.inner(self.times(self.first(x)))).float().mean()


def trained(factor: float) -> tuple[Engine, BatchRecorder]:
    torch.manual_seed(0)
    engine = Engine(Net(factor).half(), half=True)
    recorder = BatchRecorder(engine)
    engine(torch.randn(4, 8).half()).backward()
    return engine, recorder


def test_the_module_behind_which_nothing_is_left_is_named_with_what_float32_has_there() -> None:
    engine, recorder = trained(1e-9)

    assert has_lost_gradient(engine, Meters())
    found = underflowed_activation(engine, recorder)
    assert found is not None
    assert (found.frame.module, found.name, found.share) == ("times", "output", 1.0)
    assert 1e-10 < found.largest < 1e-8


def test_what_is_nothing_in_float32_too_is_none() -> None:
    engine, recorder = trained(0.0)

    assert has_lost_gradient(engine, Meters())
    assert underflowed_activation(engine, recorder) is None


def test_a_model_of_ordinary_values_raises_no_suspicion() -> None:
    engine, _ = trained(1.0)

    assert not has_lost_gradient(engine, Meters())
