"""Machine -> what any build needs: the torch that works, the packages, the disk space; findings for what lacks. Pure."""

from collections.abc import Iterator

from packaging.version import InvalidVersion, Version

from dsdoctor.core.build_models import OpPlan, ToolkitPlan
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.machine import Machine, Torch

GIB = 1 << 30
BASE_DISK = GIB // 4
OBJECT_DISK = 48 << 20
"""Bytes of one object with its share of the shared object: with -g they are 17 to 40 MB."""

TOOLKIT_DISK = GIB
UNPACKED = 6
"""What NVIDIA's archives take with what is in them, as a multiple of their size, estimated high."""

SETUPTOOLS_WITH_BDIST_WHEEL = Version("70.1")


def working_torch(machine: Machine) -> Torch:
    """The torch of the environment. Raises ImpossiblePlan with the reason when there is none that works."""
    python = machine.python
    if python is None:
        reason = next((gap.reason for gap in machine.gaps if gap.question.startswith("python")), "it does not answer")
        raise ImpossiblePlan(f"the Python to build for cannot be asked: {reason}", hint="name one with --python PATH")
    if machine.torch is None:
        raise ImpossiblePlan(
            f"there is no torch in the environment of {python.executable}",
            hint=step("{python} -m pip install torch", python=python.executable).line,
        )
    if machine.torch.broken is not None:
        raise ImpossiblePlan(
            f"torch {machine.torch.version} is installed and cannot be imported: {machine.torch.broken}",
            hint=step("{python} -m pip install --force-reinstall torch", python=python.executable).line,
        )
    return machine.torch


def disk_needed(ops: tuple[OpPlan, ...], toolkit: ToolkitPlan | None) -> int:
    """The bytes that a build may take in the cache folder, estimated high."""
    objects = sum(len(op.sources) * OBJECT_DISK for op in ops)
    archives = sum(archive.size for archive in toolkit.archives) if toolkit else 0
    return BASE_DISK + objects + (TOOLKIT_DISK if toolkit and toolkit.fetches else 0) + UNPACKED * archives


def environment_findings(machine: Machine, disk: int) -> Iterator[Finding]:
    """Errors for missing packages and for a disk with less than ``disk`` bytes free."""
    python = machine.python
    assert python is not None
    for name in _missing_packages(machine):
        yield Finding.error(
            "wheel-package-missing",
            f"{name} is not in the environment of {python.executable}, and DeepSpeed's setup.py needs it",
            fix="install it",
            steps=(step("{executable} -m pip install {name}", executable=python.executable, name=name),),
        )
    free = machine.system.cache_free
    if free is not None and free < disk:
        yield Finding.error(
            "disk-full",
            f"the build needs about {disk / GIB:.1f} GiB, the cache folder's disk has {free / GIB:.1f} GiB free",
            fix="free some, or put the cache elsewhere",
            steps=(step("export DSDOCTOR_CACHE=/path/with/room"),),
        )


def gap_findings(machine: Machine) -> Iterator[Finding]:
    """A note for each question about the machine that could not be answered."""
    for gap in machine.gaps:
        yield Finding.note("not-asked", f"{gap.question} could not be asked: {gap.reason}")


def _missing_packages(machine: Machine) -> list[str]:
    setuptools = machine.package("setuptools")
    if setuptools is None:
        return ["setuptools"]
    try:
        complete = Version(setuptools) >= SETUPTOOLS_WITH_BDIST_WHEEL
    except InvalidVersion:
        complete = False
    return [] if complete or machine.package("wheel") else ["wheel"]
