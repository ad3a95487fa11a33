"""The parts of an assembled toolkit: which ones are planned, and what is kept with them once they are there.

They are layers on this machine, parts of PyPI, NVIDIA's archives or a distribution's package. Where PyPI has no compiler, the
very release of torch's CUDA comes first, which NVIDIA's archives have; then the package whose minor is nearest to it, with a
warning, and PyPI's headers of that minor. The plan is pure.

``dsdoctor-toolkit.txt`` lists the parts, each with the sha256 it was fetched by, ``parts.sha256`` the files, as sha256sum writes
it: ``sha256sum --check parts.sha256``.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.architectures import numeric
from dsdoctor.core.build_models import Archive, Choice, DebianPackage, Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import real_path, sha256_of, write_text
from dsdoctor.core.finding import Finding, Severity, step
from dsdoctor.core.machine import MINOR_TOLERANT, Cuda, Machine, Toolkit, compiled_for
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

MIRROR = "DSDOCTOR_CUDA_REDIST"
"""The variable that names a mirror of NVIDIA's archives."""

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
REQUIRED_COMPONENTS = ("cuda_nvcc", "cuda_cudart", "cuda_cccl")
"""The components without which nothing compiles."""

OPTIONAL_COMPONENTS = ("cuda_crt", "libnvvm", "cuda_profiler_api")
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

COMPILER_HEADERS = {"crt/host_config.h", "cuda_runtime.h", "cccl", "cuda_profiler_api.h"}
"""What belongs to the compiler: never that of another release, which torch's wheels may have."""

PART_FOLDERS = ("cuda_runtime", "cuda_nvcc", "cuda_cccl", "cuda_profiler_api")
OLDEST_ON_PYPI = Cuda(11, 8)
FIRST_WHOLE_CCCL, CCCL = Cuda(12, 3), "nvidia-cuda-cccl-cu12==12.3.101.post1"
"""PyPI's wheels of cccl for CUDA 12.0 to 12.2 lack nv/target, which cuda_fp16.h includes: the first whole one serves them too."""


@dataclass(frozen=True, kw_only=True)
class NvidiaRelease:
    """A release of NVIDIA's redistributable archives for one platform. ``label`` is such as "12.8.1"."""

    label: str
    archives: tuple[Archive, ...]

    @property
    def release(self) -> Cuda:
        """Major and minor."""
        release = Cuda.parse(self.label)
        assert release is not None
        return release

    def archive(self, name: str) -> Archive | None:
        """The component of that name."""
        return next((archive for archive in self.archives if archive.name == name), None)


@dataclass(frozen=True, kw_only=True)
class Offers:
    """Who has a compiler of a CUDA major. ``misses`` says why of each who has none or cannot be asked; ``asked``: anybody was."""

    nvidia: NvidiaRelease | None = None
    packages: tuple[DebianPackage, ...] = ()
    misses: tuple[str, ...] = ()
    asked: bool = False


NOT_ASKED = Offers()
Assembled = tuple[ToolkitPlan | None, tuple[Choice, ...], tuple[Finding, ...]]
Planned = tuple[ToolkitPlan, tuple[Choice, ...], tuple[Finding, ...]]


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
        root=_root(cache, release, (requirements, layers)),
        release=release,
        assemble=True,
        headers=tuple(sorted(wanted)),
        fetch=requirements,
        layers=layers,
        architectures=base.architectures if base else (),
    )
    if requirements and request.offline and plan.root not in {toolkit.root for toolkit in machine.toolkits}:
        offline = book.finding(
            "cuda-toolkit-missing", Severity.ERROR, case="offline", release=str(release), requirements=requirements
        )
        return None, (), (offline,)
    choice = Choice(what="toolkit", value=f"assembled in {plan.root}", because=_reason(machine, release, base))
    return plan, (choice,), ()


def from_offers(
    machine: Machine, release: Cuda, cache: str, offers: Offers, wheels: Sequence[Toolkit]
) -> Planned | None:
    """A toolkit made of the best offer, None where there is none. ``wheels`` are torch's own packages of headers and libraries."""
    present = frozenset().union(*(toolkit.headers for toolkit in wheels)) - COMPILER_HEADERS
    layers = tuple(_without_compiler(toolkit) for toolkit in wheels)
    wanted = book.phrase("builder", "toolkit-wanted", release=str(release), here=_what_is_here(machine))
    if offers.nvidia is not None and offers.nvidia.release == release:
        archives = _archives(offers.nvidia, present)
        if archives:
            label = offers.nvidia.label
            plan = _of_archives(machine, offers.nvidia, archives, present, layers)
            because = book.phrase("builder", "nvidia-has-it", wanted=wanted, label=label)
            return _finished(plan, cache, because, ())
    package = _nearest(offers.packages, release)
    if package is None:
        return None
    plan = _of_package(machine, package, present, layers)
    source = f"{package.name} {package.version} of {package.distribution} {package.suite}"
    name = "nearest-package-since" if offers.misses else "nearest-package"
    because = book.phrase("builder", name, wanted=wanted, source=source, misses="; ".join(offers.misses))
    return _finished(plan, cache, because, _another_minor(machine, plan, release, source, offers))


