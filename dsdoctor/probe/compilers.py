"""Host -> every C++ compiler: $CXX, then g++ and clang++ on PATH, versioned names too."""

import glob
import re
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.machine import Compiler
from dsdoctor.probe.paths import folders_on

NAME = re.compile(r"^(c\+\+|g\+\+|clang\+\+|[\w.-]+-linux-gnu(?:-cc)?-(?:c|g)\+\+)(-\d[\d.]*)?$")
C_NAMES = {"clang++": "clang", "g++": "gcc", "c++": "cc"}


def find_compilers(host: Host) -> tuple[Compiler, ...]:
    """All C++ compilers that work, in the order in which a build would find them, each real file once."""
    found: list[Compiler] = []
    seen: set[str] = set()
    for path, via in _candidates(host):
        real = host.resolve(path)
        if real in seen:
            continue
        seen.add(real)
        compiler = read_compiler(host, path, via)
        if compiler is not None:
            found.append(compiler)
    return tuple(found)


def read_compiler(host: Host, path: str, via: str) -> Compiler | None:
    """Ask one compiler for its kind and version; None for one without a C++ back end (cc1plus)."""
    kind_and_version = parse_version(host.run([path, "--version"], timeout=20).stdout)
    if kind_and_version is None:
        return None
    kind, version = kind_and_version
    if kind == "gcc" and not host.run([path, "-print-prog-name=cc1plus"], timeout=20).stdout.startswith("/"):
        return None
    return Compiler(path=path, c_path=_c_beside(host, path), kind=kind, version=version, found_via=via)


def parse_version(text: str) -> tuple[str, tuple[int, ...]] | None:
    """Kind and version from the first line of ``--version``.

    >>> parse_version("g++ (Debian 12.2.0-14+deb12u1) 12.2.0\\nCopyright")
    ('gcc', (12, 2, 0))
    >>> parse_version("Debian clang version 14.0.6\\nTarget: x86_64")
    ('clang', (14, 0, 6))
    """
    first = text.splitlines()[0] if text.strip() else ""
    kind = "clang" if "clang" in first else "gcc" if re.search(r"\(|gcc|g\+\+|GCC", first) else None
    versions = re.findall(r"(?<![\w.-])(\d+(?:\.\d+){1,3})(?![\w.])", re.sub(r"\([^)]*\)", "", first))
    if kind is None or not versions:
        return None
    return kind, tuple(int(part) for part in versions[-1].split("."))


def _candidates(host: Host) -> Iterator[tuple[str, str]]:
    named = (host.variable("CXX") or "").split()
    if len(named) == 1:
        path = named[0] if named[0].startswith("/") else host.which(named[0])
        if path:
            yield path, "cxx_variable"
    for name in ("g++", "c++", "clang++"):
        path = host.which(name)
        if path:
            yield path, "path"
    for folder in folders_on(host, "PATH"):
        for path in host.glob(f"{glob.escape(folder)}/*++*"):
            if NAME.match(path.rsplit("/", 1)[1]):
                yield path, "path"


def _c_beside(host: Host, path: str) -> str | None:
    """The C compiler of the same kind and version, beside the C++ one: nvcc takes it as -ccbin."""
    folder, name = path.rsplit("/", 1)
    for cxx, c in C_NAMES.items():
        if cxx in name:
            beside = f"{folder}/{name.replace(cxx, c)}"
            return beside if host.glob(glob.escape(beside)) else None
    return None
