"""Hooks on every module of a model: a module goes in, a BatchRecord per call of the whole model comes out, which gives frames.

Never changes a tensor, never returns anything to torch, and never waits for a GPU while the model runs. Inside a compiled graph an
operator that is part of the graph measures, without a break: less is known then, all calls of a step are merged, and inputs are not
measured.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from dsdoctor.overflow.frames.frame import FORMATS, CallPhase, Frame, Other, TensorStats
from dsdoctor.overflow.measure.measure import blank, blank_, scan_into, settled
from dsdoctor.overflow.measure.readings import Items, Meters, Readings, note, stats_of, tensors_of

MAX_OUTPUTS = 4
"""Outputs of a module that have a row."""
KINDS = tuple(form.name for form in FORMATS)
_CODES = {getattr(torch, name): number for number, name in enumerate(KINDS, start=1) if hasattr(torch, name)}
_INPUT = tuple(f"input[{place}]" for place in range(64))
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs now, or -1. A forward inside a backward recomputes activations (checkpointing)."""
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_tracing: Callable[[], object] = torch._C._get_tracing_state
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", lambda: False)


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a training is: the optimizer step and the micro-batch within it, both from 0; the stage of a pipeline."""

    step: int = 0
    micro: int = 0
    stage: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModulePlace:
    """A module of the model: its name, its class, and whether it has no children."""

    name: str
    kind: str
    leaf: bool


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: which, for which time, and what was seen. ``items``: names with readings or words."""

    index: int
    call: int
    items: Items
    phase: CallPhase = CallPhase.FORWARD
    raised: bool = False
    after: tuple[int, ...] = ()


@dataclass(kw_only=True)
class BatchRecord:
    """What was recorded during one call of the whole model, and during its backward."""

    batch: int
    position: Position
    training: bool
    rank: int
    places: tuple[ModulePlace, ...]
    readings: Readings
    calls: list[ModuleCall] = field(default_factory=list)
    graded: dict[int, tuple[weakref.ref[Tensor], list[int]]] = field(default_factory=dict)
    graded_handles: list[RemovableHandle] = field(default_factory=list)
    gradient_readings: Readings | None = None
    """Of the gradients, where those of the forward are settled before; None: both are in ``readings``."""

    def settle_forward(self) -> None:
        """Bring the figures of the forward to the host; gradients that come later are still seen."""
        self.readings.settle()

    def settle(self) -> None:
        """Bring the figures to the host: at most one wait per device. Gradients that come later are not seen."""
        for handle in self.graded_handles:
            handle.remove()
        self.graded_handles, self.graded = [], {}
        self.readings.settle()
        if self.gradient_readings is not None:
            self.gradient_readings.settle()

    def frames(self) -> Iterator[Frame]:
        """The frames in the order in which the calls ended: after ``settle_forward`` those of the forward, after ``settle`` all."""
        with_gradients = self.gradient_readings is None or self.gradient_readings.is_settled
        for order, call in enumerate(self.calls):
            if with_gradients or call.phase is CallPhase.FORWARD:
                yield self._frame(order, call)

    def _frame(self, order: int, call: ModuleCall) -> Frame:
        place = self.places[call.index]
        readings = self.readings if call.phase is CallPhase.FORWARD else self.gradient_readings or self.readings
        return Frame(
            batch=self.batch,
            step=self.position.step,
            micro=self.position.micro,
            stage=self.position.stage,
            rank=self.rank,
            order=order,
            module=place.name,
            kind=place.kind,
            leaf=place.leaf,
            call=call.call,
            phase=call.phase,
            training=self.training,
            raised=call.raised,
            after=tuple(self.places[index].name for index in call.after),
            tensors=tuple(
                Other(name=name, what=what) if isinstance(what, str) else readings.stats(what, name)
                for name, what in call.items
            ),
        )