def not_on_pypi(
    machine: Machine, release: Cuda, misses: Sequence[str] = (), *, missing: frozenset[str] = frozenset()
) -> Finding:
    """No toolkit can be had for a CUDA that PyPI has no compiler of; ``misses`` is what others said who were asked."""
    seen = [f"{t.root}: CUDA {t.version}" for t in machine.toolkits if t.nvcc]
    evidence, first = (*seen, *misses), str(FIRST_ON_PYPI)
    if seen and missing:
        return book.finding(
            "cuda-torch-mismatch",
            Severity.ERROR,
            case="incomplete",
            evidence=evidence,
            release=str(release),
            major=release.major,
            missing=sorted(missing),
            first=first,
        )
    return book.finding(
        "cuda-torch-mismatch" if seen else "cuda-toolkit-missing",
        Severity.ERROR,
        case="not-on-pypi",
        evidence=evidence,
        release=str(release),
        major=release.major,
        first=first,
    )


def is_assembled(toolkit: Toolkit) -> bool:
    """Whether dsdoctor assembled this toolkit."""
    return "assembled" in toolkit.found_via


def wheels_of(machine: Machine, release: Cuda) -> list[Toolkit]:
    """The headers and libraries of PyPI's packages, those that torch needs, for a CUDA major."""
    wheels = (toolkit for toolkit in machine.toolkits if "pypi_wheels" in toolkit.found_via)
    return [toolkit for toolkit in wheels if toolkit.release is not None and toolkit.release.major == release.major]


def label_of(package: DebianPackage) -> str | None:
    """The CUDA release that a package was made of: Debian writes it behind a "~".

    >>> from dsdoctor.core.build_models import DebianPackage
    >>> facts = dict(name="nvidia-cuda-toolkit", distribution="Debian", suite="", component="", sha256="", size=0)
    >>> label_of(DebianPackage(version="11.8.89~11.8.0-5~deb12u1", **facts))
    '11.8.0'
    """
    match = re.match(r"(?:[0-9.]+~)?([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3})-", package.version)
    return match[1] if match else None


def release_of(package: DebianPackage) -> Cuda | None:
    """The CUDA release of a distribution's package."""
    return Cuda.parse(label_of(package))


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
    return (*wanted, *_nccl(machine, release, present))


def _root(cache: str, release: Cuda, made_of: object) -> str:
    """The folder of a toolkit, named after all that it is made of."""
    return f"{cache}/toolkits/{release}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}/home"


def _reason(machine: Machine, release: Cuda, base: Toolkit | None) -> str:
    if base is not None:
        missing = sorted(EVERY_HEADER - base.headers)
        if missing:
            return book.phrase("builder", "nvcc-alone", root=base.root, release=str(release), missing=missing)
        return book.phrase("builder", "nvcc-with-parts-elsewhere", root=base.root, release=str(release))
    return book.phrase("builder", "toolkit-wanted", release=str(release), here=_what_is_here(machine))


def _finished(plan: ToolkitPlan, cache: str, because: str, findings: tuple[Finding, ...]) -> Planned:
    made_of = (plan.fetch, plan.archives, plan.packages, plan.layers)
    plan = replace(plan, root=_root(cache, plan.release, made_of))
    return plan, (Choice(what="toolkit", value=f"assembled in {plan.root}", because=because),), findings


def _archives(nvidia: NvidiaRelease, present: frozenset[str]) -> tuple[Archive, ...]:
    """The components to fetch; none where the manifest lacks one without which nothing compiles."""
    names = [
        *REQUIRED_COMPONENTS,
        *OPTIONAL_COMPONENTS,
        *(part for header, part in LIBRARIES.items() if header not in present),
    ]
    found = {name: archive for name in names if (archive := nvidia.archive(name)) is not None}
    return tuple(found.values()) if set(REQUIRED_COMPONENTS) <= found.keys() else ()


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
        headers=tuple(
            sorted(present | libraries | profiler | (COMPILER_HEADERS - {"cuda_profiler_api.h"}) | {"nccl.h"})
        ),
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
        headers=tuple(sorted(present | COMPILER_HEADERS | EXTRAS.keys() | {"nccl.h"})),
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
    other = book.finding(
        "cuda-torch-mismatch",
        Severity.WARNING,
        case="packaged-minor",
        evidence=evidence,
        nvcc=str(plan.release),
        release=str(release),
    )
    return (other,)


def _what_is_here(machine: Machine) -> str:
    others = sorted({str(t.release) for t in machine.toolkits if t.nvcc and t.release})
    return book.phrase("builder", "toolkits-here", releases=others) if others else book.phrase("builder", "no-toolkits")


