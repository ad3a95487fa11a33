"""The methods of an engine that are shadowed: what a script sees of that."""

import gc
import inspect
import sys
import traceback
import weakref
from types import SimpleNamespace
from typing import Any

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
    hooked = type(engine).backward
    found = []
    for call in (lambda: engine.backward(torch.ones(())), lambda: engine.load_checkpoint("nowhere")):
        with pytest.raises((RuntimeError, FileNotFoundError)) as raised:
            call()
        found.append([frame.name for frame in traceback.extract_tb(raised.value.__traceback__)])
    adapter.detach()

    assert hooked.__wrapped__
    assert [names[-2:] for names in found] == [["<lambda>", "backward"], ["<lambda>", "load_checkpoint"]]


def test_what_the_watch_raises_itself_is_raised() -> None:
    def stop(_: torch.Tensor) -> None:
        raise KeyError("stop")

    engine = Fails(torch.nn.Linear(1, 1))
    adapter = EngineAdapter(engine, on_decision=lambda _: None, on_backward=stop)
    with pytest.raises(KeyError) as raised:
        engine.backward(torch.ones(()))

    adapter.detach()

    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "stop"


class Base(Engine):
    def backward(self, loss: torch.Tensor) -> list[str]:
        return ["base"]

    def _take_model_step(self) -> None:
        return None


class Own(Base):
    def backward(self, loss: torch.Tensor) -> list[str]:
        return ["own", *super().backward(loss)]


def made(kind: type[Base], heard: list[Any]) -> tuple[Base, EngineAdapter]:
    engine = kind(torch.nn.Linear(1, 1))
    engine.optimizer = SimpleNamespace()
    return engine, EngineAdapter(engine, on_decision=lambda _: None, on_backward=lambda _: heard.append(engine))


def test_an_engine_has_no_attribute_of_ours_and_its_class_is_as_before_in_the_end() -> None:
    before = {kind: dict(vars(kind)) for kind in (Base, Own)}
    files = [inspect.getsourcefile(kind.backward) for kind in (Base, Own)]
    plain, heard = set(vars(Own(torch.nn.Linear(1, 1)))), []
    pairs = [made(kind, heard) for kind in (Base, Own, Own)]
    loss = torch.ones(())

    assert [set(vars(engine)) == plain for engine, _ in pairs] == [True] * 3
    assert [inspect.getsourcefile(kind.backward) for kind in (Base, Own)] == files
    assert str(inspect.getfullargspec(Own.backward)) == str(inspect.getfullargspec(before[Own]["backward"]))
    assert [engine.backward(loss) for engine, _ in pairs] == [["base"], ["own", "base"], ["own", "base"]]
    assert heard == [engine for engine, _ in pairs], "each once, though one calls the method of the other's class"

    pairs[1][1].detach()
    heard.clear()
    for engine, _ in pairs:
        engine.backward(loss)
    assert heard == [pairs[0][0], pairs[2][0]]
    for _, adapter in pairs:
        adapter.detach()
    assert {kind: dict(vars(kind)) for kind in (Base, Own)} == before


def test_a_method_that_a_script_puts_into_the_class_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    engine, adapter = made(Own, heard)
    inner = Own.backward
    monkeypatch.setattr(Own, "backward", lambda self, loss: ["script", *inner(self, loss)])

    assert (engine.backward(torch.ones(())), heard) == (["script", "own", "base"], [engine])
    adapter.detach()
    assert engine.backward(torch.ones(())) == ["script", "own", "base"]


def test_an_engine_that_is_dropped_is_not_kept_by_its_hooks() -> None:
    engine, adapter = made(Own, [])
    engine.dsdoctor = adapter  # type: ignore[assignment]
    gone = weakref.ref(engine)
    del engine, adapter
    gc.collect()

    assert gone() is None


class Ends(Base):
    def destroy(self) -> str:
        return "destroyed"


def test_the_end_of_an_engine_is_heard() -> None:
    engine, heard = Ends(torch.nn.Linear(1, 1)), []
    engine.optimizer = SimpleNamespace()
    adapter = EngineAdapter(engine, on_decision=lambda _: None, on_destroy=lambda: heard.append("end"))

    assert (engine.destroy(), heard) == ("destroyed", ["end"])
    adapter.detach()
    engine.destroy()
    assert heard == ["end"]
