"""What --python names (a path, or a version) -> an interpreter that runs. Versions are looked for on PATH, in pyenv and uv.

Installs nothing.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Gap


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """A Python that runs: its own path, its version such as "3.12.1", and the step that found it."""

    executable: str
    version: str
    found_via: str

    @property
    def minor(self) -> str:
        """Its version without the last number.

        >>> Interpreter(executable="/usr/bin/python3", version="3.12.1", found_via="on_path").minor
        '3.12'
        """
        return ".".join(self.version.split(".")[:2])


@dataclass(frozen=True, kw_only=True)
class _InterpreterFacts:
    executable: str
    version: str


@dataclass(frozen=True, kw_only=True)
class _InterpreterAnswer:
    python: _InterpreterFacts


def is_version(asked: str) -> bool:
    """Whether what was named is a version, not a path.

    >>> is_version("3.12"), is_version("3.12.1"), is_version("python3.12"), is_version("/opt/3.12")
    (True, True, False, False)
    """
    return re.fullmatch(r"3\.\d+(\.\d+)?", asked, re.ASCII) is not None


def find_interpreters(host: Host, asked: Sequence[str]) -> tuple[Interpreter, ...]:
    """An interpreter for each path and version. Raises ImpossiblePlan, which names all missing ones and how to get them."""
    found = [find_version(host, name) if is_version(name) else _at(host, name) for name in asked]
    missing = [name for name, interpreter in zip(asked, found, strict=True) if interpreter is None]
    if missing:
        places = "PATH, pyenv's versions and uv's" if find_uv(host) else "PATH and pyenv's versions"
        raise ImpossiblePlan(
            f"there is no Python {' and no Python '.join(missing)} here: looked for on {places}",
            hint=_how_to_get(host, missing),
        )
    return tuple(interpreter for interpreter in found if interpreter is not None)


def find_version(host: Host, version: str) -> Interpreter | None:
    """The first interpreter of a version that runs; a version manager's shim often does not."""
    for step in STEPS:
        for candidate in step(host, version):
            found = _ask(host, candidate)
            if not isinstance(found, Gap) and f"{found.version}.".startswith(f"{version}."):
                return Interpreter(executable=found.executable, version=found.version, found_via=step.__name__)
    return None


def find_uv(host: Host) -> str | None:
    """The program uv: on PATH, or in the environment that runs dsdoctor."""
    beside = str(Path(sys.executable).parent / "uv")
    return host.which("uv") or (beside if host.exists(beside) else None)


def _at(host: Host, path: str) -> Interpreter:
    found = _ask(host, path)
    if isinstance(found, Gap):
        raise ImpossiblePlan(
            f"the Python {path} cannot be asked: {found.reason}", hint="name another, or a version: --python 3.12"
        )
    return Interpreter(executable=found.executable, version=found.version, found_via="--python")


def _ask(host: Host, path: str) -> _InterpreterFacts | Gap:
    answer = parse_answer(host.ask(path, "ask_python.py", timeout=60), _InterpreterAnswer, f"python {path}")
    return answer if isinstance(answer, Gap) else answer.python


def _how_to_get(host: Host, missing: Sequence[str]) -> str:
    wanted = " ".join(missing)
    if uv := find_uv(host):
        return f"{uv} python install {wanted}"
    if host.which("pyenv"):
        return "; ".join(f"pyenv install {version}" for version in missing)
    return f"python -m pip install uv && python -m uv python install {wanted}"


def on_path(host: Host, version: str) -> Iterator[str]:
    """``python3.12`` in every folder of PATH."""
    name = "python" + ".".join(version.split(".")[:2])
    for folder in dict.fromkeys((host.variable("PATH") or "").split(":")):
        if folder.startswith("/") and host.exists(f"{folder}/{name}"):
            yield f"{folder}/{name}"


def of_this_dsdoctor(_: Host, version: str) -> Iterator[str]:
    """The interpreter that runs dsdoctor, if it has that version."""
    here = ".".join(map(str, sys.version_info[:3]))
    if f"{here}.".startswith(f"{version}."):
        yield sys.executable


def of_pyenv(host: Host, version: str) -> Iterator[str]:
    """pyenv's versions, the newest first."""
    root = host.variable("PYENV_ROOT") or f"{host.variable('HOME') or ''}/.pyenv"
    for path in sorted(host.glob(f"{root}/versions/{version}*/bin/python3"), key=_release, reverse=True):
        if re.fullmatch(rf"{re.escape(version)}(\.\d+)*", _folder(path)):
            yield path


def of_uv(host: Host, version: str) -> Iterator[str]:
    """The interpreter that uv finds; it may be one that uv installed."""
    uv = find_uv(host)
    if uv is not None:
        answer = host.run([uv, "python", "find", "--no-project", version], timeout=60)
        yield from answer.stdout.split("\n")[:1] if answer.ok else ()


def _folder(path: str) -> str:
    return path.split("/")[-3]


def _release(path: str) -> Version:
    found = re.match(r"\d+(\.\d+)*", _folder(path))
    return Version(found[0] if found else "0")


STEPS = (on_path, of_this_dsdoctor, of_pyenv, of_uv)
