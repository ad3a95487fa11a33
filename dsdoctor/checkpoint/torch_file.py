"""A file that torch.save wrote, as inert data."""

import errno
import io
import os
import pickletools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from dsdoctor.core.files import open_regular

# What a torch file holds, as inert data: names, tensors without their values, calls that nobody made.
#
# Types go by the names that safetensors has for them.


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


# The pickle inside of a torch file -> inert data: dicts, lists, numbers, texts, tensors without their values.
#
# The opcodes are read, never obeyed: a class or function is a name (``Name``), a call of it a ``Call`` that nobody makes. What
# is too large, or has an opcode that torch does not write, raises NotUnderstood.


MOST_OPCODES = 5_000_000
"""A file of a thousand tensors has fifty thousand."""
LONGEST_NAME = 300


class NotUnderstood(Exception):
    """A pickle that torch did not write, or one that is too large to be read here."""


def read_pickle(content: bytes, names: set[str] | None = None) -> Any:
    """What a pickle would make, as inert data. Raises NotUnderstood. ``names`` takes every class and function that it names, those
    too of which nothing is left in the result.

    >>> import collections, pickle
    >>> read_pickle(pickle.dumps({"a": [1, 2.5, None], "b": collections.OrderedDict(c=(True,))}))
    {'a': [1, 2.5, None], 'b': {'c': (True,)}}
    >>> read_pickle(b"cos\\nsystem\\n(S'true'\\ntR.").function
    'os.system'
    """
    reader = _Reader(set() if names is None else names)
    stream = io.BytesIO(content)
    try:
        for _ in range(MOST_OPCODES):
            code = stream.read(1)
            if code not in OPCODES:
                raise NotUnderstood(
                    "its pickle has no end" if not code else "its pickle cannot be read: no such opcode"
                )
            name, read, step = OPCODES[code]
            argument = None if read is None else read(stream)
            if name == "STOP":
                return reader.stack[-1]
            if step is None:
                raise NotUnderstood(f"its pickle has the opcode {name}, which torch does not write")
            step(reader, argument)
        raise NotUnderstood(f"its pickle has more than {MOST_OPCODES:,} opcodes")
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise NotUnderstood(f"its pickle cannot be read: {type(error).__name__}: {str(error)[:100]}") from error


class _Reader:
    """The stack and the memory of the machine that a pickle is written for."""

    def __init__(self, names: set[str]) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.names = names

    def push(self, argument: Any) -> None:
        """A number or a text."""
        self.stack.append(argument)

    def put(self, argument: Any) -> None:
        """Remember what lies on top."""
        self.memo[len(self.memo) if argument is None else int(argument)] = self.stack[-1]

    def get(self, argument: Any) -> None:
        """What was remembered."""
        self.stack.append(self.memo[int(argument)])

    def mark(self) -> None:
        """A sequence begins here."""
        self.marks.append(len(self.stack))

    def pop_to_mark(self) -> list[Any]:
        """What lies above the last mark."""
        begin = self.marks.pop()
        taken = self.stack[begin:]
        del self.stack[begin:]
        return taken

    def pop(self) -> None:
        """Drop what lies on top, be it a mark."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def fill(self, pairs: list[Any]) -> None:
        """Put keys and values into the dict below them."""
        target = self.stack[-1]
        items = target.items if isinstance(target, Call) else target
        if not isinstance(items, dict):
            raise TypeError("items for what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # a deeply nested tuple as a key would be hashed without a limit
            items[key if isinstance(key, str | int | float | bytes | None) else f"{type(key).__name__} {id(key)}"] = (
                value
            )

    def extend(self, values: list[Any]) -> None:
        """Put values into the list or set below them."""
        target = self.stack[-1]
        into = target.values if isinstance(target, Call) else target
        if not isinstance(into, list):
            raise TypeError("values for what is no list")
        into.extend(values)

    def call(self) -> None:
        """Note a call, or what it stands for where that is data."""
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(arguments, tuple):
            raise TypeError("a call without arguments")
        self.stack.append(made_of(function.name if isinstance(function, Name) else "?", arguments))

    def build(self) -> None:
        """Note the state of an object."""
        state = self.stack.pop()
        if isinstance(self.stack[-1], Call):
            self.stack[-1].state = state

    def name(self, argument: str | None) -> None:
        """A name, of the argument ("module name") or of the stack."""
        module, name = argument.split(" ", 1) if argument is not None else (self.stack.pop(-2), self.stack.pop())
        self.stack.append(Name(f"{module}.{name}"[:LONGEST_NAME]))
        self.names.add(self.stack[-1].name)


def _persistent(reader: _Reader) -> None:
    """torch's way to speak of a storage: ("storage", its class, its entry, the device, its elements)."""
    value = reader.stack.pop()
    if not (isinstance(value, tuple) and len(value) == 5 and value[0] == "storage" and isinstance(value[1], Name)):
        raise NotUnderstood("its pickle refers to something that is no storage of torch")
    key, count = value[2], value[4]
    if not isinstance(key, str) or not isinstance(count, int) or count < 0:
        raise NotUnderstood("its pickle refers to a storage without a name or a size")
    dtype = STORAGES.get(value[1].name.rpartition(".")[2], "")
    reader.stack.append(Storage(key=key, dtype=dtype, count=count))


