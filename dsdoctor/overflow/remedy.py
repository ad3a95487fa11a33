"""The guide's remedy as one call: run a module's forward in float32 with autocast off, whatever its weights are."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dsdoctor.errors import UsageError

Forward = TypeVar("Forward", bound=Callable[..., Any])
HALVES = (torch.float16, torch.bfloat16)


class Fp32Forward:
    """One or more modules whose forward runs in float32. Usable as a context manager; ``remove`` undoes it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules
        self._owners: list[nn.Module] = []
        for module in modules:
            for part in module.modules():
                self._wrap(part, outermost=part is module)

    def _wrap(self, module: nn.Module, *, outermost: bool) -> None:
        if "forward" in vars(module) and getattr(module.forward, "_dsdoctor_fp32", False):
            return
        module.forward = _in_float32(module, module.forward, cast_back=outermost)
        self._owners.append(module)

    def remove(self) -> None:
        """Give every module its own forward back."""
        for module in self._owners:
            own = module.forward.__wrapped__  # type: ignore[attr-defined]
            if getattr(own, "__self__", None) is module and getattr(type(module), "forward", None) is own.__func__:
                del module.forward
            else:
                module.forward = own
        self._owners = []

    def __enter__(self) -> "Fp32Forward":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def fp32_forward(target: Any) -> Any:
    """Run a module's forward in float32: inputs and weights are cast on the way in, autocast is off.

    ``target``: a module (from now on, or for a ``with`` block; returns an ``Fp32Forward`` that can ``remove`` it), a module
    class or a forward function (as a decorator). Weights stay what they are: a float32 copy lives during the call, and
    gradients flow back through the cast. Works with ZeRO-3, where each part's weights are there only during its own call.
    Outside of autocast the output is cast back to the half precision that went in, so that the next module takes it; an
    output that does not fit there is inf again: then take the module around this one.
    Raises UsageError for anything else.
    """
    if isinstance(target, nn.Module):
        return Fp32Forward([target])
    if isinstance(target, type) and issubclass(target, nn.Module):
        target.forward = _function_in_float32(target.forward)
        return target
    if callable(target) and not isinstance(target, type):
        return _function_in_float32(target)
    raise UsageError(f"fp32_forward takes a module, a module class or a function, not {target!r}")


def keep_in_fp32(model: nn.Module, names: list[str]) -> Fp32Forward:
    """Run the named modules of ``model`` in float32. Raises UsageError for a name that the model does not have."""
    known = dict(model.named_modules())
    for name in names:
        if name not in known:
            raise UsageError(
                f"{type(model).__name__} has no module {name!r}", hint="names as model.named_modules() gives them"
            )
    inner = [name for name in names if not any(name != other and _is_below(name, other) for other in names)]
    return Fp32Forward([known[name] for name in inner])


def _is_below(name: str, other: str) -> bool:
    return other == "" or name.startswith(f"{other}.")


def _in_float32(module: nn.Module, forward: Callable[..., Any], *, cast_back: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        half = _half_of(module, args, kwargs)
        with _autocast_off(args, kwargs) as was_on, _float32_weights(module):
            output = forward(*_to_float32(args), **_to_float32(kwargs))
        return _cast_back(output, half) if cast_back and not was_on else output

    in_float32._dsdoctor_fp32 = True  # type: ignore[attr-defined]
    in_float32.__wrapped__ = forward
    return in_float32


def _function_in_float32(function: Forward) -> Forward:
    """The function in float32; where its first argument is a module, with all weights of that module."""

    @functools.wraps(function)
    def in_float32(*args: Any, **kwargs: Any) -> Any:
        modules = args[:1] if args and isinstance(args[0], nn.Module) else ()
        given = args[len(modules) :]
        half = _half_of(args[0] if modules else None, given, kwargs)
        children = Fp32Forward([child for module in modules for child in module.children()])
        with children, _autocast_off(given, kwargs) as was_on, _float32_weights(*modules):
            output = function(*modules, *_to_float32(given), **_to_float32(kwargs))
        return output if was_on else _cast_back(output, half)

    return in_float32  # type: ignore[return-value]


@contextmanager
def _autocast_off(args: Any, kwargs: Any) -> Iterator[bool]:
    """Autocast off for the device of the inputs. Yields whether it was on."""
    device = next((one.device.type for one in _tensors(args, kwargs)), "cpu")
    was_on = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False):
        yield was_on


@contextmanager
def _float32_weights(*modules: nn.Module) -> Iterator[None]:
    """Float32 copies in place of the half-precision weights and buffers that are the modules' own."""
    kept = []
    try:
        for module in modules:
            for table in (module._parameters, module._buffers):
                halves = {name: one for name, one in table.items() if one is not None and one.dtype in HALVES}
                kept.append((table, halves))
                table.update({name: one.float() for name, one in halves.items()})  # type: ignore[misc]
        yield
    finally:
        for table, halves in kept:
            table.update(halves)  # type: ignore[arg-type]


def _to_float32(value: Any) -> Any:
    return tree_map(lambda one: one.float() if isinstance(one, Tensor) and one.dtype in HALVES else one, value)


def _half_of(module: nn.Module | None, args: Any, kwargs: Any) -> torch.dtype | None:
    """The half precision that the caller computes in: that of the inputs, or of the weights where no input is floating."""
    floating = [one.dtype for one in _tensors(args, kwargs) if one.is_floating_point()]
    if not floating and module is not None:
        floating = [one.dtype for one in module.parameters()]
    return next((dtype for dtype in floating if dtype in HALVES), None)


def _cast_back(output: Any, half: torch.dtype | None) -> Any:
    """The output in the half precision that the caller computes in, if it does."""
    if half is None:
        return output
    return tree_map(lambda one: one.to(half) if isinstance(one, Tensor) and one.dtype is torch.float32 else one, output)


def _tensors(*values: Any) -> Iterator[Tensor]:
    found: list[Tensor] = []
    tree_map(lambda one: found.append(one) if isinstance(one, Tensor) else None, values)
    return iter(found)
