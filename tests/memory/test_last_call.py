"""What is noted of an engine's calls: sizes alone."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dsdoctor.memory.calls import Call, LastCall, call_of


class Tensor:
    def __init__(self, *shape: int, floating: bool = False) -> None:
        self.shape, self.floating = shape, floating

    def is_floating_point(self) -> bool:
        return self.floating


@pytest.mark.parametrize(
    ("values", "call"),
    [
        ((Tensor(4, 96), Tensor(4, 96)), Call(batch=4, sequence=96)),
        ((Tensor(8, 3, 32, 32, floating=True), Tensor(8)), Call(batch=8, sequence=None)),
        ((Tensor(4, 128, floating=True),), Call(batch=4, sequence=None)),
        (({"input_ids": Tensor(2, 7)},), Call(batch=2, sequence=7)),
        ((None, 3, Tensor(), Tensor(5)), None),
    ],
)
def test_the_sizes_are_those_of_the_first_tensor_that_has_some(values: tuple[Any, ...], call: Call | None) -> None:
    assert call_of(values) == call


def test_the_last_call_counts_and_nothing_is_kept_alive() -> None:
    hooks: list[Callable[..., Any]] = []

    class Engine:
        def register_forward_pre_hook(self, hook: Callable[..., Any], *, with_kwargs: bool) -> None:
            assert with_kwargs
            hooks.append(hook)

    engine = Engine()
    last, tokens = LastCall(engine), Tensor(4, 96)
    hooks[0](engine, (Tensor(1, 1),), {})
    hooks[0](engine, (), {"input_ids": tokens})
    hooks[0](engine, (), {"nothing": None})
    gone = weakref.ref(tokens)
    del tokens
    gc.collect()

    assert last.call == Call(batch=4, sequence=96)
    assert gone() is None


@pytest.mark.slow
def test_a_mode_of_the_script_sees_no_read_of_the_sizes() -> None:
    torch = pytest.importorskip("torch")
    seen: list[str] = []

    class Counts(torch.overrides.TorchFunctionMode):  # type: ignore[misc, name-defined]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    engine = torch.nn.Identity()
    last = LastCall(engine)
    with Counts():
        engine(torch.zeros(4, 96, dtype=torch.long))

    assert last.call == Call(batch=4, sequence=96)
    assert not [each for each in seen if "shape" in each or "is_floating_point" in each], seen
