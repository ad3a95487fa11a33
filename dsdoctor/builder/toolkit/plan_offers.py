"""Offers + machine -> a toolkit assembled from NVIDIA's archives or a distribution's package, for what PyPI lacks. Pure.

The very release of torch's CUDA comes first, which NVIDIA's archives have; then the package whose minor is nearest to it, with a
warning, and PyPI's headers of that minor.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from dsdoctor.builder.toolkit.offers import NvidiaRelease, Offers, label_of
from dsdoctor.core.architectures import numeric
from dsdoctor.core.build_models import Archive, Choice, DebianPackage, Layer, ToolkitPlan
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.machine import MINOR_TOLERANT, Cuda, Machine, Toolkit, compiled_for
from dsdoctor.core.text import and_more

COMPILER = ("cuda_nvcc", "cuda_cudart", "cuda_cccl")
"""The components without which nothing compiles."""

BESIDE = ("cuda_crt", "libnvvm", "cuda_profiler_api")
LIBRARIES = {
    "cublas_v2.h": "libcublas",
    "cusparse.h": "libcusparse",
    "cusolverDn.h": "libcusolver",
    "curand_kernel.h": "libcurand",
    "cufile.h": "libcufile",
}
"""Header -> the component that is fetched for it where torch's wheels do not have it."""

EXTRAS = {"cublas_v2.h": "cublas", "cusparse.h": "cusparse", "cusolverDn.h": "cusolver", "curand_kernel.h": "curand"}
"""The same for the package ``cuda-toolkit`` on PyPI; that of CUDA 12.4 and older has no cufile."""

OF_COMPILER = {"crt/host_config.h", "cuda_runtime.h", "cccl", "cuda_profiler_api.h"}
"""What belongs to the compiler: never that of another release, which torch's wheels may have."""

PART_FOLDERS = ("cuda_runtime", "cuda_nvcc", "cuda_cccl", "cuda_profiler_api")
OLDEST_ON_PYPI = Cuda(11, 8)
FIRST_WHOLE_CCCL, CCCL = Cuda(12, 3), "nvidia-cuda-cccl-cu12==12.3.101.post1"
"""PyPI's wheels of cccl for CUDA 12.0 to 12.2 lack nv/target, which cuda_fp16.h includes: the first whole one serves them too."""

Planned = tuple[ToolkitPlan, tuple[Choice, ...], tuple[Finding, ...]]


def from_offers(
    machine: Machine, release: Cuda, cache: str, offers: Offers, wheels: Sequence[Toolkit]
) -> Planned | None:
    """A toolkit made of the best offer, None where there is none. ``wheels`` are torch's own packages of headers and libraries."""
    present = frozenset().union(*(toolkit.headers for toolkit in wheels)) - OF_COMPILER
    layers = tuple(_without_compiler(toolkit) for toolkit in wheels)
    wanted = f"torch was built with CUDA {release}, and {_what_is_here(machine)}"
    if offers.nvidia is not None and offers.nvidia.release == release:
        archives = _archives(offers.nvidia, present)
        if archives:
            label = offers.nvidia.label
            plan = _of_archives(machine, offers.nvidia, archives, present, layers)
            return _finished(plan, cache, f"{wanted}; NVIDIA's archives of CUDA {label} are of that very release", ())
    package = _nearest(offers.packages, release)
    if package is None:
        return None
    plan = _of_package(machine, package, present, layers)
    source = f"{package.name} {package.version} of {package.distribution} {package.suite}"
    because = f"{wanted}; {source} is the nearest that can be had"
    because += f": {'; '.join(offers.misses)}" if offers.misses else ""
    return _finished(plan, cache, because, _another_minor(machine, plan, release, source, offers))


def _finished(plan: ToolkitPlan, cache: str, because: str, findings: tuple[Finding, ...]) -> Planned:
    key = hashlib.sha256(repr((plan.fetch, plan.archives, plan.packages, plan.layers)).encode()).hexdigest()[:12]
    plan = replace(plan, root=f"{cache}/toolkits/{plan.release}-{key}/home")
    return plan, (Choice(what="toolkit", value=f"assembled in {plan.root}", because=because),), findings


def _archives(nvidia: NvidiaRelease, present: frozenset[str]) -> tuple[Archive, ...]:
    """The components to fetch; none where the manifest lacks one without which nothing compiles."""
    names = [*COMPILER, *BESIDE, *(part for header, part in LIBRARIES.items() if header not in present)]
    found = {name: archive for name in names if (archive := nvidia.archive(name)) is not None}
    return tuple(found.values()) if set(COMPILER) <= found.keys() else ()


