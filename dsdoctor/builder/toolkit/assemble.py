"""A toolkit in one folder: its parts fetched, linked together, given a libcuda.so to link against, and tried.

It is tried as an extension of torch would use it: ``nvcc -V``, ``nvcc -c`` of a small kernel for each architecture, and
``g++ -shared -lcudart``. A whole program is not linked: that needs libcudadevrt.a and libcudart_static.a, which no extension does.
"""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock

from dsdoctor.builder.toolkit.download import Say
from dsdoctor.builder.toolkit.fetch_parts import fetch_parts, fetched_layers, forget_downloads
from dsdoctor.builder.toolkit.kept import KeptPart, altered, read_mark, write_digests, write_mark
from dsdoctor.builder.toolkit.plan_assembly import MARK
from dsdoctor.core.build_models import Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed, is_full
from dsdoctor.core.files import real_path, write_text
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import why_failed
from dsdoctor.core.workspace import private_folder

PROFILE = """\
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
"""

KERNEL = """\
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda/std/type_traits>
__global__ void scale(float* values, float factor, int count) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) values[index] *= factor;
}
extern "C" int launch() {
    scale<<<1, 32>>>(nullptr, 2.0f, 0);
    return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
"""

FOLDERS = {"cccl"}
"""Names in a plan's headers that are folders; in CUDA 12 they lie elsewhere."""

USED = ("home/bin/*", "home/nvvm/bin/*", "home/include", "home/lib64", "parts")
"""What of a kept toolkit runs, or is compiled and linked into ops: nobody else may write to it, or on the way to it."""

COMPILE_TIMEOUT_SECONDS = 600.0


def assemble(
    host: LocalHost, plan: ToolkitPlan, *, python: str, architectures: Sequence[str], compiler: str, say: Say
) -> Path:
    """Make the toolkit of a plan and return its root. ``compiler`` is the host compiler that nvcc uses.

    Raises BuildFailed when a part cannot be fetched or the result does not compile.
    """
    home = Path(plan.root)
    toolkits = private_folder(home.parent.parent)
    home = toolkits / home.parent.name / home.name
    for part in USED:
        private_folder(toolkits, f"{glob.escape(home.parent.name)}/{part}")
    with FileLock(home.parent.with_suffix(".lock")), _full_disk_named(home.parent.parent):
        whole = _is_whole(home) and _is_unaltered(home, say)
        if whole:
            say(f"using the toolkit assembled in {home}")
            parts = read_mark(home)
        else:
            parts = _make(host, plan, home, python=python, compiler=compiler, say=say)
        try:
            try_toolkit(host, home, plan, architectures=architectures, compiler=compiler)
        except BuildFailed:
            if not whole:
                # one that was whole before stays: another build may be using it
                shutil.rmtree(home.parent, ignore_errors=True)
            raise
        if not whole:
            write_mark(home, parts)
            forget_downloads(plan, home.parents[2])
    return home


def try_toolkit(host: LocalHost, home: Path, plan: ToolkitPlan, *, architectures: Sequence[str], compiler: str) -> None:
    """Raise BuildFailed with the tool's own words where the toolkit does not serve. ``compiler`` is the host compiler."""
    release = plan.release
    nvcc = str(home / "bin" / "nvcc")
    answer = host.run([nvcc, "-V"], timeout=60)
    if f"release {release}," not in answer.stdout:
        raise BuildFailed(
            f"the assembled {nvcc} is not the nvcc of CUDA {release}: {(answer.stdout + answer.stderr).strip()[-200:]}",
            hint="python -m dsdoctor toolkit --toolkit pypi",
        )
    missing = [name for name in plan.headers if name not in FOLDERS and not (home / "include" / name).exists()]
    if missing:
        raise BuildFailed(
            f"the toolkit assembled in {home} lacks {', '.join(missing)}",
            hint="python -m dsdoctor toolkit --toolkit pypi",
        )
    scratch = home.parent / f".try.{os.getpid()}"
    scratch.mkdir()
    try:
        _compile_kernel(host, home, plan, scratch, architectures=architectures, compiler=compiler)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


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


