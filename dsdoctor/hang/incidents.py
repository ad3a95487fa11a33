"""Dumps of torch's flight recorder, one file a rank -> an incident, for jobs that never knew dsdoctor. Nothing in them is executed.

torch writes pickle. It is taken apart by its opcodes (`pickletools`): numbers, texts, lists and dicts are all that a dump
holds, and whatever would import or call something is refused.
"""

import pickletools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited
from dsdoctor.core.text import decode
from dsdoctor.hang.models import RECORDERS, Frame, GroupState, Incident, Operation, RankView, Sample, ThreadStack

NAME = re.compile(r"(?:nccl|fr|comm_lib)_?trace(?:_rank)?_+(\d+)(?:\.json|\.pkl|\.pickle)?")
LARGEST = 256 << 20
KEPT = 2000


def dumps_in(folder: Path) -> dict[int, Path]:
    """The dumps of a folder by rank."""
    found = ((NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir()) if path.is_file())
    return {int(name[1]): path for name, path in found if name}


def read_dumps(dumps: dict[int, Path]) -> Incident:
    """What the recorders of all ranks say together. Raises UsageError for a file that is no such dump."""
    views = tuple(_view(rank, path, _content(path)) for rank, path in sorted(dumps.items()))
    world = max((max(group.ranks, default=0) + 1 for view in views for group in _groups(view)), default=0)
    return Incident(world=max(world, max(dumps) + 1), still=0.0, after=0.0, ranks=views, source=RECORDERS)


def _content(path: Path) -> dict[str, Any]:
    try:
        content = read_limited(path, LARGEST)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}", hint="see whose it is: ls -l") from error
    try:
        read = decode(content, dict) if content[:1] == b"{" else plain_pickle(content)
    except ValueError as error:
        raise UsageError(f"{path} is no dump of a flight recorder: {error}", hint="name a folder of them") from error
    if not isinstance(read, dict) or not isinstance(read.get("entries"), list):
        raise UsageError(f"{path} is no dump of a flight recorder", hint="it would hold a list of entries")
    return read


def _view(rank: int, path: Path, dump: dict[str, Any]) -> RankView:
    entries = [entry for entry in dump["entries"] if isinstance(entry, dict) and not entry.get("is_p2p")][-KEPT:]
    names: dict[str, list[Operation]] = {}
    timeouts: dict[str, float] = {}
    for entry in entries:
        name = str(next(iter(entry.get("process_group") or ("0",))))
        names.setdefault(name, []).append(_operation(entry))
        timeouts[name] = float(entry.get("timeout_ms") or 0) / 1000
    config = dump.get("pg_config") if isinstance(dump.get("pg_config"), dict) else {}
    groups = tuple(
        GroupState(
            name=name,
            ranks=_ranks(config, name),
            sequence=operations[-1].sequence,
            operations=tuple(operations),
            timeout=timeouts[name] or None,
        )
        for name, operations in names.items()
    )
    stack = ThreadStack(name="MainThread", frames=_frames(entries[-1] if entries else {}), main=True)
    world = max((max(group.ranks, default=0) + 1 for group in groups), default=0)
    sample = Sample(rank=rank, world=world, pid=0, time=0.0, joined=True, groups=groups, threads=(stack,))
    return RankView(rank=rank, host=path.name, pid=0, sample=sample)


def _operation(entry: dict[str, Any]) -> Operation:
    sizes = entry.get("input_sizes") or ()
    state = "done" if entry.get("retired") or entry.get("state") == "completed" else str(entry.get("state", ""))
    return Operation(
        sequence=int(entry.get("collective_seq_id") or 0),
        name=str(entry.get("profiling_name", "")).rpartition(":")[2],
        sizes=tuple(tuple(int(number) for number in size) for size in sizes if isinstance(size, list | tuple)),
        types=tuple(str(name) for name in entry.get("input_dtypes") or ()),
        state=state,
        called=int(entry.get("time_created_ns") or 0) / 1e9,
    )


def _ranks(config: Any, name: str) -> tuple[int, ...]:
    group = config.get(name)
    text = str(group.get("ranks", "")) if isinstance(group, dict) else ""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _frames(entry: dict[str, Any]) -> tuple[Frame, ...]:
    """Where the last recorded call was made; torch writes the innermost frame first."""
    frames = [frame for frame in entry.get("frames") or () if isinstance(frame, dict)]
    return tuple(
        Frame(
            file=str(frame.get("filename", "")), line=int(frame.get("line") or 0), function=str(frame.get("name", ""))
        )
        for frame in reversed(frames)
    )


def _groups(view: RankView) -> tuple[GroupState, ...]:
    return view.sample.groups if view.sample else ()


MARK = object()
COLLECTING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "LIST", "DICT"}
SIMPLE = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
EMPTY: dict[str, Any] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}
IGNORED = {"PROTO", "FRAME"}
VALUES = re.compile(r"(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?BINUNICODE8?|UNICODE|(SHORT_)?BINSTRING")


def plain_pickle(content: bytes) -> Any:
    """The value of a pickle that holds nothing but plain values; raises ValueError for any other.

    >>> import pickle
    >>> plain_pickle(pickle.dumps({"entries": [{"a": (1, 2.5, None, True)}]}))
    {'entries': [{'a': (1, 2.5, None, True)}]}
    >>> plain_pickle(pickle.dumps(print))
    Traceback (most recent call last):
    ValueError: it holds more than plain values (STACK_GLOBAL)
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name == "STOP":
                return stack.pop()
            _apply(opcode.name, argument, stack, memo)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("it is damaged") from error
    raise ValueError("it is cut off")


def _apply(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """One opcode's effect."""
    if name in IGNORED:
        return
    if name in SIMPLE:
        stack.append(SIMPLE[name])
    elif name in EMPTY:
        stack.append(EMPTY[name]())
    elif VALUES.fullmatch(name):
        stack.append(argument)
    elif name == "MARK":
        stack.append(MARK)
    elif name in {"MEMOIZE", "BINPUT", "LONG_BINPUT", "PUT"}:
        memo[len(memo) if argument is None else int(argument)] = stack[-1]
    elif name in {"BINGET", "LONG_BINGET", "GET"}:
        stack.append(memo[int(argument)])
    elif name in {"TUPLE1", "TUPLE2", "TUPLE3"}:
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    else:
        _collect(name, stack)


def _collect(name: str, stack: list[Any]) -> None:
    """The opcodes that put what stands above the mark into what stands below it."""
    if name not in COLLECTING:
        raise ValueError(f"it holds more than plain values ({name})")
    if name in {"APPEND", "SETITEM"}:
        above: Sequence[Any] = [stack.pop() for _ in range(1 if name == "APPEND" else 2)][::-1]
    else:
        place = max(number for number, each in enumerate(stack) if each is MARK)
        above = stack[place + 1 :]
        del stack[place:]
    if name in {"APPEND", "APPENDS"}:
        stack[-1].extend(above)
    elif name in {"SETITEM", "SETITEMS"}:
        stack[-1].update(zip(above[::2], above[1::2], strict=True))
    elif name in {"TUPLE", "LIST"}:
        stack.append(tuple(above) if name == "TUPLE" else list(above))
    else:
        stack.append(dict(zip(above[::2], above[1::2], strict=True)))
