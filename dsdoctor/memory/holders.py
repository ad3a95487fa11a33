"""The live storages of a rank -> bytes by what holds them: parameters, gradients, the optimizer, and the largest of the rest."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsdoctor.memory.live import tensors_in_python

DEEPEST = 5
MOST_LARGE = 5
BUFFER = "ZeRO's buffers of reduce_bucket_size for gradients"
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "the optimizer: fp32 copies, states, buckets"
REST = "activations and everything else"


@dataclass(frozen=True, kw_only=True)
class Holders:
    """Bytes by holder, and the largest storages that none of them holds: their shape and type."""

    sizes: tuple[tuple[str, int], ...]
    largest: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(size for _, size in self.sizes)


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
    largest = sorted(rest.values(), key=lambda entry: -entry[1])[:MOST_LARGE]
    return Holders(sizes=tuple(sorted(sizes.items(), key=lambda entry: -entry[1])), largest=tuple(largest))


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
    elif depth < DEEPEST:
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
