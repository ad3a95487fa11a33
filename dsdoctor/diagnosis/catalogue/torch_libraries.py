"""Rules of libraries that torch and other compiled packages load: cuDNN, NCCL, MKL, nvJitLink, glibc, and Triton's compiler."""

from dsdoctor.core.finding import instead, step
from dsdoctor.diagnosis.models import Rule, Signature, Stage

TORCH_LIBRARIES_MIXED = Rule(
    id="torch-libraries-mixed",
    stage=Stage.LOAD,
    title="torch cannot be imported: {library} does not fit the {other} that is loaded with it (undefined symbol "
    "{symbol})",
    fix="let torch load the libraries that came with it: unset LD_LIBRARY_PATH (and LD_PRELOAD), and install torch "
    "and its nvidia-* packages again "
    "from one source, pip or conda, not both",
    steps=(
        step("LD_LIBRARY_PATH= python -c 'import torch'", note="if that works, the variable is the reason"),
        step("python -m pip install --force-reinstall torch"),
    ),
    manual="""A library of torch looks for a function that the loaded version of another library does not have.

An older NCCL, cuBLAS or nvJitLink of the system's CUDA (LD_LIBRARY_PATH) or of conda is found before the one that
torch brought.

Why it matters: Nothing that imports torch can start, DeepSpeed neither. Building DeepSpeed anew does not help.""",
    signatures=(
        Signature(
            words="ijit_notifyevent",
            pattern=r"(?P<library>lib(?:torch|mkl)\w{0,40}\.so[.\d]{0,8}): undefined symbol: "
            r"(?P<symbol>iJIT_NotifyEvent)",
            title="this torch (of conda) does not work with MKL 2024.1 and newer: {library} misses {symbol}",
            fix="take an older MKL, or torch from pip",
            steps=(step("conda install 'mkl<2024.1'"), instead("python -m pip install --force-reinstall torch")),
            sample="ImportError: /venv/torch/lib/libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent",
        ),
        Signature(
            words="ncclcommregister ncclmemfree ncclmemalloc ncclcommsplit ncclcommwindowregister "
            "ncclgroupsimulateend ncclcommshrink "
            "ncclcominitrankscalable ncclgetuniqueid",
            pattern=r"(?P<library>libtorch\w{0,40}\.so[.\d]{0,8}): undefined symbol: (?P<symbol>nccl\w{3,40})",
            title="torch cannot be imported: an older NCCL (libnccl.so) than torch needs is loaded first ({symbol})",
            fix="unset LD_LIBRARY_PATH where it names a system's NCCL, and install the NCCL that belongs to torch "
            "(nvidia-nccl-cu12)",
            steps=(
                step("LD_LIBRARY_PATH= python -c 'import torch'"),
                step("python -m pip install -U nvidia-nccl-cu12"),
            ),
            sample="ImportError: /venv/torch/lib/libtorch_cuda.so: undefined symbol: ncclCommRegister",
        ),
        Signature(
            words="libcublas+undefined libcublaslt+undefined libcudnn+undefined libcusolver+undefined "
            "libcudnn_cnn_infer+undefined",
            pattern=r"(?P<library>lib(?:cublas|cublasLt|cudnn\w{0,30}|cusolver|cufft)\.so[.\d]{0,8}): undefined "
            r"symbol: "
            r"(?P<symbol>(?!__nvJitLink)\w{3,80})",
            title="{library} is loaded with another release of its own parts: undefined symbol {symbol}",
            sample="ImportError: /usr/local/cuda/lib64/libcublas.so.12: undefined symbol: cublasLtGetStatusName",
        ),
    ),
)

GLIBC_TOO_OLD = Rule(
    id="glibc-too-old-for-package",
    stage=Stage.LOAD,
    title="the wheel of {package} is for a newer Linux: it needs {version}, and this system's glibc is older",
    fix="build {package} here from source, or take an older release of it whose wheel is for this system (of "
    "flash-attn 2.7.4.post1), or a newer "
    "container image; glibc itself is not to be exchanged",
    steps=(
        step("ldd --version"),
        step(
            "FLASH_ATTENTION_FORCE_BUILD=TRUE python -m pip install --no-build-isolation --no-cache-dir "
            "flash-attn==2.7.4.post1"
        ),
    ),
    manual="""A compiled package was built on a newer Linux, and asks for functions of a newer C library (glibc).

ldd --version shows this system's: Ubuntu 20.04 has 2.31, Debian 11 2.31, RHEL 8 2.28, Ubuntu 22.04 2.35.

Why it matters: The package cannot be imported. It is no op of DeepSpeed.""",
    signatures=(
        Signature(
            words="glibc_2+flash_attn_2_cuda glibc_2+flash_attn glibc_2+vllm glibc_2+xformers glibc_2+bitsandbytes "
            "glibc_2+transformer_engine",
            pattern=r"(?P<version>GLIBC_2\.\d{1,3})['\"]? not found.{0,40}required by "
            r"\S{0,300}?(?P<package>flash_attn|vllm|xformers|bitsandbytes"
            r"|transformer_engine)",
            title="the wheel of flash-attn or the like ({package}) is for a newer Linux: it needs {version}, and this "
            "system's glibc is older",
            sample="ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.32' not found (required by "
            "/venv/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so)",
        ),
    ),
)

