"""One sick machine for every check: what a practitioner would show, cut down to what matters."""

from dataclasses import replace
from typing import Any

from dsdoctor.core.machine import (
    TAKEN,
    Compiler,
    Cuda,
    DeepSpeed,
    Driver,
    Gap,
    Gpu,
    JitCache,
    Library,
    Machine,
    Runtime,
    SearchPaths,
)
from dsdoctor.core.processes import Leftover, SharedMemory
from tests.conftest import CPU_TORCH, GCC, PYTHON, SYSTEM, TORCH, machine, toolkit

H100 = Gpu(index=0, name="NVIDIA H100", uuid="GPU-1", capability="9.0", memory=80 << 30)
A100 = replace(H100, index=1, name="NVIDIA A100", uuid="GPU-2", capability="8.0")
DRIVER = Driver(version="580.10", cuda=Cuda(13, 0))
LIBAIO = Library(name="libaio", header="/usr/include/libaio.h", library="/usr/lib/libaio.so")
LINKED = frozenset({"cudart", "curand", "cublas", "cufile", "cuda"})
WHOLE = toolkit(Cuda(13, 0), libraries=LINKED, found_via=("cuda_home_variable", TAKEN))
LEFT = Leftover(path="/dev/shm/deepspeed_allreduce_buffer_0_127.0.0.1_29500_0", size=69206016, age=7200.0)
BUILT = DeepSpeed(
    version="0.19.8+cu13.0.torch2.14",
    location="/venv/lib/python3.11/site-packages/deepspeed",
    accelerator="cuda",
    torch="2.14",
    cuda="13.0",
    installed_ops=("cpu_adam", "fused_adam"),
    present_ops=("cpu_adam", "fused_adam"),
    python=("cp311",),
    platform=("linux_x86_64",),
    sm_arch={"fused_adam": ("90_real",)},
    cpu_flags=("-march=znver3", "-mavx2"),
    glibc="2.34",
    glibcxx="3.4.30",
    told_by="manifest",
)
BIG = replace(
    SYSTEM,
    cpu_flags=frozenset(
        ["pni", "ssse3", "sse4_1", "sse4_2", "popcnt", "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe"]
    ),
    glibc="2.36",
    glibcxx="3.4.30",
    shared_memory=64 << 30,
    memory=256 << 30,
)


def healthy(**changes: Any) -> Machine:
    """An H100 with torch 2.14.1+cu130, the toolkit of that release, and a DeepSpeed wheel made for it."""
    facts: dict[str, Any] = {
        "system": BIG,
        "python": replace(PYTHON, packages={"setuptools": "84.2.1", "pip": "24.0"}),
        "torch": replace(TORCH, cuda_home="/usr/local/cuda-13.0"),
        "toolkits": (WHOLE,),
        "gpus": (H100,),
        "driver": DRIVER,
        "libraries": (LIBAIO,),
        "deepspeed": BUILT,
        "jit": JitCache(folder="/home/user/.cache/torch_extensions/py311_cu130", named=False, writable=True),
    }
    return machine(**{**facts, **changes})


def without_gpu(**changes: Any) -> Machine:
    return healthy(gpus=(), driver=None, **changes)


def taking(home: str, *toolkits: Any, **changes: Any) -> Machine:
    """A machine whose torch takes a folder for CUDA_HOME."""
    return healthy(torch=replace(TORCH, cuda_home=home), toolkits=toolkits, **changes)


