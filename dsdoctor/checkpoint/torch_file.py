"""The pickle inside of a torch file -> inert data: dicts, lists, numbers, texts, tensors without their values.

The opcodes are read, never obeyed: a class or function is a name (``Name``), a call of it a ``Call`` that nobody makes. What
is too large, or has an opcode that torch does not write, raises NotUnderstood.
"""

import io
import pickletools
from collections.abc import Callable
from typing import Any

from dsdoctor.checkpoint.inert import STORAGES, Call, Name, Storage, made_of

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
