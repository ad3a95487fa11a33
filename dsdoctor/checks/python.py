"""Machine -> findings about the Python environment: torch, headers, ninja, pip; and how to install torch."""

import re
from collections.abc import Iterator

from packaging.version import Version

from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Severity, Step, step
from dsdoctor.core.machine import Cuda, Machine
from dsdoctor.rules import book

ALWAYS_ISOLATES = Version("25.3")
SETUPTOOLS_WITH_BDIST_WHEEL = Version("70.1")
TOOL_ENVIRONMENT = re.compile(r"/uv/tools/|/archive-v\d+/|/pipx/")
"""Parts of paths at which uv and pipx keep the environments of tools."""
CUDA_WITH_WHEELS = tuple(map(Cuda.parse, ("11.8", "12.1", "12.4", "12.6", "12.8", "13.0")))
"""CUDA releases that torch has had wheels for (https://pytorch.org/get-started/previous-versions)."""


def summary(machine: Machine) -> str:
    """One line for the topic."""
    python, torch = machine.python, machine.torch
    if python is None:
        return "Python and torch: the interpreter does not respond"
    if torch is None:
        return f"Python {python.version}, no torch"
    built = " ".join(filter(None, (torch.accelerator, str(torch.cuda) if torch.cuda else torch.hip)))
    return f"Python {python.version}, torch {torch.version} ({built} build)"


def other_torch(machine: Machine) -> Step:
    """Install another torch, pinned to a CUDA release that the driver here runs: an index has builds for several.

    Without a driver it is the release of the torch that is here; without that pip chooses.
    """
    torch, driver = machine.torch, machine.driver
    runs = (driver and driver.cuda) or (torch and torch.cuda)
    release = next((cuda for cuda in reversed(CUDA_WITH_WHEELS) if cuda and runs and cuda <= runs), None)
    python = machine.python.executable if machine.python else "python"
    if release is None:
        return step("{python} -m pip install --upgrade torch", python=python)
    return step(
        "{python} -m pip install --upgrade torch --index-url https://download.pytorch.org/whl/{tag}",
        python=python,
        # as torch names it: cu128
        tag=f"cu{release.major}{release.minor}",
    )


def same_torch(machine: Machine) -> Step:
    """Install the very torch that is here again, neither a newer one nor one for another CUDA release."""
    python = machine.python.executable if machine.python else "python"
    if machine.torch is None:
        return step("{python} -m pip install --force-reinstall torch", python=python)
    release, _, local = machine.torch.version.partition("+")
    if not local:
        return step("{python} -m pip install --force-reinstall torch=={release}", python=python, release=release)
    return step(
        "{python} -m pip install --force-reinstall torch=={release} --index-url https://download.pytorch.org/whl/{tag}",
        python=python,
        release=release,
        tag=local,
    )


def python_silent(machine: Machine) -> Iterator[Finding]:
    """The interpreter whose environment was to be examined does not answer."""
    for gap in machine.gaps:
        if machine.python is None and gap.question.startswith("python"):
            yield book.finding("python-silent", Severity.ERROR, affects=(needs.TORCH,), reason=gap.reason)


def torch_missing(machine: Machine) -> Iterator[Finding]:
    """There is no torch in this environment."""
    if machine.python is None or machine.torch is not None or _broken_beyond_reading(machine):
        return
    python = machine.python.executable
    if TOOL_ENVIRONMENT.search(python):
        made = "uv or pipx created it for dsdoctor only; name the environment that you train in"
        yield book.finding(
            "torch-missing", Severity.ERROR, case="tool", evidence=(made,), affects=(needs.TORCH,), python=python
        )
    else:
        steps = (other_torch(machine),)
        yield book.finding("torch-missing", Severity.ERROR, affects=(needs.TORCH,), python=python, steps=steps)


def torch_broken(machine: Machine) -> Iterator[Finding]:
    """torch is installed and cannot be loaded."""
    torch, python = machine.torch, machine.python
    reason = torch.broken if torch else _broken_beyond_reading(machine)
    if reason and python:
        evidence = (f"{torch.location} (torch {torch.version})",) if torch else ()
        yield book.finding(
            "torch-broken",
            Severity.ERROR,
            case="" if torch else "unread",
            evidence=evidence,
            affects=(needs.TORCH,),
            torch=torch.version if torch else "",
            reason=reason,
            steps=(same_torch(machine),),
        )


def torch_without_cuda(machine: Machine) -> Iterator[Finding]:
    """torch is a CPU build and there is a GPU."""
    torch = machine.torch
    if torch and torch.accelerator == "CPU" and machine.gpus and machine.unjudged_accelerator is None:
        yield book.finding(
            "torch-without-cuda",
            Severity.ERROR,
            evidence=(torch.location,),
            torch=torch.version,
            gpu=machine.gpus[0].name,
            steps=(other_torch(machine),),
        )


def python_headers_missing(machine: Machine) -> Iterator[Finding]:
    """Python.h is not there for this interpreter."""
    python = machine.python
    if python and not python.headers:
        yield book.finding(
            "python-headers-missing",
            Severity.ERROR,
            affects=(needs.PYTHON_HEADERS,),
            minor=".".join(python.version.split(".")[:2]),
            include=python.include,
        )


def ninja_missing(machine: Machine) -> Iterator[Finding]:
    """There is no ninja, or it is not on PATH."""
    python, ninja = machine.python, machine.system.ninja
    if python and ninja is None:
        yield book.finding("ninja-missing", Severity.WARNING, python=python.executable)
    elif python and not machine.system.ninja_on_path:
        yield book.finding("ninja-missing", Severity.NOTE, case="not-on-path", ninja=ninja, scripts=python.scripts)


def wheel_package_missing(machine: Machine) -> Iterator[Finding]:
    """setuptools is missing, or it is older than 70.1 and the wheel package is missing too."""
    python = machine.python
    if python is None:
        return
    setuptools = machine.package("setuptools")
    if setuptools is None:
        yield book.finding("wheel-package-missing", Severity.WARNING, python=python.executable)
    elif not machine.package("wheel") and _older(setuptools, SETUPTOOLS_WITH_BDIST_WHEEL):
        yield book.finding(
            "wheel-package-missing",
            Severity.WARNING,
            case="wheel",
            setuptools=setuptools,
            python=python.executable,
        )


def pip_isolates(machine: Machine) -> Iterator[Finding]:
    """pip hides torch from DeepSpeed's setup.py unless it is told not to."""
    pip = machine.package("pip")
    allowed = machine.variables.get("PIP_NO_BUILD_ISOLATION", "").lower() in {"0", "false", "no", "off"}
    if pip and machine.torch and not allowed and not _older(pip, ALWAYS_ISOLATES):
        yield book.finding("pip-isolates", Severity.NOTE, pip=pip, torch=machine.torch.version)


def _broken_beyond_reading(machine: Machine) -> str | None:
    """Why torch, although installed, could not be read at all; None where it could."""
    return next((gap.reason for gap in machine.gaps if gap.question == "torch" and machine.torch is None), None)


def _older(version: str, than: Version) -> bool:
    try:
        return Version(version) < than
    except ValueError:
        match = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
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
