"""Machine + what the ops need -> which CUDA toolkit to use, or what to assemble one from. Pure."""

import hashlib
from collections.abc import Iterable

from dsdoctor.builder.nouns import Choice, Layer, ToolkitPlan, Wish
from dsdoctor.builder.ops import BASE_HEADERS
from dsdoctor.finding import Finding, Fix, Severity
from dsdoctor.machine import Cuda, Machine, Toolkit

FIRST_ON_PYPI = 13
"""From this CUDA major on, PyPI carries the compiler itself (nvidia-cuda-nvcc)."""

MINOR_TOLERANT = (11, 12)
"""CUDA majors of which DeepSpeed accepts another minor than torch's without DS_SKIP_CUDA_CHECK (0.19.8)."""

PARTS = {
    "crt/host_config.h": "crt",
    "cuda_runtime.h": "cudart",
    "cccl": "cccl",
    "cublas_v2.h": "cublas",
    "cusparse.h": "cusparse",
    "cusolverDn.h": "cusolver",
    "curand_kernel.h": "curand",
    "cuda_profiler_api.h": "profiler",
    "cufile.h": "cufile",
}
"""Header -> extra of the ``cuda-toolkit`` package on PyPI that brings it."""

Chosen = tuple[ToolkitPlan | None, tuple[Choice, ...], tuple[Finding, ...]]


def choose_toolkit(
    machine: Machine, wish: Wish, cache: str, *, headers: frozenset[str], libraries: frozenset[str]
) -> Chosen:
    """Choose for this torch. ``headers`` and ``libraries`` are those that the wanted ops need."""
    torch = machine.torch
    assert torch is not None
    assert torch.cuda is not None
    if wish.toolkit not in {"auto", "pypi"}:
        return _named(machine, wish.toolkit, torch.cuda, headers)
    if wish.toolkit == "auto":
        for toolkit in _of_release(machine, torch.cuda):
            if headers <= toolkit.headers and libraries <= toolkit.libraries:
                return _as_is(toolkit, f"its release {torch.cuda} is the one torch was built with, and it is whole")
        tolerated = _tolerated(machine, torch.cuda, headers, libraries)
        if tolerated is not None:
            return _as_is(
                tolerated,
                f"no whole toolkit of torch's CUDA {torch.cuda} is here; DeepSpeed and torch accept another minor of "
                f"CUDA {torch.cuda.major}",
            )
    return assembly(machine, wish, cache)


def assembly(machine: Machine, wish: Wish, cache: str) -> Chosen:
    """Plan an assembled toolkit of torch's release; a finding where that cannot be done."""
    torch = machine.torch
    assert torch is not None
    assert torch.cuda is not None
    base = None if wish.toolkit == "pypi" else _with_compiler(machine, torch.cuda)
    wheels = [toolkit for toolkit in machine.toolkits if _is_wheels(toolkit, torch.cuda)]
    present = frozenset().union(*(toolkit.headers for toolkit in [*wheels, *([base] if base else [])]))
    fetch = _requirements(machine, torch.cuda, present, with_nvcc=base is None)
    if fetch and torch.cuda.major < FIRST_ON_PYPI:
        return None, (), (_cuda_12_finding(machine, torch.cuda),)
    if fetch and wish.offline and not _assembled_before(machine, torch.cuda):
        return _offline(machine, torch.cuda, fetch)
    layers = tuple(_layer(toolkit) for toolkit in [*([base] if base else []), *wheels])
    plan = ToolkitPlan(
        root=f"{cache}/toolkits/{torch.cuda}-{_key(fetch, layers)}/home",
        release=torch.cuda,
        assemble=True,
        fetch=fetch,
        layers=layers,
    )
    choice = Choice(
        what="toolkit", value=f"assembled in {plan.root}", because=_why_assembled(machine, torch.cuda, base)
    )
    return plan, (choice,), ()


