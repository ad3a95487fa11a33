"""Machine + a CUDA release -> what to assemble a toolkit from: layers on this machine, parts from PyPI. Pure."""

import hashlib
from collections.abc import Sequence

from dsdoctor.core.build_models import Choice, Layer, ToolkitPlan
from dsdoctor.core.finding import Finding, Fix, Severity, instead, step
from dsdoctor.core.machine import Cuda, Machine, Toolkit
from dsdoctor.core.requests import BuildRequest

FIRST_ON_PYPI = 13
"""From this CUDA major on, PyPI has the compiler itself (nvidia-cuda-nvcc)."""

MARK = "dsdoctor-toolkit.txt"
"""The file that marks an assembled toolkit as finished."""

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
"""Header -> the extra of the ``cuda-toolkit`` package on PyPI that provides it."""

COMPILER_PARTS = ("nvcc", "crt", "nvvm", "cccl", "cudart")
"""Versioned together: the compiler, its headers, its back end, the runtime."""

EVERY_HEADER = frozenset({*PARTS, "nccl.h"})
Assembled = tuple[ToolkitPlan | None, tuple[Choice, ...], tuple[Finding, ...]]


def assembly(
    machine: Machine,
    request: BuildRequest,
    cache: str,
    release: Cuda,
    compilers: Sequence[Toolkit],
    headers: frozenset[str],
    *,
    fetch: bool = True,
) -> Assembled:
    """Plan an assembled toolkit; a finding where that cannot be done.

    ``compilers`` are toolkits whose nvcc can be used; ``headers`` are what the ops need.
    """
    # where PyPI has all parts, the toolkit gets every header, so that it serves every op from then on
    base = compilers[0] if compilers else None
    wheels = wheels_of(machine, release)
    used = [*([base] if base else []), *wheels]
    present = frozenset().union(*(toolkit.headers for toolkit in used)) if used else frozenset()
    on_pypi = release.major >= FIRST_ON_PYPI and fetch
    wanted = EVERY_HEADER if on_pypi else headers
    if not on_pypi and (base is None or not wanted <= present):
        return None, (), (not_on_pypi(machine, release, missing=wanted - present),)
    requirements = _requirements(machine, release, present, with_nvcc=base is None) if on_pypi else ()
    layers = tuple(_layer(toolkit) for toolkit in used)
    plan = ToolkitPlan(
        root=f"{cache}/toolkits/{release}-{_key(requirements, layers)}/home",
        release=release,
        assemble=True,
        headers=tuple(sorted(wanted)),
        fetch=requirements,
        layers=layers,
        architectures=base.architectures if base else (),
    )
    if requirements and request.offline and plan.root not in {toolkit.root for toolkit in machine.toolkits}:
        return None, (), (_offline(release, requirements),)
    choice = Choice(what="toolkit", value=f"assembled in {plan.root}", because=_why(machine, release, base))
    return plan, (choice,), ()


def assembled_in(toolkit: Toolkit) -> bool:
    """Whether dsdoctor assembled this toolkit."""
    return "assembled" in toolkit.found_via


def user_space_toolkit(release: Cuda) -> Fix:
    """How a user without root gets a whole toolkit of a release that PyPI does not carry."""
    return Fix(
        text=f"any of these, none needs root: a whole CUDA {release} toolkit in your home, by conda or NVIDIA's runfile, and "
        f"named; a mirror of NVIDIA's archives; a torch for CUDA {FIRST_ON_PYPI} or later, whose compiler is on PyPI",
        steps=(
            step('conda create -y -p "$HOME"/cuda-{release} -c nvidia cuda-toolkit={release}', release=str(release)),
            instead(
                'sh cuda_{release}.*_linux.run --silent --toolkit --toolkitpath="$HOME"/cuda-{release}',
                note="NVIDIA's runfile",
                release=str(release),
            ),
            step('python -m dsdoctor build-wheel --toolkit "$HOME"/cuda-{release}', release=str(release)),
            instead("export DSDOCTOR_CUDA_REDIST=https://mirror/cuda/redist", note="or file:///folder"),
            instead(
                "python -m pip install --upgrade torch --index-url https://download.pytorch.org/whl/cu130",
                note="a torch whose compiler is on PyPI",
            ),
        ),
    )


