"""Rules of headers that the compiler did not find, in any language: the name of the header decides."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.catalogue.linker import linker
from dsdoctor.diagnosis.models import Rule, Signature, Stage, Tier


def missing(names: str) -> str:
    """A pattern for a missing header, whatever language gcc, clang, nvcc or MSVC print.

    >>> import re
    >>> find = re.compile(missing(r"cusparse\\.h"))
    >>> [bool(find.search(line)) for line in (
    ...     "/x/CUDAContext.h:6:10: fatal error: cusparse.h: No such file or directory",
    ...     "/x/CUDAContext.h:6:10: schwerwiegender Fehler: cusparse.h: Datei oder Verzeichnis nicht gefunden",
    ...     "/x/CUDAContext.h:6:10: 致命错误：cusparse.h：没有那个文件或目录",
    ...     "/x/CUDAContext.h(6): fatal error C1083: Cannot open include file: 'cusparse.h': No such file",
    ...     "/x/CUDAContext.h:6:10: fatal error: 'cusparse.h' file not found",
    ...     '/x/CUDAContext.h(6): catastrophic error: cannot open source file "cusparse.h"',
    ...     "#include <cusparse.h>", "copying cusparse.h -> build")]
    [True, True, True, True, True, True, False, False]
    """
    return (
        r"(?::\d+(?::\d+)?: ?[^:：]{2,60}[:：]\s?|C1083\b.{0,80}?|(?:cannot|could not) open source file\s?|error: )"
        rf"['\"‘“«„]?(?P<header>{names})['\"’”»]?(?:\s?[:：]|['\"’”»]? file not found|\s*$|\s*\()"
    )


IN_ENGLISH = "fatal+such fatal+found"
"""Words of every missing header in English; in other languages the name of the header is the word."""

CUDA_STEMS = (
    "cusparse cusparseLt cusolver cusolverDn cusolver_common cusolverSp cusolverRf cusolverMg cublas cublas_v2 "
    "cublas_api cublasLt cublasXt "
    "curand curand_kernel curand_uniform curand_philox4x32_x cuda cuda_profiler_api cuda_runtime "
    "cuda_runtime_api cuda_fp16 cuda_bf16 cuda_fp8 "
    "cuda_device_runtime_api cuda_texture_types cuda_surface_types cuda_occupancy cudaProfiler cufft nvrtc nvml "
    "nccl cudnn cudnn_version "
    "cudnn_frontend nvJitLink cupti library_types driver_types vector_types host_defines cuComplex "
    "cooperative_groups device_launch_parameters "
    "channel_descriptor builtin_types math_constants nvPTXCompiler nvToolsExt nvToolsExtCuda"
)
CUDA_FAMILIES = (
    r"cuda_(?:awbarrier|pipeline|fp\d|bf16|runtime|profiler|device|egl|gl_|texture|surface|stdint|vdpau)\w*"
    r"|cu(?:blas|sparse|solver|rand|fft|dnn|tensor|pti|DNN|Complex)\w*|nv(?:shmem|rtc|ml|JitLink|ToolsExt|PTXCompiler"
    r"|jpeg)\w*|nccl\w*"
)
CUDA_HEADERS = rf"(?:{CUDA_STEMS.replace(' ', '|')}|{CUDA_FAMILIES})\.h(?:pp)?|nvtx3/\S{{1,40}}|crt/\S{{1,40}}|mma\.h"
CCCL_HEADERS = r"(?:cub|thrust|libcudacxx|cccl)/\S{1,60}|cuda/(?:std/)?[\w/]{1,40}|nv/target\S{0,10}"
C_STEMS = (
    "features stdlib stdio string strings math limits assert errno stdint inttypes stddef stdarg ctype wchar "
    "time unistd pthread signal "
    "locale crypt malloc alloca dlfcn fcntl sched endian elf"
)
CXX_STEMS = (
    "cstdlib cstddef cmath cstdint cstring cassert cstdio cerrno climits cwchar algorithm string vector iostream "
    "memory utility limits map "
    "mutex type_traits functional cctype cfloat cstdarg ctime cinttypes csignal new exception stdexcept "
    "initializer_list "
    "iterator numeric sstream fstream ostream istream iomanip tuple array deque list queue set unordered_map "
    "unordered_set "
    "atomic thread condition_variable future chrono random bitset complex typeinfo typeindex"
)
C_HEADERS = (
    rf"(?:{C_STEMS.replace(' ', '|')})\.h|(?:sys|bits|gnu|asm|asm-generic|linux)/[\w./-]{{1,40}}\.h"
    rf"|(?:{CXX_STEMS.replace(' ', '|')})"
)

CUDA_HEADER_MISSING = Rule(
    id="cuda-header-missing",
    stage=Stage.COMPILE,
    title="the toolkit in {cuda_home|CUDA_HOME} has no {header}",
    fix="use a whole toolkit: dsdoctor finds one, or links the headers that torch's own wheels brought beside "
    "your nvcc",
    steps=(
        step('eval "$(python -m dsdoctor env)"'),
        step("python -m dsdoctor prebuild"),
        instead("sudo apt install cuda-libraries-dev-{cuda_dashed|12-8}"),
    ),
    manual="""The compiler did not find a header of the CUDA libraries.

