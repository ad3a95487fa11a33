"""Hooks on real modules: what is seen, what is not counted twice, and that nothing changes."""

import copy
import functools
import gc
import io
import pickle
import re
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dsdoctor.overflow.frames.frame import CallPhase, Frame, Other, TensorStats
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hooks, Position, outside_modes
from dsdoctor.overflow.replay.replay import BatchRecorder
from tests.overflow.engine import Engine


def frames_of(model: nn.Module, *args: Any, backward: bool = False, **kwargs: Any) -> list[Frame]:
    """The frames of one call; with its backward if asked."""
    records: list[BatchRecord] = []
    hooks = Hooks(model, on_record=records.append, gradients=backward)
    output = model(*args, **kwargs)
    if backward:
        output.sum().backward()
    hooks.detach()
    return settled(records[0])


def settled(record: BatchRecord) -> list[Frame]:
    record.settle()
    return list(record.frames())


def names(frame: Frame) -> list[str]:
    return [item.name for item in frame.tensors]


class Gives(nn.Module):
    """Returns what it was given."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.make(*args, **kwargs)


@dataclass
class Output:
    logits: Tensor
    cache: Any = None


def test_each_call_is_a_frame_and_children_come_before_their_parent() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())

    assert [(frame.order, frame.module, frame.kind, frame.leaf) for frame in frames_of(model, torch.ones(1, 2))] == [
        (0, "0", "Linear", True),
        (1, "1", "ReLU", True),
        (2, "", "Sequential", False),
    ]


def test_the_figures_are_exact() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 1e-40, -3.0])

    assert frames_of(nn.Identity(), x)[0].tensors[0] == TensorStats(
        name="input[0]",
        dtype="float32",
        shape=(6,),
        count=6,
        nan=1,
        posinf=1,
        neginf=1,
        zeros=1,
        subnormal=1,
        absmin=0.0,
        absmin_nonzero=x[4].item(),
        absmax=3.0,
    )


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (lambda x: {"logits": x, "loss": x.sum()}, ["output.logits", "output.loss"]),
        (lambda x: Output(logits=x), ["output.logits", "output.cache"]),
        (lambda x: [x, x + 1], ["output[0]", "output[1]"]),
        (lambda x: (x, None, (x, "text")), ["output[0]", "output[1]", "output[2][0]", "output[2][1]"]),
        (lambda x: {"deep": [{"er": x}]}, ["output.deep[0].er"]),
        (lambda x: "text", ["output"]),
        (lambda x: {}, ["output"]),
        (lambda x: ["only", "words"], ["output"]),
    ],
)
def test_outputs_of_any_nesting_are_seen(make: Any, seen: list[str]) -> None:
    frame = frames_of(Gives(make), torch.ones(2))[0]

    assert names(frame)[1:] == seen


def test_keyword_inputs_are_seen_by_their_names() -> None:
    frame = frames_of(Gives(lambda x, *, mask, flag: x), torch.ones(2), mask=torch.zeros(2), flag=True)[0]

    assert names(frame) == ["input[0]", "input[mask]", "output"]


def test_whole_numbers_booleans_and_empty_tensors_have_no_figures() -> None:
    given = (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool), torch.ones(0), None, "text")
    frame = frames_of(Gives(lambda *_: None), *given)[0]

    assert [item.what for item in frame.tensors if isinstance(item, Other)] == [
        "int64",
        "bool",
        "float32",
        "None",
        "not a tensor",
        "None",
    ]


def test_a_tensor_that_goes_from_module_to_module_is_read_once() -> None:
    records: list[BatchRecord] = []
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    with_hooks = Hooks(model, on_record=records.append)
    model(torch.ones(4))
    with_hooks.detach()

    assert len(records[0].readings.taken) == 1


def test_memory_that_is_handed_out_again_is_another_tensor() -> None:
    model = Gives(lambda x: [float((x * n).sum()) for n in range(50)])
    chain = nn.Sequential(*(Gives(lambda x, n=n: x * 0 + n) for n in range(1, 20)))

    with torch.no_grad():
        frames = frames_of(nn.Sequential(chain, model), torch.ones(40000))

    values = [frame.outputs[0].absmax for frame in frames[:19]]
    assert values == [float(n) for n in range(1, 20)]


def test_a_big_tensor_is_known_again_by_its_storage() -> None:
    records: list[BatchRecord] = []
    model = nn.Sequential(Gives(lambda x: x.detach()), Gives(lambda x: x.detach()))
    hooks = Hooks(model, on_record=records.append)
    model(torch.ones(100_000))
    hooks.detach()

    assert len(records[0].readings.taken) == 1


def test_what_was_written_in_place_is_read_again() -> None:
    model = nn.Sequential(Gives(lambda x: x + 1), Gives(lambda x: x.mul_(5)), nn.Identity())
    frames = frames_of(model, torch.ones(2))

    assert [frame.outputs[0].absmax for frame in frames] == [2.0, 10.0, 10.0, 10.0]


def test_an_in_place_module_shows_its_input_as_it_was() -> None:
    frames = frames_of(nn.Sequential(Gives(lambda x: x * 1), nn.ReLU(inplace=True)), torch.tensor([-7.0, 1.0]))

    assert (frames[1].inputs[0].absmax, frames[1].outputs[0].absmax) == (7.0, 1.0)


def test_a_module_called_twice_counts_its_calls() -> None:
    shared = nn.Linear(2, 2)

    assert [frame.call for frame in frames_of(nn.Sequential(shared, shared), torch.ones(2)) if frame.module == "0"] == [
        0,
        1,
    ]


def test_a_module_that_is_added_later_is_seen() -> None:
    records: list[BatchRecord] = []
    model = nn.Sequential(nn.Identity())
    hooks = Hooks(model, on_record=records.append)
    model(torch.ones(1))
    model.add_module("late", nn.ReLU())
    model(torch.ones(1))
    hooks.detach()

    assert [[frame.module for frame in settled(record)] for record in records] == [["0", ""], ["0", "late", ""]]


def test_a_forward_that_raises_leaves_its_frames() -> None:
    records: list[BatchRecord] = []
    model = nn.Sequential(nn.Identity(), Gives(lambda x: x.nothing()))
    hooks = Hooks(model, on_record=records.append)
    with pytest.raises(AttributeError):
        model(torch.ones(1))
    hooks.detach()

    assert [(frame.module, frame.raised) for frame in settled(records[0])] == [("0", False), ("1", True), ("", True)]


def test_globs_choose_the_modules() -> None:
    records: list[BatchRecord] = []
    model = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Sequential(nn.Identity()))
    hooks = Hooks(model, on_record=records.append, include=("[12]*",), exclude=("2.*",))
    model(torch.ones(1))
    hooks.detach()

    assert [frame.module for frame in settled(records[0])] == ["1", "2"]


@pytest.mark.launch  # launches nothing, but torch takes seconds to import what checkpoints
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_is_not_counted(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.Sequential(nn.Linear(2, 2), Gives(lambda x: checkpoint(inner, x, use_reentrant=reentrant)))
    model[1].inner = inner
    frames = frames_of(model, torch.ones(1, 2), backward=True)

    forward = [frame.module for frame in frames if frame.phase is CallPhase.FORWARD]
    assert forward == ["0", "1.inner.0", "1.inner.1", "1.inner", "1", ""]


def test_gradients_come_in_the_order_of_the_backward_with_their_consumers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    frames = [frame for frame in frames_of(model, torch.ones(1, 2), backward=True) if frame.phase is CallPhase.BACKWARD]

    seen = [(frame.module, frame.tensors[0].name, frame.after) for frame in frames]
    assert ("1", "grad output", ()) in seen
    assert ("0", "grad output", ("1",)) in seen
    assert seen.index(("1", "grad output", ())) < seen.index(("0", "grad output", ("1",)))
    assert {name for _, name, _ in seen} == {"grad output", "grad weight", "grad bias"}


def test_nothing_changes_bit_for_bit() -> None:
    def trained(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 1)
        )
        hooks = Hooks(model, on_record=lambda record: None, gradients=True) if watched else None
        for _ in range(10):
            model(torch.randn(6, 4)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        if hooks is not None:
            hooks.detach()
        return list(model.state_dict().values())

    assert all(torch.equal(weight, other) for weight, other in zip(trained(True), trained(False), strict=True))


def test_detach_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True))
    Hooks(model, on_record=lambda record: None).detach()

    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_the_position_is_asked_when_a_batch_begins() -> None:
    records: list[BatchRecord] = []
    model = nn.Identity()
    hooks = Hooks(model, on_record=records.append, position=lambda: Position(step=4, micro=1), rank=3)
    model.eval()
    model(torch.ones(1))
    hooks.detach()
    frame = settled(records[0])[0]

    assert (frame.step, frame.micro, frame.rank, frame.batch, frame.training) == (4, 1, 3, 0, False)


def test_a_replay_is_no_batch() -> None:
    records: list[BatchRecord] = []
    replaying = False
    model = nn.Identity()
    hooks = Hooks(model, on_record=records.append, paused=lambda: replaying)
    model(torch.ones(1))
    replaying = True
    model(torch.ones(1))
    replaying = False
    model(torch.ones(1))
    hooks.detach()

    assert [record.batch for record in records] == [0, 1]


@pytest.mark.slow
def test_tensors_without_memory_are_borne() -> None:
    strange = (
        torch.ones(2, device="meta"),
        torch.ones(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.ones(2).to(torch.float8_e4m3fn),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, 3).t(),
        torch.ones(1).expand(5),
    )
    frame = frames_of(Gives(lambda *_: None), *strange)[0]

    assert len(frame.measured) == 6
    assert all(tensor.absmax == 1.0 for tensor in frame.measured)


def test_a_model_that_the_script_drops_is_not_kept() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    model_hooks = Hooks(model, on_record=lambda record: None)
    held = weakref.ref(model)
    del model, model_hooks
    gc.collect()

    assert held() is None
    nn.Sequential(nn.Linear(1, 1))  # and a module that is made later calls nothing of it


@pytest.mark.slow
def test_the_import_leaves_the_warnings_that_were_shown_alone() -> None:
    """What begins with a ``catch_warnings`` makes Python show each of them once more."""
    script = """
