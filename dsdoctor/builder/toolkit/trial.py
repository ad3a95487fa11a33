"""A toolkit -> nothing, or BuildFailed: it is asked for what an extension of torch asks of it.

That is ``nvcc -V``, ``nvcc -c`` of a small kernel for each architecture, and ``g++ -shared -lcudart``. A whole program is not
linked: that needs libcudadevrt.a and libcudart_static.a, which no extension does.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from dsdoctor.core.build_models import ToolkitPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import write_text
from dsdoctor.core.host import LocalHost

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
extern "C" int launch() {
    scale<<<1, 32>>>(nullptr, 2.0f, 0);
    return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
"""
LIMIT = 600.0


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
        _compile(host, home, plan, scratch, architectures=architectures, compiler=compiler)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _compile(
    host: LocalHost, home: Path, plan: ToolkitPlan, scratch: Path, *, architectures: Sequence[str], compiler: str
) -> None:
    source, made, library = scratch / "try.cu", scratch / "try.o", scratch / "try.so"
    write_text(source, KERNEL)
    options = ["-std=c++17", "-Xcompiler", "-fPIC", f"-I{home / 'include'}"]
    options += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _numbers(architectures)]
    nvcc = [str(home / "bin" / "nvcc"), "-ccbin", compiler, *options, "-c", str(source), "-o", str(made)]
    answer = host.run(nvcc, timeout=LIMIT)
    if not answer.ok:
        said = first_complaint(answer.stderr + answer.stdout, ("error", "fatal"))
        raise BuildFailed(
            f"the toolkit assembled in {home} (nvcc {plan.release}) does not compile: {said}",
            hint="see the architectures (--arch) and the host compiler above, or name a toolkit with --toolkit DIR",
        )
    answer = host.run(
        [compiler, "-shared", "-o", str(library), str(made), f"-L{home / 'lib64'}", "-lcudart"], timeout=LIMIT
    )
    if not answer.ok:
        said = first_complaint(answer.stderr + answer.stdout, ("ld: ", "ld.", "undefined", "error"))
        raise BuildFailed(
            f"what the toolkit assembled in {home} (nvcc {plan.release}) compiles does not link: {said}",
            hint="see the linker's line; --toolkit DIR names another toolkit",
        )


def first_complaint(text: str, words: Sequence[str]) -> str:
    """The first line with the first of the words that is in any line.

    >>> first_complaint("in function f:\\n/usr/bin/ld: cannot find -lcudart\\ncollect2: error: ld returned 1", ("ld: ", "error"))
    '/usr/bin/ld: cannot find -lcudart'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = (line for word in words for line in lines if word in line)
    return next(found, (lines or ["no message"])[-1])


def _numbers(architectures: Sequence[str]) -> list[str]:
    return [name.removesuffix("+PTX").replace(".", "") for name in architectures]
