"""Machine -> findings about the CUDA toolkits: which one torch and DeepSpeed would take now, and whether it is usable."""

from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import TAKEN, Compiler, Machine, Toolkit, Torch, compiler_limits, fits, same_release
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

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
        yield book.finding(
            "cuda-toolkit-missing",
            Severity.ERROR,
            evidence=[f"{root} holds headers and libraries only" for root in headers],
            affects=(needs.CUDA,),
            release=str(torch.cuda),
        )


def nvcc_broken(machine: Machine) -> Iterator[Finding]:
    """An nvcc is there and does not print its version: it fails, hangs, or is a script whose target is gone."""
    for toolkit in machine.toolkits:
        if toolkit.broken:
            taken = TAKEN in toolkit.found_via
            yield book.finding(
                "nvcc-broken",
                Severity.ERROR if taken and _wants_cuda(machine) else Severity.WARNING,
                evidence=[f"found via {', '.join(toolkit.found_via)}"],
                affects=(needs.CUDA,) if taken else (),
                root=toolkit.root,
                reason=toolkit.broken,
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
    yield book.finding(
        "cuda-home-wrong",
        Severity.ERROR,
        case="" if whole else "assemble",
        evidence=[f"a toolkit is in {toolkit.root} (CUDA {toolkit.release})" for toolkit in here],
        affects=(needs.CUDA,),
        home=home,
        how=how,
        problem=f"{has}{joined or quoted}",
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
    evidence = [f"{taken.nvcc} ({', '.join(taken.found_via)})", f"torch {torch.version} in {torch.location}"]
    if fitting:
        yield book.finding(
            "cuda-torch-mismatch",
            Severity.ERROR if refused else Severity.WARNING,
            case="here" if major else "minor-refused-here" if refused else "minor-accepted-here",
            evidence=evidence,
            affects=(needs.CUDA,) if refused else (),
            nvcc=str(taken.release),
            torch=str(torch.cuda),
            root=fitting[0].root,
        )
    else:
        yield book.finding(
            "cuda-torch-mismatch",
            Severity.ERROR if refused else Severity.WARNING,
            case="" if major else "minor-refused" if refused else "minor-accepted",
            evidence=evidence,
            affects=(needs.CUDA,) if refused else (),
            nvcc=str(taken.release),
            torch=str(torch.cuda),
        )


def cuda_home_cuda_path_differ(machine: Machine) -> Iterator[Finding]:
    """CUDA_HOME and CUDA_PATH name different folders."""
    home, path = machine.variables.get("CUDA_HOME"), machine.variables.get("CUDA_PATH")
    if home and path and home.rstrip("/") != path.rstrip("/"):
        yield book.finding("cuda-home-cuda-path-differ", Severity.WARNING, home=home, path=path)


def toolkits_several(machine: Machine) -> Iterator[Finding]:
    """Several CUDA toolkits are here."""
    here = real_toolkits(machine)
    if len(here) > 1 and _wants_cuda(machine):
        yield book.finding(
            "toolkits-several",
            Severity.NOTE,
            evidence=[f"CUDA {toolkit.version} in {toolkit.root} ({', '.join(toolkit.found_via)})" for toolkit in here],
            count=len(here),
            root=machine.taken.root if machine.taken else "",
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
    yield book.finding(
        "cuda-header-missing",
        Severity.ERROR if base else Severity.WARNING,
        evidence=evidence,
        affects=(*((needs.CUDA,) if base else ()), *base, *of_ops),
        root=taken.root,
        headers=(*base, *of_ops),
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
        yield book.finding(
            "cuda-lib-link-missing",
            Severity.ERROR if "cudart" in missing else Severity.WARNING,
            evidence=[f"looked in {', '.join(taken.library_dirs) or 'no folder: lib64 and lib are not there'}"],
            affects=(*((needs.CUDA,) if "cudart" in missing else ()), *(needs.library(name) for name in missing)),
            root=taken.root,
            libraries=[f"lib{name}.so" for name in missing],
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
        yield book.finding("host-compiler-missing", Severity.ERROR, affects=(needs.COMPILER,))


def host_compiler_too_new(machine: Machine) -> Iterator[Finding]:
    """The host compiler is newer than this nvcc takes."""
    default, limits = _default_and_limits(machine)
    if default is None or limits[1] is None or default.major <= limits[1]:
        return
    taken = machine.taken
    other = _fitting(machine, limits)
    yield book.finding(
        "host-compiler-too-new",
        Severity.ERROR,
        case="here" if other else "",
        evidence=[f"{taken.root}/include/crt/host_config.h" if taken else "torch's own table"],
        affects=(needs.DEVICE_CODE,),
        nvcc=str(taken.release) if taken else "",
        kind=default.kind,
        newest=limits[1],
        compiler=name(default),
        other=name(other) if other else "",
    )


def host_compiler_too_old(machine: Machine) -> Iterator[Finding]:
    """The host compiler is too old for the headers of this torch, which decide on the C++ standard."""
    default, limits = _default_and_limits(machine)
    if default is None or default.major >= limits[0] or machine.torch is None:
        return
    other = _fitting(machine, limits)
    yield book.finding(
        "host-compiler-too-old",
        Severity.ERROR,
        case="here" if other else "",
        affects=(needs.COMPILER,),
        torch=machine.torch.version,
        standard=machine.torch.cxx_standard,
        kind=default.kind,
        oldest=limits[0],
        compiler=name(default),
        other=name(other) if other else "",
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
            yield book.finding(
                "compilers-differ",
                Severity.WARNING,
                case="cc-unset" if default.c_path else "cc-unset-no-c-compiler",
                cxx=cxx,
                compiler=name(default),
                on_path=name(on_path),
                c_compiler=default.c_path,
            )
    elif cc and cxx and default.c_path and cc.rsplit("/", 1)[-1] != default.c_path.rsplit("/", 1)[-1]:
        yield book.finding("compilers-differ", Severity.WARNING, cxx=cxx, cc=cc, c_compiler=default.c_path)


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
