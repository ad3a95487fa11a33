"""Machine -> findings about a built DeepSpeed's files: damaged, altered, or for another system or Python."""

import re
from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Machine
from dsdoctor.core.text import and_more
from dsdoctor.rules import book


def libstdcxx_too_old(machine: Machine) -> Iterator[Finding]:
    """The ops need a newer libstdc++ than the system's."""
    built, here = machine.deepspeed, machine.system.glibcxx
    if built and built.glibcxx and here and _number(built.glibcxx) > _number(here):
        yield book.finding(
            "libstdcxx-too-old",
            Severity.ERROR,
            evidence=[built.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            needed=built.glibcxx,
            here=here,
        )


def glibc_too_old(machine: Machine) -> Iterator[Finding]:
    """The ops need a newer glibc than this system has."""
    built, here = machine.deepspeed, machine.system.glibc
    if built and built.glibc and here and _number(built.glibc) > _number(here):
        yield book.finding(
            "glibc-too-old",
            Severity.ERROR,
            evidence=[built.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            needed=built.glibc,
            here=here,
        )


def wheel_python_mismatch(machine: Machine) -> Iterator[Finding]:
    """The wheel is for another Python: its shared objects are compiled for one minor version."""
    built, python = machine.deepspeed, machine.python
    if built and python and built.python and not {python.tag, "py3", "py2.py3"} & set(built.python):
        yield book.finding(
            "wheel-python-mismatch",
            Severity.ERROR,
            affects=(needs.INSTALLED, *built.installed_ops),
            tags=built.python,
            tag=python.tag,
            python=python.executable,
        )


def wheel_platform_mismatch(machine: Machine) -> Iterator[Finding]:
    """The wheel is for another operating system, processor family or newer glibc."""
    built, architecture = machine.deepspeed, machine.system.architecture
    if not built or not built.platform or architecture == "unknown":
        return
    if not any(_is_for(tag, architecture, machine.system.glibc) for tag in built.platform):
        yield book.finding(
            "wheel-platform-mismatch",
            Severity.ERROR,
            affects=(needs.INSTALLED, *built.installed_ops),
            tags=built.platform,
            architecture=architecture,
            glibc=str(machine.system.glibc),
        )


def wheel_altered(machine: Machine) -> Iterator[Finding]:
    """Files of the built DeepSpeed are not those that were recorded: their sha256 differs, or they are gone."""
    built = machine.deepspeed
    if built and built.altered:
        is_wheel = built.location.endswith(".whl")
        yield book.finding(
            "wheel-altered",
            Severity.ERROR if is_wheel else Severity.WARNING,
            affects=(needs.INSTALLED, *built.installed_ops) if is_wheel else (),
            count=len(built.altered),
            location=built.location,
            files=and_more(built.altered),
        )


def wheel_foreign_files(machine: Machine) -> Iterator[Finding]:
    """The wheel, or the installed DeepSpeed, has what no DeepSpeed has: other packages, .pth files, programs, entry points."""
    built = machine.deepspeed
    if not built or not built.foreign:
        return
    is_wheel = built.location.endswith(".whl")
    yield book.finding(
        "wheel-foreign-files",
        Severity.ERROR,
        case="" if is_wheel else "installed",
        affects=(needs.INSTALLED, *built.installed_ops),
        location=built.location,
        foreign=and_more(built.foreign),
    )


def wheel_identity(machine: Machine) -> Iterator[Finding]:
    """What the wheel says of itself is not what its file name says: another package or version, or two .dist-info folders."""
    built = machine.deepspeed
    if built and built.contradictions:
        yield book.finding(
            "wheel-identity",
            Severity.ERROR,
            affects=(needs.INSTALLED, *built.installed_ops),
            location=built.location,
            contradictions=and_more(built.contradictions),
        )


def wheel_requires_address(machine: Machine) -> Iterator[Finding]:
    """The wheel requires a package from an address that it names itself (``torch @ https://...``), not from the index in use."""
    built = machine.deepspeed
    if built and built.addresses:
        yield book.finding(
            "wheel-requires-address",
            Severity.ERROR,
            affects=(needs.INSTALLED, *built.installed_ops),
            location=built.location,
            addresses=and_more(built.addresses),
        )


def op_unreadable(machine: Machine) -> Iterator[Finding]:
    """A shared object is damaged: it is no ELF file, or its tables are inconsistent."""
    built = machine.deepspeed
    if built and built.unreadable:
        yield book.finding(
            "op-unreadable",
            Severity.ERROR,
            affects=(needs.INSTALLED, *built.installed_ops),
            unreadable=and_more(built.unreadable),
            location=built.location,
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