class CompiledRows:
    """Rows for the outputs of ``modules`` modules on a device. ``kinds`` [rows, 2]: the dtype's number and the elements."""

    def __init__(self, modules: int, device: torch.device) -> None:
        self._ring = blank(modules * MAX_OUTPUTS, device)
        self._kinds = torch.zeros(modules * MAX_OUTPUTS, 2, dtype=torch.int64)
        self._modules = modules

    def look(self, index: int, output: Any) -> None:
        """Measure the outputs of a module. This is what the compiler traces: plain loops, constant rows."""
        if index >= self._modules:
            return
        if isinstance(output, Tensor):
            parts = [output]
        elif isinstance(output, Mapping):
            parts = list(output.values())
        elif isinstance(output, (tuple, list)):
            parts = list(output)
        else:
            parts = []
        for place, part in enumerate(parts[:MAX_OUTPUTS]):
            if isinstance(part, Tensor) and part.dtype.is_floating_point:
                row = index * MAX_OUTPUTS + place
                scan_into(self._ring, row, part)
                torch.ops.dsdoctor.note_kind(part.detach(), self._kinds, row)

    def read(self) -> dict[int, list[TensorStats]]:
        """What was measured since the last time, by module. One wait."""
        rows = settled(self._ring).tolist()
        found: dict[int, list[TensorStats]] = {}
        for row, (code, count) in enumerate(self._kinds.tolist()):
            if code:
                index, place = divmod(row, MAX_OUTPUTS)
                stats = stats_of(
                    rows[row],
                    name=f"output[{place}]",
                    dtype=KINDS[code - 1],
                    shape=(count,),
                    device=str(self._ring.device),
                )
                found.setdefault(index, []).append(stats)
        blank_(self._ring)
        self._kinds.zero_()
        return found


def _note_kind(tensor: Tensor, kinds: Tensor, row: int) -> None:
    kinds[row, 0] = _CODES.get(tensor.dtype, 0)
    kinds[row, 1] = tensor.numel()


def _note_nothing(tensor: Tensor, kinds: Tensor, row: int) -> None:
    """What a compiler that traces with fake tensors runs."""


# The plain form of torch.library.custom_op, which makes Python forget the warnings that it has shown once.
_LIBRARY = torch.library.Library("dsdoctor", "FRAGMENT")
_LIBRARY.define("note_kind(Tensor tensor, Tensor(a!) kinds, int row) -> ()")
_LIBRARY.impl("note_kind", _note_kind, "CompositeExplicitAutograd")
# before torch 2.4 it is called impl_abstract
_REGISTER_FAKE = getattr(torch.library, "register_fake", None) or torch.library.impl_abstract
_REGISTER_FAKE("dsdoctor::note_kind", _note_nothing, lib=_LIBRARY)


@contextlib.contextmanager
def outside_modes() -> Iterator[None]:
    """Without the script's TorchDispatchModes and TorchFunctionModes: what is done inside is not counted or changed by them.

    The default device, which is such a mode, stays: a module that is replayed makes its tensors there.
    """
    if not (_dispatch_modes() or _function_modes()):
        yield
        return
    functions = [_pop_mode() for _ in range(_function_modes())][::-1]
    devices = [mode for mode in functions if isinstance(mode, DeviceContext)]
    try:
        with _disable_current_modes():
            _push_modes(devices)
            try:
                yield
            finally:
                for _ in devices:
                    _pop_mode()
    finally:
        _push_modes(functions)


def _push_modes(modes: list[Any]) -> None:
    for mode in modes:
        _push_mode(mode)