torch's CUDA headers include cusparse.h, cublas_v2.h and cusolverDn.h, and DeepSpeed's include curand_kernel.h,
cuda_profiler_api.h or nccl.h. A toolkit of nvcc alone (a conda nvcc, Debian's, PyPI's) lacks them; torch's wheels
carry most of them in site-packages/nvidia/*/include. `python -m dsdoctor look` shows which headers each toolkit
here has.

Why it matters: Every CUDA op of DeepSpeed includes them through torch, so none can be compiled.""",
    explained_by=("cuda-home-wrong",),
    signatures=(
        Signature(
            words=" ".join(f"{stem}+h" for stem in CUDA_STEMS.lower().split())
            + f" nccl+hpp nvtx3 crt+h mma+h {IN_ENGLISH}",
            pattern=missing(CUDA_HEADERS),
            tier=Tier.FILE,
            sample="torch/include/ATen/cuda/CUDAContextLight.h:6:10: fatal error: cusparse.h: No such file or "
            "directory",
        ),
    ),
)

CCCL_HEADERS_MOVED = Rule(
    id="cccl-headers-moved",
    stage=Stage.COMPILE,
    title="{header} was not found: CUDA 13 keeps it under include/cccl",
    fix="put the cccl folder on the include path; dsdoctor's environment does",
    steps=(step('eval "$(python -m dsdoctor env)"'), step('export CPATH="$CUDA_HOME/include/cccl:$CPATH"')),
    manual="""CUDA 13 moved the headers of thrust, cub and cuda/std (CCCL) from include/ to include/cccl/.

nvcc adds that folder itself, a plain g++ compile of a .cpp file that includes torch's CUDA headers does not.
Newer DeepSpeeds add it. A toolkit made of nvcc alone may have no CCCL at all (package cuda-cccl,
nvidia-cuda-cccl).

Why it matters: The .cpp files of CUDA ops fail to compile while the .cu files succeed.""",
    signatures=(
        Signature(
            words="cub thrust cuda+std cuda+error nv+target cccl libcudacxx",
            pattern=missing(CCCL_HEADERS),
            tier=Tier.FILE,
            sample="torch/include/c10/util/complex.h:9:10: fatal error: thrust/complex.h: No such file or directory",
        ),
    ),
)

PYTHON_HEADERS_MISSING = Rule(
    id="python-headers-missing",
    stage=Stage.COMPILE,
    title="Python{python_hint} has no {header}: its development files are not installed",
    fix="install the development package of exactly this Python; dsdoctor fetches Debian's and Ubuntu's without root",
    steps=(
        step("python -m dsdoctor prebuild"),
        instead("sudo apt install python{python|3}-dev"),
        instead("conda install python={python|3}"),
    ),
    manual="""The headers of this Python (Python.h) are not installed.

An extension module is compiled against Python.h of the same interpreter that loads it. Distributions have a
package of its own for it: python3.11-dev for python3.11 on Debian and Ubuntu, python3-devel on Fedora and RHEL.
The Pythons of conda and uv bring it.

Why it matters: No op can be compiled. The headers of another Python version do not help.""",
    signatures=(
        Signature(
            words="python+h pyconfig+h patchlevel+h structmember+h",
            pattern=missing(r"(?:[\w-]{1,40}/)?(?:python3\.\d+/)?(?:Python|pyconfig|patchlevel|structmember)\.h"),
            tier=Tier.FILE,
            sample="torch/include/torch/csrc/utils/x.h:1:10: fatal error: Python.h: No such file or directory",
        ),
        Signature(
            words="lnk1104 lnk1181",
            pattern=r"LNK1(?:104|181)\b.{0,80}?(?P<header>python3\d*(?:_d)?\.lib)",
            tier=Tier.FILE,
            sample="LINK : fatal error LNK1104: cannot open file 'python311.lib'",
        ),
    ),
)

LIBC_HEADERS_MISSING = Rule(
    id="libc-headers-missing",
    stage=Stage.COMPILE,
    title="the compiler does not find {header}, a part of the system's C or C++ library",
    fix="install the C library's development files for the compiler in use; drop -isystem /usr/include and a "
    "CPATH that hides them",
    steps=(
        step("sudo apt install libc6-dev libstdc++-12-dev"),
        instead("conda install -c conda-forge gxx_linux-64 sysroot_linux-64"),
    ),
    manual="""The compiler does not find the headers of the system's C or C++ library.

The reason is a slim image without libc6-dev, a conda compiler without its sysroot, or an include path (CPATH,
CUDA_HOME=/usr, -isystem /usr/include) that breaks the order of the system's own folders.

Why it matters: Nothing can be compiled until it is repaired, CUDA or not.""",
    explained_by=("cuda-home-wrong",),
    signatures=(
        Signature(
            words=" ".join(f"{stem}+h" for stem in C_STEMS.split())
            + " sys+h bits+h gnu+h asm+h linux+h "
            + " ".join(f"{stem}+error" for stem in CXX_STEMS.split() if stem.startswith("c") or "_" in stem)
            + f" {IN_ENGLISH}",
            pattern=missing(C_HEADERS),
            unless=r"sys/mman\.h.{0,40}C1083|C1083.{0,80}(?:unistd|sys/mman|libaio)",
            tier=Tier.FILE,
            sample="/usr/include/stdlib.h:25:10: fatal error: features.h: No such file or directory",
        ),
        Signature(
            words="crt1 crti scrt1 lc lm lpthread lstdc",
            pattern=linker() + r"(?P<header>S?crt[1i]\.o|-l(?:c|m|pthread|stdc\+\+)(?![\w+]))",
            unless=r" -(?:shared|o|L)\b",
            tier=Tier.FILE,
            sample="/usr/bin/ld: cannot find crti.o: No such file or directory",
        ),
    ),
)

RULES = (
    CUDA_HEADER_MISSING,
    CCCL_HEADERS_MOVED,
    PYTHON_HEADERS_MISSING,
    LIBC_HEADERS_MISSING,
)
