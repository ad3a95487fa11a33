"""The CUDA toolkit of a build: one that is here, else one to be assembled, else a finding; and what can be fetched for it.

``choose_toolkit`` decides and is pure; ``toolkit_offers`` asks the network, only where that matters.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.source.ops import BASE_HEADERS
from dsdoctor.builder.toolkit.parts import (
    FIRST_ON_PYPI,
    MIRROR,
    NOT_ASKED,
    NvidiaRelease,
    Offers,
    assembly,
    from_offers,
    is_assembled,
    not_on_pypi,
    wheels_of,
)
from dsdoctor.core.architectures import parse_architectures, plain
from dsdoctor.core.build_models import Choice, DebianPackage, ToolkitPlan
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import MINOR_TOLERANT, Cuda, Machine, Toolkit
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.workspace import private_folder
from dsdoctor.probe.observe import Observation
from dsdoctor.rules import book

BASE_LIBRARIES = ("cudart",)
"""torch links every CUDA extension with -lcudart."""

Chosen = tuple[ToolkitPlan | None, tuple[Choice, ...], tuple[Finding, ...]]


@dataclass(frozen=True, kw_only=True)
class Needs:
    """CUDA headers and libraries that some ops need."""

    headers: frozenset[str]
    libraries: frozenset[str]

    def met_by(self, toolkit: Toolkit) -> bool:
        """Whether a toolkit has them all where torch looks for them."""
        wanted = self.headers | self.libraries
        return wanted <= (toolkit.headers | toolkit.libraries) - toolkit.scattered


BARE = Needs(headers=frozenset(BASE_HEADERS), libraries=frozenset(BASE_LIBRARIES))


def choose_toolkit(
    machine: Machine, request: BuildRequest, cache: str, needs: Needs, offers: Offers = NOT_ASKED
) -> Chosen:
    """Choose a toolkit for this torch: an existing one, else an assembled one, else one that serves at least some of the ops.

    ``offers`` are what can be fetched where PyPI has no compiler.
    """
    assert machine.torch is not None
    assert machine.torch.cuda is not None
    release = machine.torch.cuda
    if request.toolkit not in {"auto", "pypi"}:
        return _named(machine, request, cache, release, needs)
    found = _existing(machine, release, needs, offers) if request.toolkit == "auto" else None
    if found is not None:
        return found
    made = assembly(machine, request, cache, release, _compilers(machine, request, release), needs.headers)
    if made[0] is not None:
        return made
    fetched = from_offers(machine, release, cache, offers, wheels_of(machine, release))
    if fetched is not None:
        return fetched
    if request.toolkit == "pypi":
        return _refused(machine, release, made, offers)
    some = _existing(machine, release, BARE, offers) or _another_minor(machine, request, release)
    return some or _refused(machine, release, made, offers)


def lacking(
    toolkit: ToolkitPlan | None, machine: Machine, headers: Iterable[str], libraries: Iterable[str]
) -> list[str]:
    """The wanted headers and libraries that a chosen toolkit does not have."""
    if toolkit is None:
        return []
    if toolkit.assemble:
        return [name for name in headers if name not in toolkit.headers]
    found = next((known for known in machine.toolkits if known.root == toolkit.root), None)
    if found is None:
        return []
    here = (found.headers | found.libraries) - found.scattered
    return [name for name in headers if name not in here] + [f"lib{name}.so" for name in libraries if name not in here]


def needs_offers(machine: Machine, request: BuildRequest, *, mirror: bool = False) -> bool:
    """Whether it matters what can be fetched beside PyPI: nothing that is here serves torch's CUDA 12 or older.

    One of another minor that dsdoctor assembled serves, unless it cannot compile for --arch, or a ``mirror`` is named now.
    """
    release = machine.torch.cuda if machine.torch else None
    if release is None or release.major >= FIRST_ON_PYPI or request.offline or request.toolkit not in {"auto", "pypi"}:
        return False
    if request.toolkit == "pypi":
        return True
    plan, _, _ = choose_toolkit(machine, request, "", BARE)
    here = next((toolkit for toolkit in machine.toolkits if plan and toolkit.root == plan.root), None)
    if plan is None or here is None or here.release == release or not is_assembled(here):
        return plan is None
    wanted = parse_architectures(request.arch) if request.arch else ()
    return mirror or not all(plain(entry) in here.architectures for entry in wanted)


def toolkit_offers(observation: Observation, request: BuildRequest) -> Offers:
    """NVIDIA's archives of the very release, else what the distribution packages; NOT_ASKED where a toolkit is here or on PyPI."""
    torch = observation.machine.torch
    mirror = LocalHost().variable(MIRROR) is not None
    asking = replace(request, offline=False)
    if torch is None or torch.cuda is None or not needs_offers(observation.machine, asking, mirror=mirror):
        return NOT_ASKED
    neither = "NVIDIA's archives and the distribution's packages were not checked"
    if request.offline:
        return Offers(asked=True, misses=(f"--offline: {neither}",))
    if not observation.is_here:
        return Offers(
            asked=True, misses=(f"this is a snapshot: {neither}; run dsdoctor on that machine to check them",)
        )
    return _ask_offers(LocalHost(), torch.cuda, observation.machine.system.architecture, Path(observation.cache))