def lacking(
    toolkit: ToolkitPlan | None, machine: Machine, headers: Iterable[str], libraries: Iterable[str]
) -> list[str]:
    """What of the wanted headers and libraries a chosen toolkit does not have; an assembled one has all."""
    if toolkit is None or toolkit.assemble:
        return []
    found = next((known for known in machine.toolkits if known.root == toolkit.root), None)
    if found is None:
        return []
    missing = [name for name in headers if name not in found.headers]
    return missing + [f"lib{name}.so" for name in libraries if name not in found.libraries]


def user_space_toolkit(release: Cuda) -> Fix:
    """How a user without root gets a whole toolkit of a release that PyPI does not carry."""
    return Fix(
        text=f"put a whole CUDA {release} toolkit into your home (either way needs no root), then name it",
        commands=(
            f'conda create -y -p "$HOME/cuda-{release}" -c nvidia cuda-toolkit={release}',
            f'sh cuda_{release}.*_linux.run --silent --toolkit --toolkitpath="$HOME/cuda-{release}"  # NVIDIA\'s runfile',
            f'python -m dsdoctor build-wheel --toolkit "$HOME/cuda-{release}"',
        ),
    )


def _named(machine: Machine, folder: str, release: Cuda, headers: frozenset[str]) -> Chosen:
    found = next((toolkit for toolkit in machine.toolkits if "named" in toolkit.found_via), None)
    if found is None or found.nvcc is None or found.release is None:
        return None, (), (_error("cuda-home-wrong", f"{folder} holds no CUDA toolkit (no bin/nvcc that runs)"),)
    if found.release.major != release.major:
        title = f"{folder} is CUDA {found.release}, torch was built with CUDA {release}: another major never works"
        return None, (), (_error("cuda-torch-mismatch", title, user_space_toolkit(release)),)
    missing = sorted(set(BASE_HEADERS) & headers - found.headers)
    if missing:
        title = f"{folder} lacks {', '.join(missing)}, which every CUDA op includes"
        fix = Fix(
            text="let dsdoctor choose or assemble one", commands=("python -m dsdoctor build-wheel --toolkit auto",)
        )
        return None, (), (_error("cuda-header-missing", title, fix),)
    return _as_is(found, "you named it", minor_of=release)


def _as_is(toolkit: Toolkit, because: str, *, minor_of: Cuda | None = None) -> Chosen:
    assert toolkit.release is not None
    findings: tuple[Finding, ...] = ()
    if minor_of is not None and toolkit.release != minor_of:
        findings = (
            Finding(
                rule="cuda-torch-mismatch",
                severity=Severity.WARNING,
                title=f"nvcc is CUDA {toolkit.release}, torch was built with CUDA {minor_of}: another minor, same major",
                evidence=(toolkit.nvcc or toolkit.root,),
            ),
        )
    choice = Choice(what="toolkit", value=f"CUDA {toolkit.version} in {toolkit.root}", because=because)
    return ToolkitPlan(root=toolkit.root, release=toolkit.release), (choice,), findings


def _of_release(machine: Machine, release: Cuda) -> list[Toolkit]:
    return [toolkit for toolkit in machine.toolkits if toolkit.nvcc and toolkit.release == release]


def _tolerated(machine: Machine, release: Cuda, headers: frozenset[str], libraries: frozenset[str]) -> Toolkit | None:
    if release.major not in MINOR_TOLERANT:
        return None
    near = [
        toolkit
        for toolkit in machine.toolkits
        if toolkit.nvcc and toolkit.release and toolkit.release.major == release.major
        if headers <= toolkit.headers and libraries <= toolkit.libraries
    ]
    return min(near, key=lambda t: abs((t.release or release).minor - release.minor), default=None)


def _assembled_before(machine: Machine, release: Cuda) -> bool:
    return any("assembled" in toolkit.found_via for toolkit in _of_release(machine, release))


