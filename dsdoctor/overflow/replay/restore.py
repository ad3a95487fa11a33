"""Around a replay: everything in an engine, its module and the random generators that a forward or backward changes.

Snapshot on entry, put back on exit, bit for bit. And what a forward outside of ``engine.forward`` needs: no compiler,
checkpointing that autograd.grad supports, and ZeRO-3's weights gathered by all ranks together, even when one of them fails on the
way. Runs nothing itself and communicates only where weights are gathered or released.
"""

import contextlib
import ctypes
import functools
import random
import struct
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

TRACKERS = (
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron.core.tensor_parallel.random",
)
"""Modules that keep generators of their own for model-parallel dropout, with ``get_states`` and ``set_states``."""
TWISTER = struct.Struct("=624Ii")
"""numpy's ``mt19937_state``: 624 words and the position in them."""
PYTHONS = struct.Struct("=i624I")
"""CPython's ``RandomObject`` behind an object's head: the position, and 624 words."""
QUIET = {
    "reduce_ready_partitions_and_remove_grads": None,
    "process_gradients": None,
    "_update_hp_grad": None,
    "update_hook_state_and_maybe_run_epilogue": None,
    "reenter_backward_if_needed": None,
    "enter_backward": None,
    "exit_backward": None,
    "queue_post_backward_callback": True,
    "should_refresh_expected_hook_count": False,
}
"""Methods of the ZeRO optimizers that react to a gradient, and what each returns during a replay. Without this, modules that
run a backward of their own (tiled losses, leaf modules of experts) would reduce a replay's gradients."""
SILENT = {"_start_timers": None, "_stop_timers": None, "flops_profiler_enabled": False}
"""Methods of the engine that react to a forward of its module, and what each returns during a replay."""
BASES: dict[type, Any] = {
    list: list, set: set, deque: deque, bytearray: bytearray, dict: dict, OrderedDict: dict, defaultdict: dict, Counter: dict,
}  # fmt: skip
"""Containers whose content is put back, and the type that copies it."""
IMMUTABLE = frozenset(
    {int, float, complex, bool, str, bytes, tuple, frozenset, type(None), torch.dtype, torch.device, torch.Size}
)
MAX_DEPTH = 6
"""Containers and objects in each other, from a module's attribute on."""
MAX_ITEMS = 4096
"""Items of a container that are looked into."""
MAX_COPIED_BYTES = 256 << 20
"""Of tensors that modules hold within something else, and of arrays. Their buffers and tensors of their own are always copied."""
OF_OTHERS = (
    "threading",
    "queue",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "logging",
    "io",
    "torch",
    "deepspeed",
    "dsdoctor",
)
"""Packages whose objects other threads, or the training itself, go on with."""
MACHINERY = frozenset(vars(torch.nn.Module())) - {"training", "_buffers"}
COORDINATOR = "_PartitionedParameterCoordinator__"


class Randomness:
    """The states of every generator a forward may draw from: torch's on the CPU and on ``device``, Python's, numpy's,
    and the model-parallel trackers'. Never waits for a device.

    Unless ``exact``, numpy's and Python's are read from their memory. That takes 100 us less, and leaves out the second of a pair
    of normal deviates that ``numpy.random.normal`` may have kept.
    """

    __slots__ = ("_cpu", "_device", "_numpy", "_on_device", "_python", "_trackers")

    def __init__(self, device: Any = None, *, exact: bool = False) -> None:
        self._cpu = torch.default_generator.get_state()
        self._python = random.getstate() if exact else _python_state()
        self._numpy = _numpy_state(exact=exact)
        self._device = device
        self._on_device = None if device is None else device.get_rng_state()
        self._trackers = [(tracker, dict(tracker.get_states())) for tracker in _trackers()]

    def restore(self) -> None:
        """Set all generators to these states."""
        torch.default_generator.set_state(self._cpu)
        random.setstate(_as_state(*self._python) if isinstance(self._python[0], bytes) else self._python)
        if isinstance(self._numpy, bytes):
            *key, position = TWISTER.unpack(self._numpy)
            sys.modules["numpy.random"].set_state(("MT19937", key, position, 0, 0.0))
        elif self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
        if self._device is not None:
            self._device.set_rng_state(self._on_device)
        for tracker, states in self._trackers:
            tracker.set_states(dict(states))


