"""A pickle of torch as inert data: names, tensors without their values, calls that nobody made.

Its opcodes are read, never obeyed. Shared parts, depth and numbers are bounded, so that what was read may be hashed, compared and
printed whole; what goes beyond, or has an opcode that torch does not write, raises NotUnderstood.
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
MAX_SIZE = 1 << 63

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
        and all(isinstance(size, int) and 0 <= size < MAX_SIZE for size in value)
    )


def read_pickle(content: bytes, names: set[str] | None = None, *, max_opcodes: int = MAX_OPCODES) -> Any:
    """What a pickle would make, as inert data. Raises NotUnderstood. ``names`` takes every class and function that it names, those
    too of which nothing is left in the result, and what is called or filled in another form than its makers write.

    >>> import collections, pickle
    >>> read_pickle(pickle.dumps({"a": [1, 2.5, None], "b": collections.OrderedDict(c=(True,))}))
    {'a': [1, 2.5, None], 'b': {'c': (True,)}}
    >>> read_pickle(b"cos\\nsystem\\n(S'true'\\ntR.").function
    'os.system'
    """
    reader = _Reader(set() if names is None else names)
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
                raise NotUnderstood("its pickle shares its parts so often that it has no end")


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
                    raise NotUnderstood("its pickle nests its parts without an end")
                if id(value) not in sizes:
                    inner = itertools.chain(value, value.values()) if isinstance(value, dict) else value
                    within.add(id(value))
                    opened.append((value, iter(inner), [1, 1]))
                    break
                inside, depth = sizes[id(value)]
                size[0], size[1] = size[0] + inside, max(size[1], depth + 1)
                if len(opened) + depth > MAX_NESTING:
                    raise NotUnderstood("its pickle nests its parts without an end")
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
            raise NotUnderstood("its pickle shares its parts so often that it has no end")


def _made_of(function: str, arguments: tuple[Any, ...]) -> Any:
    """What a call stands for, where torch and DeepSpeed write data in this way; else the call itself."""
    if function == "collections.OrderedDict" and not arguments:
        return {}
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
        and isinstance(start, int)
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


# The forms in which torch, numpy, Python and DeepSpeed themselves write calls and states into a pickle.
#
# Names alone promise nothing: numpy.ndarray makes pointers out of bytes where it is called with a type of objects. An unpickler
# that obeys may be given only what is called and filled as its makers do it, with plain data.


TENSOR_BUILDERS = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
TENSOR_CLASSES = {"torch.Tensor", "torch.nn.parameter.Parameter"}
FACTORIES = {
    "collections.OrderedDict",
    *(f"{module}.{name}" for module in ("builtins", "__builtin__") for name in ("dict", "list", "set", "int")),
}
"""What a defaultdict may call."""
NUMBERS = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|c8|c16)")
"""numpy's types of numbers: none of them holds objects, fields or bytes of any length."""
STATE_OF_DTYPE = re.compile(r"[<>|=]")
ODDLY = "(not in the form that its library writes)"
FIELD = re.compile(r"(?!__)\w{1,100}", re.ASCII)
OF_TORCH = {"data", "grad", "_grad", "real", "imag", "names", "requires_grad", "_backward_hooks"}
"""Fields of a tensor that torch's own code sets."""
NUMPY_FUNCTION = r"numpy\.(?:core|_core)\.multiarray\."


