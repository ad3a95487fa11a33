"""An observation + a request -> what can be fetched of a CUDA that PyPI has no compiler of.

Asks the network only where that matters.
"""

from dataclasses import replace
from pathlib import Path

from dsdoctor.builder.toolkit.choose import needs_offers
from dsdoctor.builder.toolkit.offers import MIRROR, NOT_ASKED, NvidiaRelease, Offers
from dsdoctor.core.build_models import DebianPackage
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.workspace import private_folder
from dsdoctor.probe.observe import Observation


def offers_for(observation: Observation, request: BuildRequest) -> Offers:
    """NVIDIA's archives of the very release, else what the distribution packages; NOT_ASKED where a toolkit is here or on PyPI."""
    torch = observation.machine.torch
    mirror = LocalHost().variable(MIRROR) is not None
    asking = replace(request, offline=False)
    if torch is None or torch.cuda is None or not needs_offers(observation.machine, asking, mirror=mirror):
        return NOT_ASKED
    neither = "neither NVIDIA's archives nor a distribution's packages were asked"
    if request.offline:
        return Offers(asked=True, misses=(f"--offline: {neither}",))
    if not observation.is_here:
        return Offers(asked=True, misses=(f"this is a snapshot: {neither}; there, dsdoctor asks them",))
    return _look(LocalHost(), torch.cuda, observation.machine.system.architecture, Path(observation.cache))


def _look(host: LocalHost, release: Cuda, architecture: str, cache: Path) -> Offers:
    # http and apt are imported where they are needed: most machines have a toolkit, or CUDA 13
    from dsdoctor.builder.toolkit.redist import ask_nvidia

    nvidia = ask_nvidia(host, release, architecture)
    if isinstance(nvidia, NvidiaRelease):
        return Offers(nvidia=nvidia, asked=True)
    packages = _packages(host, architecture, cache)
    if isinstance(packages, str):
        return Offers(misses=(nvidia, packages), asked=True)
    return Offers(packages=packages, misses=(nvidia,), asked=True)


def _packages(host: LocalHost, architecture: str, cache: Path) -> tuple[DebianPackage, ...] | str:
    from dsdoctor.builder.toolkit.debian import ask_distribution, find_mirrors
    from dsdoctor.builder.toolkit.fetch_parts import APT

    mirrors = find_mirrors(host)
    return (
        mirrors
        if isinstance(mirrors, str)
        else ask_distribution(host, mirrors, private_folder(cache) / APT, architecture)
    )
