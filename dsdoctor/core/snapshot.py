"""A machine written down: ``Recorder`` keeps every question and answer, ``RecordedHost`` answers from such a snapshot.

Only what was asked is kept, so a snapshot holds no token and no unrelated variable; the user's home is written as
``/home/user``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import PRIVATE, read_limited, real_path, write_bytes
from dsdoctor.core.host import Answer, Host
from dsdoctor.core.processes import FileHolder, SharedMemory
from dsdoctor.core.redaction import RedactingHost, definitions, urls
from dsdoctor.core.text import decode, encode

T = TypeVar("T")
SNAPSHOT_SCHEMA = "dsdoctor-snapshot/1"
HOME = "/home/user"


@dataclass
class Snapshot:
    """The answers of a machine, by question. ``python`` and ``cache`` are those that were asked about; ``source`` describes the
    ops of the DeepSpeed at hand, in the words of the builder."""

    schema: str = SNAPSHOT_SCHEMA
    python: str = ""
    cache: str = ""
    source: Any = None
    answers: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """A Host that passes every question on and keeps the redacted answer in ``snapshot``."""

    def __init__(self, host: Host) -> None:
        self._host = RedactingHost(host)
        self.snapshot = Snapshot()

    def variable(self, name: str) -> str | None:
        return self._keep(self._host.variable(name), "variable", name)

    def variables(self, prefix: str) -> dict[str, str]:
        return self._keep(self._host.variables(prefix), "variables", prefix)

    def names(self, prefix: str) -> tuple[str, ...]:
        return self._keep(self._host.names(prefix), "names", prefix)

    def read(self, path: str) -> str | None:
        return self._keep(self._host.read(path), "read", path)

    def search(self, path: str, pattern: str, *, most: int = 64) -> str:
        return self._keep(self._host.search(path, pattern, most=most), "search", path, pattern)

    def glob(self, pattern: str) -> tuple[str, ...]:
        return self._keep(self._host.glob(pattern), "glob", pattern)

    def exists(self, path: str) -> bool:
        return self._keep(self._host.exists(path), "exists", path)

    def age(self, path: str) -> float | None:
        return self._keep(self._host.age(path), "age", path)

    def holder(self, path: str) -> FileHolder | None:
        return self._keep(self._host.holder(path), "holder", path)

    def shared_memory(self, folder: str) -> SharedMemory | None:
        return self._keep(self._host.shared_memory(folder), "shared_memory", folder)

    def writable(self, path: str) -> bool:
        return self._keep(self._host.writable(path), "writable", path)

    def which(self, name: str) -> str | None:
        return self._keep(self._host.which(name), "which", name)

    def resolve(self, path: str) -> str:
        return self._keep(self._host.resolve(path), "resolve", path)

    def free(self, path: str) -> int | None:
        return self._keep(self._host.free(path), "free", path)

    def distrust(self, path: str, inside: str = "", *, existing: bool = False) -> str | None:
        question = (path, inside) if inside else (path,)
        return self._keep(self._host.distrust(path, inside, existing=existing), "distrust", *question)

    def cpus(self) -> int:
        return self._keep(self._host.cpus(), "cpus")

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
        return self._keep(self._host.run(argv, timeout=timeout, env=env), "run", *argv)

    def ask(self, python: str, script: str, *arguments: str, timeout: float) -> Answer:
        return self._keep(self._host.ask(python, script, *arguments, timeout=timeout), "ask", script, *arguments)

    def stop(self) -> None:
        self._host.stop()

    def _keep(self, answer: T, *question: str) -> T:
        self.snapshot.answers[_key(question)] = answer
        return answer


class RecordedHost:
    """A Host that answers from a snapshot; what was not asked then is answered as "not there"."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._answers = snapshot.answers

    @classmethod
    def load(cls, path: Path) -> "RecordedHost":
        """Read a snapshot file. Raises UsageError for anything else."""
        try:
            snapshot = decode(read_limited(path), Snapshot)
        except (OSError, msgspec.DecodeError) as error:
            raise UsageError(
                f"{path} is not a machine snapshot: {error}", hint="dsdoctor machine record FILE writes one"
            ) from None
        if snapshot.schema != SNAPSHOT_SCHEMA:
            raise UsageError(
                f"{path} is a snapshot of schema {snapshot.schema!r}, but this dsdoctor reads {SNAPSHOT_SCHEMA!r}",
                hint="record it again with this version: dsdoctor machine record FILE",
            )
        return cls(snapshot)

    def variable(self, name: str) -> str | None:
        return self._answer(str | None, None, "variable", name)

    def variables(self, prefix: str) -> dict[str, str]:
        return self._answer(dict[str, str], {}, "variables", prefix)

    def names(self, prefix: str) -> tuple[str, ...]:
        return self._answer(tuple[str, ...], (), "names", prefix)

    def read(self, path: str) -> str | None:
        return self._answer(str | None, None, "read", path)

    def search(self, path: str, pattern: str, *, most: int = 64) -> str:
        return self._answer(str, "", "search", path, pattern)

    def glob(self, pattern: str) -> tuple[str, ...]:
        return self._answer(tuple[str, ...], (), "glob", pattern)

    def exists(self, path: str) -> bool:
        return self._answer(bool, False, "exists", path)

    def age(self, path: str) -> float | None:
        return self._answer(float | None, None, "age", path)

    def holder(self, path: str) -> FileHolder | None:
        return self._answer(FileHolder | None, None, "holder", path)

    def shared_memory(self, folder: str) -> SharedMemory | None:
        return self._answer(SharedMemory | None, None, "shared_memory", folder)

    def writable(self, path: str) -> bool:
        return self._answer(bool, True, "writable", path)

    def which(self, name: str) -> str | None:
        return self._answer(str | None, None, "which", name)

    def resolve(self, path: str) -> str:
        return self._answer(str, path, "resolve", path)

    def free(self, path: str) -> int | None:
        return self._answer(int | None, None, "free", path)

    def distrust(self, path: str, inside: str = "", *, existing: bool = False) -> str | None:
        question = (path, inside) if inside else (path,)
        return self._answer(str | None, None, "distrust", *question)

    def cpus(self) -> int:
        return max(1, self._answer(int, 1, "cpus"))

    def run(self, argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None) -> Answer:
        return self._answer(Answer, Answer(returncode=127, stderr="not in the snapshot"), "run", *argv)

    def ask(self, python: str, script: str, *arguments: str, timeout: float) -> Answer:
        return self._answer(Answer, Answer(returncode=127, stderr="not in the snapshot"), "ask", script, *arguments)

    def stop(self) -> None:
        """Nothing runs here."""

    def _answer(self, kind: Any, default: T, *question: str) -> T:
        key = _key(question)
        if key not in self._answers:
            return default
        try:
            answer: T = msgspec.convert(self._answers[key], kind)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"the snapshot's answer to {key!r} is malformed: {error}", hint="record it again"
            ) from None
        return answer


