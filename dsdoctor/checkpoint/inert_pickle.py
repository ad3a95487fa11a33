"""A pickle of torch as inert data: names, tensors without their values, calls that nobody made.

Its opcodes are read, never obeyed. Shared parts, depth and numbers are bounded, so that what was read may be hashed, compared and
printed whole; what goes beyond, or has an opcode that torch does not write, raises NotUnderstood.

Names alone promise nothing: numpy.ndarray makes pointers out of bytes where it is called with a type of objects. An unpickler that
obeys may be given only what is called and filled as torch, numpy, Python and DeepSpeed themselves do it, with plain data.
"""

import io
import itertools
import pickletools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

MAX_OPCODES = 5_000_000
"""A file of a thousand tensors has fifty thousand."""
MAX_VALUES = 20_000_000
"""Values, a part that is shared counted wherever it stands; sixteen characters of a text are one more."""
MAX_KEY_BITS = 63
"""Of a number that is a key."""
MAX_NESTING = 100
"""Containers in each other. What DeepSpeed writes has seven."""
MAX_WALKED = 40
"""Levels that are searched for tensors."""
MAX_INT_BITS = 4096
"""Python prints no number of more than 4300 digits. States of random generators have 128 bits."""
MAX_NAME_LENGTH = 300
MAX_DIMENSIONS = 64
"""torch's own limit."""
MAX_NUMPY_DIMENSIONS = 32
MAX_SIZE = 1 << 63
MAX_KEY_DEPTH = 20
"""Tuples in each other."""
MAX_PROTOCOL = 5
"""Of pickles that Python reads."""
# types go by the names that safetensors has for them
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
KeyPath = tuple[Any, ...]
"""The keys that lead to a value."""
TENSOR_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
FACTORIES = {
    "collections.OrderedDict",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("dict", "list", "set", "int")),
}
"""What a defaultdict may call."""
NUMBERS = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|c8|c16)")
"""numpy's types of numbers: none of them holds objects, fields or bytes of any length."""
STATE_OF_DTYPE = re.compile(r"[<>|=]")
ODDLY = "(not in its library's format)"
FIELD = re.compile(r"(?!__)\w{1,100}", re.ASCII)
OF_TORCH = {
    "data", "grad", "_grad", "real", "imag", "names", "requires_grad", "_backward_hooks", "H", "T", "mH", "mT", "_base", "_cdata",
    "_has_symbolic_sizes_strides", "_python_dispatch", "_version", "device", "dtype", "grad_fn", "itemsize", "layout", "name",
    "nbytes", "ndim", "output_nr", "retains_grad", "shape", "volatile",
}  # fmt: skip
"""Fields of a tensor that torch's own code sets, or that nobody can set; so are those that begin with is_."""
NUMPY_FUNCTION = r"numpy\.(?:core|_core)\.multiarray\."
FLOATS = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"}
WIDTHS = {
    **{name: ITEM_SIZES[dtype] for name, dtype in DTYPES.items()},
    "uint16": 2, "uint32": 4, "uint64": 8, "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip
"""Bytes of an element of each of torch's types, by torch's names."""
PLACES = re.compile(r"cpu|(?:cuda|xpu|npu|hpu|mps|mlu|sdaa|supa)(?::\d{1,3})?", re.ASCII)
"""Devices, as torch writes them with a storage."""
STAGES = ("disabled", "optimizer_states", "gradients", "weights", "max_stage")
TEXT_OPCODES = {"INT", "LONG", "FLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "PUT", "GET"}
"""Of protocols that torch.save has never written."""
PYTHON = r"(?:builtins|__builtin__)\."
ONLY_OBJECTS = (
    r"deepspeed\.runtime\.fp16\.loss_scaler\.\w{0,20}LossScaler|deepspeed\.utils\.tensor_fragment\.fragment_address"
    r"|torch\.torch_version\.TorchVersion"
)
OBJECTS = rf"{ONLY_OBJECTS}|argparse\.Namespace|types\.SimpleNamespace"
"""Classes without a constructor that could be asked: their fields are put into them."""
ZERO_STAGE = r"deepspeed\.runtime\.zero\.config\.ZeroStageEnum"
PATHS = r"pathlib\.(?:PosixPath|PurePosixPath|PureWindowsPath)"
HASHABLE = (
    rf"numpy\.dtype|{NUMPY_FUNCTION}scalar|torch\.device|{ZERO_STAGE}|{PATHS}|{PYTHON}(?:complex|bytes|frozenset)"
    r"|_codecs\.encode"
)
STORAGE_CLASSES = (
    r"torch\.(?:" + "|".join({**STORAGES, "ComplexFloatStorage": "", "ComplexDoubleStorage": ""}) + r")"
    r"|torch\.storage\.UntypedStorage"
)
LOADABLE = re.compile(
    rf"{STORAGE_CLASSES}|torch\.(?:Size|Tensor|device|{'|'.join(WIDTHS)})|torch\.nn\.parameter\.Parameter"
    r"|torch\._utils\._rebuild_(?:tensor_v[23]|parameter|parameter_with_state)|torch\._tensor\._rebuild_from_type_v2"
    r"|torch\.torch_version\.TorchVersion|collections\.(?:OrderedDict|defaultdict|deque|Counter)"
    rf"|{PYTHON}(?:set|frozenset|bytes|bytearray|complex|slice|dict|list|int|getattr)|_codecs\.encode"
    rf"|{NUMPY_FUNCTION}(?:_reconstruct|scalar)|numpy\.(?:ndarray|dtype)"
    rf"|{ZERO_STAGE}|deepspeed\.runtime\.fp16\.loss_scaler\.(?:LossScalerBase|(?:Dynamic)?LossScaler)"
    rf"|deepspeed\.utils\.tensor_fragment\.fragment_address|argparse\.Namespace|types\.SimpleNamespace|{PATHS}"
    r"|datetime\.(?:datetime|timedelta)",
    re.ASCII,
)


class OrderedItems(dict[Any, Any]):
    """An OrderedDict: the one dict that may have fields."""


class Members(list[Any]):
    """A set."""


class FrozenMembers(list[Any]):
    """A set that nothing is added to."""


class NotUnderstood(Exception):
    """A pickle that torch did not write, or one that is too large to be read here."""


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
    """A call that was not made, and what was to be put into its result. Printed by its name: its parts may lead back to it."""

    function: str
    arguments: tuple[Any, ...] = field(repr=False)
    state: Any = field(default=None, repr=False)
    items: dict[Any, Any] = field(default_factory=dict, repr=False)
    values: list[Any] = field(default_factory=list, repr=False)


def count_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape.

    >>> count_of((2, 3)), count_of(()), count_of((0, 5))
    (6, 1, 0)
    """
    count = 1
    for size in shape:
        count *= size
    return count


def is_shape(value: Any) -> bool:
    """Whether a value is the shape of a tensor that can exist."""
    return (
        isinstance(value, tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(is_int(size) and 0 <= size < MAX_SIZE for size in value)
    )


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is a number without a fraction: True is none to torch.

    >>> is_int(3), is_int(True), is_int(3.0)
    (True, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


def read_pickle(
    content: bytes,
    names: set[str] | None = None,
    *,
    built: "list[Storage | Tensor] | None" = None,
    max_opcodes: int = MAX_OPCODES,
) -> Any:
    """What a pickle would make, as inert data. Raises NotUnderstood. ``names`` takes every class and function that it names, those
    too of which nothing is left in the result, and what is called or filled in another form than its makers write. ``built`` takes
    every storage and tensor on the way.

    >>> import collections, pickle
    >>> read_pickle(pickle.dumps({"a": [1, 2.5, None], "b": collections.OrderedDict(c=(True,))}))
    {'a': [1, 2.5, None], 'b': {'c': (True,)}}
    >>> read_pickle(b"cos\\nsystem\\n(S'true'\\ntR.").function
    'os.system'
    """
    reader = _Reader(set() if names is None else names, [] if built is None else built)
    stream = io.BytesIO(content)
    try:
        for _ in range(max_opcodes):
            code = stream.read(1)
            if code not in OPCODES:
                raise NotUnderstood(
                    "its pickle has no end" if not code else "its pickle cannot be read: no such opcode"
                )
            name, read, step = OPCODES[code]
            argument = None if read is None else read(stream)
            if name == "FRAME" and int(argument or 0) > len(content) - stream.tell():
                raise NotUnderstood("its pickle has a frame that extends past its end")
            if name in TEXT_OPCODES:
                reader.names.add(f"the opcode {name} {ODDLY}")
            if name == "STOP":
                made = reader.stack[-1]
                _check_size(made)
                return made
            if step is None:
                raise NotUnderstood(f"its pickle has the opcode {name}, which torch does not write")
            step(reader, argument)
        raise NotUnderstood(f"its pickle has more than {max_opcodes:,} opcodes")
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise NotUnderstood(f"its pickle cannot be read: {type(error).__name__}: {str(error)[:100]}") from error


def tensors(content: Any) -> Iterator[tuple[KeyPath, Tensor]]:
    """Every tensor with the keys that lead to it, in the order of the file. Shared parts are walked once."""
    waiting: list[tuple[KeyPath, Any]] = [((), content)]
    seen: set[int] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Tensor):
            yield path, value
        elif isinstance(value, dict | list | tuple | Call):
            if id(value) in seen or len(path) > MAX_WALKED:
                continue
            seen.add(id(value))
            waiting.extend((path + (key,), inner) for key, inner in reversed(list(_parts(value))))


def values(content: Any) -> Iterator[Any]:
    """Every value, whatever it is, once."""
    waiting, seen = [(0, content)], set()
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, dict | list | tuple | Call):
            if id(value) in seen or depth > MAX_WALKED:
                continue
            seen.add(id(value))
            waiting.extend((depth + 1, inner) for _, inner in _parts(value))
        yield value


def at(content: Any, *path: Any) -> Any:
    """The value at a path, None where there is none.

    >>> at({"a": [{"b": 1}]}, "a", 0, "b"), at({"a": None}, "a", "b")
    (1, None)
    """
    for key in path:
        if isinstance(content, Call):
            content = content.items
        if isinstance(content, dict):
            content = content.get(key)
        elif isinstance(content, list | tuple) and isinstance(key, int) and 0 <= key < len(content):
            content = content[key]
        else:
            return None
    return content


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, Call):
        yield from enumerate((value.arguments, value.state, value.items, value.values))
    else:
        yield from enumerate(value)


def _check_size(content: Any) -> None:
    """Raise NotUnderstood for what is too large to be hashed, compared or printed: Python does that without a look at what is
    shared. A call is looked at on its own, because nothing of this goes into one."""
    sizes: dict[int, tuple[int, int]] = {}
    calls, known, total = [content], set[int](), 0
    while calls:
        call = calls.pop()
        for part in (call.arguments, call.state, call.items, call.values) if isinstance(call, Call) else (call,):
            total += _size_of(part, sizes, calls, known)
            if total > MAX_VALUES:
                raise NotUnderstood("its pickle shares its parts without end")


def _size_of(root: Any, sizes: dict[int, tuple[int, int]], calls: list[Any], known: set[int]) -> int:
    """Values in a part. ``sizes`` keeps those of all containers and how deep each is, ``calls`` takes the calls in it that are not
    ``known``."""
    # each container that is gone into: itself, what is left in it, the values so far and how deep they are
    opened: list[tuple[Any, Iterator[Any], list[int]]] = [([root], iter((root,)), [0, 0])]
    within: set[int] = set()
    while True:
        container, left, size = opened[-1]
        for value in left:
            if isinstance(value, dict | list | tuple):
                if id(value) in within or len(opened) > MAX_NESTING:
                    raise NotUnderstood("its pickle nests its parts without end")
                if id(value) not in sizes:
                    inner = itertools.chain(value, value.values()) if isinstance(value, dict) else value
                    within.add(id(value))
                    opened.append((value, iter(inner), [1, 1]))
                    break
                inside, depth = sizes[id(value)]
                size[0], size[1] = size[0] + inside, max(size[1], depth + 1)
                if len(opened) + depth > MAX_NESTING:
                    raise NotUnderstood("its pickle nests its parts without end")
            elif isinstance(value, Call):
                size[0] += 1
                if id(value) not in known:
                    known.add(id(value))
                    calls.append(value)
            else:
                size[0] += 1 + (len(value) >> 4 if isinstance(value, str | bytes | bytearray) else 0)
        else:
            opened.pop()
            if not opened:
                return size[0]
            within.discard(id(container))
            sizes[id(container)] = size[0], size[1]
            above = opened[-1][2]
            above[0], above[1] = above[0] + size[0], max(above[1], size[1] + 1)
        if size[0] > MAX_VALUES:
            raise NotUnderstood("its pickle shares its parts without end")


def _made_of(function: str, arguments: tuple[Any, ...]) -> Any:
    """What a call stands for, where torch and DeepSpeed write data in this way; else the call itself."""
    if function == "collections.OrderedDict" and not arguments:
        return OrderedItems()
    if function == "torch.Size" and len(arguments) == 1 and is_shape(arguments[0]):
        return arguments[0]
    if function in {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"} and len(arguments) >= 4:
        return _tensor(function, arguments)
    if function == "torch._tensor._rebuild_from_type_v2" and len(arguments) >= 3 and isinstance(arguments[0], Name):
        # a tensor with attributes of its own: its builder, its class, what the builder is given
        nested = arguments[0].name == function or not isinstance(arguments[2], tuple)
        return Call(function, arguments) if nested else _made_of(arguments[0].name, arguments[2])
    if function in {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"} and arguments:
        return arguments[0]
    return Call(function, arguments)


def _tensor(function: str, arguments: tuple[Any, ...]) -> Any:
    storage, start, shape, stride = arguments[:4]
    fits = (
        isinstance(storage, Storage)
        and is_int(start)
        and 0 <= start < MAX_SIZE
        and is_shape(shape)
        and is_shape(stride)
    )
    if not fits or len(shape) != len(stride):
        return Call(function, arguments)
    dtype = storage.dtype
    if function.endswith("v3"):
        given = arguments[6] if len(arguments) > 6 else None
        dtype = DTYPES.get(given.name.removeprefix("torch."), "") if isinstance(given, Name) else ""
    return Tensor(storage=storage, dtype=dtype, start=start, shape=shape, stride=stride)


def is_known_call(function: str, arguments: tuple[Any, ...], *, as_object: bool = False) -> bool:
    """Whether a call has the form in which its makers write it; of a function that is not known here nothing is said.

    ``as_object``: an object is made of a class, and its ``__init__`` not called.
    """
    if as_object and not re.fullmatch(rf"{OBJECTS}|torch\.torch_version\.TorchVersion", function, re.ASCII):
        return next((False for pattern, _ in CALLS if re.fullmatch(pattern, function, re.ASCII)), True)
    if not as_object and re.fullmatch(ONLY_OBJECTS, function, re.ASCII):
        return False
    return next((form(arguments) for pattern, form in CALLS if re.fullmatch(pattern, function, re.ASCII)), True)


def is_known_state(made: object, state: Any) -> bool:
    """Whether the state that is put into an object has the form in which its makers write it."""
    if isinstance(made, Call):
        form = next((form for pattern, form in STATES if re.fullmatch(pattern, made.function, re.ASCII)), None)
        # what is not known by its name is refused for its name
        return form is None or form(state)
    # torch writes fields of an OrderedDict: the versions of a state_dict
    return isinstance(made, OrderedItems) and _is_fields(state)


def takes_items(made: object) -> bool:
    """Whether keys and values may be put into what was made."""
    return type(made) in {dict, OrderedItems} or _is_call(
        made, r"collections\.(OrderedDict|defaultdict|Counter)|(builtins|__builtin__)\.dict"
    )


def takes_values(made: object) -> bool:
    """Whether values may be appended to what was made."""
    return type(made) is list or _is_call(made, r"collections\.deque|(builtins|__builtin__)\.list")


def takes_members(made: object) -> bool:
    """Whether values may be added to what was made."""
    return type(made) is Members or _is_call(made, r"(builtins|__builtin__)\.set")


def is_known_storage(kind: Name, place: object, count: object) -> bool:
    """Whether torch's reference to a storage has a class of storages, the name of a device and a number of elements."""
    place_known = isinstance(place, str) and PLACES.fullmatch(place) is not None
    return re.fullmatch(STORAGE_CLASSES, kind.name) is not None and place_known and is_int(count)


def is_loadable(name: str) -> bool:
    """Whether a class or a function of torch, numpy, DeepSpeed or Python is known to be there, wherever a checkpoint is loaded.

    >>> is_loadable("torch._utils._rebuild_tensor_v2"), is_loadable("torch._utils._rebuilt_tensor_v2")
    (True, False)
    """
    return LOADABLE.fullmatch(name) is not None


def is_hashable(value: Any, depth: int = 0) -> bool:
    """Whether a value may be a key, or a member of a set."""
    if isinstance(value, tuple):
        return depth < MAX_KEY_DEPTH and all(is_hashable(each, depth + 1) for each in value)
    if isinstance(value, Call):
        return re.fullmatch(HASHABLE, value.function, re.ASCII) is not None
    plain = isinstance(value, str | int | float | bytes | None)
    return plain or isinstance(value, Name | Tensor | FrozenMembers)


def _is_plain(value: Any) -> bool:
    """Data without a call at its top: what is in it has been judged when it was made."""
    return value is None or isinstance(value, str | bytes | bytearray | int | float | list | tuple | dict)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_fields(state: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(state, dict) and all(isinstance(key, str) and FIELD.fullmatch(key) for key in state)


def _is_tensor_state(state: Any) -> bool:
    """Fields, or those of its dict and of its slots."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return all(
        part is None
        or (_is_fields(part) and not OF_TORCH & set(part) and not any(name.startswith("is_") for name in part))
        for part in parts
    )


def _is_call(value: Any, pattern: str) -> TypeGuard[Call]:
    return isinstance(value, Call) and re.fullmatch(pattern, value.function, re.ASCII) is not None


def _is_bytes(value: Any) -> bool:
    return _length(value) is not None


def _length(value: Any) -> int | None:
    """The number of bytes, None for what is no bytes: protocol 2 writes them as a text that is encoded, and none by a call of their
    class."""
    if isinstance(value, bytes | bytearray):
        return len(value)
    if _is_call(value, r"(builtins|__builtin__)\.bytes") and not value.arguments:
        return 0
    if _is_call(value, r"_codecs\.encode") and _is_latin(value.arguments):
        return len(value.arguments[0])
    return None


def _is_latin(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 2 or not isinstance(arguments[0], str) or arguments[1] not in ("latin1", "latin-1"):
        return False
    return all(ord(each) < 256 for each in set(arguments[0]))


def _is_hooks(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)


def _plain_tensor(arguments: tuple[Any, ...], dtype: Name | None = None) -> bool:
    """The arguments of a tensor's builder without its type, which ``dtype`` names where it is none of its storage's."""
    if not 6 <= len(arguments) <= 7:
        return False
    storage, start, shape, stride, trains, *hooks = arguments
    known = (
        isinstance(storage, Storage)
        and is_int(start)
        and 0 <= start < MAX_SIZE
        and is_shape(shape)
        and is_shape(stride)
        and len(shape) == len(stride)
        and isinstance(trains, bool)
        and all(map(_is_hooks, hooks))
    )
    if not known:
        return False
    own = storage.dtype if dtype is None else DTYPES.get(dtype.name.removeprefix("torch."), "")
    if trains and not (own in FLOATS or (dtype is None and not own)):
        return False
    width, there = 1, storage.count
    if dtype is not None:
        width = WIDTHS.get(dtype.name.removeprefix("torch."), MAX_SIZE)
        there *= ITEM_SIZES.get(storage.dtype, 0)
    last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # of types that are known the damage is told
    return bool(own) or not count_of(shape) or (last + 1) * width <= there


def _typed_plain_tensor(arguments: tuple[Any, ...]) -> bool:
    if not 7 <= len(arguments) <= 8 or not isinstance(arguments[6], Name):
        return False
    package, _, name = arguments[6].name.partition(".")
    return package == "torch" and name in WIDTHS and _plain_tensor((*arguments[:6], *arguments[7:]), arguments[6])


TENSOR_BUILDERS = {
    "torch._utils._rebuild_tensor_v2": _plain_tensor,
    "torch._utils._rebuild_tensor_v3": _typed_plain_tensor,
}


def _typed_tensor(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 4:
        return False
    builder, kind, given, state = arguments
    if not (isinstance(builder, Name) and isinstance(kind, Name) and isinstance(given, tuple)):
        return False
    known = builder.name in TENSOR_BUILDERS and TENSOR_BUILDERS[builder.name](given)
    return known and kind.name in TENSOR_CLASSES and _is_tensor_state(state)


def _parameter(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 3 or not isinstance(arguments[0], Tensor):
        return False
    made, trains, hooks = arguments
    can_train = made.dtype in FLOATS or not made.storage.dtype
    return isinstance(trains, bool) and (can_train or not trains) and _is_hooks(hooks)


def _container(arguments: tuple[Any, ...]) -> bool:
    return not arguments or (len(arguments) == 1 and isinstance(arguments[0], list | tuple | dict))


def _set(arguments: tuple[Any, ...]) -> bool:
    return _container(arguments) and all(is_hashable(each) for given in arguments for each in given)


def _dict(arguments: tuple[Any, ...]) -> bool:
    if not _container(arguments):
        return False
    return all(
        isinstance(given, dict)
        or all(isinstance(each, list | tuple) and len(each) == 2 and is_hashable(each[0]) for each in given)
        for given in arguments
    )


def _default_dict(arguments: tuple[Any, ...]) -> bool:
    factory = arguments[0] if arguments else None
    known = factory is None or (isinstance(factory, Name) and factory.name in FACTORIES)
    return known and _dict(arguments[1:])


def _array(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 3:
        return False
    kind, shape, typed = arguments
    one_letter = typed == "b" or (_length(typed) == 1)
    return isinstance(kind, Name) and kind.name == "numpy.ndarray" and shape == (0,) and one_letter


def _dtype(arguments: tuple[Any, ...]) -> bool:
    # the last one: a copy of its own, which may be changed
    if len(arguments) != 3 or not isinstance(arguments[0], str):
        return False
    return NUMBERS.fullmatch(arguments[0]) is not None and arguments[1:] == (False, True)


def _width(kind: Any) -> int | None:
    """Bytes of a number of a type of numpy's."""
    if not _is_call(kind, r"numpy\.dtype") or not _dtype(kind.arguments):
        return None
    return int(kind.arguments[0].lstrip("<>|=")[1:])


def _scalar(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 2 and _width(arguments[0]) is not None and _width(arguments[0]) == _length(arguments[1])


def _state_of_array(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 5:
        return False
    version, shape, kind, by_columns, content = state
    width = _width(kind)
    if version != 1 or not is_shape(shape) or width is None or not isinstance(by_columns, bool):
        return False
    return len(shape) <= MAX_NUMPY_DIMENSIONS and _length(content) == count_of(shape) * width


def _state_of_dtype(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 8 or not isinstance(state[1], str):
        return False
    order = STATE_OF_DTYPE.fullmatch(state[1]) is not None
    return order and state[0] == 3 and state[2:] == (None, None, None, -1, -1, 0)


def _bytearray(arguments: tuple[Any, ...]) -> bool:
    return not arguments or _is_latin(arguments) or (len(arguments) == 1 and _is_bytes(arguments[0]))


def _deque(arguments: tuple[Any, ...]) -> bool:
    given, most = (*arguments, None)[:2] if arguments else ((), None)
    return len(arguments) <= 2 and given == () and (most is None or (is_int(most) and 0 <= most < MAX_SIZE))


def _moment(arguments: tuple[Any, ...]) -> bool:
    return (
        len(arguments) == 1
        and isinstance(arguments[0], bytes)
        and len(arguments[0]) == 10
        and arguments[0][2] in range(1, 13)
    )


def _never(_: Any) -> bool:
    return False


def _nothing(given: tuple[Any, ...]) -> bool:
    return not given


CALLS: tuple[tuple[str, Callable[[tuple[Any, ...]], bool]], ...] = (
    (r"torch\._utils\._rebuild_tensor_v2", _plain_tensor),
    (r"torch\._utils\._rebuild_tensor_v3", _typed_plain_tensor),
    (r"torch\._tensor\._rebuild_from_type_v2", _typed_tensor),
    (r"torch\._utils\._rebuild_parameter", _parameter),
    (
        r"torch\._utils\._rebuild_parameter_with_state",
        lambda given: len(given) == 4 and _parameter(given[:3]) and _is_tensor_state(given[3]),
    ),
    (r"torch\.Size", lambda given: len(given) == 1 and is_shape(given[0])),
    (
        r"torch\.device",
        lambda given: (
            (
                1 <= len(given) <= 2
                and isinstance(given[0], str)
                and PLACES.fullmatch("".join((given[0], *(f":{each}" for each in given[1:])))) is not None
            )
            or given == ("cpu", 0)
            or given in (("meta",), ("meta", 0))
        ),
    ),
    (r"torch\.torch_version\.TorchVersion", lambda given: len(given) == 1 and isinstance(given[0], str)),
    (r"collections\.OrderedDict", _dict),
    (r"collections\.defaultdict", _default_dict),
    (r"collections\.deque", _deque),
    (r"collections\.Counter", lambda given: len(given) <= 1 and all(isinstance(each, dict) for each in given)),
    (PYTHON + r"(?:set|frozenset)", _set),
    (PYTHON + r"list", _container),
    (PYTHON + r"dict", _dict),
    (PYTHON + r"bytearray", _bytearray),
    (PYTHON + r"bytes", _nothing),
    (PYTHON + r"complex", lambda given: len(given) <= 2 and all(map(_is_number, given))),
    (PYTHON + r"int", lambda given: len(given) <= 1 and all(isinstance(each, int) for each in given)),
    (PYTHON + r"slice", lambda given: len(given) == 3 and all(each is None or _is_number(each) for each in given)),
    (
        PYTHON + r"getattr",
        # how Python 3.11.0 wrote members of an enumeration
        lambda given: (
            len(given) == 2
            and isinstance(given[0], Name)
            and re.fullmatch(ZERO_STAGE, given[0].name) is not None
            and given[1] in STAGES
        ),
    ),
    (NUMPY_FUNCTION + r"_reconstruct", _array),
    (NUMPY_FUNCTION + r"scalar", _scalar),
    (r"numpy\.dtype", _dtype),
    (r"_codecs\.encode", _is_latin),
    (ZERO_STAGE, lambda given: len(given) == 1 and is_int(given[0]) and 0 <= given[0] <= 3),
    (PATHS, lambda given: all(isinstance(each, str) for each in given)),
    (
        r"datetime\.timedelta",
        lambda given: len(given) == 3 and all(is_int(each) and abs(each) < 1 << 29 for each in given),
    ),
    (r"datetime\.datetime", _moment),
    (OBJECTS, _nothing),
    # classes that are named, and called by nobody who writes a checkpoint
    (r"numpy\.ndarray|torch\.(?:storage\.)?\w{1,20}Storage|torch\.Tensor|torch\.nn\.parameter\.Parameter", _never),
)


STATES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    (NUMPY_FUNCTION + r"_reconstruct", _state_of_array),
    (r"numpy\.dtype", _state_of_dtype),
    (rf"{OBJECTS}|collections\.OrderedDict", _is_fields),
    (r"(?:torch|numpy|collections|_codecs|builtins|__builtin__|deepspeed|argparse|types|pathlib|datetime)\..*", _never),
)


def _kind_of(value: object) -> str:
    kinds = ((OrderedItems, "OrderedDict"), (Members, "set"), (FrozenMembers, "frozenset"))
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)


class _Reader:
    """The stack and the memory of the machine that a pickle is written for."""

    def __init__(self, names: set[str], built: "list[Storage | Tensor]") -> None:
        self.protocol: int | None = None
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stacks under the marks."""
        self.memo: dict[int, Any] = {}
        self.names = names
        self.built = built
        self.storages: dict[str, tuple[Storage, Name]] = {}

    def begin(self, protocol: int) -> None:
        """A protocol is told."""
        if protocol > MAX_PROTOCOL:
            raise NotUnderstood(f"its pickle has protocol {protocol}")
        self.note(self.protocol is None, Name("the opcode PROTO"))
        self.protocol = protocol

    def push(self, argument: Any) -> None:
        """A number or a text."""
        if isinstance(argument, int) and argument.bit_length() > MAX_INT_BITS:
            raise NotUnderstood(f"its pickle has a number of more than {MAX_INT_BITS} bits")
        self.stack.append(argument)

    def put(self, argument: Any) -> None:
        """Remember what lies on top."""
        place = len(self.memo) if argument is None else int(argument)
        if not 0 <= place <= MAX_OPCODES:
            raise NotUnderstood("its pickle memoizes a value at an index that does not exist")
        self.memo[place] = self.stack[-1]

    def get(self, argument: Any) -> None:
        """What was remembered."""
        self.stack.append(self.memo[int(argument)])

    def note(self, is_known: bool, used: object) -> None:
        """Keep the name of what is used in another form than its makers write, as one that nobody knows."""
        if not is_known:
            name = used.function if isinstance(used, Call) else used.name if isinstance(used, Name) else _kind_of(used)
            self.names.add(f"{name} {ODDLY}")

    def mark(self) -> None:
        """A sequence begins here."""
        self.below.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        """What lies above the last mark."""
        taken = self.stack
        self.stack = self.below.pop()
        return taken

    def drop_to_mark(self) -> None:
        """Forget what lies above the last mark."""
        self.pop_to_mark()

    def pop(self) -> None:
        """Drop what lies on top, be it a mark."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_to_mark()

    def fill(self, pairs: list[Any]) -> None:
        """Put keys and values into the dict below them."""
        target = self.stack[-1]
        items = target.items if isinstance(target, Call) else target
        if not isinstance(items, dict):
            raise TypeError("items for something other than a dict")
        self.note(takes_items(target) and all(map(is_hashable, pairs[::2])), target)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # a deeply nested tuple as a key would be hashed without a limit, and large numbers can be chosen to hash alike
            plain = isinstance(key, str | int | float | bytes | None)
            plain = plain and not (isinstance(key, int) and key.bit_length() > MAX_KEY_BITS)
            items[key if plain else f"{type(key).__name__} {len(items)}"] = value

    def extend(self, values: list[Any], *, members: bool = False) -> None:
        """Put values into the list or set below them."""
        target = self.stack[-1]
        into = target.values if isinstance(target, Call) else target
        if not isinstance(into, list):
            raise TypeError("values for something other than a list")
        known = takes_members(target) and all(map(is_hashable, values)) if members else takes_values(target)
        self.note(known, target)
        into.extend(values)

    def freeze(self) -> None:
        """A set that does not change, of what lies above the mark."""
        made = FrozenMembers(self.pop_to_mark())
        self.note(all(map(is_hashable, made)), made)
        self.stack.append(made)

    def tuple(self, count: int) -> None:
        """Make a tuple of what lies on top."""
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def call(self, *, as_object: bool = False) -> None:
        """Note a call, or what it stands for where that is data."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError("a call without arguments")
        called = function.name if isinstance(function, Name) else "?"
        self.note(isinstance(function, Name) and is_known_call(called, arguments, as_object=as_object), function)
        made = _made_of(called, arguments)
        if isinstance(made, Tensor):
            self.built.append(made)
        self.stack.append(made)

    def build(self) -> None:
        """Note the state of an object."""
        state = self.stack.pop()
        self.note(is_known_state(self.stack[-1], state), self.stack[-1])
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def name(self, argument: str | None) -> None:
        """A name, of the argument ("module name") or of the stack."""
        if argument is not None:
            module, name = argument.split(" ", 1)
        else:
            name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        if len(module) + len(name) > MAX_NAME_LENGTH:
            raise NotUnderstood(f"its pickle names a class in more than {MAX_NAME_LENGTH} characters")
        self.stack.append(Name(f"{module}.{name}"))
        self.names.add(self.stack[-1].name)
        # only protocols 0 to 2 have Python 2's names, and only later ones what stands in a class
        self.note("." not in name and not (module == "__builtin__" and (self.protocol or 0) > 2), self.stack[-1])

    def storage(self) -> None:
        """torch's way to speak of a storage: ("storage", its class, its entry, the device, its elements)."""
        value = self.stack.pop()
        if not (isinstance(value, tuple) and len(value) == 5 and value[0] == "storage" and isinstance(value[1], Name)):
            raise NotUnderstood("its pickle refers to something other than a torch storage")
        key, count = value[2], value[4]
        if not isinstance(key, str) or not isinstance(count, int) or not 0 <= count < MAX_SIZE:
            raise NotUnderstood("its pickle refers to a storage without a name or a size")
        dtype = STORAGES.get(value[1].name.rpartition(".")[2], "")
        storage = Storage(key=key, dtype=dtype, count=count)
        # torch takes the first of two that speak of one entry
        same = self.storages.setdefault(key, (storage, value[1])) == (storage, value[1])
        self.note(same and is_known_storage(value[1], value[3], count), value[1])
        self.built.append(storage)
        self.stack.append(storage)

    def set_item(self) -> None:
        """Put one key and its value into the dict below them."""
        value, key = self.stack.pop(), self.stack.pop()
        self.fill([key, value])

    def make_dict(self) -> None:
        """A dict of what lies above the mark."""
        pairs = self.pop_to_mark()
        self.stack.append({})
        self.fill(pairs)


Step = Callable[[_Reader, Any], None]


def _plain(action: Callable[[_Reader], None]) -> Step:
    return lambda reader, _: action(reader)


def _constant(make: Callable[[], Any]) -> Step:
    return lambda reader, _: reader.stack.append(make())


STEPS: dict[str, Step] = {
    "PROTO": _Reader.begin, "FRAME": lambda _reader, _argument: None,
    **dict.fromkeys(
        ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
         "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
         "BINUNICODE8"), _Reader.push),
    "NONE": _constant(lambda: None), "NEWTRUE": _constant(lambda: True), "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict), "EMPTY_LIST": _constant(list), "EMPTY_TUPLE": _constant(tuple), "EMPTY_SET": _constant(Members),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Reader.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Reader.get),
    "MARK": _plain(_Reader.mark), "POP": _plain(_Reader.pop), "POP_MARK": _plain(_Reader.drop_to_mark),
    "TUPLE1": lambda reader, _: reader.tuple(1), "TUPLE2": lambda reader, _: reader.tuple(2),
    "TUPLE3": lambda reader, _: reader.tuple(3), "TUPLE": lambda reader, _: reader.push(tuple(reader.pop_to_mark())),
    "LIST": lambda reader, _: reader.push(reader.pop_to_mark()), "FROZENSET": _plain(_Reader.freeze),
    "DICT": _plain(_Reader.make_dict), "SETITEM": _plain(_Reader.set_item),
    "SETITEMS": lambda reader, _: reader.fill(reader.pop_to_mark()),
    "APPEND": lambda reader, _: reader.extend([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.extend(reader.pop_to_mark()),
    "ADDITEMS": lambda reader, _: reader.extend(reader.pop_to_mark(), members=True),
    "REDUCE": _plain(_Reader.call), "NEWOBJ": lambda reader, _: reader.call(as_object=True), "BUILD": _plain(_Reader.build),
    "BINPERSID": _plain(_Reader.storage), "GLOBAL": _Reader.name, "STACK_GLOBAL": _Reader.name,
}  # fmt: skip
"""What each opcode does; one that is not here is none that torch writes."""


OPCODES = {
    opcode.code.encode("latin-1"): (
        opcode.name, None if opcode.arg is None else opcode.arg.reader, STEPS.get(opcode.name),
    )
    for opcode in pickletools.opcodes
}  # fmt: skip
