"""Containers of the script whose tensors keep graphs are found by name, wherever the script has them; nothing else is."""

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.memory.failure import kept_graphs
from tests.each import each

BYTES = 4_000_000
torch_like = type(
    "Tensor",
    (),
    {"__module__": "torch", "grad_fn": None, "numel": lambda _: BYTES // 4, "element_size": lambda _: 4},
)


class Node:
    """What torch's graphs are made of."""

    def __init__(self, name: str, *below: "Node | None") -> None:
        self.called, self.next_functions = name, [(each, 0) for each in below]

    def name(self) -> str:
        return self.called


def tensor(*, graph: bool) -> Any:
    """What has the name and the attribute of torch's."""
    made = torch_like()
    made.grad_fn = object() if graph else None
    return made


SHAPES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "dict": lambda made: dict(enumerate(made)),
    "pairs": lambda made: [(number, each) for number, each in enumerate(made)],
    "dicts": lambda made: [{"loss": each} for each in made],
}


class Holder:
    """An object of the script."""

    def __init__(self, history: Any) -> None:
        self.history = history


def failure(make: Callable[[], Any], how: str) -> BaseException:
    """An exception raised in a function that has what ``make`` makes by a local name, an attribute, or of its caller."""

    def local() -> None:
        losses = make()
        raise MemoryError(len(losses))

    def attribute() -> None:
        trainer = Holder(make())
        raise MemoryError(len(trainer.history))

    def called() -> None:
        outer = make()
        deeper(len(outer))

    def deeper(count: int) -> None:
        raise MemoryError(count)

    try:
        {"local": local, "attribute": attribute, "called": called}[how]()
    except MemoryError as error:
        return error
    raise AssertionError


@each("shape", SHAPES)
def test_a_container_is_found_by_its_name(shape: str) -> None:
    for how, name in (("local", "losses"), ("attribute", "trainer.history"), ("called", "outer")):
        kept = kept_graphs(failure(partial(SHAPES[shape], [tensor(graph=True) for _ in range(20)]), how).__traceback__)
        assert name in [each.name for each in kept], how
        assert {(each.place, each.count) for each in kept} == {("test_kept_graphs.py", 20)}


@each("shape", SHAPES)
def test_what_keeps_no_graph_or_few_is_not_told(shape: str) -> None:
    for made in ([tensor(graph=False) for _ in range(20)], [tensor(graph=True) for _ in range(4)], [1.0] * 20):
        assert kept_graphs(failure(partial(SHAPES[shape], made), "local").__traceback__) == ()


def test_frames_of_packages_are_not_looked_at(tmp_path: Path) -> None:
    for folder, names in (("site-packages", []), ("mine", ["losses"])):
        file = tmp_path / folder / "loop.py"
        space: dict[str, Any] = {}
        exec(compile("def fit(losses):\n    raise MemoryError(len(losses))\n", str(file), "exec"), space)
        with pytest.raises(MemoryError) as raised:
            space["fit"]([tensor(graph=True) for _ in range(20)])

        # the frame of this very test is the first
        inner = raised.value.__traceback__ and raised.value.__traceback__.tb_next
        assert [each.name for each in kept_graphs(inner)] == names


@each("shape", SHAPES)
def test_where_memory_grew_many_bytes_are_told_too(shape: str) -> None:
    held = failure(partial(SHAPES[shape], [tensor(graph=False) for _ in range(20)]), "local").__traceback__

    assert [(kept.name, kept.count, kept.size) for kept in kept_graphs(held, least=20 * BYTES)] == [
        ("losses", 0, 20 * BYTES)
    ]
    assert kept_graphs(held, least=21 * BYTES) == ()


def summed(steps: int, *, size: int, last: bool) -> Any:
    """A tensor of ``size`` numbers that is 0 + loss + loss ...; ``last``: on the right."""
    made, node = tensor(graph=True), Node("MseLossBackward0")
    for _ in range(steps):
        loss = Node("MseLossBackward0", Node("SigmoidBackward0"))
        node = Node("AddBackward0", loss, node) if last else Node("AddBackward0", node, loss)
    made.grad_fn, made.numel = node, lambda: size
    return made


@each("last", (False, True))
def test_a_running_sum_is_found_and_a_residual_network_is_not(last: bool) -> None:
    def raised(total: Any) -> BaseException:
        try:
            raise MemoryError
        except MemoryError as error:
            assert total is not None
            return error

    for steps in (3, 7, 8, 50):
        kept = kept_graphs(raised(summed(steps, size=1, last=last)).__traceback__)
        assert [(each.name, each.count, each.is_sum) for each in kept] == (
            [("total", steps, True)] if steps >= 8 else []
        )
        assert kept_graphs(raised(summed(steps, size=512, last=last)).__traceback__) == ()
        assert kept_graphs(raised(summed(steps, size=1, last=last)).__traceback__, fewest=60) == ()
