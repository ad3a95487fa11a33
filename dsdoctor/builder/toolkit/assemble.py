"""ToolkitPlan -> a CUDA_HOME, assembled without root: parts fetched from PyPI and parts of this machine, as one folder of links.

It is made under a lock in a temporary folder, renamed, and tried (``nvcc -V``, a small .cu for the wanted architectures); only then
it is marked as finished. One without the mark is made again; a finished one is tried again and used.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from filelock import FileLock

from dsdoctor.builder.toolkit.plan_assembly import MARK
from dsdoctor.core.build_models import Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import run_pip, why_failed
from dsdoctor.core.workspace import private_folder

FOLDERS = {"cccl"}
"""Names in a plan's headers that are folders; in CUDA 12 they lie elsewhere."""

KERNEL = """\
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda/std/type_traits>
__global__ void scale(float* values, float factor, int count) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) values[index] *= factor;
}
int main() {
    scale<<<1, 32>>>(nullptr, 2.0f, 0);
    return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
"""
Say = Callable[[str], None]


def assemble(
    host: LocalHost, plan: ToolkitPlan, *, python: str, architectures: Sequence[str], compiler: str, say: Say
) -> Path:
    """Make the toolkit of a plan and return its root. ``compiler`` is the host compiler that nvcc uses.

    Raises BuildFailed when a part cannot be fetched or the result does not compile.
    """
    home = Path(plan.root)
    private_folder(home.parent.parent)
    with FileLock(home.parent.with_suffix(".lock")):
        whole = _is_whole(home)
        if whole:
            say(f"using the toolkit assembled in {home}")
        else:
            _make(host, plan, home, python=python, compiler=compiler, say=say)
        try:
            _try(host, home, plan, architectures=architectures, compiler=compiler)
        except BuildFailed:
            if not whole:
                # one that was whole before stays: another build may be using it
                shutil.rmtree(home.parent, ignore_errors=True)
            raise
        (home / MARK).write_text("\n".join(plan.fetch) + "\n", encoding="utf-8")
    return home


def _make(host: LocalHost, plan: ToolkitPlan, home: Path, *, python: str, compiler: str, say: Say) -> None:
    final = home.parent
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    try:
        temporary.mkdir(mode=0o700)
        layers = list(plan.layers)
        if plan.fetch:
            say(f"fetching {', '.join(plan.fetch)} from PyPI")
            _fetch(host, plan.fetch, temporary / "parts", python=python)
            layers[:0] = _fetched_layers(temporary / "parts", final / "parts")
        _link(temporary, final, layers)
        temporary.rename(final)
        _stub(host, home, compiler)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _fetch(host: LocalHost, requirements: Sequence[str], target: Path, *, python: str) -> None:
    """Let pip put wheels into a folder of their own; the environment itself stays as it is."""
    options = ("--quiet", "--no-warn-script-location", "--disable-pip-version-check", "--only-binary=:all:")
    run_pip(
        host,
        python,
        ["install", *options, "--target", str(target), *requirements],
        what=", ".join(requirements),
        hint="check the network; --offline shows what would be needed; --toolkit DIR takes one that you have",
    )


def _fetched_layers(parts: Path, final: Path) -> list[Layer]:
    """The layers inside the fetched parts, with the paths that they will have after the rename."""
    layers = []
    for folder in sorted(parts.glob("nvidia/*")):
        there = final / folder.relative_to(parts)
        layers.append(
            Layer(
                include=(str(there / "include"),) if (folder / "include").is_dir() else (),
                libraries=(str(there / "lib"),) if (folder / "lib").is_dir() else (),
                tools=str(there / "bin") if (folder / "bin" / "nvcc").is_file() else None,
            )
        )
    return layers


def _link(temporary: Path, final: Path, layers: Iterable[Layer]) -> None:
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


def _stub(host: LocalHost, home: Path, compiler: str) -> None:
    """Make a libcuda.so to link against, with every function of cuda.h and no code: the real one comes with the driver."""
    # the functions must be in it: a linker with --as-needed would drop a library that defines nothing
    header = (home / "include" / "cuda.h").read_text(encoding="utf-8", errors="replace")
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    path = home / "lib64" / "stubs" / "libcuda.so"
    source = path.with_suffix(".c")
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), encoding="utf-8")
    argv = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(source)]
    answer = host.run(argv, timeout=120)
    source.unlink()
    if not answer.ok:
        raise BuildFailed(
            f"the stub of libcuda.so does not compile: {why_failed(host, answer.stderr)}", hint="see CC above"
        )


def _is_whole(home: Path) -> bool:
    """Whether an assembled toolkit is there and none of its links dangles."""
    if not (home / MARK).is_file() or not (home / "nvvm" / "bin" / "cicc").exists():
        return False
    entries = [*(home / "bin").iterdir(), *(home / "include").iterdir(), *(home / "lib64").iterdir()]
    return all(entry.exists() for entry in entries)


def _try(host: LocalHost, home: Path, plan: ToolkitPlan, *, architectures: Sequence[str], compiler: str) -> None:
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
        (scratch / "try.cu").write_text(KERNEL, encoding="utf-8")
        answer = host.run(
            [nvcc, "-ccbin", compiler, "-std=c++17", "-o", str(scratch / "try"), str(scratch / "try.cu")]
            + [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _numbers(architectures)],
            timeout=600,
        )
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not answer.ok:
        lines = [line for line in (answer.stderr + answer.stdout).splitlines() if "error" in line or "fatal" in line]
        raise BuildFailed(
            f"the toolkit assembled in {home} (nvcc {release}) does not compile: {(lines or ['no message'])[0]}",
            hint="see the architectures (--arch) and the host compiler above, or name a toolkit with --toolkit DIR",
        )


def _numbers(architectures: Sequence[str]) -> list[str]:
    return [name.removesuffix("+PTX").replace(".", "") for name in architectures]