import torch, torch.utils.checkpoint, warnings
def warn():
    warnings.warn("once", FutureWarning, stacklevel=1)
warn()
import dsdoctor.overflow.watch.engine
warn()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stderr.count("FutureWarning: once") == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_module_that_is_traced_holds_no_operation_of_ours() -> None:
    """torch.jit.trace writes down every operation, and warns of each tensor that becomes a number."""
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    plain = torch.jit.trace(model, torch.ones(1, 2)).graph  # type: ignore[no-untyped-call]
    records: list[BatchRecord] = []
    hooks = Hooks(model, on_record=records.append)

    traced = torch.jit.trace(model, torch.ones(1, 2))  # type: ignore[no-untyped-call]
    hooks.detach()

    graphs = [re.sub(r"___torch_mangle_\d+\.", "", str(graph)) for graph in (plain, traced.graph)]
    assert graphs[0] == graphs[1]
    assert len(records) <= 1, "what torch runs to check the trace"


class CountsFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


class CountsOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountsFunctions, CountsOperations])
def test_a_mode_of_the_script_sees_the_same_calls_with_hooks_as_without(mode: Any) -> None:
    def counted() -> Counter[str]:
        model.zero_grad()
        with mode() as here, torch.autograd.set_multithreading_enabled(False):
            model(torch.ones(2, 4)).sum().backward()
        return here.seen  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    without = counted()
    engine = Engine(model)
    recorder = BatchRecorder(engine)
    hooks = Hooks(model, on_record=lambda record: record.settle(), gradients=True)

    assert counted() == without

    assert len(recorder.batches) == 1
    hooks.detach()


def test_outside_of_modes_the_default_device_stays_and_the_modes_come_back_in_their_order() -> None:
    one, two = CountsFunctions(), CountsFunctions()
    operations = CountsOperations()
    with torch.device("meta"), one, operations, two:
        with outside_modes():
            assert torch.ones(1).is_meta
        assert _get_current_function_mode_stack()[-2:] == [one, two]
        assert torch.utils._python_dispatch._get_current_dispatch_mode() is operations
    assert not any("ones" in name for each in (one, two, operations) for name in each.seen)


def test_a_hook_has_a_name_as_a_function_has_and_a_copied_or_pickled_model_is_not_watched() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    records: list[BatchRecord] = []
    hooks = Hooks(model, on_record=records.append)
    found = [
        hook for part in model.modules() for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    ]
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for each_copy in copies:
        assert torch.equal(each_copy(torch.ones(1, 2)), model(torch.ones(1, 2)))
    hooks.detach()

    assert len(found) >= 2
    assert all(hook.__name__.isidentifier() and hook.__qualname__ and hook.__module__ for hook in found)
    assert [functools.wraps(hook)(lambda: None).__name__ for hook in found] == [hook.__name__ for hook in found]
    assert len(records) == 2, "the model itself, twice"
