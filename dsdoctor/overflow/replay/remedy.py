"""The guide's remedy as one call: run a module's forward in float32 with autocast off, whatever its weights are.

Before it is advised, the bad micro-batch is replayed with it, on all ranks together.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dsdoctor.core.errors import UsageError
from dsdoctor.overflow.frames.first_bad import BadKind, FirstBad, Tried, first_bad
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.replay.replay import BatchRecorder, began, is_not_finite, recorded, replay

Forward = TypeVar("Forward", bound=Callable[..., Any])
HALVES = (torch.float16, torch.bfloat16)
MAX_CANDIDATES = 4


class Float32Call:
    """Stands in place of a module's ``forward``. A copy of the module gets a copy of this that runs the copy.

    ``own``: the forward that the instance had of its own, None: its class's. ``wraps``: how often it was asked for.
    """

    def __init__(self, module: nn.Module, *, outermost: bool) -> None:
        self.module = module
        self.own = vars(module).get("forward")
        self.outermost = outermost
        self.wraps = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward in float32."""
        forward = self.own or functools.partial(type(self.module).forward, self.module)
        if not self.outermost:
            with _float32_weights(self.module):
                return forward(*_to_float32(args), **_to_float32(kwargs))
        half = _half_of(self.module, args, kwargs)
        with _autocast_off(args, kwargs) as was_on, _float32_weights(*_together(self.module)):
            output = forward(*_to_float32(args), **_to_float32(kwargs))
        return output if was_on else _cast_back(output, half)


class Fp32Forward:
    """Modules whose forward runs in float32. A context manager; ``remove`` undoes it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self._calls: list[Float32Call] = []
        for module in modules:
            for part in module.modules():
                self._wrap(part, outermost=part is module)

    def _wrap(self, module: nn.Module, *, outermost: bool) -> None:
        call = vars(module).get("forward")
        if isinstance(call, Float32Call):
            call.wraps += 1
            call.outermost = call.outermost or outermost
        else:
            call = Float32Call(module, outermost=outermost)
            vars(module)["forward"] = call
        self._calls.append(call)

    def remove(self) -> None:
        """Give every module its own forward back, unless another call still wants it in float32."""
        for call in self._calls:
            call.wraps -= 1
            if call.wraps == 0 and vars(call.module).get("forward") is call:
                del vars(call.module)["forward"]
                if call.own is not None:
                    vars(call.module)["forward"] = call.own
        self._calls = []

    def __enter__(self) -> "Fp32Forward":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def fp32_forward(target: Any) -> Any:
    """Run a module's forward in float32: inputs and weights are cast on the way in, autocast is off.

    ``target``: a module (from now on, or for a ``with`` block; returns an ``Fp32Forward`` that can ``remove`` it), a module
    class or a forward function (as a decorator). Weights stay what they are: float32 copies live during the call (in
    training to the backward), and gradients flow back through the cast. Works with ZeRO-3, where each part's weights are
    there only during its own call. Outside of autocast the output is cast back to the half precision that went in, so that
    the next module takes it; an output that does not fit there is inf again: then take the module around this one.
    Raises UsageError for anything else.
    """
    if isinstance(target, nn.Module):
        return Fp32Forward(_called(target))
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = _function_in_float32(target.forward)
        return target
    if callable(target) and not isinstance(target, type):
        return _function_in_float32(target)
    raise UsageError(f"fp32_forward takes a module, a module class or a function, not {target!r}")


def keep_in_fp32(model: nn.Module, names: list[str]) -> Fp32Forward:
    """Run the named modules of ``model`` in float32. Raises UsageError for a name that the model does not have."""
    if isinstance(names, str):
        raise UsageError(f"names is the text {names!r}", hint=f"a list: [{names!r}]")
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise UsageError(
                f"{type(model).__name__} has no module {name!r}", hint="use names from model.named_modules()"
            )
    # without those in others of them: "" is the whole model
    inner = [
        name
        for name in names
        if not any(name != other and (not other or name.startswith(f"{other}.")) for other in names)
    ]
    return Fp32Forward([part for name in inner for part in _called(known[name])])


def has_forward(module: nn.Module) -> bool:
    """Whether a module is one that is called: a ``ModuleList`` is not."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _called(module: nn.Module) -> list[nn.Module]:
    """The module, or what it holds if it is a list of modules."""
    return [module] if has_forward(module) else [part for child in module.children() for part in _called(child)]


def _together(module: nn.Module) -> tuple[nn.Module, ...]:
    """The modules whose weights are cast at once: all parts, which may read each other's weights; under ZeRO-3 only the
    module itself, since the others' weights are not there yet."""
    parted = any(hasattr(parameter, "ds_status") for parameter in module.parameters())
    return (module,) if parted else tuple(module.modules())


