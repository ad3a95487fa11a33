"""Hooks on every module of a model: a module goes in, a BatchRecord per call of the whole model comes out.

Never changes a tensor, never returns anything to torch, and never waits for a GPU while the model runs.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats
from dsdoctor.overflow.hooks.batch_record import BatchRecord, ModuleCall, ModulePlace, Position
from dsdoctor.overflow.hooks.compiled import CompiledRows
from dsdoctor.overflow.measure.readings import Meters, Readings
from dsdoctor.overflow.measure.tensor_paths import Items, note, tensors_of


class Hook:
    """Calls ``function``. A copy of it, or one that was pickled, calls nothing: copies of a model are not watched."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook(nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (nothing,)


def nothing(*_: Any, **__: Any) -> None:
    """What the hook of a copy does."""


_INPUT = tuple(f"input[{place}]" for place in range(64))
_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs now, or -1. A forward inside a backward recomputes activations (checkpointing)."""


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
        self._handles.append(register_module_module_registration_hook(self._tree_grows))

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
            if module in self._hooked or not self._is_wanted(name):
                continue
            index = self._hooked[module] = len(self._places)
            leaf = next(module.children(), None) is None
            self._places.append(ModulePlace(name=name, kind=type(module).__name__, leaf=leaf))
            self._counts.append(0)
            hook = Hook(self._after_forward(index))
            self._handles.append(module.register_forward_hook(hook, prepend=True, with_kwargs=True, always_call=True))
            if self._parts_end is not None and module is not self.model:
                self._hook_part(module)
            if getattr(module, "inplace", False) is True:
                self._handles.append(
                    module.register_forward_pre_hook(Hook(self._before_in_place(index)), with_kwargs=True)
                )

    def _is_wanted(self, name: str) -> bool:
        taken = not self._include or any(fnmatchcase(name, glob) for glob in self._include)
        return taken and not any(fnmatchcase(name, glob) for glob in self._exclude)

    # -- a batch begins and ends

    def _root_starts(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or _graph_task() != -1 or self._paused():
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

    def _hook_part(self, module: nn.Module) -> None:
        before, after = Hook(self._part_starts), Hook(self._part_ends)
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _part_starts(self, *_: Any) -> None:
        if self._part_depth == 0 and self._is_open:
            return
        if torch.compiler.is_compiling() or _graph_task() != -1 or self._paused():
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
                if self._compiled is not None:
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

        record.graded_handles.append(tensor.register_hook(seen))