def is_known_call(function: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call has the form in which its makers write it; of a function that is not known here nothing is said."""
    return next((form(arguments) for pattern, form in CALLS if re.fullmatch(pattern, function, re.ASCII)), True)


def is_known_state(made: object, state: Any) -> bool:
    """Whether the state that is put into an object has the form in which its makers write it."""
    if isinstance(made, Call):
        form = next((form for pattern, form in STATES if re.fullmatch(pattern, made.function, re.ASCII)), None)
        # what is not known by its name is refused for its name
        return form is None or form(state)
    # torch writes fields of an OrderedDict: the versions of a state_dict
    return isinstance(made, dict) and _is_fields(state)


def is_known_filling(made: object) -> bool:
    """Whether items or values may be put into an object: into Python's own containers only."""
    filled = r"collections\.(OrderedDict|defaultdict)|(builtins|__builtin__)\.(dict|list|set|frozenset)"
    return not isinstance(made, Call) or re.fullmatch(filled, made.function) is not None


def is_known_storage(kind: Name, place: object) -> bool:
    """Whether torch's reference to a storage has a class of storages and the name of a device."""
    known = re.fullmatch(r"torch\.\w{1,20}Storage|torch\.storage\.(Untyped|Typed)Storage", kind.name, re.ASCII)
    return known is not None and isinstance(place, str)


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
    return all(part is None or (_is_fields(part) and not OF_TORCH & set(part)) for part in parts)


def _is_call(value: Any, pattern: str) -> TypeGuard[Call]:
    return isinstance(value, Call) and re.fullmatch(pattern, value.function, re.ASCII) is not None


def _is_bytes(value: Any) -> bool:
    # protocol 2 writes bytes as a text that is encoded, and none by a call of their class
    return isinstance(value, bytes | bytearray) or _is_call(value, r"_codecs\.encode|(builtins|__builtin__)\.bytes")


def _is_hooks(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)


def _plain_tensor(arguments: tuple[Any, ...]) -> bool:
    if not 4 <= len(arguments) <= 8:
        return False
    storage, start, shape, stride = arguments[:4]
    last = arguments[4:]
    return (
        isinstance(storage, Storage)
        and isinstance(start, int)
        and is_shape(shape)
        and is_shape(stride)
        and len(shape) == len(stride)
        and isinstance((last or (False,))[0], bool)
        and all(_is_hooks(each) or isinstance(each, Name) for each in last[1:])
    )


def _typed_tensor(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 4:
        return False
    builder, kind, given, state = arguments
    if not (isinstance(builder, Name) and isinstance(kind, Name) and isinstance(given, tuple)):
        return False
    known = builder.name in TENSOR_BUILDERS and _plain_tensor(given)
    return known and kind.name in TENSOR_CLASSES and _is_tensor_state(state)


def _parameter(arguments: tuple[Any, ...]) -> bool:
    if not 3 <= len(arguments) <= 4 or not isinstance(arguments[0], Tensor | Call):
        return False
    made, trains, hooks = arguments[:3]
    known = isinstance(made, Tensor) or made.function in {*TENSOR_BUILDERS, "torch._tensor._rebuild_from_type_v2"}
    return known and isinstance(trains, bool) and _is_hooks(hooks) and all(map(_is_tensor_state, arguments[3:]))


def _container(arguments: tuple[Any, ...]) -> bool:
    return not arguments or (len(arguments) == 1 and isinstance(arguments[0], list | tuple | dict))


def _default_dict(arguments: tuple[Any, ...]) -> bool:
    factory = arguments[0] if arguments else None
    known = factory is None or (isinstance(factory, Name) and factory.name in FACTORIES)
    return known and _container(arguments[1:])


def _array(arguments: tuple[Any, ...]) -> bool:
    if len(arguments) != 3:
        return False
    kind, shape, typed = arguments
    return (
        isinstance(kind, Name) and kind.name == "numpy.ndarray" and shape == (0,) and (typed == "b" or _is_bytes(typed))
    )


def _dtype(arguments: tuple[Any, ...]) -> bool:
    # the last one: a copy of its own, which may be changed
    if len(arguments) != 3 or not isinstance(arguments[0], str):
        return False
    return NUMBERS.fullmatch(arguments[0]) is not None and arguments[1:] == (False, True)


def _scalar(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 2 and _is_call(arguments[0], r"numpy\.dtype") and _is_bytes(arguments[1])


def _state_of_array(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 5:
        return False
    version, shape, kind, _, content = state
    return version == 1 and is_shape(shape) and _is_call(kind, r"numpy\.dtype") and _is_bytes(content)


def _state_of_dtype(state: Any) -> bool:
    if not isinstance(state, tuple) or len(state) != 8 or not isinstance(state[1], str):
        return False
    order = STATE_OF_DTYPE.fullmatch(state[1]) is not None
    return order and state[0] == 3 and state[2:] == (None, None, None, -1, -1, 0)


def _never(_: Any) -> bool:
    return False


PYTHON = r"(?:builtins|__builtin__)\."
OBJECTS = (
    r"deepspeed\.runtime\.fp16\.loss_scaler\.\w{0,20}LossScaler|deepspeed\.utils\.tensor_fragment\.fragment_address"
    r"|argparse\.Namespace"
)
CALLS: tuple[tuple[str, Callable[[tuple[Any, ...]], bool]], ...] = (
    (r"torch\._utils\._rebuild_tensor_v[23]", _plain_tensor),
    (r"torch\._tensor\._rebuild_from_type_v2", _typed_tensor),
    (r"torch\._utils\._rebuild_parameter(?:_with_state)?", _parameter),
    (r"torch\.Size", lambda given: len(given) == 1 and is_shape(given[0])),
    (r"torch\.device", lambda given: 1 <= len(given) <= 2 and all(isinstance(each, str | int) for each in given)),
    (r"collections\.OrderedDict", _container),
    (r"collections\.defaultdict", _default_dict),
    (PYTHON + r"(?:set|frozenset|list|dict)", _container),
    (PYTHON + r"bytearray", lambda given: not given or isinstance(given[0], str | bytes) or _is_bytes(given[0])),
    (PYTHON + r"bytes", lambda given: not given),
    (PYTHON + r"complex", lambda given: len(given) <= 2 and all(map(_is_number, given))),
    (PYTHON + r"int", lambda given: len(given) <= 1 and all(map(_is_number, given))),
    (PYTHON + r"slice", lambda given: all(each is None or _is_number(each) for each in given)),
    (NUMPY_FUNCTION + r"_reconstruct", _array),
    (NUMPY_FUNCTION + r"scalar", _scalar),
    (r"numpy\.dtype", _dtype),
    (
        r"_codecs\.encode",
        lambda given: len(given) == 2 and isinstance(given[0], str) and given[1] in ("latin1", "latin-1"),
    ),
    (r"deepspeed\.runtime\.zero\.config\.ZeroStageEnum", lambda given: len(given) == 1 and _is_number(given[0])),
    (OBJECTS, lambda given: all(map(_is_plain, given))),
    # classes that are named, and called by nobody who writes a checkpoint
    (r"numpy\.ndarray|torch\.(?:storage\.)?\w{1,20}Storage|torch\.Tensor|torch\.nn\.parameter\.Parameter", _never),
)
STATES: tuple[tuple[str, Callable[[Any], bool]], ...] = (
    (NUMPY_FUNCTION + r"_reconstruct", _state_of_array),
    (r"numpy\.dtype", _state_of_dtype),
    (rf"{OBJECTS}|collections\.(?:OrderedDict|defaultdict)", _is_fields),
    (r"(?:torch|numpy|collections|_codecs|builtins|__builtin__|deepspeed|argparse)\..*", _never),
)


class _Reader:
    """The stack and the memory of the machine that a pickle is written for."""

    def __init__(self, names: set[str]) -> None:
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stacks under the marks."""
        self.memo: dict[int, Any] = {}
        self.names = names

    def push(self, argument: Any) -> None:
        """A number or a text."""
        if isinstance(argument, int) and argument.bit_length() > MAX_INT_BITS:
            raise NotUnderstood(f"its pickle has a number of more than {MAX_INT_BITS} bits")
        self.stack.append(argument)

    def put(self, argument: Any) -> None:
        """Remember what lies on top."""
        self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]

    def get(self, argument: Any) -> None:
        """What was remembered."""
        self.stack.append(self.memo[int(argument)])

    def note(self, is_known: bool, used: object) -> None:
        """Keep the name of what is used in another form than its makers write, as one that nobody knows."""
        if not is_known:
            name = (
                used.function
                if isinstance(used, Call)
                else used.name
                if isinstance(used, Name)
                else type(used).__name__
            )
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
            raise TypeError("items for what is no dict")
        self.note(is_known_filling(target), target)
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # a deeply nested tuple as a key would be hashed without a limit, and large numbers can be chosen to hash alike
            plain = isinstance(key, str | int | float | bytes | None)
            plain = plain and not (isinstance(key, int) and key.bit_length() > MAX_KEY_BITS)
            items[key if plain else f"{type(key).__name__} {len(items)}"] = value

    def extend(self, values: list[Any]) -> None:
        """Put values into the list or set below them."""
        target = self.stack[-1]
        into = target.values if isinstance(target, Call) else target
        if not isinstance(into, list):
            raise TypeError("values for what is no list")
        self.note(is_known_filling(target), target)
        into.extend(values)

    def tuple(self, count: int) -> None:
        """Make a tuple of what lies on top."""
        if len(self.stack) < count:
            raise IndexError("the stack is empty")
        self.stack[len(self.stack) - count :] = [tuple(self.stack[len(self.stack) - count :])]

    def call(self) -> None:
        """Note a call, or what it stands for where that is data."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError("a call without arguments")
        called = function.name if isinstance(function, Name) else "?"
        self.note(isinstance(function, Name) and is_known_call(called, arguments), function)
        self.stack.append(_made_of(called, arguments))

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
            raise TypeError("a name that is no text")
        if len(module) + len(name) > MAX_NAME_LENGTH:
            raise NotUnderstood(f"its pickle names a class in more than {MAX_NAME_LENGTH} characters")
        self.stack.append(Name(f"{module}.{name}"))
        self.names.add(self.stack[-1].name)

    def storage(self) -> None:
        """torch's way to speak of a storage: ("storage", its class, its entry, the device, its elements)."""
        value = self.stack.pop()
        if not (isinstance(value, tuple) and len(value) == 5 and value[0] == "storage" and isinstance(value[1], Name)):
            raise NotUnderstood("its pickle refers to something that is no storage of torch")
        key, count = value[2], value[4]
        if not isinstance(key, str) or not isinstance(count, int) or not 0 <= count < MAX_SIZE:
            raise NotUnderstood("its pickle refers to a storage without a name or a size")
        self.note(is_known_storage(value[1], value[3]), value[1])
        dtype = STORAGES.get(value[1].name.rpartition(".")[2], "")
        self.stack.append(Storage(key=key, dtype=dtype, count=count))

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
    **dict.fromkeys(("PROTO", "FRAME"), lambda _reader, _argument: None),
    **dict.fromkeys(
        ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
         "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
         "BINUNICODE8"), _Reader.push),
    "NONE": _constant(lambda: None), "NEWTRUE": _constant(lambda: True), "NEWFALSE": _constant(lambda: False),
    "EMPTY_DICT": _constant(dict), "EMPTY_LIST": _constant(list), "EMPTY_TUPLE": _constant(tuple), "EMPTY_SET": _constant(list),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _Reader.put),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Reader.get),
    "MARK": _plain(_Reader.mark), "POP": _plain(_Reader.pop), "POP_MARK": _plain(_Reader.drop_to_mark),
    "TUPLE1": lambda reader, _: reader.tuple(1), "TUPLE2": lambda reader, _: reader.tuple(2),
    "TUPLE3": lambda reader, _: reader.tuple(3), "TUPLE": lambda reader, _: reader.push(tuple(reader.pop_to_mark())),
    "LIST": lambda reader, _: reader.push(reader.pop_to_mark()), "FROZENSET": lambda reader, _: reader.push(reader.pop_to_mark()),
    "DICT": _plain(_Reader.make_dict), "SETITEM": _plain(_Reader.set_item),
    "SETITEMS": lambda reader, _: reader.fill(reader.pop_to_mark()),
    "APPEND": lambda reader, _: reader.extend([reader.stack.pop()]),
    "APPENDS": lambda reader, _: reader.extend(reader.pop_to_mark()),
    "ADDITEMS": lambda reader, _: reader.extend(reader.pop_to_mark()),
    "REDUCE": _plain(_Reader.call), "NEWOBJ": _plain(_Reader.call), "BUILD": _plain(_Reader.build),
    "BINPERSID": _plain(_Reader.storage), "GLOBAL": _Reader.name, "STACK_GLOBAL": _Reader.name,
}  # fmt: skip
"""What each opcode does; one that is not here is none that torch writes."""
OPCODES = {
    opcode.code.encode("latin-1"): (
        opcode.name, None if opcode.arg is None else opcode.arg.reader, STEPS.get(opcode.name),
    )
    for opcode in pickletools.opcodes
}  # fmt: skip