TRITON_CANNOT_COMPILE = Rule(
    id="triton-cannot-compile",
    stage=Stage.JIT,
    title="Triton compiles at run time, and it cannot here: {why|see the message}",
    fix="install a C compiler (gcc) with the headers of Python in the image that runs the ranks, and name it in CC; "
    "the driver's libcuda.so must be "
    "there as well",
    steps=(step("sudo apt install gcc python3-dev"), instead("export CC=gcc")),
    manual="""torch.compile and kernels in Triton are compiled when they are first used, with a C compiler,
Python.h, ptxas and the driver's libcuda.

Slim images have no compiler. An older Triton has a ptxas that does not know newer GPUs.

Why it matters: The first step fails, although the installation looked complete.""",
    signatures=(
        Signature(
            words="libcuda+cannot+found",
            pattern=r"AssertionError: (?P<why>libcuda\.so cannot found!)",
            title="Triton does not find libcuda.so, the driver's library",
            fix="make a link of that name to the driver's libcuda.so.1, or name its folder in TRITON_LIBCUDA_PATH; in "
            "a container start it with "
            "--gpus all, which brings the driver",
            steps=(step("ldconfig -p | grep libcuda"), step("export TRITON_LIBCUDA_PATH=/usr/lib/x86_64-linux-gnu")),
            sample="AssertionError: libcuda.so cannot found!",
        ),
        Signature(
            words="triton+working+installation",
            pattern=r"(?P<why>Cannot find a working triton installation)",
            title="torch.compile finds no Triton that works: it is missing, of another version than torch names, or has no "
            "GPU that it knows",
            fix="take the triton that this torch names (pip install of the same torch again); where there is none for the "
            "platform, switch torch.compile off",
            steps=(step("python -m pip list"), step("gcc --version")),
            sample="RuntimeError: Cannot find a working triton installation. Either the package is not installed or it is "
            "too old.",
        ),
        Signature(
            words="ptxaserror ptxas+error ptxas+codegen",
            pattern=r"PTXASError(?:: (?P<why>PTXAS error: .{1,120}))?|PTXAS error|ptxas codegen",
            title="Triton's ptxas does not take the code for this GPU: it is too old for it",
            fix="upgrade torch and triton together; or point TRITON_PTXAS_PATH to the ptxas of a newer CUDA toolkit",
            steps=(
                step("export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"),
                instead("python -m pip install -U torch"),
            ),
            sample="triton.runtime.errors.PTXASError: PTXAS error: Internal Triton PTX codegen error",
        ),
    ),
)

SYSTEM_LIBRARY_MISSING = Rule(
    id="system-library-missing",
    stage=Stage.LOAD,
    title="the system has no {library}, which a Python package loads",
    fix="install the system's package that holds it (libGL.so.1 is in libgl1, libsndfile in libsndfile1), or take a build "
    "of the Python package that does without: opencv-python-headless needs no libGL",
    steps=(
        step("apt-get install -y libgl1 libglib2.0-0", note="for libGL and libgthread"),
        instead("python -m pip install opencv-python-headless"),
    ),
    manual="""A compiled part of a Python package needs a library of the operating system that slim images leave out.

It is most often OpenCV, which asks for the libraries of a screen although nothing is shown.

Why it matters: The import fails, on every rank.""",
    signatures=(
        Signature(
            words="libgl libglx libegl libgthread libglib libsm libxext libxrender libsndfile libturbojpeg libmagic "
            "libsqlite3 libcrypt",
            pattern=r"^(?:ImportError|OSError): (?P<library>lib(?:GL|GLX|EGL|gthread-2\.0|glib-2\.0|SM|Xext|Xrender|sndfile"
            r"|turbojpeg|magic|sqlite3|crypt)\.so[.\d]*): cannot open shared object",
            sample="ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
        ),
    ),
)

RULES = (SYSTEM_LIBRARY_MISSING, TORCH_LIBRARIES_MIXED, GLIBC_TOO_OLD, TRITON_CANNOT_COMPILE)
