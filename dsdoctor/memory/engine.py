"""A running DeepSpeed engine: what of it lives in memory and who holds it, and its shape for a prediction.

What counts is each storage once, however many tensors view it. A walk over Python's objects (``gc``) misses what only C++
holds: what autograd saved for the backward pass, for one. So every operation is watched as it is dispatched, and each
storage that it returns is weakly referenced: torch keeps a storage's Python object for as long as the storage lives.
What an operation allocates and frees within itself is not seen.
"""

import gc
import importlib.util
import json
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from dsdoctor.memory.calls import Call
from dsdoctor.memory.models import Layout, ModelShape, Owner, Run, ZeroSettings, parse_model

MAX_DEPTH = 5
MAX_LARGE_STORAGES = 5
BUFFER = "ZeRO's buffers of reduce_bucket_size for gradients"
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "the optimizer: fp32 copies, states, buckets"
REST = "activations and everything else"
SCRIPT = CHILD_SCRIPTS / "ask_zero_config.py"
CHILD_TIMEOUT_SECONDS = 120.0
"""For the child, at the end of a training that is lost already."""
NOT_FOR_CHILD = ("DSDOCTOR_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class LiveStorages:
    """Bytes of live storages by device, from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self._sizes: dict[int, tuple[Any, int, str]] = {}
        self._mode: Any = None

    def start(self, *, existing: bool = True) -> None:
        """Watch every operation from here on. ``existing``: count also what is there."""
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        add = self.add

        if not hasattr(TorchDispatchMode, "ignore_compile_internals"):
            return  # under any mode an older torch compiles nothing, and with fullgraph=True refuses to; marks walk instead

        class Watching(TorchDispatchMode):
            @classmethod
            def ignore_compile_internals(cls) -> bool:
                """Whether torch.compile works as without this mode; of compiled code it sees the outputs alone."""
                return True

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                for leaf in tree_leaves(result):
                    if isinstance(leaf, torch.Tensor):
                        add(leaf)
                return result

        if existing:
            for tensor in tensors_in_python():
                self.add(tensor)
        self._mode = Watching()  # type: ignore[no-untyped-call]
        self._mode.__enter__()

    def stop(self) -> None:
        """Watch no longer."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def add(self, tensor: Any) -> None:
        """Count the storage of a tensor, unless it is counted."""
        try:
            storage = tensor.untyped_storage()
            size, key = storage.nbytes(), storage._cdata
        except (NotImplementedError, RuntimeError):  # a tensor without a storage: sparse, or a subclass that has none
            return
        if size and key not in self._sizes:
            device = storage.device.type
            self._sizes[key] = (weakref.ref(storage, lambda _: self._gone(key)), size, device)
            self.now[device] = self.now.get(device, 0) + size
            self.most[device] = max(self.most.get(device, 0), self.now[device])

    def _gone(self, key: int) -> None:
        entry = self._sizes.pop(key, None)
        if entry is not None:
            self.now[entry[2]] -= entry[1]

    def mark(self) -> dict[str, int]:
        """The most bytes since the last mark; begins anew from what is alive now."""
        if self._mode is None:
            self.now = walked()
            return dict(self.now)
        most, self.most = self.most, dict(self.now)
        return most


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Bytes by holder, and the largest storages that none of them holds: their shape and type."""

    sizes: tuple[tuple[str, int], ...]
    largest: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(size for _, size in self.sizes)


def tensors_in_python() -> list[Any]:
    """Every tensor that Python knows, gradients included."""
    import torch

    found = []
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            found.append(each)
            if each.grad_fn is None and each.grad is not None:
                found.append(each.grad)
    return found


def walked() -> dict[str, int]:
    """Bytes of the storages that Python's tensors hold, by device: no operation need be watched, and autograd's are missed."""
    sizes: dict[int, tuple[str, int]] = {}
    for tensor in tensors_in_python():
        try:
            storage = tensor.untyped_storage()
            sizes[storage._cdata] = (storage.device.type, storage.nbytes())
        except (NotImplementedError, RuntimeError):
            continue
    total: dict[str, int] = {}
    for device, size in sizes.values():
        total[device] = total.get(device, 0) + size
    return total


def holders(engine: Any) -> Holders:
    """What holds the storages of this process: the device's, or those of the CPU where that is the accelerator."""
    import torch

    device = torch.device(engine.device).type
    owner: dict[int, str] = {}
    for what, tensor in _owned(engine):
        owner.setdefault(_key(tensor), what)
    sizes: dict[str, int] = {}
    rest: dict[int, tuple[str, int]] = {}
    seen: set[int] = set()
    for tensor in tensors_in_python():
        key = _key(tensor)
        if key in seen or tensor.device.type != device:
            continue
        seen.add(key)
        what, size = owner.get(key, REST), tensor.untyped_storage().nbytes()
        sizes[what] = sizes.get(what, 0) + size
        if what == REST:
            rest[key] = (f"{list(tensor.shape)} {tensor.dtype}", size)
    largest = sorted(rest.values(), key=lambda entry: -entry[1])[:MAX_LARGE_STORAGES]
    return Holders(sizes=tuple(sorted(sizes.items(), key=lambda entry: -entry[1])), largest=tuple(largest))


def settings_of(engine: Any) -> ZeroSettings:
    """What the configuration of an engine says, by the reader that asks DeepSpeed for a file's; its optimizer is the real one."""
    spec = importlib.util.spec_from_file_location("dsdoctor_zero_config", SCRIPT)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(SCRIPT)
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    settings = msgspec.convert(reader.values_of(engine._config), ZeroSettings)
    basic = getattr(engine, "basic_optimizer", None)
    if basic is None:
        return settings
    return replace(
        settings, optimizer=type(basic).__name__.lower(), torch_adam=type(basic).__module__.startswith("torch.")
    )


def shape_of(module: Any) -> ModelShape:
    """The parameters of a module, whole also where ZeRO-3 has divided them (``ds_numel``)."""
    named = list(module.named_parameters())
    numbers = {id(parameter): number for number, (_, parameter) in enumerate(named)}
    owners = []
    for name, part in module.named_modules():
        own = tuple(numbers[id(parameter)] for parameter in part.parameters(recurse=False))
        if own:
            owners.append(Owner(name=name, parameters=own))
    return ModelShape(
        parameters=tuple((name, int(getattr(p, "ds_numel", p.numel())), int(p.requires_grad)) for name, p in named),
        modules=tuple(owners),
        buffers=sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
        name=type(module).__name__,
    )


def layout_of(engine: Any) -> Layout:
    """The ranks that share the engine's parameters, and which of them this is."""
    import torch

    together = torch.device(engine.device).type == "cpu"
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    world = int(getattr(engine, "dp_world_size", 1))
    return Layout(world=world, rank=rank % world, together=together)


def followed(module: Any, call: Call, dtype: str, *, together: bool) -> tuple[ModelShape, Run] | str:
    """The model with its runs and the one that is meant, or why it could not be followed.

    ``together``: the CPU is the accelerator, whose attention with dropout makes all scores.
    """
    config = getattr(module, "config", None)
    if config is None or not type(module).__module__.startswith("transformers."):
        return (
            f"{type(module).__name__} is not a transformers model: dsdoctor memory --model FILE.py:FUNCTION follows it"
        )
    fields = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [type(module).__name__]}
    again = bool(getattr(module, "is_gradient_checkpointing", False))
    runs = [(call.batch, call.sequence, again), (call.batch, call.sequence, True)]
    runs += [(call.batch // 2, call.sequence, again)] if call.batch > 1 else []
    wish = json.dumps({"model": fields, "dtype": dtype, "runs": list(dict.fromkeys(runs))})
    answer = child_host().ask(sys.executable, "ask_model.py", wish, timeout=CHILD_TIMEOUT_SECONDS)
    try:
        shape = parse_model(parse_answer(answer, dict, "the model"))
    except UsageError as error:
        return str(error)
    first = shape.runs[0]
    if first.error:
        return first.error
    run = (shape.run_like(first, materialized=True) if together else None) or first
    return shape, run


def child_host() -> LocalHost:
    """This machine for a child that is no rank, and needs no GPU."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILD}
    return LocalHost(env={**env, "CUDA_VISIBLE_DEVICES": ""})


def _key(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return -1


def _owned(engine: Any) -> Iterator[tuple[str, Any]]:
    """Tensors with their holders; the first that is named for a storage counts."""
    own = vars(engine.optimizer) if engine.optimizer is not None else {}
    for tensor in _buffers(own):
        yield BUFFER, tensor
    for parameter in engine.module.parameters():
        yield PARAMETERS, parameter.data
        for name in ("ds_tensor", "grad", "grad_accum"):
            tensor = getattr(parameter, name, None)
            if tensor is not None:
                yield (PARAMETERS if name == "ds_tensor" else GRADIENTS), tensor
    for tensor in _inside(own, 0):
        yield OPTIMIZER, tensor


def _buffers(own: dict[str, Any]) -> Iterator[Any]:
    """The buffers into which gradients are copied until they are reduced: a list below stage 3, one tensor there."""
    buckets = own.get("ipg_buckets")
    for bucket in buckets.values() if isinstance(buckets, dict) else ():
        buffer = getattr(bucket, "buffer", None)
        yield from buffer if isinstance(buffer, list) else () if buffer is None else (buffer,)


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """The tensors in containers, and in the few objects of an optimizer that hold some."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
        if value.is_leaf and value.grad is not None:
            yield value.grad
    elif depth < MAX_DEPTH:
        for part in _parts(value):
            yield from _inside(part, depth + 1)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    named = type(value).__name__
    inner = named.endswith(("Optimizer", "Bucket", "BucketZ3", "BufferGroup")) or hasattr(value, "param_groups")
    return list(vars(value).values()) if inner and hasattr(value, "__dict__") else []
