"""Machine -> findings about the CUDA toolkits: which one torch and DeepSpeed would take now, and whether it is usable."""

from collections.abc import Iterator

from dsdoctor.checks.advice import ASSEMBLE, BUILD_WHEEL, OR_ASSEMBLE, USE_ENV
from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.machine import TAKEN, Compiler, Machine, Toolkit, Torch, compiler_limits, fits, same_release
from dsdoctor.core.text import and_more

BASE_HEADERS = ("cuda_runtime.h", "crt/host_config.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "cccl")
"""What every CUDA extension of torch includes (ATen/cuda/CUDAContext.h)."""

OP_HEADERS = ("curand_kernel.h", "cuda_profiler_api.h", "nccl.h", "cufile.h")
LINKED = ("cudart", "curand", "cufile", "cuda")
"""What DeepSpeed's ops link of a toolkit, and of the driver."""


def summary(machine: Machine) -> str:
    """One line for the topic."""
    whole = real_toolkits(machine)
    if not whole:
        return "CUDA toolkit: none" if _wants_cuda(machine) else "CUDA toolkit: none, and none is needed"
    return f"CUDA toolkit {and_more([f'{toolkit.release} in {toolkit.root}' for toolkit in whole], 3)}"


def real_toolkits(machine: Machine) -> tuple[Toolkit, ...]:
    """The toolkits with a compiler, without a folder that is listed only because torch takes it."""
    return tuple(toolkit for toolkit in machine.toolkits if toolkit.nvcc and toolkit.found_via != (TAKEN,))


def cuda_toolkit_missing(machine: Machine) -> Iterator[Finding]:
    """torch is a CUDA build and no CUDA toolkit (no nvcc) is here."""
    torch = machine.torch
    if torch and torch.cuda and not real_toolkits(machine) and not _named(machine):
        headers = [toolkit.root for toolkit in machine.toolkits if not toolkit.broken]
        yield Finding.error(
            "cuda-toolkit-missing",
            f"torch was built with CUDA {torch.cuda}, and there is no CUDA toolkit (no nvcc) on this machine",
            evidence=[f"{root} holds headers and libraries only" for root in headers],
            affects=(needs.CUDA,),
            fix=f"let dsdoctor assemble one without root, or install CUDA {torch.cuda}",
            steps=(BUILD_WHEEL, OR_ASSEMBLE),
        )


def nvcc_broken(machine: Machine) -> Iterator[Finding]:
    """An nvcc is there and does not print its version: it fails, hangs, or is a script whose target is gone."""
    for toolkit in machine.toolkits:
        if toolkit.broken:
            taken = TAKEN in toolkit.found_via
            make = Finding.error if taken and _wants_cuda(machine) else Finding.warning
            yield make(
                "nvcc-broken",
                f"{toolkit.root}/bin/nvcc does not print its version: {toolkit.broken}",
                evidence=[f"found via {', '.join(toolkit.found_via)}"],
                affects=(needs.CUDA,) if taken else (),
                fix="repair it, or select another toolkit",
                steps=(USE_ENV,),
            )


def cuda_home_wrong(machine: Machine) -> Iterator[Finding]:
    """The folder that torch and DeepSpeed take for CUDA_HOME is not a usable toolkit."""
    torch = machine.torch
    taken, home = machine.taken, torch.cuda_home if torch else None
    if torch is None or torch.cuda is None or home is None or (taken and taken.broken):
        return
    if taken is None and not _known(machine):
        return
    if taken and taken.nvcc and (taken.found_via != (TAKEN,) or "cuda_runtime.h" in taken.headers):
        return
    here = real_toolkits(machine)
    whole = any(_is_whole(toolkit, torch) for toolkit in here)
    how = _named(machine) or ("two folders up from the nvcc on PATH" if taken and taken.nvcc else "the default")
    joined = ": it is a list, and must be one folder" if ":" in home else ""
    quoted = ": it has a quote or a blank in it" if home.strip("'\" ") != home else ""
    has = "has no CUDA headers" if taken else "holds no CUDA toolkit"
    yield Finding.error(
        "cuda-home-wrong",
        f"torch takes {home} for CUDA_HOME ({how}), and it {has}{joined or quoted}",
        evidence=[f"a toolkit is in {toolkit.root} (CUDA {toolkit.release})" for toolkit in here],
        affects=(needs.CUDA,),
        fix="select the toolkit that fits torch" if whole else "let dsdoctor assemble a whole one, without root",
        steps=(USE_ENV,) if whole else (ASSEMBLE, BUILD_WHEEL),
    )


def cuda_torch_mismatch(machine: Machine) -> Iterator[Finding]:
    """The toolkit that the build takes is of another CUDA release than the one torch was built with."""
    torch, taken = machine.torch, machine.taken
    if not torch or not torch.cuda or taken is None or taken.nvcc is None or taken.release is None:
        return
    if taken.release == torch.cuda or _known_wrong(taken):
        return
    major = taken.release.major != torch.cuda.major
    skipped = machine.variables.get("DS_SKIP_CUDA_CHECK") == "1"
    refused = major or not (same_release(taken.release, torch.cuda) or skipped)
    fitting = [toolkit for toolkit in real_toolkits(machine) if toolkit.release == torch.cuda]
    tail = "" if major else "; DeepSpeed refuses it" if refused else "; DeepSpeed lets it pass"
    yield (Finding.error if refused else Finding.warning)(
        "cuda-torch-mismatch",
        f"nvcc is CUDA {taken.release}, torch was built with CUDA {torch.cuda}{tail}",
        evidence=[f"{taken.nvcc} ({', '.join(taken.found_via)})", f"torch {torch.version} in {torch.location}"],
        affects=(needs.CUDA,) if refused else (),
        fix=f"use the toolkit in {fitting[0].root}" if fitting else f"use or assemble a toolkit of CUDA {torch.cuda}",
        steps=(USE_ENV,) if fitting else (BUILD_WHEEL,),
    )


def cuda_home_cuda_path_differ(machine: Machine) -> Iterator[Finding]:
    """CUDA_HOME and CUDA_PATH name different folders."""
    home, path = machine.variables.get("CUDA_HOME"), machine.variables.get("CUDA_PATH")
    if home and path and home.rstrip("/") != path.rstrip("/"):
        yield Finding.warning(
            "cuda-home-cuda-path-differ",
            f"CUDA_HOME is {home} and CUDA_PATH is {path}: torch takes the first, other tools the second",
            fix="let both name one folder",
            steps=(step('export CUDA_PATH="$CUDA_HOME"'),),
        )


def toolkits_several(machine: Machine) -> Iterator[Finding]:
    """Several CUDA toolkits are here."""
    here = real_toolkits(machine)
    if len(here) > 1 and _wants_cuda(machine):
        taken = machine.taken
        yield Finding.note(
            "toolkits-several",
            f"there are {len(here)} CUDA toolkits; a build takes {taken.root if taken else 'none of them'}",
            evidence=[f"CUDA {toolkit.version} in {toolkit.root} ({', '.join(toolkit.found_via)})" for toolkit in here],
            fix="to select the one that fits torch",
            steps=(USE_ENV,),
        )


def cuda_header_missing(machine: Machine) -> Iterator[Finding]:
    """The toolkit that the build takes has a compiler but lacks headers of the CUDA libraries."""
    taken = machine.taken
    if not _wants_cuda(machine) or taken is None or taken.nvcc is None or _known_wrong(taken):
        return
    base, of_ops = _missing_headers(machine, taken, BASE_HEADERS), _missing_headers(machine, taken, OP_HEADERS)
    if not base and not of_ops:
        return
    scattered = [name for name in (*base, *of_ops) if name in taken.scattered]
    evidence = [f"{taken.root} (CUDA {taken.version}, found via {', '.join(taken.found_via)})"]
    evidence += [f"{', '.join(scattered)}: there, but not in {taken.root}/include"] if scattered else []
    yield (Finding.error if base else Finding.warning)(
        "cuda-header-missing",
        f"the toolkit in {taken.root} lacks {', '.join((*base, *of_ops))}",
        evidence=evidence,
        affects=(*((needs.CUDA,) if base else ()), *base, *of_ops),
        fix="let dsdoctor join it with the headers of torch's own wheels, without root",
        steps=(BUILD_WHEEL, OR_ASSEMBLE),
    )


def cuda_lib_link_missing(machine: Machine) -> Iterator[Finding]:
    """The toolkit that the build takes lacks libraries to link with."""
    taken = machine.taken
    if not _wants_cuda(machine) or taken is None or taken.nvcc is None or _known_wrong(taken):
        return
    here = (taken.libraries - taken.scattered) | machine.paths.libraries
    driver = machine.library("libcuda")
    missing = [name for name in LINKED if name not in here and not (name == "cuda" and driver and driver.library)]
    if missing:
        yield (Finding.error if "cudart" in missing else Finding.warning)(
            "cuda-lib-link-missing",
            f"the toolkit in {taken.root} has no {', '.join(f'lib{name}.so' for name in missing)} to link with",
            evidence=[f"looked in {', '.join(taken.library_dirs) or 'no folder: lib64 and lib are not there'}"],
            affects=(*((needs.CUDA,) if "cudart" in missing else ()), *(needs.library(name) for name in missing)),
            fix="let dsdoctor assemble a whole one, without root",
            steps=(BUILD_WHEEL,),
        )


def _is_whole(toolkit: Toolkit, torch: Torch) -> bool:
    """Whether a toolkit is of torch's release and has all headers that every op includes."""
    return toolkit.release == torch.cuda and set(BASE_HEADERS) <= toolkit.headers - toolkit.scattered


def _missing_headers(machine: Machine, taken: Toolkit, wanted: tuple[str, ...]) -> tuple[str, ...]:
    here = (taken.headers - taken.scattered) | machine.paths.headers
    return tuple(name for name in wanted if name not in here)


def _wants_cuda(machine: Machine) -> bool:
    return machine.torch is not None and machine.torch.cuda is not None


def _named(machine: Machine) -> str | None:
    """The variable that names the folder which torch takes, None for a guessed one."""
    return next((name for name in ("CUDA_HOME", "CUDA_PATH") if machine.variables.get(name)), None)


def _known(machine: Machine) -> bool:
    """Whether there is something to compare with: a variable that names a folder, or a toolkit elsewhere."""
    return _named(machine) is not None or bool(real_toolkits(machine))


def _known_wrong(taken: Toolkit) -> bool:
    """Whether ``cuda_home_wrong`` reports it already."""
    return taken.found_via == (TAKEN,) and "cuda_runtime.h" not in taken.headers


CHECKS = (
    cuda_toolkit_missing,
    nvcc_broken,
    cuda_home_wrong,
    cuda_torch_mismatch,
    cuda_home_cuda_path_differ,
    toolkits_several,
    cuda_header_missing,
    cuda_lib_link_missing,
)


# Machine -> findings about the host compiler: what nvcc supports, and what torch's headers need.


def compilers_summary(machine: Machine) -> str:
    """One line for the topic."""
    if not machine.compilers:
        return "C++ compiler: none"
    first, *others = machine.compilers
    return f"C++ compiler {name(first)}" + (f"; also {', '.join(map(name, others[:4]))}" if others else "")


def name(compiler: Compiler) -> str:
    """Kind, version and path."""
    return f"{compiler.kind} {'.'.join(map(str, compiler.version))} ({compiler.path})"


def host_compiler_missing(machine: Machine) -> Iterator[Finding]:
    """There is no C++ compiler that works: none on PATH, or one whose back end (cc1plus) is missing."""
    if not machine.compilers:
        yield Finding.error(
            "host-compiler-missing",
            "no C++ compiler: neither g++ nor clang++ on PATH works",
            affects=(needs.COMPILER,),
            fix="install one",
            steps=(
                step("sudo apt-get install g++"),
                instead("sudo dnf install gcc-c++"),
                instead("conda install gxx_linux-64"),
            ),
        )


def host_compiler_too_new(machine: Machine) -> Iterator[Finding]:
    """The host compiler is newer than this nvcc takes."""
    default, limits = _default_and_limits(machine)
    if default is None or limits[1] is None or default.major <= limits[1]:
        return
    taken = machine.taken
    other = _fitting(machine, limits)
    yield Finding.error(
        "host-compiler-too-new",
        f"nvcc {taken.release if taken else ''} takes {default.kind} up to {limits[1]}, here is {name(default)}",
        evidence=[f"{taken.root}/include/crt/host_config.h" if taken else "torch's own table"],
        affects=(needs.DEVICE_CODE,),
        fix=f"use {name(other)}" if other else f"install {default.kind} {limits[1]}; nothing needs to be removed",
        steps=(USE_ENV,) if other else (step("sudo apt-get install g++-{release}", release=limits[1]), USE_ENV),
    )


def host_compiler_too_old(machine: Machine) -> Iterator[Finding]:
    """The host compiler is too old for the headers of this torch, which decide on the C++ standard."""
    default, limits = _default_and_limits(machine)
    if default is None or default.major >= limits[0] or machine.torch is None:
        return
    other = _fitting(machine, limits)
    yield Finding.error(
        "host-compiler-too-old",
        f"torch {machine.torch.version}'s headers (C++{machine.torch.cxx_standard}) need {default.kind} {limits[0]} or newer, "
        f"the compiler is {name(default)}",
        affects=(needs.COMPILER,),
        fix=f"use {name(other)}" if other else "install a newer one beside it",
        steps=(USE_ENV,)
        if other
        else (
            step("sudo apt-get install g++-12"),
            instead("sudo dnf install gcc-toolset-12"),
            instead("conda install gxx_linux-64"),
            instead("module load gcc", note="on many clusters"),
        ),
    )


def compilers_differ(machine: Machine) -> Iterator[Finding]:
    """C++ files and nvcc's host code would be compiled by different compilers."""
    cc, cxx = machine.variables.get("CC"), machine.variables.get("CXX")
    if machine.taken is None or not machine.compilers or (not cc and not cxx):
        return
    default = machine.compilers[0]
    if cxx and not cc and default.found_via == "cxx_variable":
        on_path = next((compiler for compiler in machine.compilers if compiler.found_via == "path"), None)
        if on_path is not None and (on_path.kind, on_path.major) != (default.kind, default.major):
            yield _differ(f"CXX is {cxx} ({name(default)}), and CC is not set: nvcc takes {name(on_path)}", default)
    elif cc and cxx and default.c_path and cc.rsplit("/", 1)[-1] != default.c_path.rsplit("/", 1)[-1]:
        yield _differ(f"CXX is {cxx} and CC is {cc}: nvcc takes CC for its host code", default)


def _differ(title: str, default: Compiler) -> Finding:
    steps = (step("export CC={compiler}", compiler=default.c_path),) if default.c_path else (USE_ENV,)
    return Finding.warning("compilers-differ", title, fix="let CC and CXX name the same compiler", steps=steps)


def _fitting(machine: Machine, limits: tuple[int, int | None]) -> Compiler | None:
    """Another compiler here that is within the limits and has its C compiler beside it."""
    return next((compiler for compiler in machine.compilers if compiler.c_path and fits(compiler, limits)), None)


def _default_and_limits(machine: Machine) -> tuple[Compiler | None, tuple[int, int | None]]:
    """The compiler that a build would take first, and the oldest and newest major that it may have."""
    if not machine.compilers or machine.torch is None:
        return None, (0, None)
    default = machine.compilers[0]
    taken = (machine.taken,) if machine.taken and machine.torch.cuda else ()
    return default, compiler_limits(machine.torch, default.kind, taken)


COMPILER_CHECKS = (host_compiler_missing, host_compiler_too_new, host_compiler_too_old, compilers_differ)
