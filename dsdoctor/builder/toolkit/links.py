"""Layers -> one folder of links that looks like an installed toolkit, and a libcuda.so to link against."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from dsdoctor.core.build_models import Layer
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import write_text
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import why_failed

PROFILE = """\
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
"""


def link_layers(temporary: Path, final: Path, layers: Iterable[Layer]) -> None:
    """One folder of links to the files of all layers; where several layers have a name, the first one is linked."""
    home = temporary / "home"
    for name in ("bin", "include", "lib64/stubs"):
        (home / name).mkdir(parents=True)

    def present(folder: str) -> Path:
        """Where a folder of the finished toolkit is now, under its temporary name."""
        path = Path(folder)
        return temporary / path.relative_to(final) if path.is_relative_to(final) else path

    for layer in layers:
        if layer.tools is not None and not (home / "bin" / "nvcc").is_symlink():
            _link_all(present(layer.tools), Path(layer.tools), home / "bin")
            (home / "nvvm").symlink_to(Path(layer.tools).parent / "nvvm")
        for folder in layer.include:
            _link_all(present(folder), Path(folder), home / "include")
        for folder in layer.libraries:
            if not folder.endswith("/stubs"):
                _link_all(present(folder), Path(folder), home / "lib64")
    _unversioned(home / "lib64")
    (home / "lib").symlink_to("lib64")
    target = home / "targets" / f"{os.uname().machine}-linux"
    target.mkdir(parents=True)
    (target / "include").symlink_to("../../include")
    (target / "lib").symlink_to("../../lib64")


def _link_all(present: Path, named: Path, into: Path) -> None:
    """Link every entry that no earlier layer has; a folder is linked as a whole."""
    for entry in sorted(present.iterdir()) if present.is_dir() else ():
        link = into / entry.name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(named / entry.name)


def _unversioned(folder: Path) -> None:
    """Add a libX.so for each libX.so.N: PyPI's wheels have only the latter, the linker looks for the former."""
    for library in sorted(folder.glob("lib*.so.*")):
        plain = folder / f"{library.name.split('.so.')[0]}.so"
        if not plain.is_symlink() and not plain.exists():
            plain.symlink_to(library.name)


def settle_nvcc(home: Path) -> None:
    """Make the nvcc of a toolkit look for everything in that toolkit, whatever part it came with.

    Some releases look beside the name that they are called by, others beside the file that it leads to: here both are one.
    """
    nvcc, profile = home / "bin" / "nvcc", home / "bin" / "nvcc.profile"
    file = nvcc.resolve()
    nvcc.unlink()
    nvcc.hardlink_to(file)
    profile.unlink(missing_ok=True)
    write_text(profile, PROFILE)


def make_stub(host: LocalHost, home: Path, compiler: str) -> None:
    """Make a libcuda.so to link against, with every function of cuda.h and no code: the real one comes with the driver."""
    # the functions must be in it: a linker with --as-needed would drop a library that defines nothing
    header = (home / "include" / "cuda.h").read_text(encoding="utf-8", errors="replace")
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    path = home / "lib64" / "stubs" / "libcuda.so"
    source = path.with_suffix(".c")
    write_text(source, "".join(f"void {name}(void) {{}}\n" for name in names))
    argv = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(source)]
    answer = host.run(argv, timeout=120)
    source.unlink()
    if not answer.ok:
        raise BuildFailed(
            f"the stub of libcuda.so does not compile: {why_failed(host, answer.stderr)}", hint="see CC above"
        )
