"""Checks of the Python environment: torch, headers, ninja, pip."""

import re
from collections.abc import Iterator
from shlex import quote

from packaging.version import InvalidVersion, Version

from dsdoctor.checks.say import BUILD_WHEEL, error, note, warning
from dsdoctor.core import needs
from dsdoctor.core.finding import Finding
from dsdoctor.core.machine import Machine

ALWAYS_ISOLATES = Version("25.3")
SETUPTOOLS_WITH_BDIST_WHEEL = Version("70.1")


def summary(machine: Machine) -> str:
    """One line for the topic."""
    python, torch = machine.python, machine.torch
    if python is None:
        return "Python and torch: the interpreter does not answer"
    built = f"CUDA {torch.cuda}" if torch and torch.cuda else f"ROCm {torch.hip}" if torch and torch.hip else "CPU"
    return f"Python {python.version}, {f'torch {torch.version} ({built} build)' if torch else 'no torch'}"


def python_silent(machine: Machine) -> Iterator[Finding]:
    """The interpreter whose environment was to be looked at does not answer.

    Everything about torch, DeepSpeed and packages stays unknown then. Name another one with --python PATH.
    """
    for gap in machine.gaps:
        if machine.python is None and gap.question.startswith("python"):
            title = f"the interpreter cannot be asked: {gap.reason}"
            yield error(
                "python-silent",
                title,
                affects=(needs.TORCH,),
                fix="name one that runs",
                commands=("python -m dsdoctor check --python /path/to/python",),
            )


def torch_missing(machine: Machine) -> Iterator[Finding]:
    """There is no torch in this environment.

    DeepSpeed compiles its ops against the torch in front of it, and imports it at run time. The environment that is looked
    at is that of --python, by default that of the interpreter that runs dsdoctor.
    """
    if machine.python and machine.torch is None and not _broken_beyond_reading(machine):
        yield error(
            "torch-missing",
            f"there is no torch in the environment of {machine.python.executable}",
            affects=(needs.TORCH,),
            fix="install it, or look at another environment with --python PATH",
            commands=(f"{quote(machine.python.executable)} -m pip install torch",),
        )


def torch_broken(machine: Machine) -> Iterator[Finding]:
    """torch is installed and cannot be loaded.

    Its files are there, and a process that loads them ends with an error or a signal: a half-finished installation, a
    CUDA library of another release found first (LD_LIBRARY_PATH), or a package that torch needs and that is gone.
    """
    torch, python = machine.torch, machine.python
    reason = torch.broken if torch else _broken_beyond_reading(machine)
    if reason and python:
        evidence = (f"{torch.location} (torch {torch.version})",) if torch else ()
        yield error(
            "torch-broken",
            f"torch {torch.version if torch else ''} is installed and cannot be loaded: {reason}".replace("  ", " "),
            evidence=evidence,
            affects=(needs.TORCH,),
            fix="install it anew",
            commands=(f"{quote(python.executable)} -m pip install --force-reinstall torch",),
        )


def torch_without_cuda(machine: Machine) -> Iterator[Finding]:
    """torch is a CPU build and there is a GPU.

    Nothing of DeepSpeed will use the GPU, and its CUDA ops cannot be built. pip takes the CPU build when it was named
    (a "+cpu" version or index) or when the platform has no other.
    """
    torch = machine.torch
    if torch and torch.cuda is None and torch.hip is None and machine.gpus:
        yield error(
            "torch-without-cuda",
            f"torch {torch.version} is a CPU build, and here is {machine.gpus[0].name}",
            evidence=(torch.location,),
            fix="install a CUDA build that this driver runs",
            commands=("python -m pip install --force-reinstall torch",),
        )


