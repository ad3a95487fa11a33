"""Machine -> findings about a built DeepSpeed's files: damaged, altered, for another system or Python, or linked with libraries
that are not here."""

import re
from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Machine, System
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

OTHER_NAME = {"libaio.so.1": "libaio.so.1t64", "libaio.so.1t64": "libaio.so.1"}
"""One library under two names. Debian and Ubuntu renamed it with the change to 64-bit time and kept no link under the old
name; on 64-bit processors the library itself did not change."""


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
            count=f"{len(built.altered)} file{'s' * (len(built.altered) > 1)}",
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
    """What the wheel says of itself does not match its file name: another package or version, or two .dist-info folders."""
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


def wheel_unusual(machine: Machine) -> Iterator[Finding]:
    """The built DeepSpeed requires packages that no release does, or has a manifest that cannot be read."""
    built = machine.deepspeed
    if built and built.doubts:
        yield book.finding("wheel-unusual", Severity.WARNING, location=built.location, doubts=and_more(built.doubts))


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


def shared_library_missing(machine: Machine) -> Iterator[Finding]:
    """An op links a shared library that this machine does not have."""
    built, here = machine.deepspeed, machine.loadable
    if built is None or here is None:
        return
    wanted = {name for names in built.needed.values() for name in names}
    for soname in sorted(wanted - here):
        ops = [op for op, names in built.needed.items() if soname in names]
        yield (_libaio_missing if soname in OTHER_NAME else _package_missing)(machine, soname, ops)


def _package_missing(machine: Machine, soname: str, ops: list[str]) -> Finding:
    """A library that one package has, libgomp or libcufile."""
    nvidia = soname == "libcufile.so.0"
    release = str(machine.torch.cuda).replace(".", "-") if machine.torch and machine.torch.cuda else "13-0"
    return book.finding(
        "shared-library-missing",
        Severity.ERROR,
        case="cufile" if nvidia else "",
        evidence=[machine.deepspeed.location] if machine.deepspeed else [],
        affects=(needs.INSTALLED, *ops),
        ops=ops,
        soname=soname,
        apt=f"libcufile-{release}" if nvidia else "libgomp1",
        dnf=f"libcufile-{release}" if nvidia else "libgomp",
        conda="nvidia::libcufile" if nvidia else "libgomp",
    )


def _libaio_missing(machine: Machine, soname: str, ops: list[str]) -> Finding:
    """libaio, under the name that the op links: systems have it under another."""
    system, other = machine.system, OTHER_NAME[soname]
    renamed = _renamed_libaio(system)
    folder = f"/usr/lib/{system.architecture}-linux-gnu" if re.match("Debian|Ubuntu", system.os) else "/usr/lib64"
    evidence = [machine.deepspeed.location] if machine.deepspeed else []
    if other in (machine.loadable or ()):
        return book.finding(
            "shared-library-missing",
            Severity.ERROR,
            case="other-name",
            evidence=evidence,
            affects=(needs.INSTALLED, *ops),
            ops=ops,
            soname=soname,
            other=other,
            link=f"{folder}/{soname}",
        )
    return book.finding(
        "shared-library-missing",
        Severity.ERROR,
        case="" if renamed == soname.endswith("t64") else "renamed",
        evidence=evidence,
        affects=(needs.INSTALLED, *ops),
        ops=ops,
        soname=soname,
        apt="libaio1t64" if renamed else "libaio1",
        dnf="libaio",
        conda="libaio",
        other=other,
        link=f"{folder}/{soname}",
    )


def _renamed_libaio(system: System) -> bool:
    """Whether this system's libaio has the new name: Debian from 13, Ubuntu from 24.04 on.

    >>> names = ("Debian GNU/Linux 13 (trixie)", "Ubuntu 24.04.2 LTS", "Ubuntu 22.04.5 LTS", "Debian GNU/Linux trixie/sid")
    >>> [_renamed_libaio(System(architecture="x86_64", os=name)) for name in names]
    [True, True, False, False]
    """
    match = re.match(r"(Debian|Ubuntu)\D*(\d+)", system.os)
    return match is not None and int(match[2]) >= {"Debian": 13, "Ubuntu": 24}[match[1]]


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
    wheel_unusual,
    op_unreadable,
    shared_library_missing,
)
