"""Python.h from the distribution's package, unpacked into the cache without root, where the machine has none.

Only for the system's Python of Debian and Ubuntu, whose headers belong in /usr/include: any other Python has no such package.
"""

import os
import shutil
from pathlib import Path

from filelock import FileLock

from dsdoctor.core.build_models import Choice, HeadersPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.finding import Finding, Severity, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.pip import why_failed
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.workspace import private_folder
from dsdoctor.rules import book

UNPACK_TIMEOUT_SECONDS = 120.0


def choose_headers(
    machine: Machine, request: BuildRequest, cache: str
) -> tuple[HeadersPlan | None, tuple[Choice, ...], tuple[Finding, ...]]:
    """Nothing when Python.h is there; the package to unpack where apt-get can fetch it; else an error with the fix."""
    python = machine.python
    if python is None or python.headers:
        return None, (), ()
    short = ".".join(python.version.split(".")[:2])
    missing = f"Python.h of Python {python.version} is not in {python.include}"
    if machine.system.apt_get and python.include == f"/usr/include/python{short}" and not request.offline:
        root = f"{cache}/headers/python{python.version}"
        plan = HeadersPlan(
            package=f"libpython{short}-dev",
            root=root,
            include=(f"{root}/usr/include/python{short}", f"{root}/usr/include"),
        )
        choice = Choice(what="Python headers", value=f"{plan.package}, unpacked in {root}", because=missing)
        return plan, (choice,), ()
    finding = book.finding(
        "python-headers-missing",
        Severity.ERROR,
        case="build",
        version=python.version,
        include=python.include,
        short=short,
    )
    return None, (), (finding,)


def unpack_headers(host: LocalHost, plan: HeadersPlan) -> None:
    """Fetch the package and unpack it; it is not installed. Raises BuildFailed when that cannot be done."""
    root = Path(plan.root)
    root = private_folder(root.parent) / root.name
    with FileLock(root.with_suffix(".lock")):
        if root.is_dir():
            return
        temporary = root.with_name(f".{root.name}.{os.getpid()}")
        temporary.mkdir(mode=0o700)
        try:
            _unpack(host, plan, temporary)
            temporary.rename(root)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _unpack(host: LocalHost, plan: HeadersPlan, folder: Path) -> None:
    lines: list[str] = []
    env = host.environment()
    # apt-get download writes to the current folder, and needs no root
    fetched = host.stream(["apt-get", "download", "--quiet", plan.package], cwd=folder, env=env, on_line=lines.append)
    packages = sorted(folder.glob("*.deb")) if fetched == 0 else []
    if packages:
        answer = host.run(["dpkg-deb", "--extract", str(packages[0]), str(folder)], timeout=UNPACK_TIMEOUT_SECONDS)
        lines += answer.stderr.splitlines()
        packages[0].unlink()
    if not list(folder.glob("usr/include/python3*/Python.h")):
        raise BuildFailed(
            f"apt-get could not fetch {plan.package}, which holds Python.h: {why_failed(host, chr(10).join(lines))}",
            hint=step("sudo apt-get update && sudo apt-get install {package}", package=plan.package).line,
        )