def python_headers_missing(machine: Machine) -> Iterator[Finding]:
    """Python.h is not there for this interpreter.

    Every op includes it. Distributions put it into a package of its own (python3.11-dev, python3-devel), for that very
    minor version. dsdoctor's own builds fetch it without root on Debian and Ubuntu.
    """
    python = machine.python
    if python and not python.headers:
        minor = ".".join(python.version.split(".")[:2])
        yield error(
            "python-headers-missing",
            f"Python {minor} has no Python.h in {python.include}",
            affects=(needs.PYTHON_HEADERS,),
            fix="install its headers, or let build-wheel fetch them without root",
            commands=(f"sudo apt-get install python{minor}-dev  # Fedora, RHEL: python3-devel", BUILD_WHEEL),
        )


def ninja_missing(machine: Machine) -> Iterator[Finding]:
    """There is no ninja: ops cannot be compiled at run time (JIT).

    torch's JIT loader starts the program "ninja", so it must be on PATH: the Python package alone does not help where its
    environment is not activated. Ahead-of-time builds work without it, one file after the other.
    """
    python, ninja = machine.python, machine.system.ninja
    if python and ninja is None:
        yield warning(
            "ninja-missing",
            "there is no ninja: DeepSpeed cannot compile ops at run time, and builds go file by file",
            fix="install it into this environment",
            commands=(f"{quote(python.executable)} -m pip install 'ninja>=1.13'",),
        )
    elif python and not machine.system.ninja_on_path:
        yield note(
            "ninja-missing",
            f"ninja {ninja} is in {python.scripts}, which is not on PATH: compiling ops at run time fails",
            fix="activate the environment",
            commands=(f'export PATH={quote(python.scripts)}:"$PATH"',),
        )


def wheel_package_missing(machine: Machine) -> Iterator[Finding]:
    """setuptools is missing, or too old to make wheels by itself and the wheel package is missing too.

    DeepSpeed's setup.py is run by the environment's own setuptools when pip does not isolate the build. Before 70.1
    setuptools took bdist_wheel from the wheel package.
    """
    python = machine.python
    if python is None:
        return
    setuptools = machine.package("setuptools")
    if setuptools is None or (not machine.package("wheel") and _older(setuptools, SETUPTOOLS_WITH_BDIST_WHEEL)):
        name = "setuptools" if setuptools is None else "wheel"
        have = f" (setuptools {setuptools})" if setuptools else ""
        yield warning(
            "wheel-package-missing",
            f"{name} is not in the environment{have}, and DeepSpeed's setup.py needs it to make a wheel",
            fix="install it",
            commands=(f"{quote(python.executable)} -m pip install {name}",),
        )


def pip_isolates(machine: Machine) -> Iterator[Finding]:
    """pip hides torch from DeepSpeed's setup.py unless it is told not to.

    Since 25.3 pip builds every source distribution in an environment of its own, where no torch is. DeepSpeed's setup.py then
    stops ("Unable to pre-compile ops without torch installed"). Say --no-build-isolation, or build with dsdoctor.
    """
    pip = machine.package("pip")
    allowed = machine.variables.get("PIP_NO_BUILD_ISOLATION", "").lower() in {"0", "false", "no", "off"}
    if pip and machine.torch and not allowed and not _older(pip, ALWAYS_ISOLATES):
        yield note(
            "pip-isolates",
            f"pip {pip} builds in isolation: `DS_BUILD_OPS=1 pip install deepspeed` will not see torch {machine.torch.version}",
            fix="when you build with pip, forbid it",
            commands=("python -m pip install --no-build-isolation --no-cache-dir deepspeed",),
        )


def _broken_beyond_reading(machine: Machine) -> str | None:
    """Why a torch that is there says nothing at all of itself."""
    return next((gap.reason for gap in machine.gaps if gap.question == "torch" and machine.torch is None), None)


def _older(version: str, than: Version) -> bool:
    try:
        return Version(version) < than
    except InvalidVersion:
        match = re.match(r"\d+(?:\.\d+)*", version)
        return match is not None and Version(match[0]) < than


CHECKS = (
    python_silent,
    torch_missing,
    torch_broken,
    torch_without_cuda,
    python_headers_missing,
    ninja_missing,
    wheel_package_missing,
    pip_isolates,
)
