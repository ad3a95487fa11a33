"""Headers that the compiler did not find, in any language: the name of the header decides."""

from dsdoctor.diagnosis.nouns import Rule, Signature, Stage, Tier


def missing(names: str) -> str:
    """A pattern for a missing header, whatever tongue gcc, clang, nvcc or MSVC speak.

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
CUDA_HEADERS = rf"(?:{CUDA_STEMS.replace(' ', '|')})\.h(?:pp)?|nvtx3/\S{{1,40}}|crt/\S{{1,40}}|mma\.h"
CCCL_HEADERS = r"(?:cub|thrust|libcudacxx|cccl)/\S{1,60}|cuda/(?:std/)?[\w/]{1,40}|nv/target\S{0,10}"
C_STEMS = (
    "features stdlib stdio string strings math limits assert errno stdint inttypes stddef stdarg ctype wchar "
    "time unistd pthread signal "
    "locale crypt malloc alloca dlfcn fcntl sched endian elf"
)
CXX_STEMS = (
    "cstdlib cstddef cmath cstdint cstring cassert cstdio cerrno climits cwchar algorithm string vector iostream "
    "memory utility limits map "
    "mutex type_traits functional"
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
    commands=(
        'eval "$(python -m dsdoctor env)"',
        "python -m dsdoctor prebuild",
        "sudo apt install cuda-libraries-dev-{cuda_dashed|12-8}",
    ),
    manual="""torch's CUDA headers include cusparse.h, cublas_v2.h and cusolverDn.h, and DeepSpeed's curand_kernel.h,