class Hook:
    """Calls ``function``, and has its name. A copy of it, or one that was pickled, calls nothing: copies of a model are not
    watched."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.__name__ = "hook"
        functools.update_wrapper(self, function, updated=())
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (_dispatch_modes() or _function_modes()):
            self.function(*args, **kwargs)
        else:
            with outside_modes():
                self.function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook(nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)


def nothing(*_: Any, **__: Any) -> None:
    """What the hook of a copy does."""


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """A function that calls a method as long as its object is there."""
    held = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (here := held()) is not None:
            here(*args)

    return call


class Hooks:
    """Hooks on the modules of ``model`` whose names pass the globs; ``on_record`` gets the record when a forward is over.

    ``gradients``: also gradients of activations and parameters, which are added to the record after ``on_record``. ``integers``:
    also the extremes of whole numbers, as the guide prints them. ``compiled_on``: the device of a model that may be
    compiled later, whose outputs ``compiled_frames`` gives. ``position`` says which step and micro-batch it is, ``wanted``
    whether a batch is to be recorded, ``paused`` whether a call of the model is a replay and no batch. ``readings`` makes
    the readings of a batch. ``parts_end``: an outermost call of a part, while the model itself is not called, is a batch too;
    called with the part's output after ``on_record``. ``gradients_apart``: gradients have readings of their own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_record: Callable[[BatchRecord], None],
        position: Callable[[], Position] = Position,
        wanted: Callable[[int], bool] = lambda _batch: True,
        paused: Callable[[], bool] = lambda: False,
        include: tuple[str, ...] = (),
        exclude: tuple[str, ...] = (),
        gradients: bool = False,
        integers: bool = False,
        rank: int = 0,
        compiled_on: torch.device | None = None,
        readings: Callable[[Meters], Readings] | None = None,
        parts_end: Callable[[Any], None] | None = None,
        gradients_apart: bool = False,
    ) -> None:
        self.model = model
        self.batch = 0
        self.record: BatchRecord | None = None
        self._on_record, self._position, self._wanted, self._paused = on_record, position, wanted, paused
        self._rank = rank
        self._include, self._exclude = include, exclude
        self._gradients = gradients
        self._meters = Meters()
        self._make_readings = readings or functools.partial(Readings, integers=integers)
        self._places: list[ModulePlace] = []
        self._counts: list[int] = []
        self._before: dict[int, Items] = {}
        self._is_open = False
        self._handles: list[RemovableHandle] = []
        self._hooked: dict[nn.Module, int] = {}
        self._grown = True
        self._parts_end, self._gradients_apart = parts_end, gradients_apart
        self._part_depth = 0
        self._add_modules()
        self._compiled = None if compiled_on is None else CompiledRows(len(self._places), compiled_on)
        self._handles.append(model.register_forward_pre_hook(Hook(self._root_starts), with_kwargs=True))
        self._handles.append(model.register_forward_hook(Hook(self._root_ends), with_kwargs=True, always_call=True))
        # torch keeps this one in a list of its own, which must not hold the model that the script has dropped
        handle = register_module_module_registration_hook(_weakly(self._tree_grows))
        self._handles.append(handle)
        weakref.finalize(self, handle.remove)

    @property
    def nothing(self) -> bool:
        """Whether no module passes the globs."""
        return not self._places

    def detach(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.record = None

    def compiled_frames(self) -> list[Frame]:
        """What compiled modules gave since the last time, all calls merged, children before the module that holds them."""
        if self._compiled is None:
            return []
        where, rank = self._position(), self._rank
        return [
            Frame(
                batch=self.batch,
                step=where.step,
                rank=rank,
                stage=where.stage,
                order=order,
                module=place.name,
                kind=place.kind,
                leaf=place.leaf,
                tensors=tuple(stats),
            )
            for order, (place, stats) in enumerate(self._in_order_of_calls(self._compiled.read()))
        ]

    def _in_order_of_calls(self, found: dict[int, list[TensorStats]]) -> list[tuple[ModulePlace, list[TensorStats]]]:
        """Modules in the order of their definition, each after all that it holds."""
        last = {place.name: index for index, place in enumerate(self._places)}
        for index, place in enumerate(self._places):
            parts = place.name.split(".")
            for above in ("", *(".".join(parts[:depth]) for depth in range(1, len(parts)))):
                last[above] = max(last.get(above, 0), index)
        ordered = sorted(found.items(), key=lambda pair: (last[self._places[pair[0]].name], -pair[0]))
        return [(self._places[index], stats) for index, stats in ordered]

    # -- which modules

    def _tree_grows(self, *_: Any) -> None:
        self._grown = True

    def _add_modules(self) -> None:
        """Hook the modules that have none yet: the model may have grown, by an adapter for instance."""
        self._grown = False
        for name, module in self.model.named_modules():
            included = not self._include or any(fnmatchcase(name, glob) for glob in self._include)
            if module in self._hooked or not included or any(fnmatchcase(name, glob) for glob in self._exclude):
                continue
            index = self._hooked[module] = len(self._places)
            leaf = next(module.children(), None) is None
            self._places.append(ModulePlace(name=name, kind=type(module).__name__, leaf=leaf))
            self._counts.append(0)
            hook = Hook(self._after_forward(index))
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True))
            if self._parts_end is not None and module is not self.model:
                starts, ends = Hook(self._part_starts), Hook(self._part_ends)
                self._handles.append(module.register_forward_pre_hook(starts, with_kwargs=True))
                self._handles.append(module.register_forward_hook(ends, with_kwargs=True, always_call=True))
            if getattr(module, "inplace", False) is True:
                self._handles.append(
                    module.register_forward_pre_hook(Hook(self._before_in_place(index)), with_kwargs=True)
                )

    # -- a batch begins and ends

    def _root_starts(self, *_: Any) -> None:
        # what torch.jit.trace writes down is the script's program, and none of our operations
        if torch.compiler.is_compiling() or _tracing() is not None or _graph_task() != -1 or self._paused():
            return
        # a forward that was interrupted (Ctrl-C) never ended: its record, if one is open, is replaced
        self._is_open = True
        self._part_depth = 0
        if self._grown:
            self._add_modules()
        self.record = self._new_record() if self._wanted(self.batch) else None

    def _new_record(self) -> BatchRecord:
        self._counts = [0] * len(self._places)
        self._before = {}
        return BatchRecord(
            batch=self.batch,
            position=self._position(),
            training=self.model.training,
            rank=self._rank,
            places=tuple(self._places),
            readings=self._make_readings(self._meters),
            gradient_readings=self._make_readings(self._meters) if self._gradients_apart else None,
        )

    def _root_ends(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or _graph_task() != -1 or not self._is_open:
            return
        self._is_open = False
        record, self.record = self.record, None
        self.batch += 1
        if record is not None:
            self._on_record(record)

    # -- a part of the model is called by itself

    def _part_starts(self, *_: Any) -> None:
        if self._part_depth == 0 and self._is_open:
            return
        if torch.compiler.is_compiling() or _tracing() is not None or _graph_task() != -1 or self._paused():
            return
        if self._part_depth == 0:
            self._root_starts()
        self._part_depth += 1

    def _part_ends(self, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        if self._part_depth == 0 or torch.compiler.is_compiling() or _graph_task() != -1:
            return
        self._part_depth -= 1
        if self._part_depth == 0:
            self._root_ends()
            if self._parts_end is not None:
                self._parts_end(output)

    # -- a module was called

    def _before_in_place(self, index: int) -> Callable[..., None]:
        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            record = None if torch.compiler.is_compiling() else self.record
            if record is not None and _graph_task() == -1:
                self._before[index] = self._inputs(record, args, kwargs)

        return before

    def _after_forward(self, index: int) -> Callable[..., None]:
        """The hook of one module. It runs for every call of every module, so it does as little as possible."""

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if torch.compiler.is_compiling():
                # a program that torch.export makes is the script's: it must load where dsdoctor is not
                if self._compiled is not None and not _is_exporting():
                    self._compiled.look(index, output)
                return
            record = self.record
            if record is None or _graph_task() != -1:
                return
            look = record.readings.look
            items: Items = [(name, look(weight)) for name, weight in module._parameters.items() if weight is not None]
            items += self._before.pop(index) if index in self._before else self._inputs(record, args, kwargs)
            raised = output is None and sys.exc_info()[0] is not None
            if type(output) is Tensor:
                items.append(("output", look(output)))
            elif not raised:
                note(items, "output", output, look)
            count = self._counts[index]
            self._counts[index] = count + 1
            record.calls.append(ModuleCall(index, count, items, CallPhase.FORWARD, raised))
            if self._gradients and not raised:
                self._hook_gradients(record, index, module, args, kwargs, output)

        return after

    def _inputs(self, record: BatchRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Items:
        look = record.readings.look
        items: Items = []
        for place, value in enumerate(args):
            name = _INPUT[place] if place < len(_INPUT) else f"input[{place}]"
            if type(value) is Tensor:
                items.append((name, look(value)))
            else:
                note(items, name, value, look)
        for key, value in kwargs.items():
            if isinstance(value, Tensor):
                items.append((f"input[{key}]", look(value)))
            elif tensors_of("", value):
                note(items, f"input[{key}]", value, look)
        return items

    # -- gradients

    def _hook_gradients(
        self,
        record: BatchRecord,
        index: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Ask for the gradients of this call's outputs, of inputs that no module made, and of its parameters."""
        for name, tensor in tensors_of("input", (*args, *kwargs.values())):
            self._hook_tensor(record, index, f"grad {name}", tensor, consumer=index)
        for name, tensor in tensors_of("output", output):
            self._hook_tensor(record, index, f"grad {name}", tensor, consumer=None)
        for name, weight in module._parameters.items():
            if weight is not None:
                self._hook_tensor(record, index, f"grad {name}", weight, consumer=None)

    def _hook_tensor(self, record: BatchRecord, index: int, name: str, tensor: Tensor, *, consumer: int | None) -> None:
        if not tensor.requires_grad:
            return
        known = record.graded.get(id(tensor))
        if known is None or known[0]() is not tensor:
            consumers: list[int] = []
            record.graded[id(tensor)] = (weakref.ref(tensor), consumers)
            self._on_gradient(record, index, name, tensor, consumers)
        else:
            consumers = known[1]
        if consumer is not None:
            consumers.append(consumer)

    def _on_gradient(self, record: BatchRecord, index: int, name: str, tensor: Tensor, consumers: list[int]) -> None:
        def seen(gradient: Tensor) -> None:
            readings = record.gradient_readings or record.readings
            if not readings.is_settled:
                what = readings.look(gradient)
                record.calls.append(ModuleCall(index, 0, [(name, what)], CallPhase.BACKWARD, False, tuple(consumers)))

        record.graded_handles.append(tensor.register_hook(Hook(seen)))