def _tuple_of(count: int) -> Callable[[_Reader], None]:
    def take(reader: _Reader) -> None:
        made = tuple(reader.stack[len(reader.stack) - count :])
        if len(made) != count:
            raise IndexError("the stack is empty")
        del reader.stack[len(reader.stack) - count :]
        reader.stack.append(made)

    return take


def _set_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.fill([key, value])


def _set_items(reader: _Reader) -> None:
    reader.fill(reader.pop_to_mark())


def _append(reader: _Reader) -> None:
    reader.extend([reader.stack.pop()])


def _appends(reader: _Reader) -> None:
    reader.extend(reader.pop_to_mark())


def _tuple(reader: _Reader) -> None:
    reader.stack.append(tuple(reader.pop_to_mark()))


def _list(reader: _Reader) -> None:
    reader.stack.append(reader.pop_to_mark())


def _dict(reader: _Reader) -> None:
    pairs = reader.pop_to_mark()
    reader.stack.append({})
    reader.fill(pairs)


def _pop_mark(reader: _Reader) -> None:
    reader.pop_to_mark()


CONSTANTS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE",
    "BINUNICODE8",
}  # fmt: skip
FIXED: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "EMPTY_SET": list,
}  # fmt: skip
PUTS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
GETS = {"GET", "BINGET", "LONG_BINGET"}
ACTIONS: dict[str, Callable[[_Reader], None]] = {
    "MARK": _Reader.mark,
    "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2), "TUPLE3": _tuple_of(3), "TUPLE": _tuple, "LIST": _list, "DICT": _dict,
    "SETITEM": _set_item, "SETITEMS": _set_items, "APPEND": _append, "APPENDS": _appends, "ADDITEMS": _appends,
    "FROZENSET": _list, "POP": _Reader.pop, "POP_MARK": _pop_mark,
    "REDUCE": _Reader.call, "NEWOBJ": _Reader.call, "BUILD": _Reader.build, "BINPERSID": _persistent,
}  # fmt: skip
IDLE = {"PROTO", "FRAME"}


def _without_argument(action: Callable[[_Reader], None]) -> Callable[[_Reader, Any], None]:
    return lambda reader, _: action(reader)


def _fixed(make: Callable[[], Any]) -> Callable[[_Reader, Any], None]:
    return lambda reader, _: reader.stack.append(make())


STEPS: dict[str, Callable[[_Reader, Any], None]] = {
    **{name: lambda _reader, _argument: None for name in IDLE},
    **dict.fromkeys(CONSTANTS, _Reader.push),
    **dict.fromkeys(PUTS, _Reader.put),
    **dict.fromkeys(GETS, _Reader.get),
    **{name: _fixed(make) for name, make in FIXED.items()},
    **{name: _without_argument(action) for name, action in ACTIONS.items()},
    "GLOBAL": _Reader.name,
    "STACK_GLOBAL": _Reader.name,
}
"""What each opcode does; one that is not here is none that torch writes."""
OPCODES = {
    opcode.code.encode("latin-1"): (
        opcode.name, None if opcode.arg is None else opcode.arg.reader, STEPS.get(opcode.name),
    )
    for opcode in pickletools.opcodes
}  # fmt: skip


