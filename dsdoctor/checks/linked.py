"""Machine -> findings about the shared libraries that a built DeepSpeed's ops link and this machine does not have."""

import re
from collections.abc import Iterator

from dsdoctor.checks.advice import OR_BUILD_WHEEL
from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Step, instead, step
from dsdoctor.core.machine import Machine, System


def shared_library_missing(machine: Machine) -> Iterator[Finding]:
    """An op links a shared library that this machine does not have.

    A wheel holds DeepSpeed's code and not the system libraries that its ops link; slim images have none of those. Only
    libgomp, libaio and libcufile are judged: everything else that ops link is loaded by torch before them, or torch
    does not load without it. A library in an op's own run path, LD_LIBRARY_PATH, Python's prefix or torch's packages
    counts as there.

    Why it matters: The op fails when it is loaded ("libaio.so.1: cannot open shared object file").

    How to fix it: Install the library; the finding names the package.

        $ sudo apt-get install libaio1 libgomp1

    Since: 0.1
    """
    built, here = machine.deepspeed, machine.loadable
    if built is None or here is None:
        return
    wanted = {name for names in built.needed.values() for name in names}
    for soname in sorted(wanted - here):
        ops = [op for op, names in built.needed.items() if soname in names]
        text, steps = _how_to_get(soname, machine, here)
        yield Finding.error(
            "shared-library-missing",
            f"{', '.join(ops)} {'links' if len(ops) == 1 else 'link'} {soname}, which this machine does not have",
            evidence=[built.location],
            affects=(needs.INSTALLED, *ops),
            fix=text,
            steps=steps,
        )


OTHER_NAME = {"libaio.so.1": "libaio.so.1t64", "libaio.so.1t64": "libaio.so.1"}
"""One library under two names. Debian and Ubuntu renamed it with the change to 64-bit time and kept no link under the old
name; on 64-bit processors the library itself did not change."""


def _how_to_get(soname: str, machine: Machine, here: frozenset[str]) -> tuple[str, tuple[Step, ...]]:
    """How to get a missing library: a sentence, and steps for its packages."""
    if soname in OTHER_NAME:
        return _how_to_get_libaio(soname, machine.system, here)
    if soname == "libcufile.so.0":
        release = str(machine.torch.cuda).replace(".", "-") if machine.torch and machine.torch.cuda else "13-0"
        package = f"libcufile-{release}"
        return "install it, from NVIDIA's repository", _install(package, package, "nvidia::libcufile")
    return "install it", _install("libgomp1", "libgomp", "libgomp")


def _how_to_get_libaio(soname: str, system: System, here: frozenset[str]) -> tuple[str, tuple[Step, ...]]:
    """How to get libaio under the name that the op links."""
    other, renamed = OTHER_NAME[soname], _renamed_libaio(system)
    folder = f"/usr/lib/{system.architecture}-linux-gnu" if re.match("Debian|Ubuntu", system.os) else "/usr/lib64"
    link = step("sudo ln -s {other} {link}", other=other, link=f"{folder}/{soname}")
    if other in here:
        return f"{other} is here, the same library under another name: give it this one too, or build the ops here", (
            link,
            OR_BUILD_WHEEL,
        )
    install = _install("libaio1t64" if renamed else "libaio1", "libaio", "libaio")
    if renamed == soname.endswith("t64"):
        return "install it", install
    return f"install it; here it is called {other}, so give it this name too", (*install, link)


def _install(apt: str, dnf: str, conda: str) -> tuple[Step, ...]:
    return (
        step("sudo apt-get install {package}", package=apt),
        instead("sudo dnf install {package}", package=dnf),
        instead("conda install {package}", package=conda),
    )


def _renamed_libaio(system: System) -> bool:
    """Whether this system's libaio has the new name: Debian from 13, Ubuntu from 24.04 on.

    >>> names = ("Debian GNU/Linux 13 (trixie)", "Ubuntu 24.04.2 LTS", "Ubuntu 22.04.5 LTS", "Debian GNU/Linux trixie/sid")
    >>> [_renamed_libaio(System(architecture="x86_64", os=name)) for name in names]
    [True, True, False, False]
    """
    match = re.match(r"(Debian|Ubuntu)\D*(\d+)", system.os)
    return match is not None and int(match[2]) >= {"Debian": 13, "Ubuntu": 24}[match[1]]


CHECKS = (shared_library_missing,)
