"""Machine -> findings about a built DeepSpeed's files: damaged, altered, or for another system or Python."""

import re
from collections.abc import Iterator

from dsdoctor.checks.advice import BUILD_WHEEL
from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.machine import Machine
from dsdoctor.core.text import and_more


def libstdcxx_too_old(machine: Machine) -> Iterator[Finding]:
    """The ops need a newer libstdc++ than the system's."""
    built, here = machine.deepspeed, machine.system.glibcxx
    if built and built.glibcxx and here and _number(built.glibcxx) > _number(here):
        yield Finding.error(
            "libstdcxx-too-old",
            f"the ops need GLIBCXX_{built.glibcxx}, this system's libstdc++ has GLIBCXX_{here}",
            evidence=[built.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="install a newer libstdc++, or build the ops here",
            steps=(step("conda install 'libstdcxx-ng>=12'"), BUILD_WHEEL),
        )


def glibc_too_old(machine: Machine) -> Iterator[Finding]:
    """The ops need a newer glibc than this system has."""
    built, here = machine.deepspeed, machine.system.glibc
    if built and built.glibc and here and _number(built.glibc) > _number(here):
        yield Finding.error(
            "glibc-too-old",
            f"the ops need glibc {built.glibc}, this system has glibc {here}",
            evidence=[built.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="build them on this system, or on the oldest that is to run them",
            steps=(BUILD_WHEEL,),
        )


def wheel_python_mismatch(machine: Machine) -> Iterator[Finding]:
    """The wheel is for another Python: its shared objects are compiled for one minor version."""
    built, python = machine.deepspeed, machine.python
    if built and python and built.python and not {python.tag, "py3", "py2.py3"} & set(built.python):
        yield Finding.error(
            "wheel-python-mismatch",
            f"the wheel is for {', '.join(built.python)}, this Python is {python.tag} ({python.executable})",
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="build it with this Python",
            steps=(step("python -m dsdoctor build-wheel --python {executable}", executable=python.executable),),
        )


def wheel_platform_mismatch(machine: Machine) -> Iterator[Finding]:
    """The wheel is for another operating system, processor family or newer glibc."""
    built, architecture = machine.deepspeed, machine.system.architecture
    if not built or not built.platform or architecture == "unknown":
        return
    if not any(_is_for(tag, architecture, machine.system.glibc) for tag in built.platform):
        yield Finding.error(
            "wheel-platform-mismatch",
            f"the wheel is for {', '.join(built.platform)}, this is Linux on {architecture}, glibc {machine.system.glibc}",
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="build it here",
            steps=(BUILD_WHEEL,),
        )


def wheel_altered(machine: Machine) -> Iterator[Finding]:
    """Files of the built DeepSpeed are not those that were recorded: their sha256 differs, or they are gone."""
    built = machine.deepspeed
    if built and built.altered:
        is_wheel = built.location.endswith(".whl")
        yield (Finding.error if is_wheel else Finding.warning)(
            "wheel-altered",
            f"{len(built.altered)} files of {built.location} are not what was recorded: {and_more(built.altered)}",
            affects=(needs.INSTALLED, *built.installed_ops) if is_wheel else (),
            fix="fetch or build it again",
            steps=(BUILD_WHEEL,),
        )


def wheel_foreign_files(machine: Machine) -> Iterator[Finding]:
    """The wheel, or the installed DeepSpeed, has what no DeepSpeed has: other packages, .pth files, programs, entry points."""
    built = machine.deepspeed
    if not built or not built.foreign:
        return
    is_wheel = built.location.endswith(".whl")
    did = "would put into place" if is_wheel else "came with"
    remedy = (
        "do not install it"
        if is_wheel
        else "look at these files, and use a new environment: uninstalling does not undo them"
    )
    yield Finding.error(
        "wheel-foreign-files",
        f"{built.location} {did} what is no part of DeepSpeed: {and_more(built.foreign)}",
        affects=(needs.INSTALLED, *built.installed_ops),
        fix=f"{remedy}; build the wheel from DeepSpeed's source",
        steps=(BUILD_WHEEL,),
    )


def wheel_identity(machine: Machine) -> Iterator[Finding]:
    """What the wheel says of itself is not what its file name says: another package or version, or two .dist-info folders."""
    built = machine.deepspeed
    if built and built.contradictions:
        yield Finding.error(
            "wheel-identity",
            f"{built.location} is not what its file name says: {and_more(built.contradictions)}",
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="do not install it; build the wheel from DeepSpeed's source",
            steps=(BUILD_WHEEL,),
        )


def wheel_requires_address(machine: Machine) -> Iterator[Finding]:
    """The wheel requires a package from an address that it names itself (``torch @ https://...``), not from the index in use."""
    built = machine.deepspeed
    if built and built.addresses:
        yield Finding.error(
            "wheel-requires-address",
            f"{built.location} has pip install {and_more(built.addresses)}",
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="do not install it with its requirements; build the wheel from DeepSpeed's source",
            steps=(BUILD_WHEEL,),
        )


def op_unreadable(machine: Machine) -> Iterator[Finding]:
    """A shared object is damaged: it is no ELF file, or its tables are inconsistent."""
    built = machine.deepspeed
    if built and built.unreadable:
        yield Finding.error(
            "op-unreadable",
            f"{and_more(built.unreadable)} of {built.location} cannot be read as shared objects",
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="fetch or build it again",
            steps=(BUILD_WHEEL,),
        )


def _is_for(tag: str, architecture: str, glibc: str | None) -> bool:
    """Whether a platform tag is for a Linux machine.

    >>> _is_for("manylinux_2_28_x86_64", "x86_64", "2.36"), _is_for("manylinux_2_99_x86_64", "x86_64", "2.36")
    (True, False)
    """
    floor = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    if floor and glibc and (int(floor[1]), int(floor[2])) > _number(glibc):
        return False
    return tag == "any" or (tag.endswith(f"_{architecture}") and "linux" in tag)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


CHECKS = (
    libstdcxx_too_old,
    glibc_too_old,
    wheel_python_mismatch,
    wheel_platform_mismatch,
    wheel_altered,
    wheel_foreign_files,
    wheel_identity,
    wheel_requires_address,
    op_unreadable,
)
