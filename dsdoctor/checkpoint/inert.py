"""What a torch file holds, as inert data: names, tensors without their values, calls that nobody made.

Types go by the names that safetensors has for them.
"""

from dataclasses import dataclass, field
from typing import Any

ITEM_SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""The bytes of an element."""
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "LongStorage": "I64",
    "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "UntypedStorage": "U8",
}  # fmt: skip
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(frozen=True)
class Name:
    """A class or a function, by its name only."""

    name: str


@dataclass(frozen=True)
class Storage:
    """Where a tensor's bytes are: an entry of the archive. ``dtype`` is "" for one that is not known, or of bytes."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True)
class Tensor:
    """A tensor without its values. ``start``: its first element in the storage. ``dtype`` is "" for one that is not known."""

    storage: Storage
    dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many elements it has."""
        return count_of(self.shape)

    @property
    def in_one_piece(self) -> bool:
        """Whether its elements follow each other in the storage, in the order of its shape."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.count == 0
            expected *= size
        return True


@dataclass(eq=False)
class Call:
    """A call that was not made, and what was to be put into its result."""

    function: str
    arguments: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)


def count_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape.

    >>> count_of((2, 3)), count_of(()), count_of((0, 5))
    (6, 1, 0)
    """
    count = 1
    for size in shape:
        count *= size
    return count


def made_of(function: str, arguments: tuple[Any, ...]) -> Any:
    """What a call stands for, where torch and DeepSpeed write data in this way; else the call itself."""
    if function == "collections.OrderedDict" and not arguments:
        return {}
    if function == "torch.Size" and len(arguments) == 1 and _is_shape(arguments[0]):
        return arguments[0]
    if function in {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"} and len(arguments) >= 4:
        return _tensor(function, arguments)
    if function == "torch._tensor._rebuild_from_type_v2" and len(arguments) >= 3 and isinstance(arguments[0], Name):
        # a tensor with attributes of its own: its builder, its class, what the builder is given
        return (
            made_of(arguments[0].name, arguments[2]) if isinstance(arguments[2], tuple) else Call(function, arguments)
        )
    if function in {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"} and arguments:
        return arguments[0]
    return Call(function, arguments)


def _tensor(function: str, arguments: tuple[Any, ...]) -> Any:
    storage, start, shape, stride = arguments[:4]
    fits = (
        isinstance(storage, Storage)
        and isinstance(start, int)
        and start >= 0
        and _is_shape(shape)
        and _is_shape(stride)
    )
    if not fits or len(shape) != len(stride):
        return Call(function, arguments)
    dtype = storage.dtype
    if function.endswith("v3"):
        given = arguments[6] if len(arguments) > 6 else None
        dtype = DTYPES.get(given.name.removeprefix("torch."), "") if isinstance(given, Name) else ""
    return Tensor(storage=storage, dtype=dtype, start=start, shape=shape, stride=stride)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(size, int) and size >= 0 for size in value)
