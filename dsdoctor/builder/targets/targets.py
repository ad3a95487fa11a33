"""A target (an interpreter, a torch, its CUDA) -> an environment with that torch, below the cache folder; made once and kept.

An environment cannot be moved, so it is made in its final place; a file that is written last marks it as complete.
"""

import glob
import re
import shutil
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path

from filelock import FileLock
from packaging.version import InvalidVersion, Version

from dsdoctor.builder.targets.installers import Say, choose_installer
from dsdoctor.builder.targets.interpreters import Interpreter
from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.files import write_bytes
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda, Gap
from dsdoctor.core.text import encode
from dsdoctor.core.workspace import private_folder

INDEX = "https://download.pytorch.org/whl"
"""The index of torch's own builds for each CUDA release: .../cu128, .../cpu."""

FOLDER = "targets"
WHOLE = "dsdoctor.json"
USED = (WHOLE, "pyvenv.cfg", "bin/python", "bin/*", "lib/python*/site-packages", "lib/python*/site-packages/*")
"""What of a kept environment decides what its interpreter runs: nobody else may write to it, or on the way to it."""
CPU = "cpu"


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
    """The version of a torch, and the CUDA or ROCm release that it was built with, as torch itself states them."""

    version: str | None
    cuda: str | None = None
    hip: str | None = None


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


def _check_torch(torch: str, cudas: tuple[str, ...]) -> None:
    try:
        build = Version(torch).local
    except InvalidVersion:
        raise UsageError(f"--torch {torch!r} is not a version", hint="--torch 2.14.1") from None
    if build and cudas:
        raise UsageError(f"--torch {torch} names its build itself, and --cuda another", hint="leave one of them out")


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
                f"there is no environment for {target.name} yet, and --offline forbids to fetch torch",
                hint="run it once without --offline, or name a ready environment with --python PATH",
            )
        shutil.rmtree(folder, ignore_errors=True)
        try:
            _fill(host, target, folder, python, say)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return python


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
    write_bytes(folder / WHOLE, encode({"target": replace(target, index=None), "torch": release}))


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
    '--cuda 12.8 was asked for, and the index gave torch 2.13.0+cpu, a CPU build'
    """
    if isinstance(release, Gap) or release.version is None:
        return (
            f"torch {target.torch} was installed, and cannot be asked: {getattr(release, 'reason', 'it is not there')}"
        )
    asked = None if target.cuda in {None, CPU} else Cuda.parse(target.cuda)
    if target.cuda is None or (Cuda.parse(release.cuda) == asked and release.hip is None):
        return None
    built = f"a build for CUDA {release.cuda}" if release.cuda else "a CPU build"
    built = f"a build for ROCm {release.hip}" if release.hip else built
    return f"--cuda {target.cuda} was asked for, and the index gave torch {release.version}, {built}"


def key(target: Target) -> str:
    """The name of a target's folder: readable, and different for each interpreter, torch and index."""
    facts = "\0".join([target.python, target.version, requirement(target), target.cuda or "", target.index or ""])
    readable = re.sub(r"[^\w.]+", "-", target.name)
    return f"{readable}-{sha256(facts.encode()).hexdigest()[:8]}"


def _is_whole(host: LocalHost, folder: Path, python: str) -> bool:
    """Whether an environment was finished and its interpreter still finds torch; the interpreter may have been removed since."""
    if not (folder / WHOLE).is_file():
        return False
    release = _release(host, python)
    return not isinstance(release, Gap) and release.version is not None


def _release(host: LocalHost, python: str) -> Release | Gap:
    return parse_answer(host.ask(python, "ask_release.py", timeout=60), Release, "torch")
