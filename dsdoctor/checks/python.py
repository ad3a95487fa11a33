"""Machine -> findings about the Python environment: torch, headers, ninja, pip."""

import re
from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from dsdoctor.checks.advice import BUILD_WHEEL, other_torch, same_torch
from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.machine import Machine

ALWAYS_ISOLATES = Version("25.3")
SETUPTOOLS_WITH_BDIST_WHEEL = Version("70.1")
TOOL_ENVIRONMENT = re.compile(r"/uv/tools/|/archive-v\d+/|/pipx/")
"""Parts of paths at which uv and pipx keep the environments of tools."""
THIS_PYTHON = step('dsdoctor check --python "$(command -v python)"', note="after uvx or pipx run, where that starts it")


def summary(machine: Machine) -> str:
    """One line for the topic."""
    python, torch = machine.python, machine.torch
    if python is None:
        return "Python and torch: the interpreter does not answer"
    if torch is None:
        return f"Python {python.version}, no torch"
    built = " ".join(filter(None, (torch.accelerator, str(torch.cuda) if torch.cuda else torch.hip)))
    return f"Python {python.version}, torch {torch.version} ({built} build)"


def python_silent(machine: Machine) -> Iterator[Finding]:
    """The interpreter whose environment was to be examined does not answer."""
    for gap in machine.gaps:
        if machine.python is None and gap.question.startswith("python"):
            title = f"the interpreter does not answer: {gap.reason}"
            yield Finding.error(
                "python-silent",
                title,
                affects=(needs.TORCH,),
                fix="name one that runs",
                steps=(step("python -m dsdoctor check --python /path/to/python"),),
            )


def torch_missing(machine: Machine) -> Iterator[Finding]:
    """There is no torch in this environment."""
    if machine.python is None or machine.torch is not None or _broken_beyond_reading(machine):
        return
    python = machine.python.executable
    tool = TOOL_ENVIRONMENT.search(python)
    yield Finding.error(
        "torch-missing",
        f"there is no torch in the environment of {python}",
        evidence=("it was made for dsdoctor alone, by uv or pipx: the environment that you train in was not named",)
        if tool
        else (),
        affects=(needs.TORCH,),
        fix="name the interpreter of your environment"
        if tool
        else "install it, or look at another environment with --python PATH",
        steps=(THIS_PYTHON if tool else other_torch(machine),),
    )


def torch_broken(machine: Machine) -> Iterator[Finding]:
    """torch is installed and cannot be loaded."""
    torch, python = machine.torch, machine.python
    reason = torch.broken if torch else _broken_beyond_reading(machine)
    if reason and python:
        evidence = (f"{torch.location} (torch {torch.version})",) if torch else ()
        yield Finding.error(
            "torch-broken",
            f"torch {torch.version if torch else ''} is installed and cannot be loaded: {reason}".replace("  ", " "),
            evidence=evidence,
            affects=(needs.TORCH,),
            fix="install it again",
            steps=(same_torch(machine),),
        )


def torch_without_cuda(machine: Machine) -> Iterator[Finding]:
    """torch is a CPU build and there is a GPU."""
    torch = machine.torch
    if torch and torch.accelerator == "CPU" and machine.gpus and machine.unjudged_accelerator is None:
        yield Finding.error(
            "torch-without-cuda",
            f"torch {torch.version} is a CPU build, and there is a GPU ({machine.gpus[0].name})",
            evidence=(torch.location,),
            fix="install a CUDA build that this driver runs",
            steps=(other_torch(machine),),
        )


def python_headers_missing(machine: Machine) -> Iterator[Finding]:
    """Python.h is not there for this interpreter."""
    python = machine.python
    if python and not python.headers:
        minor = ".".join(python.version.split(".")[:2])
        yield Finding.error(
            "python-headers-missing",
            f"Python {minor} has no Python.h in {python.include}",
            affects=(needs.PYTHON_HEADERS,),
            fix="install its headers, or let build-wheel fetch them without root",
            steps=(
                step("sudo apt-get install python{minor}-dev", minor=minor),
                instead("sudo dnf install python3-devel"),
                BUILD_WHEEL,
            ),
        )


def ninja_missing(machine: Machine) -> Iterator[Finding]:
    """There is no ninja, or it is not on PATH."""
    python, ninja = machine.python, machine.system.ninja
    if python and ninja is None:
        yield Finding.warning(
            "ninja-missing",
            "there is no ninja: DeepSpeed cannot compile ops at run time, and builds go file by file",
            fix="install it into this environment",
            steps=(step("{executable} -m pip install 'ninja>=1.13'", executable=python.executable),),
        )
    elif python and not machine.system.ninja_on_path:
        yield Finding.note(
            "ninja-missing",
            f"ninja {ninja} is in {python.scripts}, which is not on PATH: compiling ops at run time fails",
            fix="activate the environment",
            steps=(step('export PATH={scripts}:"$PATH"', scripts=python.scripts),),
        )


def wheel_package_missing(machine: Machine) -> Iterator[Finding]:
    """setuptools is missing, or it is older than 70.1 and the wheel package is missing too."""
    python = machine.python
    if python is None:
        return
    setuptools = machine.package("setuptools")
    if setuptools is None or (not machine.package("wheel") and _older(setuptools, SETUPTOOLS_WITH_BDIST_WHEEL)):
        name = "setuptools" if setuptools is None else "wheel"
        have = f" (setuptools {setuptools})" if setuptools else ""
        yield Finding.warning(
            "wheel-package-missing",
            f"{name} is not in the environment{have}, and DeepSpeed's setup.py needs it to make a wheel",
            fix="install it",
            steps=(step("{executable} -m pip install {name}", executable=python.executable, name=name),),
        )


def pip_isolates(machine: Machine) -> Iterator[Finding]:
    """pip hides torch from DeepSpeed's setup.py unless it is told not to."""
    pip = machine.package("pip")
    allowed = machine.variables.get("PIP_NO_BUILD_ISOLATION", "").lower() in {"0", "false", "no", "off"}
    if pip and machine.torch and not allowed and not _older(pip, ALWAYS_ISOLATES):
        yield Finding.note(
            "pip-isolates",
            f"pip {pip} builds in isolation: `DS_BUILD_OPS=1 pip install deepspeed` will not see torch {machine.torch.version}",
            fix="build with --no-build-isolation when you build with pip",
            steps=(step("python -m pip install --no-build-isolation --no-cache-dir deepspeed"),),
        )


def _broken_beyond_reading(machine: Machine) -> str | None:
    """Why torch, although installed, could not be read at all; None where it could."""
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