def _function_in_float32(function: Forward) -> Forward:
    """The function in float32; where its first argument is a module, with all weights of that module."""

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        modules = args[:1] if args and isinstance(args[0], nn.Module) else ()
        given = args[len(modules) :]
        half = _half_of(args[0] if modules else None, given, kwargs)
        parts = [part for module in modules for part in _together(module)]
        with _autocast_off(given, kwargs) as was_on, _float32_weights(*parts):
            output = function(*modules, *_to_float32(given), **_to_float32(kwargs))
        return output if was_on else _cast_back(output, half)

    return in_float32  # type: ignore[return-value]


@contextmanager
def _autocast_off(args: Any, kwargs: Any) -> Iterator[bool]:
    """Autocast off for the device of the inputs. Yields whether it was on."""
    device = next((tensor.device.type for tensor in _tensors(args, kwargs)), "cpu")
    was_on = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False):
        yield was_on


@contextmanager
def _float32_weights(*modules: nn.Module) -> Iterator[None]:
    """Float32 copies in place of the half-precision weights and buffers that are the modules' own.

    A tied weight gets one copy. What the forward wrote into a buffer is kept.
    """
    copies: dict[int, Tensor] = {}
    kept: list[tuple[Any, dict[str, Any], bool]] = []
    try:
        for module in modules:
            for table in (module._parameters, module._buffers):
                halves = {
                    name: weight for name, weight in table.items() if weight is not None and weight.dtype in HALVES
                }
                kept.append((table, halves, table is module._buffers))
                table.update({name: copies.setdefault(id(half), half.float()) for name, half in halves.items()})  # type: ignore[misc]
        yield
    finally:
        for table, halves, are_buffers in kept:
            if are_buffers:
                _keep_what_was_written(table, halves)
            table.update(halves)


@torch.no_grad()
def _keep_what_was_written(table: Any, halves: dict[str, Tensor]) -> None:
    for name, half in halves.items():
        now = table.get(name)
        if isinstance(now, Tensor) and now.shape == half.shape and not torch.equal(now, half.float()):
            half.copy_(now)


def _to_float32(value: Any) -> Any:
    return tree_map(lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf, value)


def _half_of(module: nn.Module | None, args: Any, kwargs: Any) -> torch.dtype | None:
    """The half precision that the caller computes in: that of the inputs, or of the weights where no input is floating."""
    floating = [tensor.dtype for tensor in _tensors(args, kwargs) if tensor.is_floating_point()]
    if not floating and module is not None:
        floating = [parameter.dtype for parameter in module.parameters()]
    return next((dtype for dtype in floating if dtype in HALVES), None)


def _cast_back(output: Any, half: torch.dtype | None) -> Any:
    """The output in the half precision that the caller computes in, if it does. A number stays: a loss that is multiplied by a
    loss scale does not fit float16."""
    if half is None:
        return output

    def back(leaf: Any) -> Any:
        is_wide = isinstance(leaf, Tensor) and leaf.dtype is torch.float32 and leaf.dim() > 0
        return leaf.to(half) if is_wide else leaf

    return tree_map(back, output)


def _tensors(*values: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, values)
    return iter(found)


def candidate_modules(model: nn.Module, found: FirstBad) -> tuple[str, ...]:
    """The modules in which float32 may help, from the inside out; the last is the whole model. A list of modules is none: it is
    never called."""
    module = found.frame.module
    parts = module.split(".") if module else []
    around = [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
    around = [name for name in around if has_forward(model.get_submodule(name))]
    if found.kind is not BadKind.MODULE:  # what made it stands in the module around the one that was given it
        around = [name for name in around if name != module]
    return (*around[: MAX_CANDIDATES - 1], "") if found.kind is not BadKind.LOSS else ("",)


def try_fp32(
    engine: Any, recorder: BatchRecorder, *, number: int, modules: Sequence[str], factor: float
) -> tuple[Tried, ...]:
    """Float32 in one module after the other, until the micro-batch ``number`` is finite on all ranks. ``factor``: for the
    gradients with which the backward begins. All ranks call it with the same arguments."""
    done = []
    for name in modules:
        attempt = _try(engine, recorder, number, name, factor)
        done.append(attempt)
        fails = not attempt.forward or attempt.backward is False
        if not ranks.any_rank(fails, engine.device):
            break
    return tuple(done)


def _try(engine: Any, recorder: BatchRecorder, number: int, name: str, factor: float) -> Tried:
    found: list[FirstBad | None] = []

    @contextmanager
    def around(_: int) -> Iterator[None]:
        # another rank's expert or layer is none of this one's
        modules = [module for place, module in engine.module.named_modules() if place == name]
        records = recorded(engine, lambda record: found.append(first_bad(record.frames())), gradients=True)
        with records, Fp32Forward(modules):
            yield

    (done,) = replay(recorder, around=around, which=(number,), factor=factor)
    bad = next((each for each in found if each is not None), None)
    forward = done.forward and bool(found) and (bad is None or bad.kind is BadKind.GRADIENT)
    starts_well = done.backward and not began(recorder.batches[number], is_not_finite)
    return Tried(
        module=name,
        forward=forward,
        backward=(bad is None) if forward and starts_well else None,
        why_not="" if done.forward else done.why_not or "nothing was measured",
    )
