"""Targets: the interpreter, the torch and the CUDA that a wheel is for, and the environment with that torch.

An interpreter is named by its path, or by a version that is looked for on PATH, in pyenv and uv. An environment is made once and
kept below the cache folder, by uv, or by pip where the user has configured it, since uv ignores that configuration. It cannot be
moved, so it is made in its final place; a file that is written last marks it as complete.
"""

import glob
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path

from filelock import FileLock
from packaging.version import Version

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan, UsageError
from dsdoctor.core.files import write_bytes
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.machine import Cuda, Gap, Torch
from dsdoctor.core.pip import PIP, TIMEOUT_SECONDS, failed_fetch, pip_for, why_failed
from dsdoctor.core.text import encode
from dsdoctor.core.workspace import private_folder
from dsdoctor.rules import book

STEERS = frozenset(
    {"index-url", "extra-index-url", "find-links", "no-index", "constraint", "cert", "client-cert", "proxy"}
)
"""The settings of pip that say where packages come from, and how they are reached."""

VENV_TIMEOUT_SECONDS = 600.0
"""Seconds that making an empty environment may take."""

Say = Callable[[str], None]
INDEX = "https://download.pytorch.org/whl"
"""The index of torch's own builds for each CUDA release: .../cu128, .../cpu."""

FOLDER = "targets"
FINISHED_MARK = "dsdoctor.json"
USED = (FINISHED_MARK, "pyvenv.cfg", "bin/python", "bin/*", "lib/python*/site-packages", "lib/python*/site-packages/*")
"""What of a kept environment decides what its interpreter runs: nobody else may write to it, or on the way to it."""

CPU = "cpu"


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


@dataclass(frozen=True, kw_only=True)
class Installer:
    """Makes environments of the interpreter ``base``. ``uv`` is the path of uv, None where pip is used."""

    host: LocalHost
    base: str
    uv: str | None
    because: str

    def make(self, folder: Path) -> None:
        """Make an empty environment. Raises BuildFailed."""
        ways = (
            [[self.uv, "venv", "--quiet", "--no-project", "--seed", "--python", self.base, str(folder)]]
            if self.uv
            else [
                [self.base, "-I", "-m", "venv", str(folder)],
                # Debian's Python may lack ensurepip; dsdoctor's own pip serves then
                [self.base, "-I", "-m", "venv", "--clear", "--without-pip", str(folder)],
            ]
        )
        for argv in ways:
            answer = self.host.run(argv, timeout=VENV_TIMEOUT_SECONDS)
            if answer.ok:
                return
        raise BuildFailed(
            f"{self.base} could not create an environment: {why_failed(self.host, answer.stderr or answer.stdout)}",
            hint="on Debian and Ubuntu: apt install python3-venv; or name another with --python PATH",
        )

    def install(self, python: str, arguments: Sequence[str]) -> None:
        """Install into the environment of ``python``. Raises BuildFailed with the program's own error."""
        if self.uv:
            argv = [self.uv, "pip", "install", "--quiet", "--python", python, *arguments]
        else:
            pip, options = pip_for(self.host, python, "installs torch")
            argv = [*pip, *options, "install", "--quiet", "--disable-pip-version-check", *arguments]
        answer = self.host.run(argv, timeout=TIMEOUT_SECONDS)
        if not answer.ok:
            what = " ".join(word for word in arguments if not word.startswith("-") and "://" not in word)
            why = why_failed(self.host, answer.stderr)
            message = f"{'uv' if self.uv else 'pip'} could not install {what}: {why}"
            hint = "check the network and the versions; --torch-index URL names another index"
            raise failed_fetch(message, answer.stderr, hint)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What one wheel is for: an existing environment (``torch`` None), or one that dsdoctor makes with this torch.

    ``python`` is its interpreter, or the one that it is made with; ``version`` its version, "" where it is not known.
    ``cuda`` is the release of torch's CUDA, "cpu", or None for whichever the index gives.
    """

    python: str
    version: str = ""
    torch: str | None = None
    cuda: str | None = None
    index: str | None = None

    @property
    def name(self) -> str:
        """Its name in the output.

        >>> Target(python="/usr/bin/python3.12", version="3.12.1", torch="2.14.1", cuda="12.8").name
        'py3.12 torch2.14.1 cu12.8'
        """
        if self.torch is None:
            return self.python
        build = [] if self.cuda is None else [CPU if self.cuda == CPU else f"cu{self.cuda}"]
        return " ".join([f"py{self.minor}", f"torch{self.torch}", *build])

    @property
    def minor(self) -> str:
        """Python's version without the last number."""
        return ".".join(self.version.split(".")[:2])

    @property
    def build(self) -> str | None:
        """The CUDA release of torch, or "cpu", as far as it was asked for; None where only the index knows.

        >>> Target(python="p", torch="2.13.0+cu130").build, Target(python="p", torch="2.13.0+cpu").build
        ('13.0', 'cpu')
        >>> Target(python="p", torch="2.13.0").build is None
        True
        """
        named = re.fullmatch(r"cu(\d+)(\d)", (self.torch or "").partition("+")[2])
        return self.cuda or (
            f"{named[1]}.{named[2]}" if named else CPU if (self.torch or "").endswith("+cpu") else None
        )

    @property
    def label(self) -> str | None:
        """What torch's own index calls the build.

        >>> Target(python="p", torch="2.13.0", cuda="12.8").label
        'cu128'
        """
        return None if self.cuda is None else CPU if self.cuda == CPU else f"cu{self.cuda.replace('.', '')}"


