"""A running step -> bytes of the storages that are alive, now and at most since the last reading. For any device; needs torch.

What counts is each storage once, however many tensors view it. A walk over Python's objects (``gc``) misses what only C++
holds: what autograd saved for the backward pass, for one. So every operation is watched as it is dispatched, and each
storage that it returns is weakly referenced: torch keeps a storage's Python object for as long as the storage lives.
What an operation allocates and frees within itself is not seen.
"""

import gc
import weakref
from typing import Any


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

        class Watching(TorchDispatchMode):
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
        most, self.most = self.most, dict(self.now)
        return most


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
