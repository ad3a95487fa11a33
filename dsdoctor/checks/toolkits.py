"""Machine -> findings about the CUDA toolkits: which one torch and DeepSpeed would take now, and whether it is usable."""

from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import TAKEN, Machine, Toolkit, Torch, same_release
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
        return "CUDA toolkit: none" if _wants_cuda(machine) else "CUDA toolkit: none (not needed)"
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
            evidence=[f"{root} contains only headers and libraries" for root in headers],
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
    # nothing to compare with: no variable names a folder, and no toolkit is elsewhere
    if taken is None and not _named(machine) and not real_toolkits(machine):
        return
    if taken and taken.nvcc and (taken.found_via != (TAKEN,) or "cuda_runtime.h" in taken.headers):
        return
    here = real_toolkits(machine)
    whole = any(_is_whole(toolkit, torch) for toolkit in here)
    evidence = ["it has no CUDA headers" if taken else "no CUDA toolkit is in it"]
    if ":" in home:
        evidence.append("it is a list, but must be a single folder")
    elif home.strip("'\" ") != home:
        evidence.append("it contains a quote or a space")
    yield book.finding(
        "cuda-home-wrong",
        Severity.ERROR,
        case="" if whole else "assemble",
        evidence=[*evidence, *(f"a toolkit is in {toolkit.root} (CUDA {toolkit.release})" for toolkit in here)],
        affects=(needs.CUDA,),
        home=home,
        source=_named(machine) or ("two folders above the nvcc on PATH" if taken and taken.nvcc else "the default"),
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
    if not major:
        evidence.append(f"DeepSpeed {'rejects' if refused else 'accepts'} another minor here")
    yield book.finding(
        "cuda-torch-mismatch",
        Severity.ERROR if refused else Severity.WARNING,
        case="here" if fitting else "",
        evidence=evidence,
        affects=(needs.CUDA,) if refused else (),
        nvcc=str(taken.release),
        torch=str(torch.cuda),
        root=fitting[0].root if fitting else "",
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
    evidence += [f"{', '.join(scattered)}: installed, but not in {taken.root}/include"] if scattered else []
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
            evidence=[f"searched {', '.join(taken.library_dirs) or 'no folder: neither lib64 nor lib exists'}"],
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