@dataclass(frozen=True, kw_only=True)
class Release:
    """The version of a torch, and the CUDA, ROCm or XPU release that it was built with, as torch itself states them."""

    version: str | None
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


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
    for path in sorted(host.glob(f"{root}/versions/{version}*/bin/python3"), key=_python_release, reverse=True):
        if re.fullmatch(rf"{re.escape(version)}(\.\d+)*", _folder(path)):
            yield path


def of_uv(host: Host, version: str) -> Iterator[str]:
    """The interpreter that uv finds; it may be one that uv installed."""
    uv = find_uv(host)
    if uv is not None:
        answer = host.run([uv, "python", "find", "--no-project", version], timeout=60)
        yield from answer.stdout.split("\n")[:1] if answer.ok else ()


def choose_installer(host: LocalHost, base: str) -> Installer:
    """uv where it is installed and the user has not told pip where packages come from, else pip; with the reason."""
    uv = find_uv(host)
    if uv is None:
        return Installer(host=host, base=base, uv=None, because="pip")
    config = host.run([sys.executable, *PIP, "config", "list"], timeout=60)
    if steering := parse_steering(config.stdout):
        return Installer(
            host=host, base=base, uv=None, because=book.phrase("builder", "pip-with-settings", settings=steering)
        )
    return Installer(host=host, base=base, uv=uv, because="uv")


def parse_steering(config: str) -> tuple[str, ...]:
    """The settings in ``pip config list`` that decide where packages come from.

    >>> parse_steering("global.find-links='/opt/wheels'\\n:env:.disable-pip-version-check='1'\\n")
    ('find-links',)
    """
    named = re.findall(r"^\S+?\.([\w-]+)=", config, re.MULTILINE)
    return tuple(sorted(STEERS.intersection(named)))


def cross(
    interpreters: tuple[Interpreter, ...], torches: tuple[str, ...], cudas: tuple[str, ...], index: str | None
) -> tuple[Target, ...]:
    """Every Python with every torch and every CUDA, each once. Raises UsageError for what is not a version."""
    for torch in torches:
        _check_torch(torch, cudas)
    for cuda in cudas:
        if not re.fullmatch(r"cpu|\d{1,2}\.\d", cuda, re.ASCII):
            raise UsageError(f"--cuda {cuda!r} is not a release", hint='it takes a release such as 12.8, or "cpu"')
    targets = (
        Target(python=interpreter.executable, version=interpreter.version, torch=torch, cuda=cuda, index=index)
        for interpreter, torch, cuda in product(interpreters, torches, cudas or (None,))
    )
    return tuple(dict.fromkeys(targets))


def environment(host: LocalHost, target: Target, cache: Path, *, offline: bool, say: Say) -> str:
    """The interpreter of a target's environment, which is made where it does not exist yet. On an error nothing of it is left.

    Raises BuildFailed when pip fails; ImpossiblePlan when torch is for another CUDA than asked, or ``offline`` forbids to make it.
    """
    folder = private_folder(cache / FOLDER) / key(target)
    for part in USED:
        private_folder(folder.parent, f"{glob.escape(folder.name)}/{part}")
    python = str(folder / "bin" / "python")
    with FileLock(folder.parent / f".{folder.name}.lock", mode=0o600):
        if _is_whole(host, folder, python):
            return python
        if offline:
            raise ImpossiblePlan(
                f"there is no environment for {target.name} yet, and --offline prevents downloading torch",
                hint="run it once without --offline, or name a ready environment with --python PATH",
            )
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _fill(host, target, folder, python, say)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python