def settle_nvcc(home: Path) -> None:
    """Make the nvcc of a toolkit look for everything in that toolkit, whatever part it came with.

    Some releases look beside the name that they are called by, others beside the file that it leads to: here both are one.
    """
    nvcc, profile = home / "bin" / "nvcc", home / "bin" / "nvcc.profile"
    file = Path(real_path(nvcc))
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
            f"cannot compile the libcuda.so stub: {why_failed(host, answer.stderr)}",
            hint="check the host compiler (CC) above",
        )


def _make(
    host: LocalHost, plan: ToolkitPlan, home: Path, *, python: str, compiler: str, say: Say
) -> tuple[KeptPart, ...]:
    final = home.parent
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    # who holds the lock is alone: what other processes left here is of killed ones
    for left in (*final.parent.glob(f".{final.name}.*"), final):
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(mode=0o700)
        layers = list(plan.layers)
        parts: tuple[KeptPart, ...] = ()
        if plan.fetches:
            parts = fetch_parts(host, plan, temporary / "parts", cache=final.parent.parent, python=python, say=say)
            layers[:0] = fetched_layers(temporary / "parts", final / "parts")
            write_digests(temporary)
        link_layers(temporary, final, layers)
        temporary.rename(final)
        if plan.archives or plan.packages:
            settle_nvcc(home)
        make_stub(host, home, compiler)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return parts


def _is_whole(home: Path) -> bool:
    """Whether an assembled toolkit is there and none of its links dangles."""
    if not (home / MARK).is_file() or not (home / "nvvm" / "bin" / "cicc").exists():
        return False
    entries = [*(home / "bin").iterdir(), *(home / "include").iterdir(), *(home / "lib64").iterdir()]
    return all(entry.exists() for entry in entries)


def _is_unaltered(home: Path, say: Say) -> bool:
    wrong = altered(home.parent)
    if wrong:
        say(f"the toolkit in {home} is assembled again: {wrong[0]} was modified after download")
    return not wrong


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """A disk that is full is a failure with a name."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        free = shutil.disk_usage(folder).free
        raise BuildFailed(
            f"the disk is full: {error.filename or folder} could not be written, only {free / 1e6:.0f} MB free",
            hint="free some space, or move the cache: export DSDOCTOR_CACHE=/path/with/room",
        ) from None


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


def _compile_kernel(
    host: LocalHost, home: Path, plan: ToolkitPlan, scratch: Path, *, architectures: Sequence[str], compiler: str
) -> None:
    source, made, library = scratch / "try.cu", scratch / "try.o", scratch / "try.so"
    write_text(source, KERNEL)
    options = ["-std=c++17", "-Xcompiler", "-fPIC", f"-I{home / 'include'}"]
    options += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _numbers(architectures)]
    nvcc = [str(home / "bin" / "nvcc"), "-ccbin", compiler, *options, "-c", str(source), "-o", str(made)]
    answer = host.run(nvcc, timeout=COMPILE_TIMEOUT_SECONDS)
    if not answer.ok:
        error_line = first_error_line(answer.stderr + answer.stdout, ("error", "fatal"))
        raise BuildFailed(
            f"the toolkit assembled in {home} (nvcc {plan.release}) does not compile: {error_line}",
            hint="check the architectures (--arch) and the host compiler above, or use --toolkit DIR",
        )
    answer = host.run(
        [compiler, "-shared", "-o", str(library), str(made), f"-L{home / 'lib64'}", "-lcudart"],
        timeout=COMPILE_TIMEOUT_SECONDS,
    )
    if not answer.ok:
        error_line = first_error_line(answer.stderr + answer.stdout, ("ld: ", "ld.", "undefined", "error"))
        raise BuildFailed(
            f"the toolkit assembled in {home} (nvcc {plan.release}) compiles, but its output does not link: {error_line}",
            hint="see the linker's error, or use --toolkit DIR",
        )


def first_error_line(text: str, words: Sequence[str]) -> str:
    """The first line with the first of the words that is in any line.

    >>> first_error_line("in function f:\\n/usr/bin/ld: cannot find -lcudart\\ncollect2: error: ld returned 1", ("ld: ", "error"))
    '/usr/bin/ld: cannot find -lcudart'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = (line for word in words for line in lines if word in line)
    return next(found, (lines or ["no message"])[-1])


def _numbers(architectures: Sequence[str]) -> list[str]:
    return [name.removesuffix("+PTX").replace(".", "") for name in architectures]
