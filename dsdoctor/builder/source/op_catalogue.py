"""What op_builder does not say about its ops: the headers they need, what provides those, and where an op is broken.

Names, variables, sources, flags and libraries are asked of the source itself; an op that is not in this catalogue needs nothing
beyond torch (and CUDA's base headers when it is a CUDA extension). To add an op, write one ``Op`` record.
"""

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dsdoctor.core.finding import Fix, instead, step
from dsdoctor.core.machine import Cuda


@dataclass(frozen=True, kw_only=True)
class Need:
    """Something that an op needs beyond torch: a name in ``Machine.libraries``, what it is, and how to get it."""

    name: str
    what: str
    fix: Fix


@dataclass(frozen=True, kw_only=True)
class Breakage:
    """DeepSpeed versions and CUDA releases for which an op cannot be compiled, whatever is installed."""

    deepspeed: str
    cuda_from: Cuda | None
    cuda_below: Cuda | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Op:
    """One op. ``cuda_headers`` come on top of BASE_HEADERS; ``requires`` are ops that it cannot run without."""

    name: str
    cuda_headers: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    requires: tuple[str, ...] = ()
    broken: tuple[Breakage, ...] = ()
    empty: str = ""


CUDA_LIBRARIES = ("cudart", "curand", "cublas", "cufile", "cuda")
"""Libraries of a toolkit among those that an op links; "cuda" is the driver's, linked against a stub."""

BASE_HEADERS = ("cuda_runtime.h", "crt/host_config.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "cccl")
"""ATen/cuda/CUDAContext.h includes these whatever the op does."""

LIBAIO = Need(
    name="libaio",
    what="libaio's header and library",
    fix=Fix(
        text="install libaio's development files",
        steps=(
            step("sudo apt-get install libaio-dev"),
            instead("sudo dnf install libaio-devel"),
            instead("conda install libaio"),
        ),
    ),
)
CUTLASS = Need(
    name="cutlass",
    what="CUTLASS's headers",
    fix=Fix(
        text="install CUTLASS, or name a checkout of it in CUTLASS_PATH",
        steps=(step("python -m pip install nvidia-cutlass"),),
    ),
)
DSKERNELS = Need(
    name="dskernels",
    what="the Python package deepspeed-kernels",
    fix=Fix(text="install it", steps=(step("python -m pip install deepspeed-kernels"),)),
)
ONECCL = Need(
    name="oneccl",
    what="oneCCL, found through CCL_ROOT",
    fix=Fix(text="install oneCCL and source its environment script, which sets CCL_ROOT"),
)
CURAND = ("curand_kernel.h",)
PROFILER = ("cuda_profiler_api.h",)

OPS = (
    Op(name="async_io", needs=(LIBAIO,), requires=("pin_memory",)),
    Op(name="gds", needs=(LIBAIO,), cuda_headers=("cufile.h",), requires=("pin_memory",)),
    Op(name="random_ltd", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="transformer", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="stochastic_transformer", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="transformer_inference", cuda_headers=(*CURAND, *PROFILER)),
    Op(name="dc", cuda_headers=("nccl.h",)),
    Op(name="evoformer_attn", needs=(CUTLASS,), cuda_headers=CURAND),
    Op(name="cutlass_ops", needs=(DSKERNELS,)),
    Op(name="ragged_device_ops", needs=(DSKERNELS,)),
    Op(name="deepspeed_ccl_comm", needs=(ONECCL,)),
    Op(name="deepspeed_not_implemented", empty="it is a placeholder without any source file"),
    Op(
        name="fp_quantizer",
        cuda_headers=CURAND,
        broken=(
            Breakage(
                deepspeed="<=0.19.8",
                cuda_from=Cuda(13, 0),
                cuda_below=None,
                reason="its source redeclares a template parameter (q_exponent_bits), which nvcc 13 refuses",
            ),
        ),
    ),
    Op(
        name="sparse_attn",
        broken=(
            Breakage(
                deepspeed=">=0.1",
                cuda_from=None,
                cuda_below=None,
                reason="it needs torch < 2 with triton 1.0.0, which no supported Python can install",
            ),
        ),
    ),
)


def need_of(name: str) -> Op:
    """The catalogue's record of an op; an empty one for an op it does not know."""
    return next((op for op in OPS if op.name == name), Op(name=name))


def known_breakage(op: Op, deepspeed: str, cuda: Cuda | None) -> str | None:
    """The reason why an op cannot be compiled for this DeepSpeed and CUDA release, or None.

    >>> known_breakage(need_of("fp_quantizer"), "0.19.8", Cuda(12, 9)) is None
    True
    """
    try:
        version = Version(deepspeed.split("+")[0])
    except InvalidVersion:
        return None
    for broken in op.broken:
        above = broken.cuda_from is None or (cuda is not None and cuda >= broken.cuda_from)
        below = broken.cuda_below is None or (cuda is not None and cuda < broken.cuda_below)
        if above and below and SpecifierSet(broken.deepspeed).contains(version, prereleases=True):
            return broken.reason
    return None
