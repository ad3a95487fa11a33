"""The methods of an engine that are shadowed: what a script sees of that."""

import sys
import traceback
from types import SimpleNamespace

import pytest
import torch

from dsdoctor.overflow.hooks.engine import EngineAdapter
from tests.overflow.engine import Engine


class Fails(Engine):
    def backward(self, loss: torch.Tensor) -> None:
        raise RuntimeError(f"in the backward of {loss.item()}")

    def load_checkpoint(self, folder: str) -> None:
        raise FileNotFoundError(folder)


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before Python 3.11 a frame that re-raises stays in the traceback"
)
def test_a_traceback_holds_no_entry_of_ours() -> None:
    engine = Fails(torch.nn.Linear(1, 1))
    engine.optimizer = SimpleNamespace()
    adapter = EngineAdapter(engine, on_decision=lambda _: None, on_backward=lambda _: None)
    shadowed = vars(engine)["backward"]
    found = []
    for call in (lambda: engine.backward(torch.ones(())), lambda: engine.load_checkpoint("nowhere")):
        with pytest.raises((RuntimeError, FileNotFoundError)) as raised:
            call()
        found.append([frame.name for frame in traceback.extract_tb(raised.value.__traceback__)])
    adapter.detach()

    assert shadowed.__wrapped__
    assert [names[-2:] for names in found] == [["<lambda>", "backward"], ["<lambda>", "load_checkpoint"]]


def test_what_the_watch_raises_itself_is_raised() -> None:
    def stop(_: torch.Tensor) -> None:
        raise KeyError("stop")

    engine = Fails(torch.nn.Linear(1, 1))
    EngineAdapter(engine, on_decision=lambda _: None, on_backward=stop)
    with pytest.raises(KeyError) as raised:
        engine.backward(torch.ones(()))

    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "stop"