def _of_archives(
    machine: Machine,
    nvidia: NvidiaRelease,
    archives: tuple[Archive, ...],
    present: frozenset[str],
    layers: tuple[Layer, ...],
) -> ToolkitPlan:
    fetched = {archive.name for archive in archives}
    libraries = {header for header, part in LIBRARIES.items() if part in fetched}
    profiler = {"cuda_profiler_api.h"} if "cuda_profiler_api" in fetched else set()
    return ToolkitPlan(
        root="",
        release=nvidia.release,
        assemble=True,
        headers=tuple(sorted(present | libraries | profiler | (OF_COMPILER - {"cuda_profiler_api.h"}) | {"nccl.h"})),
        fetch=_nccl(machine, nvidia.release, present),
        layers=layers,
        architectures=compiled_for(nvidia.release),
        archives=archives,
    )


def _nearest(packages: Sequence[DebianPackage], release: Cuda) -> DebianPackage | None:
    """The package whose nvcc is of torch's major, nearest in its minor; the later one of two."""
    if release.major not in MINOR_TOLERANT:
        return None
    usable = [
        (abs(found.minor - release.minor), -found.minor, place)
        for place, package in enumerate(packages)
        if (found := release_of(package)) and found.major == release.major and found >= OLDEST_ON_PYPI
    ]
    return packages[min(usable)[2]] if usable else None


def release_of(package: DebianPackage) -> Cuda | None:
    """The CUDA release of a distribution's package."""
    return Cuda.parse(label_of(package))


def _of_package(
    machine: Machine, package: DebianPackage, present: frozenset[str], layers: tuple[Layer, ...]
) -> ToolkitPlan:
    release = release_of(package)
    assert release is not None
    extras = {"cccl", "cudart", "nvcc", "profiler"}
    extras |= {extra for header, extra in EXTRAS.items() if header not in present}
    whole_cccl: tuple[str, ...] = ()
    if Cuda(12, 0) <= release < FIRST_WHOLE_CCCL:
        extras, whole_cccl = extras - {"cccl"}, (CCCL,)
    return ToolkitPlan(
        root="",
        release=release,
        assemble=True,
        headers=tuple(sorted(present | OF_COMPILER | EXTRAS.keys() | {"nccl.h"})),
        fetch=(
            f"cuda-toolkit[{','.join(sorted(extras))}]=={label_of(package)}",
            *whole_cccl,
            *_nccl(machine, release, present),
        ),
        layers=layers,
        architectures=compiled_for(release),
        packages=(package,),
    )


def _nccl(machine: Machine, release: Cuda, present: frozenset[str]) -> tuple[str, ...]:
    if "nccl.h" in present:
        return ()
    nccl = machine.torch.nccl if machine.torch else None
    return (f"nvidia-nccl-cu{release.major}" + (f"=={nccl}" if nccl else ""),)


def _without_compiler(toolkit: Toolkit) -> Layer:
    """torch's wheels without what belongs to the compiler."""

    def kept(folders: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(folder for folder in folders if not any(f"/{part}/" in f"{folder}/" for part in PART_FOLDERS))

    return Layer(include=kept(toolkit.include_dirs), libraries=kept(toolkit.library_dirs))


def _another_minor(
    machine: Machine, plan: ToolkitPlan, release: Cuda, source: str, offers: Offers
) -> tuple[Finding, ...]:
    """A warning where the nvcc is of another minor than torch, with what it cannot compile for."""
    if plan.release == release:
        return ()
    torch = machine.torch
    lost = [name for name in numeric(torch.arch_list if torch else ()) if name not in plan.architectures]
    evidence = [f"{source}: nvcc {plan.release}", *offers.misses]
    evidence += [f"it cannot compile for {and_more(lost)}, which torch has code for"] if lost else []
    return (
        Finding.warning(
            "cuda-torch-mismatch",
            f"nvcc is CUDA {plan.release}, torch was built with CUDA {release}: another minor of the same major",
            evidence=evidence,
            fix="DeepSpeed accepts it; for the very release name a mirror of NVIDIA's archives, or a toolkit",
            steps=(
                step("export DSDOCTOR_CUDA_REDIST=https://mirror/cuda/redist"),
                instead(
                    'conda create -y -p "$HOME"/cuda-{release} -c nvidia cuda-toolkit={release}', release=str(release)
                ),
                step('python -m dsdoctor build-wheel --toolkit "$HOME"/cuda-{release}', release=str(release)),
            ),
        ),
    )


def _what_is_here(machine: Machine) -> str:
    others = sorted({str(t.release) for t in machine.toolkits if t.nvcc and t.release})
    return f"the toolkits here are CUDA {', '.join(others)}" if others else "there is no toolkit here"