def _python_state() -> tuple[Any, ...]:
    """A state as ``random.setstate`` takes it, or the bytes of CPython's generator and the normal deviate that it keeps."""
    place = _pythons_place()
    if place is None:
        return random.getstate()
    generator, memory = place
    return memory.raw, generator.gauss_next


@functools.cache
def _pythons_place() -> tuple[Any, Any] | None:
    """Python's generator and the memory of its words; None where they do not lie where CPython has them."""
    generator: Any = getattr(random.getstate, "__self__", None)
    head = object.__basicsize__
    is_known = type(generator) is random.Random and sys.implementation.name == "cpython"
    if not is_known or random.Random.__basicsize__ < head + PYTHONS.size:
        return None
    memory = _memory(id(generator) + head, PYTHONS.size)
    found = _as_state(memory.raw, generator.gauss_next)
    return (generator, memory) if found == generator.getstate() else None


def _memory(address: int, size: int) -> Any:
    """Bytes that are somebody else's, to be read again and again: ``raw`` copies them."""
    return (ctypes.c_char * size).from_address(address)


def _as_state(memory: bytes, deviate: float | None) -> tuple[Any, ...]:
    position, *words = PYTHONS.unpack(memory)
    return random.Random.VERSION, (*words, position), deviate


def _numpy_state(*, exact: bool) -> Any:
    """A state as ``numpy.random.set_state`` takes it, or the bytes of a Mersenne twister; ``None`` if numpy is not in use."""
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return None
    generator = numpy_random.mtrand._rand._bit_generator
    memory = None if exact else _numpys_place(generator)
    return numpy_random.get_state(legacy=False) if memory is None else memory.raw


@functools.lru_cache(maxsize=1)
def _numpys_place(generator: Any) -> Any:
    """The memory of a Mersenne twister, which lives as long as it is known here; None: it is of another kind."""
    if type(generator).__name__ != "MT19937":
        return None
    return _memory(generator.ctypes.state_address, TWISTER.size)


def _trackers() -> list[Any]:
    found = []
    for name in TRACKERS:
        tracker = getattr(sys.modules.get(name), "_CUDA_RNG_STATE_TRACKER", None)
        if tracker is not None and getattr(tracker, "states_", None):
            found.append(tracker)
    return found


def device_random(device: torch.device) -> Any:
    """The torch module that holds a device's generator, for ``Randomness``; ``None`` for the CPU, which it has anyway."""
    return None if device.type == "cpu" else torch.get_device_module(device)


@contextlib.contextmanager
def undisturbed(engine: Any) -> Iterator[None]:
    """Whatever runs inside, training goes on as if it had not: generators, buffers, plain attributes of modules, training
    flags, gradients, timers, DeepSpeed's counters. Under ZeRO-3 the weights are partitioned again (no communication)."""
    optimizer = engine.optimizer
    with contextlib.ExitStack() as stack:
        stack.callback(Randomness(device_random(engine.device), exact=True).restore)
        contents = Contents()
        for module in engine.module.modules():
            stack.callback(_attributes_of(module, contents))
        stack.callback(_gradients_of(engine.module))
        stack.callback(_values_of(getattr(engine, "tput_timer", None)))
        stack.callback(_values_of(getattr(optimizer, "_backward_hook_state", None)))
        stack.callback(_stack_of_modules())
        stack.callback(_replaced(engine, SILENT))
        stack.callback(_replaced(optimizer, QUIET))
        # first of all on the way out: hooks' counters on modules are put back after the weights are gone again
        stack.callback(release_weights, engine)
        yield