def wheels_of(machine: Machine, release: Cuda) -> list[Toolkit]:
    """The headers and libraries of PyPI's packages, those that torch needs, for a CUDA major."""
    wheels = (toolkit for toolkit in machine.toolkits if "pypi_wheels" in toolkit.found_via)
    return [toolkit for toolkit in wheels if toolkit.release is not None and toolkit.release.major == release.major]


def _layer(toolkit: Toolkit) -> Layer:
    tools = toolkit.nvcc.rsplit("/", 1)[0] if toolkit.nvcc else None
    return Layer(include=toolkit.include_dirs, libraries=toolkit.library_dirs, tools=tools)


def _requirements(machine: Machine, release: Cuda, present: frozenset[str], *, with_nvcc: bool) -> tuple[str, ...]:
    """What pip must fetch: extras of the package cuda-toolkit, pinned to the version that torch came with, if any; and NCCL."""
    extras = {part for header, part in PARTS.items() if header not in present}
    extras |= set(COMPILER_PARTS) if with_nvcc else set()
    installed = machine.package("cuda-toolkit")
    pin = installed if installed and Cuda.parse(installed) == release else f"{release}.*"
    wanted = [f"cuda-toolkit[{','.join(sorted(extras))}]=={pin}"] if extras else []
    if "nccl.h" not in present:
        nccl = machine.torch.nccl if machine.torch else None
        wanted.append(f"nvidia-nccl-cu{release.major}" + (f"=={nccl}" if nccl else ""))
    return tuple(wanted)


def _key(fetch: tuple[str, ...], layers: tuple[Layer, ...]) -> str:
    return hashlib.sha256(repr((fetch, layers)).encode()).hexdigest()[:12]


def _why(machine: Machine, release: Cuda, base: Toolkit | None) -> str:
    if base is not None:
        missing = sorted(EVERY_HEADER - base.headers)
        if missing:
            return f"{base.root} has nvcc {release} but lacks {', '.join(missing)}"
        return f"{base.root} has nvcc {release}, its headers or libraries lie where torch does not look"
    others = sorted({str(t.release) for t in machine.toolkits if t.nvcc and t.release})
    here = f"the toolkits here are CUDA {', '.join(others)}" if others else "there is no toolkit here"
    return f"torch was built with CUDA {release}, and {here}"


def not_on_pypi(
    machine: Machine, release: Cuda, misses: Sequence[str] = (), *, missing: frozenset[str] = frozenset()
) -> Finding:
    """No toolkit can be had for a CUDA that PyPI has no compiler of; ``misses`` is what others said who were asked."""
    seen = [f"{t.root}: CUDA {t.version}" for t in machine.toolkits if t.nvcc]
    lacks = f" (missing: {', '.join(sorted(missing))})" if seen and missing else ""
    return Finding(
        rule="cuda-torch-mismatch" if seen else "cuda-toolkit-missing",
        severity=Severity.ERROR,
        title=f"torch was built with CUDA {release}, and no whole toolkit of CUDA {release.major} is here{lacks}; "
        f"PyPI carries a CUDA compiler only from {FIRST_ON_PYPI}.0 on",
        evidence=(*seen, *misses),
        fix=user_space_toolkit(release),
    )


def _offline(release: Cuda, requirements: tuple[str, ...]) -> Finding:
    return Finding.error(
        "cuda-toolkit-missing",
        f"no whole CUDA {release} toolkit is here, and --offline forbids to fetch {', '.join(requirements)}",
        fix="assemble it once where there is a network (the cache folder can be copied)",
        steps=(step("python -m dsdoctor toolkit"),),
    )