PARTS_FOLDER = "parts"
DIGESTS = "parts.sha256"
MAX_SHOWN = 3
PYPI, NVIDIA = "pypi", "nvidia"
SAMPLE_FILES = (
    *("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h", "include/cublas_v2.h"),
    *("include/cusparse.h", "include/cusolverDn.h", "include/curand_kernel.h", "include/cuda_profiler_api.h"),
    *("include/cufile.h", "include/nccl.h", "include/cccl/cuda/std/version", "include/cuda/std/version"),
)
"""One file of each part of a toolkit; that of cccl has one place before CUDA 13 and another since."""


@dataclass(frozen=True, kw_only=True, order=True)
class KeptPart:
    """A wheel, archive or package that was fetched. ``origin`` is "pypi", "nvidia", or a distribution's name in small letters."""

    origin: str
    name: str
    version: str
    sha256: str


@dataclass(frozen=True, kw_only=True, order=True)
class Part:
    """What provides a part of a toolkit: a Python package, one of NVIDIA's archives ("nvidia"), or a package of a distribution,
    by whose name ``origin`` goes then. ``sha256`` is known of what dsdoctor fetched."""

    name: str
    version: str
    origin: str = "pypi"
    sha256: str | None = None


def write_digests(folder: Path) -> None:
    """List every file of a toolkit's parts with its digest."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(_digests(folder).items()))
    write_text(folder / DIGESTS, "".join(lines), errors="surrogateescape")


def altered(folder: Path) -> tuple[str, ...]:
    """The files of a toolkit's parts that are not what was fetched, or are gone, or were added."""
    if not (folder / PARTS_FOLDER).exists():
        return ()
    try:
        text = (folder / DIGESTS).read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        # before parts were written down, no digests were: nothing to compare with
        return (DIGESTS,) if read_mark(folder / "home") else ()
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in text.splitlines())}
    found = _digests(folder)
    return tuple(sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)))


def refuse_altered(home: Path) -> None:
    """Raise BuildFailed for a toolkit of dsdoctor's own whose files are not what was fetched; any other is not looked at."""
    if (home / MARK).is_file() and (wrong := altered(home.parent)):
        aside = step("mv {folder} {aside}", folder=str(home.parent), aside=f"{home.parent}.altered")
        raise BuildFailed(
            f"the toolkit in {home} was modified after download: {and_more(wrong, MAX_SHOWN)}",
            hint=f"{aside.line}, then rerun to assemble it again",
        )


def write_mark(home: Path, parts: Iterable[KeptPart]) -> None:
    """Mark a toolkit as finished."""
    lines = [f"{part.origin} {part.name} {part.version} sha256:{part.sha256}\n" for part in sorted(parts)]
    write_text(home / MARK, "".join(lines))


def read_mark(home: Path) -> tuple[KeptPart, ...]:
    """The fetched parts of a finished toolkit; none for one that was not assembled, or before they were written down."""
    try:
        text = (home / MARK).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    found = re.finditer(r"^(\S+) (\S+) (\S+) sha256:([0-9a-f]{64})$", text, re.MULTILINE)
    return tuple(KeptPart(origin=m[1], name=m[2], version=m[3], sha256=m[4]) for m in found)


def toolkit_parts(root: Path) -> tuple[Part, ...]:
    """What a toolkit's files belong to; nothing for one that was installed neither by pip nor by dsdoctor."""
    kept = read_mark(root)
    digests = {(part.name, part.version): part.sha256 for part in kept if part.origin == PYPI}
    wheels = {part for sample in SAMPLE_FILES for part in _owners(Path(real_path(root / sample)))}
    others = [
        Part(name=part.name, version=part.version, origin=part.origin, sha256=part.sha256)
        for part in kept
        if part.origin != PYPI
    ]
    return (*(replace(part, sha256=digests.get((part.name, part.version))) for part in sorted(wheels)), *others)


def _digests(folder: Path) -> dict[str, str]:
    files = list(_files(folder / PARTS_FOLDER))
    with ThreadPoolExecutor() as threads:
        digests = threads.map(sha256_of, files)
        return {path.relative_to(folder).as_posix(): digest for path, digest in zip(files, digests, strict=True)}


def _files(folder: Path) -> Iterator[Path]:
    # Python writes into __pycache__ whenever it likes
    return (
        path
        for path in folder.rglob("*")
        if "__pycache__" not in path.parts and not path.is_symlink() and path.is_file()
    )


def _owners(file: Path) -> Iterator[Part]:
    """The package whose RECORD lists a file."""
    # all of NVIDIA's wheels unpack into one folder called nvidia
    for folder in (parent.parent for parent in file.parents if parent.name == "nvidia"):
        line = re.compile(rf"^{re.escape(file.relative_to(folder).as_posix())},", re.MULTILINE)
        for record in sorted(folder.glob("nvidia_*.dist-info/RECORD")):
            name, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
            if line.search(record.read_text(encoding="utf-8", errors="replace")):
                yield Part(name=name.replace("_", "-"), version=version)