def release_weights(engine: Any) -> None:
    """ZeRO-3: partition every weight again, as an optimizer step found them. Elsewhere nothing."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    if offload is None:
        return
    leftovers = getattr(offload, "release_backward_leftovers", None)
    if leftovers is not None:
        leftovers()
    coordinator = offload.get_param_coordinator()
    if coordinator.is_record_trace():
        # DeepSpeed would take the trace of half a step for a whole one in the next step
        coordinator._invalidate_trace()
    offload.partition_all_parameters()


LACKS = object()


class Contents:
    """What the attributes of modules hold, to be put back in place: containers, tensors, arrays, generators and plain objects, and
    what is in those. What a thread, a queue or a loader of data holds belongs to others, and is let alone."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._bytes = 0

    def of(self, value: Any, depth: int = MAX_DEPTH) -> Callable[[], None]:
        """What puts the content of a value back."""
        if id(value) in self._seen or type(value) in IMMUTABLE:
            return _nothing
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            return self._of_tensor(value, nested=depth < MAX_DEPTH)
        if isinstance(value, torch.Generator | random.Random) or _module_of(value).startswith("numpy.random"):
            return _generator_content(value)
        if (base := BASES.get(type(value))) is not None:
            return self._of_container(value, base, depth)
        if _module_of(value) == "numpy" and type(value).__name__ == "ndarray":
            return self._of_array(value)
        return self._of_object(value, depth) if _is_plain_object(value, nested=depth < MAX_DEPTH) else _nothing

    def _of_tensor(self, value: Tensor, *, nested: bool) -> Callable[[], None]:
        if isinstance(value, torch.nn.Parameter) or (nested and not self._takes(value.nbytes)):
            return _nothing
        return _tensor_content(value)

    def _of_array(self, value: Any) -> Callable[[], None]:
        if value.dtype.hasobject or not value.flags.writeable or not self._takes(value.nbytes):
            return _nothing
        copy = value.copy()

        def put_back() -> None:
            value[...] = copy

        return put_back

    def _of_container(self, value: Any, base: Any, depth: int) -> Callable[[], None]:
        copy = base(value)
        within = copy.values() if base is dict else copy if base in {list, deque} else ()
        # a longer one is data, and nobody writes into each of its items in a forward
        parts = [self.of(each, depth - 1) for each in within] if depth and len(copy) <= MAX_ITEMS else []

        def put_back() -> None:
            # by the methods of its base: a Counter's own update adds
            if base is dict:
                dict.clear(value)
                dict.update(value, copy)
            elif base is set:
                value.clear()
                value.update(copy)
            else:
                base.clear(value)
                base.extend(value, copy)
            for part in parts:
                part()

        return put_back

    def _of_object(self, value: Any, depth: int) -> Callable[[], None]:
        held = _held(value, "__dict__")
        values = dict(held) if held is not None else {}
        slots = {
            name: _held(value, name)
            for kind in type(value).__mro__
            for name in _names(vars(kind).get("__slots__", ()))
            if isinstance(vars(kind).get(name), types.MemberDescriptorType) and _held(value, name, LACKS) is not LACKS
        }
        looks_into = depth > 0 and not _is_of_others(value)
        parts = [self.of(each, depth - 1) for each in (*values.values(), *slots.values()) if looks_into]

        def put_back() -> None:
            if held is not None:
                held.update(values)
            for name, each in slots.items():
                object.__setattr__(value, name, each)
            for part in parts:
                part()

        return put_back

    def _takes(self, size: int) -> bool:
        self._bytes += size
        return self._bytes <= MAX_COPIED_BYTES


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _attributes_of(module: torch.nn.Module, contents: Contents) -> Callable[[], None]:
    """Values are put back, and what they hold gets its content back too."""
    mine = vars(module)
    before = {name: value for name, value in mine.items() if name not in MACHINERY}
    buffers = dict(module._buffers)
    parts = [contents.of(value) for name, value in before.items() if name != "_buffers"]
    parts += [contents.of(value) for value in buffers.values()]

    def put_back() -> None:
        for name in [name for name in mine if name not in MACHINERY and name not in before]:
            del mine[name]
        mine.update(before)
        module._buffers.clear()
        module._buffers.update(buffers)
        for part in parts:
            part()

    return put_back