def _refused(machine: Machine, release: Cuda, made: Chosen, offers: Offers) -> Chosen:
    """Nothing can be had; where others than PyPI were asked, what they said."""
    return (None, (), (not_on_pypi(machine, release, offers.misses),)) if offers.asked else made


def _existing(machine: Machine, release: Cuda, needs: Needs, offers: Offers = NOT_ASKED) -> Chosen | None:
    """An existing toolkit that meets the needs: of torch's release, else of the nearest minor where DeepSpeed accepts another.

    One of another minor that dsdoctor assembled is not taken where the very release can be fetched now.
    """
    here = [toolkit for toolkit in machine.toolkits if toolkit.nvcc and toolkit.release and needs.met_by(toolkit)]
    for toolkit in here:
        if toolkit.release == release:
            return _take(toolkit, book.phrase("builder", "toolkit-of-torch", release=str(release)))
    near = [toolkit for toolkit in here if toolkit.release and toolkit.release.major == release.major]
    if offers.nvidia is not None:
        near = [toolkit for toolkit in near if not is_assembled(toolkit)]
    if not near or release.major not in MINOR_TOLERANT:
        return None
    nearest = min(near, key=lambda toolkit: abs((toolkit.release or release).minor - release.minor))
    because = book.phrase("builder", "toolkit-of-another-minor", release=str(release), major=release.major)
    return _take(nearest, because, other_than=release if is_assembled(nearest) else None)


def _another_minor(machine: Machine, request: BuildRequest, release: Cuda) -> Chosen | None:
    """Offline: a toolkit of another minor of torch's major, with a warning, since none can be fetched."""
    if not request.offline:
        return None
    for toolkit in machine.toolkits:
        if toolkit.nvcc and toolkit.release and toolkit.release.major == release.major and BARE.met_by(toolkit):
            return _take(toolkit, book.phrase("builder", "toolkit-offline"), other_than=release)
    return None


def _compilers(machine: Machine, request: BuildRequest, release: Cuda) -> list[Toolkit]:
    """The toolkits whose nvcc can be a layer of an assembled one."""
    if request.toolkit == "pypi":
        return []
    whole = {"crt/host_config.h", "cuda_runtime.h", "cccl"}
    here = [t for t in machine.toolkits if t.nvcc and t.release == release and whole <= t.headers]
    return [toolkit for toolkit in here if not is_assembled(toolkit)]


def _named(machine: Machine, request: BuildRequest, cache: str, release: Cuda, needs: Needs) -> Chosen:
    found = next((toolkit for toolkit in machine.toolkits if "named" in toolkit.found_via), None)
    if found is None or found.nvcc is None or found.release is None:
        return None, (), (book.finding("cuda-home-wrong", Severity.ERROR, case="named", folder=request.toolkit),)
    if found.release.major != release.major:
        other = book.finding(
            "cuda-torch-mismatch",
            Severity.ERROR,
            case="named",
            folder=request.toolkit,
            nvcc=str(found.release),
            torch=str(release),
        )
        return None, (), (other,)
    if BARE.met_by(found):
        return _take(found, book.phrase("builder", "named"), other_than=release)
    # its parts may be there, or in torch's wheels, but not where torch looks: assembled as links they are
    made = assembly(machine, request, cache, found.release, [found], needs.headers, fetch=False)
    if made[0] is not None and not has_error(made[2]):
        return made
    missing = sorted(BARE.headers - found.headers) or ["libcudart.so"]
    bare = book.finding("cuda-header-missing", Severity.ERROR, case="named", folder=request.toolkit, missing=missing)
    return None, (), (bare,)


def _take(toolkit: Toolkit, because: str, *, other_than: Cuda | None = None) -> Chosen:
    assert toolkit.release is not None
    findings: tuple[Finding, ...] = ()
    if other_than is not None and toolkit.release != other_than:
        other = book.finding(
            "cuda-torch-mismatch",
            Severity.WARNING,
            case="minor",
            evidence=[toolkit.nvcc or toolkit.root],
            nvcc=str(toolkit.release),
            torch=str(other_than),
        )
        findings = (other,)
    again = ", assembled before" if is_assembled(toolkit) else ""
    choice = Choice(what="toolkit", value=f"CUDA {toolkit.version} in {toolkit.root}{again}", because=because)
    plan = ToolkitPlan(root=toolkit.root, release=toolkit.release, architectures=toolkit.architectures)
    return plan, (choice,), findings


def _ask_offers(host: LocalHost, release: Cuda, architecture: str, cache: Path) -> Offers:
    # http and apt are imported where they are needed: most machines have a toolkit, or CUDA 13
    from dsdoctor.builder.toolkit.assemble import ask_nvidia

    nvidia = ask_nvidia(host, release, architecture)
    if isinstance(nvidia, NvidiaRelease):
        return Offers(nvidia=nvidia, asked=True)
    packages = _packages(host, architecture, cache)
    if isinstance(packages, str):
        return Offers(misses=(nvidia, packages), asked=True)
    return Offers(packages=packages, misses=(nvidia,), asked=True)


def _packages(host: LocalHost, architecture: str, cache: Path) -> tuple[DebianPackage, ...] | str:
    from dsdoctor.builder.toolkit.assemble import APT
    from dsdoctor.builder.toolkit.debian import ask_distribution, find_mirrors

    mirrors = find_mirrors(host)
    if isinstance(mirrors, str):
        return mirrors
    return ask_distribution(host, mirrors, private_folder(cache) / APT, architecture)