def save(snapshot: Snapshot, path: Path, *, home: str) -> None:
    """Write a snapshot for this user's eyes.

    ``home`` is the folder that nobody needs to know. Whatever the answers quote loses what is defined for a compiler
    (-DNAME=...) and all of an address but its scheme, host and path.
    """
    public = msgspec.to_builtins(snapshot)
    for place in dict.fromkeys((home.rstrip("/"), real_path(home).rstrip("/"))):
        public = _mapped(public, partial(_without_home, place))
    public = _mapped(public, _without_secrets)
    write_bytes(path, msgspec.json.format(encode(public, order="sorted"), indent=1), mode=PRIVATE)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string and key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(inner, change) for inner in value]
    return value


def _without_home(home: str, text: str) -> str:
    return re.sub(rf"{re.escape(home)}(?![\w.-])", HOME, text) if len(home) > 1 else text


def _without_secrets(text: str) -> str:
    """A text without definitions' values, with addresses cut, and without what is no UTF-8.

    >>> _without_secrets("-DTOKEN=abc -I/x https://me:pw@host/")
    '-DTOKEN=... -I/x https://host/'
    """
    return urls(definitions(text.encode("utf-8", errors="replace").decode()))


def _key(question: tuple[str, ...]) -> str:
    return "\x1f".join(question)