def _generator_content(value: Any) -> Callable[[], None]:
    """A generator of random numbers: torch's, Python's or numpy's."""
    if isinstance(value, torch.Generator):
        state = value.get_state()

        def set_back() -> None:
            value.set_state(state)

        return set_back
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if type(value).__name__ == "RandomState":
        legacy = value.get_state(legacy=False)
        return lambda: value.set_state(legacy)
    # numpy's newer ones draw from a bit generator, which may also stand alone
    source = getattr(value, "bit_generator", value)
    bits = getattr(source, "state", None)
    return _nothing if bits is None else lambda: setattr(source, "state", bits)


def _tensor_content(tensor: Tensor) -> Callable[[], None]:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.grad_fn is not None or tensor.is_inference():
        return _nothing
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return _nothing  # an expanded tensor cannot be written, by the replay as little as by us
    copy = tensor.detach().clone()

    def put_back() -> None:
        # batch norm writes its buffers without counting a version, and a counted one could trouble a retained graph
        with torch.no_grad(), torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
            tensor.copy_(copy)

    return put_back


def _gradients_of(module: torch.nn.Module) -> Callable[[], None]:
    """Set every ``.grad`` aside, so that a backward inside a forward cannot add to it."""
    kept = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, gradient in kept:
        if gradient is not None:
            parameter.grad = None

    def put_back() -> None:
        for parameter, gradient in kept:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    return put_back


def _values_of(thing: Any) -> Callable[[], None]:
    if thing is None:
        return _nothing
    before = dict(vars(thing))
    return lambda: vars(thing).update(before)


def _stack_of_modules() -> Callable[[], None]:
    """ZeRO-3's list of modules whose forward runs: an exception leaves them there."""
    stack = getattr(sys.modules.get("deepspeed.runtime.zero.parameter_offload"), "FWD_MODULE_STACK", None)
    return _nothing if stack is None else Contents().of(stack)


def _replaced(owner: Any, answers: dict[str, Any]) -> Callable[[], None]:
    mine = vars(owner) if hasattr(owner, "__dict__") else {}
    names = [name for name in answers if callable(getattr(type(owner), name, None))]
    before = {name: mine[name] for name in names if name in mine}
    for name in names:
        mine[name] = lambda *_, answer=answers[name], **__: answer

    def put_back() -> None:
        for name in names:
            del mine[name]
        mine.update(before)

    return put_back


def _is_plain_object(value: Any, *, nested: bool) -> bool:
    """Whether it is an object that holds values: no module, function, type or exception. ``nested``: within another value."""
    kind = type(value)
    foreign = (torch.nn.Module, type, BaseException, types.ModuleType)
    holds = _held(value, "__dict__") is not None or any("__slots__" in vars(each) for each in kind.__mro__)
    known = _module_of(value) in ("builtins", "functools") or (nested and _is_of_others(value))
    return holds and not known and not isinstance(value, foreign) and not callable(value)


def _held(value: Any, name: str, lacks: Any = None) -> Any:
    """What an object holds under a name; no ``__getattr__`` of the script's is asked for what it lacks."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return lacks


def _module_of(value: Any) -> str:
    """The module of a value's class, which a script may have set to anything."""
    return str(type(value).__module__)


def _is_of_others(value: Any) -> bool:
    return _module_of(value).partition(".")[0].lstrip("_") in OF_OTHERS


def _nothing() -> None:
    pass


class _Muted:
    """A stream that takes no words of one thread, and all of the others."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the words of another thread."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the lines of another thread."""
        for line in lines:
            self.write(line)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """What a forward prints was printed when it ran: this thread's prints go nowhere."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and _Muted(stream) for stream in before)
    ours = sys.stdout, sys.stderr
    try:
        yield
    finally:
        sys.stdout, sys.stderr = (
            old if now is mine else now for now, mine, old in zip((sys.stdout, sys.stderr), ours, before, strict=True)
        )


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules uncompiled: hooks added since would not run otherwise."""
    stance = getattr(torch.compiler, "set_stance", None)
    if stance is None or "torch._dynamo" not in sys.modules:
        yield
        return
    with stance("force_eager"):
        yield