cuda_profiler_api.h or nccl.h. A toolkit of nvcc alone (a conda nvcc, Debian's, PyPI's) lacks them. torch's wheels
carry most of them in site-packages/nvidia/*/include. `python -m dsdoctor toolkit` assembles nvcc and headers into one
folder, without root; `python -m dsdoctor look` says which headers each toolkit here has.""",
    explained_by=("cuda-home-wrong",),
    signatures=(
        Signature(
            words=" ".join(f"{stem}+h" for stem in CUDA_STEMS.lower().split()) + " nccl+hpp nvtx3 crt+h mma+h",
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
    commands=('eval "$(python -m dsdoctor env)"', 'export CPATH="$CUDA_HOME/include/cccl:$CPATH"'),
    manual="""CUDA 13 moved thrust, cub and cuda/std (CCCL) from include/ to include/cccl/. nvcc adds that folder
itself; a plain g++ compile of a .cpp file that includes torch's CUDA headers does not. Add it to CPATH, take a newer
DeepSpeed, or build with dsdoctor. A toolkit made of nvcc alone may have no CCCL at all (package cuda-cccl,
nvidia-cuda-cccl).""",
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
    title="Python{python| } has no {header}: its development files are not installed",
    fix="install the development package of this very Python; dsdoctor fetches Debian's and Ubuntu's without root",
    commands=(
        "python -m dsdoctor prebuild",
        "sudo apt install python{python|3}-dev",
        "conda install python={python|3}",
    ),
    manual="""An extension module is compiled against Python.h of the very interpreter that loads it. Distributions
put it into a package of its own: python3.11-dev for python3.11 on Debian and Ubuntu, python3-devel on Fedora and
RHEL. conda's and uv's Pythons bring it.""",
    signatures=(
        Signature(
            words="python+h pyconfig+h patchlevel+h structmember+h",
            pattern=missing(r"(?:python3\.\d+/)?(?:Python|pyconfig|patchlevel|structmember)\.h"),
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

LIBAIO_MISSING = Rule(
    id="libaio-missing",
    stage=Stage.INSTALL,
    title="async_io needs libaio with its header, and they were not found",
    fix="install libaio's development package, or leave async_io out (only NVMe offload needs it)",
    commands=(
        "sudo apt install libaio-dev",
        "sudo dnf install libaio-devel",
        "conda install -c conda-forge libaio",
        "python -m dsdoctor prebuild --ops async_io",
    ),
    manual="""async_io (NVMe offload) compiles against libaio.h and links libaio.so. Without both DeepSpeed leaves the
op out: a warning that is harmless where nobody asked for it, and an abort or a failed JIT load where somebody did.
libaio outside the system's folders needs CFLAGS=-I... and LDFLAGS=-L...""",
    explained_by=("windows-unsupported-op",),
    signatures=(
        Signature(
            words="libaio",
            pattern=missing(r"libaio\.h"),
            unless=r"C1083",
            tier=Tier.FILE,
            title="libaio.h was not found",
            sample="csrc/aio/common/deepspeed_aio_utils.h:12:10: fatal error: libaio.h: No such file or directory",
        ),
        Signature(
            words="async_io",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>async_io) op due to it not being compatible",
            sample="RuntimeError: Unable to JIT load the async_io op due to it not being compatible due to "
            "hardware/software issue. None",
        ),
        Signature(
            words="libaio",
            pattern=r"(?P<library>libaio\.so[.\d]*): (?:cannot open shared object|\S)",
            unless=r"Reading|=>",
            title="{library} is not there when async_io is loaded",
            sample="ImportError: libaio.so.1: cannot open shared object file: No such file or directory",
        ),
        Signature(
            words="libaio",
            pattern=r"requires the dev libaio|requires the libraries: \['libaio|requires libaio but|please "
            r"install the libaio\S{0,8} package",
            tier=Tier.PROBE,
            op="async_io",
            title="async_io is left out, libaio is not here: harmless unless you offload to NVMe",
            sample="[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
        ),
        Signature(
            words="laio",
            pattern=r"ld(?:\.\w+)?(?:\.exe)?: .{0,60}?-laio\b",
            unless=r" -(?:shared|o|L)\b",
            tier=Tier.PROBE,
            op="async_io",
            title="the linker found no libaio: harmless unless you offload to NVMe",
            sample="/usr/bin/ld: cannot find -laio: No such file or directory",
        ),
    ),
)

LIBAIO_TOO_OLD = Rule(
    id="libaio-too-old",
    stage=Stage.INSTALL,
    title="this libaio is too old: it has no {symbol}",
    fix="install libaio 0.3.112 or newer, or leave async_io out",
    commands=(
        "conda install -c conda-forge 'libaio>=0.3.112'",
        "DS_BUILD_AIO=0 python -m pip install --no-build-isolation deepspeed",
    ),
    manual="""DeepSpeed's async_io calls io_pgetevents, which libaio has since 0.3.112 (CentOS 7 and Ubuntu 18.04 have
older ones). Install a newer one (conda-forge has it) and point CFLAGS and LDFLAGS at it.""",
    signatures=(
        Signature(
            words="io_pgetevents",
            pattern=r"(?:undefined (?:reference to|symbol:?)|was not declared|undeclared|implicit "
            r"declaration).{0,40}(?P<symbol>io_pgetevents)"
            r"|(?P<symbol2>io_pgetevents)['’\"»]?,? (?:was not declared|undeclared|not found|is not defined|version)",
            tier=Tier.FILE,
            sample="deepspeed_aio_common.cpp:99:5: error: 'io_pgetevents' was not declared in this scope",
        ),
    ),
)

CUTLASS_MISSING = Rule(
    id="cutlass-missing",
    stage=Stage.INSTALL,
    title="evoformer_attn needs CUTLASS, and it was not found",
    fix="get CUTLASS and name its folder in CUTLASS_PATH, or leave the op out",
    commands=(
        "git clone --depth 1 --branch v3.5.1 https://github.com/NVIDIA/cutlass",
        'export CUTLASS_PATH="$PWD/cutlass"',
        "python -m dsdoctor prebuild --ops evoformer_attn",
    ),
    manual="""evoformer_attn is compiled with the headers of CUTLASS (3.1 or newer), which neither torch nor the CUDA
toolkit bring. CUTLASS_PATH names the checkout. The warning is harmless where nobody uses the op.""",
    signatures=(
        Signature(
            words="cutlass",
            pattern=missing(r"cutlass/\S{1,60}|cute/\S{1,60}"),
            tier=Tier.FILE,
            title="{header} was not found",
            sample="csrc/deepspeed4science/evoformer_attn/attention_cu.cu:7:10: fatal error: "
            "cutlass/arch/memory_sm80.h: No such file or "
            "directory",
        ),
        Signature(
            words="cutlass+unable cutlass_path named+cutlass named+cutlass_library",
            pattern=r"Error: (?:Unable to locate CUTLASS|CUTLASS_PATH \S{1,200} does not|'CUTLASS_PATH')|No "
            r"module named '?cutlass",
            sample="RuntimeError: Unable to locate CUTLASS. Install nvidia-cutlass, clone CUTLASS next to "
            "DeepSpeed, or set CUTLASS_PATH to "
            "the CUTLASS checkout.",
        ),
        Signature(
            words="evoformer_attn",
            pattern=r"Unable to (?:JIT load the|load the) (?P<op>evoformer_attn) op due to it not being compatible",
            tier=Tier.GENERIC,
            title="evoformer_attn cannot be built here: CUTLASS or a GPU of capability 7.0 is missing",
            sample="RuntimeError: Unable to JIT load the evoformer_attn op due to it not being compatible due to "
            "hardware/software issue. "
            "None",
        ),
        Signature(
            words="cutlass",
            pattern=r"(?:Please specify (?:the )?CUTLASS|Please use CUTLASS version|Please pip install "
            r"nvidia-cutlass|Unable to locate CUTLASS)",
            unless=r"Error:",
            tier=Tier.PROBE,
            op="evoformer_attn",
            title="evoformer_attn is left out, CUTLASS is not here: harmless unless you use it",
            sample="[WARNING]  Please specify the CUTLASS repo directory as environment variable $CUTLASS_PATH",
        ),
    ),
)

ONECCL_HEADER_MISSING = Rule(
    id="oneccl-header-missing",
    stage=Stage.COMPILE,
    title="the CPU accelerator's ccl op needs oneCCL, and it was not found",
    fix="leave the op out, or install oneCCL and source its environment; on a GPU machine set DS_ACCELERATOR=cuda",
    commands=(
        "DS_BUILD_CCL_COMM=0 python -m pip install --no-build-isolation deepspeed",
        "source /opt/intel/oneapi/ccl/latest/env/vars.sh",
        "export DS_ACCELERATOR=cuda  # if it is for a GPU",
    ),
    manual="""With the CPU accelerator DS_BUILD_OPS=1 builds deepspeed_ccl_comm too, which includes oneapi/ccl.hpp and
needs CCL_ROOT. Build without it, install oneCCL, or, if the machine it runs on has a GPU, set DS_ACCELERATOR=cuda.""",
    signatures=(
        Signature(
            words="ccl",
            pattern=missing(r"oneapi/ccl\.hpp|ccl\.hpp"),
            tier=Tier.FILE,
            sample="csrc/cpu/comm/ccl.cpp:8:10: fatal error: oneapi/ccl.hpp: No such file or directory",
        ),
        Signature(
            words="ccl_root lccl",
            pattern=r"Didn't find CCL_ROOT|ld(?:\.\w+)?: .{0,60}?-lccl\b",
            unless=r" -(?:shared|o|L)\b",
            sample="ValueError: Didn't find CCL_ROOT, install oneCCL from https://github.com/oneapi-src/oneCCL "
            "and source its environment "
            "variable",
        ),
    ),
)

LIBC_HEADERS_MISSING = Rule(
    id="libc-headers-missing",
    stage=Stage.COMPILE,
    title="the compiler does not find {header}, a part of the system's C or C++ library",
    fix="install the C library's development files for the compiler in use; drop -isystem /usr/include and a "
    "CPATH that hides them",
    commands=(
        "sudo apt install libc6-dev libstdc++-12-dev",
        "conda install -c conda-forge gxx_linux-64 sysroot_linux-64",
    ),
    manual="""The compiler in use sees no C library headers: a slim image without libc6-dev, a conda compiler without
its sysroot, or an include path (CPATH, CUDA_HOME=/usr, -isystem /usr/include) that breaks the order of the system's
own folders.""",
    explained_by=("cuda-home-wrong",),
    signatures=(
        Signature(
            words=" ".join(f"{stem}+h" for stem in C_STEMS.split())
            + " sys+h bits+h gnu+h asm+h linux+h "
            + " ".join(f"{stem}+error" for stem in CXX_STEMS.split()),
            pattern=missing(C_HEADERS),
            unless=r"sys/mman\.h.{0,40}C1083|C1083.{0,80}(?:unistd|sys/mman|libaio)",
            tier=Tier.FILE,
            sample="/usr/include/stdlib.h:25:10: fatal error: features.h: No such file or directory",
        ),
        Signature(
            words="crt1 crti scrt1 lc lm lpthread lstdc",
            pattern=r"ld(?:\.\w+)?: .{0,60}?(?P<header>S?crt[1i]\.o|-l(?:c|m|pthread|stdc\+\+)(?![\w+]))",
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
    LIBAIO_MISSING,
    LIBAIO_TOO_OLD,
    CUTLASS_MISSING,
    ONECCL_HEADER_MISSING,
    LIBC_HEADERS_MISSING,
)