def requirement(target: Target) -> str:
    """What pip is asked to install. On torch's own index the version has the label of the build: no other index has that one.

    >>> requirement(Target(python="p", torch="2.13.0", cuda="cpu")), requirement(Target(python="p", torch="2.13.0"))
    ('torch==2.13.0+cpu', 'torch==2.13.0')
    """
    label = f"+{target.label}" if target.label and target.index is None else ""
    return f"torch=={target.torch}{label}"


def mismatch(target: Target, release: Release | Gap) -> str | None:
    """Why an installed torch is not the one that was asked for, or None.

    >>> mismatch(Target(python="p", torch="2.13.0", cuda="12.8"), Release(version="2.13.0+cpu"))
    'you asked for --cuda 12.8, but the index gave torch 2.13.0+cpu, a CPU build'
    """
    if isinstance(release, Gap) or release.version is None:
        return f"torch {target.torch} was installed, but cannot be queried: {getattr(release, 'reason', 'it is not there')}"
    asked = None if target.cuda in {None, CPU} else Cuda.parse(target.cuda)
    cuda = Cuda.parse(release.cuda)
    torch = Torch(version=release.version, location="", cuda=cuda, hip=release.hip, xpu=release.xpu)
    if target.cuda is None or (cuda == asked and torch.accelerator == ("CUDA" if asked else "CPU")):
        return None
    number = release.cuda or release.hip
    built = f"a build for {torch.accelerator} {number}" if number else torch.build
    return f"you asked for --cuda {target.cuda}, but the index gave torch {release.version}, {built}"


def key(target: Target) -> str:
    """The name of a target's folder: readable, and different for each interpreter, torch and index."""
    facts = "\0".join([target.python, target.version, requirement(target), target.cuda or "", target.index or ""])
    readable = re.sub(r"[^\w.]+", "-", target.name)
    return f"{readable}-{sha256(facts.encode()).hexdigest()[:8]}"


def _at(host: Host, path: str) -> Interpreter:
    found = _ask(host, path)
    if isinstance(found, Gap):
        raise ImpossiblePlan(
            f"cannot run the Python {path}: {found.reason}", hint="name another, or a version: --python 3.12"
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


def _folder(path: str) -> str:
    return path.split("/")[-3]


def _python_release(path: str) -> Version:
    found = re.match(r"\d+(\.\d+)*", _folder(path))
    return Version(found[0] if found else "0")


def _check_torch(torch: str, cudas: tuple[str, ...]) -> None:
    try:
        build = Version(torch).local
    except ValueError:
        raise UsageError(f"--torch {torch!r} is not a version", hint="--torch 2.14.1") from None
    if build and cudas:
        raise UsageError(f"--torch {torch} already names its build, which --cuda contradicts", hint="omit one of them")


def _fill(host: LocalHost, target: Target, folder: Path, python: str, say: Say) -> None:
    installer = choose_installer(host, target.python)
    index = target.index or (f"{INDEX}/{target.label}" if target.label else None)
    say(f"installing {requirement(target)} into {folder} ({installer.because})")
    installer.make(folder)
    if index is not None:
        # only torch comes from there; what it depends on comes from where the user's other packages come from
        installer.install(python, ["--no-deps", "--index-url", index, requirement(target)])
    more = ["--extra-index-url", index] if index else []
    installer.install(python, [*more, requirement(target), "setuptools", "wheel"])
    release = _release(host, python)
    if wrong := mismatch(target, release):
        raise ImpossiblePlan(wrong, hint="name an index that has such a build: --torch-index URL")
    write_bytes(folder / FINISHED_MARK, encode({"target": replace(target, index=None), "torch": release}))


def _is_whole(host: LocalHost, folder: Path, python: str) -> bool:
    """Whether an environment was finished and its interpreter still finds torch; the interpreter may have been removed since."""
    if not (folder / FINISHED_MARK).is_file():
        return False
    release = _release(host, python)
    return not isinstance(release, Gap) and release.version is not None


def _release(host: LocalHost, python: str) -> Release | Gap:
    return parse_answer(host.ask(python, "ask_release.py", timeout=60), Release, "torch")


STEPS = (on_path, of_this_dsdoctor, of_pyenv, of_uv)