# Inert data of a pickle -> its tensors, each with the way to it; and single values by their way. Shared parts are walked once.


Way = tuple[Any, ...]
DEEPEST = 40
"""Levels. What DeepSpeed writes has seven."""


def tensors(content: Any) -> Iterator[tuple[Way, Tensor]]:
    """Every tensor with the keys that lead to it, in the order of the file."""
    waiting: list[tuple[Way, Any]] = [((), content)]
    seen: set[int] = set()
    while waiting:
        way, value = waiting.pop()
        if isinstance(value, Tensor):
            yield way, value
        elif isinstance(value, dict | list | tuple | Call):
            if id(value) in seen or len(way) > DEEPEST:
                continue
            seen.add(id(value))
            waiting.extend((way + (key,), inner) for key, inner in reversed(list(_parts(value))))


def values(content: Any) -> Iterator[Any]:
    """Every value, whatever it is, once."""
    waiting, seen = [(0, content)], set()
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, dict | list | tuple | Call):
            if id(value) in seen or depth > DEEPEST:
                continue
            seen.add(id(value))
            waiting.extend((depth + 1, inner) for _, inner in _parts(value))
        yield value


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, Call):
        yield from enumerate((value.arguments, value.state, value.items, value.values))
    else:
        yield from enumerate(value)


def at(content: Any, *way: Any) -> Any:
    """The value at a way, None where there is none.

    >>> at({"a": [{"b": 1}]}, "a", 0, "b"), at({"a": None}, "a", "b")
    (1, None)
    """
    for key in way:
        if isinstance(content, Call):
            content = content.items
        if isinstance(content, dict):
            content = content.get(key)
        elif isinstance(content, list | tuple) and isinstance(key, int) and 0 <= key < len(content):
            content = content[key]
        else:
            return None
    return content


# A file that torch.save wrote -> its entries, and what its pickle says, as inert data; or what is the matter with the file.
#
# Reads the directory at the end of the zip and the pickle, never the tensors: a file of 70 GB costs what one of 70 kB costs.


LARGEST_PICKLE = 64 << 20
DENIED = "you may not read it"
ZIP, LEGACY = b"PK\x03\x04", (b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", b"\x80\x02}")
LOCAL_HEADER = 30
NOT_SAVED = (
    (b"version https://git-lfs", "it is a pointer of git-lfs and not the file, which git lfs pull gets"),
    (b"<", "it is a page of XML or HTML, as a download that was refused leaves it"),
    (b"\x1f\x8b", "it is compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "it is compressed by zstd"),
)
"""How a file begins that stands for one of torch, and what it is."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the zip. ``header``: where its own header begins in the file."""

    header: int
    size: int
    crc: int


@dataclass(frozen=True, kw_only=True)
class Archive:
    """A file as far as it could be read. ``problem``: what is the matter, "" for nothing. ``unknown``: why nothing is known.

    ``root``: the name that the file had when it was written, as torch puts it into the zip. ``content``: the pickle's.
    ``names``: every class and function that the pickle names.
    """

    path: Path
    size: int = 0
    modified: float = 0.0
    root: str = ""
    entries: Mapping[str, Entry] = field(default_factory=dict)
    content: Any = None
    names: frozenset[str] = frozenset()
    problem: str = ""
    unknown: str = ""


@dataclass(frozen=True, kw_only=True)
class Understood:
    """A pickle that was read: its content, the names in it, and the storages that it speaks of."""

    content: Any
    names: frozenset[str]
    storages: tuple[Storage, ...]


Pickles = dict[bytes, Understood]
"""Pickles by their bytes: of a large run's ranks most are the same, and each is read once."""


def read_archive(path: Path, pickles: Pickles) -> Archive:
    """Look at one file. What is the matter with it is told in the answer, and nothing is raised."""
    try:
        with open_regular(path) as file:
            return _read(path, file, pickles)
    except FileNotFoundError:
        reason = "it is a link to a file that is not there" if path.is_symlink() else "it is not there"
        return Archive(path=path, problem=reason)
    except IsADirectoryError:
        return Archive(path=path, problem="it is a folder")
    except PermissionError:
        return Archive(path=path, unknown=DENIED)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Archive(path=path, problem="it is a link that leads back to itself")
        return Archive(path=path, unknown=error.strerror or str(error))


def _read(path: Path, file: BinaryIO, pickles: Pickles) -> Archive:
    state = os.fstat(file.fileno())
    size = state.st_size
    known = Archive(path=path, size=size, modified=state.st_mtime)
    start = file.read(len(LEGACY[0]))
    if not size:
        return replace(known, problem="it is empty")
    if start.startswith(LEGACY):
        return replace(known, unknown="it is in torch's format from before 1.6, which is not read")
    if not start.startswith(ZIP):
        file.seek(0)
        return replace(known, problem=_other_kind(file.read(len(NOT_SAVED[0][0]))))
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OverflowError, MemoryError, EOFError):
        return replace(known, problem=f"it ends after {size:,} bytes without the zip's directory: it was cut off")
    return _inside(known, archive, pickles)