class _Plain:
    """Replaces an autograd function that checkpoints by a backward within the backward, which autograd.grad refuses.

    torch's non-reentrant checkpointing computes the same and saves the same memory.
    """

    used = False

    def __init__(self, adapt: Callable[..., Any]) -> None:
        self.apply = adapt


@contextlib.contextmanager
def plain_checkpointing() -> Iterator[None]:
    """Reentrant activation checkpointing, torch's and DeepSpeed's, is of the non-reentrant kind inside."""
    names: dict[str, Callable[..., Any]] = {
        "torch.utils.checkpoint": _like_torch,
        "deepspeed.runtime.activation_checkpointing.checkpointing": _like_deepspeed,
    }
    with contextlib.ExitStack() as stack:
        for name, adapt in names.items():
            home: Any = sys.modules.get(name)
            original = getattr(home, "CheckpointFunction", None)
            if original is not None:
                home.CheckpointFunction = _Plain(adapt)
                stack.callback(setattr, home, "CheckpointFunction", original)
        _Plain.used = False
        yield


def _like_torch(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        # as the reentrant kind: no gradient in, no gradient out
        with torch.no_grad():
            return function(*args)
    _Plain.used = True
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)


def _like_deepspeed(function: Callable[..., Any], outputs: list[Any], *args: Any) -> Any:
    result = _like_torch(function, True, *args)
    outputs.extend([result] if isinstance(result, Tensor) else result)
    return result


@contextlib.contextmanager
def external_parameters(engine: Any) -> Iterator[None]:
    """ZeRO-3 before 0.17 marks its modules in ``engine.forward``; later ones do it in a hook of the module."""
    dictionaries: list[Any] = []
    if int(engine.zero_optimization_stage()) == 3 and not hasattr(engine, "module_forward_pre_hook"):
        mine = (module._parameters for module in engine.module.modules())
        dictionaries = [each for each in mine if hasattr(each, "_in_forward")]
    for each in dictionaries:
        each._in_forward = True
    try:
        yield
    finally:
        for each in dictionaries:
            each._in_forward = False


def release_gathered(engine: Any) -> None:
    """ZeRO-3, after each micro-batch: release weights whose last hook never ran. Elsewhere nothing."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    release = getattr(offload, "release_backward_leftovers", None)
    if release is not None:
        release()


def gathers_weights(engine: Any) -> bool:
    """ZeRO-3: modules' hooks gather weights from all ranks, in the order of the modules."""
    return hasattr(engine.optimizer, "parameter_offload")


def gathers_so_far(engine: Any) -> int | None:
    """ZeRO-3: how many modules' weights were requested since this forward began. Elsewhere ``None``."""
    offload = getattr(engine.optimizer, "parameter_offload", None)
    return None if offload is None else getattr(offload.get_param_coordinator(), COORDINATOR + "step_id", None)


def finish_gathering(engine: Any, gathers: int | None) -> bool:
    """When a forward (of ``gathers`` modules) or a backward (``None``) failed on this rank: join the gathers that the
    other ranks still do, by the trace that DeepSpeed has of a healthy step. False when they cannot be known.
    """
    if not gathers_weights(engine):
        return True
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    if not coordinator.is_complete_trace() or (gathers is None and _Plain.used):
        # checkpoints of the other kind do not follow the trace in a backward
        return False
    order = getattr(coordinator, COORDINATOR + "submodule_order")
    end = len(order) if gathers is None else gathers
    while coordinator.is_complete_trace() and (at := gathers_so_far(engine)) is not None and at < end:
        coordinator.fetch_sub_module(order[at], forward=gathers is not None)
        coordinator.release_sub_module(order[at], forward=gathers is not None)
    return True