HPC = toolkit(Cuda(12, 8), libraries=LINKED, found_via=("usr_local", TAKEN))
OTHER_MINOR = toolkit(Cuda(13, 1), libraries=LINKED, found_via=("usr_local", TAKEN))
GUESSED = replace(WHOLE, root="/usr/local", headers=frozenset(), libraries=frozenset(), found_via=(TAKEN,))
REAL = replace(WHOLE, found_via=("nvcc_on_path", "usr_local"))
BARE = replace(WHOLE, headers=frozenset({"cuda_runtime.h", "crt/host_config.h", "cccl"}))
NEW_GCC = Compiler(path="/usr/bin/g++-16", c_path="/usr/bin/gcc-16", kind="gcc", version=(16, 1, 0), found_via="path")
OLD_GCC = Compiler(path="/usr/bin/g++", c_path="/usr/bin/gcc", kind="gcc", version=(8, 5, 0), found_via="path")
NAMED_GCC = Compiler(path="/opt/g++", c_path="/opt/gcc", kind="gcc", version=(13, 1, 0), found_via="cxx_variable")

SICK: dict[str, Machine] = {
    "python-silent": Machine(system=SYSTEM, gaps=(Gap(question="python /x", reason="No such file"),)),
    "torch-missing": healthy(torch=None),
    "torch-broken": healthy(torch=replace(TORCH, broken="the child process was ended by signal 11 (SIGSEGV)")),
    "torch-without-cuda": healthy(torch=CPU_TORCH),
    "python-headers-missing": healthy(python=replace(PYTHON, headers=False)),
    "ninja-missing": healthy(system=replace(BIG, ninja=None)),
    "wheel-package-missing": healthy(python=replace(PYTHON, packages={"setuptools": "65.5.0"})),
    "pip-isolates": healthy(python=replace(PYTHON, packages={"pip": "26.3", "setuptools": "84"})),
    "cuda-toolkit-missing": healthy(toolkits=(), torch=replace(TORCH, cuda_home=None)),
    "nvcc-broken": taking("/usr/local/cuda", replace(WHOLE, nvcc=None, release=None, broken="no answer within 10 s")),
    "cuda-home-wrong": taking("/usr/local", REAL, GUESSED),
    "cuda-torch-mismatch": taking("/usr/local/cuda-12.8", HPC),
    "cuda-home-cuda-path-differ": healthy(variables={"CUDA_HOME": "/a", "CUDA_PATH": "/b"}),
    "toolkits-several": healthy(toolkits=(WHOLE, replace(HPC, found_via=("usr_local",)))),
    "cuda-header-missing": taking("/usr/local/cuda-13.0", BARE),
    "cuda-lib-link-missing": taking("/usr/local/cuda-13.0", replace(WHOLE, libraries=frozenset({"cudart"}))),
    "host-compiler-missing": healthy(compilers=()),
    "host-compiler-too-new": healthy(compilers=(NEW_GCC, GCC)),
    "host-compiler-too-old": healthy(compilers=(OLD_GCC,)),
    "compilers-differ": healthy(compilers=(NAMED_GCC, GCC), variables={"CXX": "/opt/g++"}),
    "driver-silent": healthy(gpus=(), driver=None, gaps=(Gap(question="gpus", reason="version mismatch"),)),
    "not-asked": healthy(gaps=(Gap(question="toolkits", reason="it broke"),)),
    "cache-not-trusted": healthy(
        gaps=(Gap(question="cache", reason="everyone may write to /c; chmod o-w /c ends that"),)
    ),
    "op-unreadable": healthy(deepspeed=replace(BUILT, unreadable=("deepspeed/ops/adam/cpu_adam_op.so",))),
    "driver-too-old": healthy(driver=Driver(version="550.1", cuda=Cuda(12, 4))),
    "gpu-not-in-torch": healthy(gpus=(replace(H100, name="Tesla V100", capability="7.0"),)),
    "gpu-arch-unsupported-by-nvcc": healthy(variables={"TORCH_CUDA_ARCH_LIST": "7.0;9.0"}),
    "gpu-arch-unknown-to-torch": healthy(variables={"TORCH_CUDA_ARCH_LIST": "8.0,9.0"}),
    "arch-list-empty": without_gpu(),
    "accelerator-autodetect-cpu": without_gpu(),
    "accelerator-name-invalid": healthy(variables={"DS_ACCELERATOR": "gpu"}),
    "gpus-differ": healthy(gpus=(H100, A100)),
    "ops-torch-version-mismatch": healthy(deepspeed=replace(BUILT, torch="2.13")),
    "ops-cuda-version-mismatch": healthy(deepspeed=replace(BUILT, cuda="12.8")),
    "ops-accelerator-mismatch": healthy(deepspeed=replace(BUILT, accelerator="cpu")),
    "op-without-gpu-code": healthy(deepspeed=replace(BUILT, sm_arch={})),
    "claimed-op-missing": healthy(deepspeed=replace(BUILT, present_ops=("cpu_adam",))),
    "op-not-claimed": healthy(deepspeed=replace(BUILT, unclaimed=("fused_lamb_op",))),
    "no-kernel-image": healthy(gpus=(A100,)),
    "cpu-isa-illegal-instruction": healthy(deepspeed=replace(BUILT, cpu_flags=("-march=skylake-avx512", "-mavx512f"))),
    "cpu-flags-unknown": healthy(deepspeed=replace(BUILT, cpu_flags=(), told_by="files")),
    "libstdcxx-too-old": healthy(deepspeed=replace(BUILT, glibcxx="3.4.32")),
    "shared-library-missing": healthy(
        deepspeed=replace(BUILT, needed={"cpu_adam": ("libgomp.so.1",)}), loadable=frozenset()
    ),
    "glibc-too-old": healthy(deepspeed=replace(BUILT, glibc="2.38")),
    "wheel-python-mismatch": healthy(deepspeed=replace(BUILT, python=("cp310",))),
    "wheel-platform-mismatch": healthy(deepspeed=replace(BUILT, platform=("win_amd64",))),
    "wheel-altered": healthy(deepspeed=replace(BUILT, altered=("deepspeed/ops/adam/cpu_adam_op.so",))),
    "wheel-foreign-files": healthy(deepspeed=replace(BUILT, foreign=("torch/__init__.py",))),
    "wheel-identity": healthy(deepspeed=replace(BUILT, contradictions=("METADATA names the package 'torch'",))),
    "wheel-requires-address": healthy(deepspeed=replace(BUILT, addresses=("torch from https://evil.example/x.whl",))),
    "wheel-unusual": healthy(deepspeed=replace(BUILT, doubts=("it requires einops-evil",))),
    "path-entry-missing": healthy(paths=SearchPaths(missing_path=("/gone",))),
    "library-path-entry-missing": healthy(paths=SearchPaths(missing_library_path=("/gone", "/too"))),
    "library-path-other-cuda": healthy(
        paths=SearchPaths(runtimes=(Runtime(folder="/usr/local/cuda-12/lib64", major=12),))
    ),
    "libaio-missing": healthy(libraries=()),
    "ds-variables-set": healthy(variables={"DS_BUILD_OPS": "1"}),
    "variable-misspelt": healthy(ds_names=("DS_SKIP_CUDA_CHEKC",)),
    "variable-malformed": healthy(variables={"DS_BUILD_OPS": "true"}),
    "nccl-shm-too-small": healthy(system=replace(BIG, shared_memory=64 << 20)),
    "shared-memory-left-over": healthy(
        shared_memory=SharedMemory(total=1 << 30, leftovers=(LEFT, replace(LEFT, path=f"{LEFT.path}1")))
    ),
    "compiler-oom-killed": healthy(system=replace(BIG, cpus=64, memory=16 << 30)),
    "disk-full": healthy(system=replace(BIG, cache_free=100 << 20)),
    "jit-cache-shared": healthy(jit=JitCache(folder="/shared", named=True, writable=True, ops=("fused_adam",))),
    "stale-jit-cache": healthy(
        torch=replace(CPU_TORCH, cuda=Cuda(13, 0)),
        jit=JitCache(folder="/c", named=False, writable=True, locks={"cpu_adam": 7200.0}),
    ),
    "torch-extensions-permission": healthy(jit=JitCache(folder="/root/x", named=True, writable=False)),
}