def _other_kind(start: bytes) -> str:
    """What a file is that torch did not write, by its first bytes."""
    if not start.strip(b"\0"):
        return "it begins with zeros: it was never written"
    return next((what for begin, what in NOT_SAVED if start.startswith(begin)), "it is no file of torch.save")


def _inside(known: Archive, archive: zipfile.ZipFile, pickles: Pickles) -> Archive:
    infos = archive.infolist()
    root = infos[0].filename.partition("/")[0] if infos else ""
    entries = {
        info.filename.partition("/")[2]: Entry(header=info.header_offset, size=info.file_size, crc=info.CRC)
        for info in infos
    }
    known = replace(known, root=root, entries=entries)
    if len(entries) != len(infos):
        return replace(known, unknown="its zip has two entries of one name")
    if any(info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size for info in infos):
        return replace(known, unknown="its zip is compressed, which torch never does")
    late = [name for name, entry in entries.items() if entry.header + LOCAL_HEADER + entry.size > known.size]
    if late:
        return replace(known, problem=f"{late[0]} lies behind the end of the file")
    if "data.pkl" not in entries:
        return replace(known, problem="its zip has no data.pkl")
    if entries["data.pkl"].size > LARGEST_PICKLE:
        return replace(known, unknown=f"its pickle is larger than {LARGEST_PICKLE >> 20} MiB")
    try:
        pickle = _understood(archive.read(f"{root}/data.pkl"), pickles)
    except (zipfile.BadZipFile, EOFError) as error:
        return replace(known, problem=f"its pickle is damaged: {str(error)[:100]}")
    except NotUnderstood as error:
        return replace(known, unknown=str(error))
    problem = _storage_problem(entries, pickle.storages)
    return replace(known, content=pickle.content, names=pickle.names, problem=problem)


def _understood(pickle: bytes, pickles: Pickles) -> Understood:
    """A pickle's content. Raises NotUnderstood."""
    if pickle not in pickles:
        names: set[str] = set()
        content = read_pickle(pickle, names)
        pickles[pickle] = Understood(content=content, names=frozenset(names), storages=_storages(content))
    return pickles[pickle]


def _storage_problem(entries: Mapping[str, Entry], storages: tuple[Storage, ...]) -> str:
    """What of the tensors that the pickle names is not in the zip."""
    for storage in storages:
        entry = entries.get(f"data/{storage.key}")
        if entry is None:
            return f"data/{storage.key}, the values of a tensor, is missing in its zip"
        wanted = storage.count * ITEM_SIZES.get(storage.dtype, 0)
        if wanted and entry.size != wanted:
            return f"data/{storage.key} has {entry.size:,} bytes, and its tensor {wanted:,}"
    return ""


def _storages(content: Any) -> tuple[Storage, ...]:
    """Every storage that a content speaks of, once."""
    return tuple(dict.fromkeys(tensor.storage for _, tensor in tensors(content)))