def _offline(machine: Machine, release: Cuda, fetch: tuple[str, ...]) -> Chosen:
    whole = [t for t in machine.toolkits if t.nvcc and t.release and set(BASE_HEADERS) <= t.headers]
    near = [t for t in whole if t.release and t.release.major == release.major]
    if near:
        return _as_is(near[0], "offline: the nearest whole toolkit of torch's major", minor_of=release)
    finding = Finding(
        rule="cuda-toolkit-missing",
        severity=Severity.ERROR,
        title=f"no whole CUDA {release} toolkit is here, and --offline forbids to fetch {', '.join(fetch)}",
        fix=Fix(
            text="assemble it once where there is a network (the cache folder can be copied)",
            commands=("python -m dsdoctor toolkit",),
        ),
    )
    return None, (), (finding,)


def _with_compiler(machine: Machine, release: Cuda) -> Toolkit | None:
    wanted = {"crt/host_config.h", "cuda_runtime.h", "cccl"}
    found = [t for t in _of_release(machine, release) if wanted <= t.headers and "assembled" not in t.found_via]
    return found[0] if found else None


def _is_wheels(toolkit: Toolkit, release: Cuda) -> bool:
    return "pypi_wheels" in toolkit.found_via and toolkit.release is not None and toolkit.release.major == release.major


def _layer(toolkit: Toolkit) -> Layer:
    tools = toolkit.nvcc.rsplit("/", 1)[0] if toolkit.nvcc else None
    return Layer(include=toolkit.include_dirs, libraries=toolkit.library_dirs, tools=tools)


def _requirements(machine: Machine, release: Cuda, present: frozenset[str], *, with_nvcc: bool) -> tuple[str, ...]:
    """What pip must fetch: the meta package's extras, pinned to the one torch came with where there is one."""
    extras = {part for header, part in PARTS.items() if header not in present}
    if with_nvcc:
        # the compiler's own parts are versioned together: nvcc, its headers, its back end, the runtime
        extras |= {"nvcc", "crt", "nvvm", "cccl", "cudart"}
    installed = machine.package("cuda-toolkit")
    pin = installed if installed and Cuda.parse(installed) == release else f"{release}.*"
    wanted = [f"cuda-toolkit[{','.join(sorted(extras))}]=={pin}"] if extras else []
    if "nccl.h" not in present:
        nccl = machine.torch.nccl if machine.torch else None
        wanted.append(f"nvidia-nccl-cu{release.major}" + (f"=={nccl}" if nccl else ""))
    return tuple(wanted)


def _key(fetch: tuple[str, ...], layers: tuple[Layer, ...]) -> str:
    return hashlib.sha256(repr((fetch, layers)).encode()).hexdigest()[:12]


def _why_assembled(machine: Machine, release: Cuda, base: Toolkit | None) -> str:
    if base is not None:
        missing = sorted({*PARTS, "nccl.h"} - base.headers)
        return f"{base.root} has nvcc {release} but lacks {', '.join(missing)}"
    others = sorted({str(t.release) for t in machine.toolkits if t.nvcc and t.release})
    here = f"the toolkits here are CUDA {', '.join(others)}" if others else "there is no toolkit here"
    return f"torch was built with CUDA {release}, and {here}"


def _cuda_12_finding(machine: Machine, release: Cuda) -> Finding:
    seen = [f"{t.root}: CUDA {t.version}" for t in machine.toolkits if t.nvcc]
    return Finding(
        rule="cuda-toolkit-missing" if not seen else "cuda-torch-mismatch",
        severity=Severity.ERROR,
        title=f"torch was built with CUDA {release} and no whole toolkit of CUDA {release.major} is here; "
        f"PyPI carries a CUDA compiler only from {FIRST_ON_PYPI}.0 on",
        evidence=tuple(seen),
        fix=user_space_toolkit(release),
    )


def _error(rule: str, title: str, fix: Fix | None = None) -> Finding:
    return Finding(rule=rule, severity=Severity.ERROR, title=title, fix=fix)
