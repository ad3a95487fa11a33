"""What a replay puts back: generators, read the quick way and the exact one, and what modules hold."""

import collections
import dataclasses
import queue
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dsdoctor.overflow.replay.restore import Contents, Randomness, _pythons_place, muted
from tests.each import each

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")


def drawn() -> list[float]:
    return [random.random(), random.gauss(0, 1), random.gauss(0, 1), float(random.getrandbits(40))]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "before",
    [
        lambda: random.seed(5),
        lambda: [random.random() for _ in range(1000)],
        # the second of a pair is kept
        lambda: random.gauss(0, 1),
        lambda: random.setstate((3, (*range(1, 625), 7), None)),
    ],
)
def test_pythons_generator_goes_on_as_it_would_have(before: Callable[[], object], *, exact: bool) -> None:
    before()
    kept = Randomness(exact=exact)
    state, first = random.getstate(), drawn()
    random.seed(9)

    kept.restore()

    assert random.getstate() == state
    assert drawn() == first


def test_this_pythons_generator_is_read_from_its_memory() -> None:
    assert _pythons_place() is not None


class Slots:
    __slots__ = ("number", "within")

    def __init__(self) -> None:
        self.number, self.within = 0, [0]


@dataclasses.dataclass
class Memory:
    bank: Any
    parts: list[Any]


def add_slots(value: Slots) -> None:
    value.number += 1
    value.within.append(1)


def add_memory(value: Memory) -> None:
    value.bank += 1
    value.parts[0]["a"].append(torch.zeros(1))


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "Counter": (lambda: collections.Counter(a=2), lambda value: value.update("ab"), dict),
    "defaultdict": (lambda: collections.defaultdict(int, a=2), lambda value: value["b"] + value.pop("a"), dict),
    "deque of lists": (lambda: collections.deque([[0]], 3), lambda value: value[0].append(value.append(1)), list),
    "bytearray": (lambda: bytearray(b"a"), lambda value: value.append(1), bytes),
    "slots": (Slots, add_slots, lambda value: (value.number, list(value.within))),
    "dataclass": (
        lambda: Memory(torch.zeros(2), [{"a": []}]), add_memory, lambda value: (value.bank.tolist(), str(value.parts))
    ),
    "tensors in a list": (lambda: [torch.zeros(2)], lambda value: value[0].add_(1), str),
    "array": (lambda: np.zeros(2), lambda value: value.__iadd__(1), lambda value: value.tolist()),
    "RandomState": (lambda: np.random.RandomState(3), lambda value: value.rand(), lambda value: str(value.get_state())),
    "default_rng": (lambda: np.random.default_rng(3), lambda value: value.random(), lambda value: str(value.bit_generator.state)),
    "Random": (lambda: random.Random(3), lambda value: value.random(), lambda value: value.getstate()),
    "Generator": (torch.Generator, lambda value: torch.rand(1, generator=value), lambda value: str(value.get_state().tolist())),
}  # fmt: skip


@each("kind", list(HELD))
def test_what_a_module_holds_is_put_back_alone_and_within_something(kind: str) -> None:
    make, change, shown = HELD[kind]
    for held in (make(), kept := {"x": [make()]}):
        value = held["x"][0] if held is kept else held
        before, put_back = shown(value), Contents().of(held)
        change(value)
        assert shown(value) != before
        put_back()
        assert shown(value) == before
        assert held is not kept or kept["x"][0] is value


class Strange:
    """Its class has no name of a module, a slot is empty, and whoever asks for what it lacks runs its code."""

    __slots__ = ("empty", "number")
    __module__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.number = 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


def test_no_code_of_what_a_module_holds_is_run() -> None:
    held = {"x": Strange()}
    put_back = Contents().of(held)
    held["x"].number = 5
    put_back()

    assert held["x"].number == 0


def test_what_other_threads_go_on_with_is_let_alone() -> None:
    shared: queue.Queue[int] = queue.Queue()
    held = {"queue": shared, "lock": threading.Lock()}
    put_back = Contents().of(held)
    shared.put(1)
    put_back()

    assert shared.get_nowait() == 1


def test_a_replays_prints_go_nowhere_and_those_of_other_threads_where_they_went(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout
    with muted():
        print("twice")
        print("twice", file=sys.stderr)
        thread = threading.Thread(target=print, args=("another thread's",))
        thread.start()
        thread.join()

    assert sys.stdout is before
    assert tuple(capsys.readouterr()) == ("another thread's\n", "")
