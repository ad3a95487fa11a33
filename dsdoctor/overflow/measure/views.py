"""Which numbers of a tensor are measured: any tensor goes in, a plain strided one comes out, or None. Never communicates."""

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from dsdoctor.overflow.frames.dtypes import FORMATS, Format

# fp8 types came with different releases of torch
FORMAT_OF: dict[torch.dtype, Format] = {
    getattr(torch, form.name): form for form in FORMATS if hasattr(torch, form.name)
}
PLAIN = frozenset({Tensor, torch.nn.Parameter})
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_NO_DISPATCH = Tensor.__torch_dispatch__


def measurable(tensor: object) -> bool:
    """Whether ``Meter.scan`` would measure it: it is a tensor that has floating point or complex elements in memory."""
    return measured_view(tensor) is not None


def measured_view(tensor: object) -> Tensor | None:
    """The elements that are measured, as a plain, strided, non-empty tensor of a format in dtypes.FORMATS.

    A view, but for conjugated and negated views, which are copied. Sparse and nested tensors give their values, a DTensor
    its local part, complex numbers their real and imaginary parts (a last dimension of two). None for what is no tensor,
    empty, bool, integer, quantised, packed, and for what has no memory: meta, fake, wrapped by torch.func, not yet
    initialised.
    """
    if not isinstance(tensor, Tensor) or not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return None
    try:
        plain = _values(_unwrapped(tensor))
        if plain is None or plain.is_meta or plain.numel() == 0:
            return None
        if plain.is_complex():
            plain = torch.view_as_real(plain.resolve_conj().resolve_neg())
        if plain.is_neg():
            plain = plain.resolve_neg()
        # a tensor of torch.func raises here, a zero that was never made has no address
        return plain if plain.dtype in FORMAT_OF and plain.data_ptr() else None
    except (
        RuntimeError,
        NotImplementedError,
    ):  # wrappers of torch.func and foreign layouts have no memory that could be read
        return None


def _unwrapped(tensor: Tensor) -> Tensor | None:
    """Without its class; of the classes with a dispatch of their own only two are known to hold plain memory."""
    kind = type(tensor)
    if kind in PLAIN:
        return tensor
    if kind.__torch_dispatch__ is _NO_DISPATCH:
        return None if is_lazy(tensor) else tensor.as_subclass(Tensor)
    if kind.__name__ == "DTensor":
        local = getattr(tensor, "_local_tensor", None)  # to_local() may wait for others
        return local if isinstance(local, Tensor) and type(local) in PLAIN else None
    if tensor.layout is torch.jagged:
        values = tensor.values()
        return values if type(values) in PLAIN else None
    return None


def _values(tensor: Tensor | None) -> Tensor | None:
    """The strided tensor that holds the values."""
    if tensor is None:
        return None
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.layout in _COMPRESSED or tensor.is_nested:
        return tensor.values()
    return tensor if tensor.layout is torch.strided else None
