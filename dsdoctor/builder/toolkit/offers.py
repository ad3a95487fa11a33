"""What can be fetched of a CUDA release that PyPI does not have whole. Data only."""

import re
from dataclasses import dataclass

from dsdoctor.core.build_models import Archive, DebianPackage
from dsdoctor.core.machine import Cuda

MIRROR = "DSDOCTOR_CUDA_REDIST"
"""The variable that names a mirror of NVIDIA's archives."""


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


def label_of(package: DebianPackage) -> str | None:
    """The CUDA release that a package was made of: Debian writes it behind a "~".

    >>> from dsdoctor.core.build_models import DebianPackage
    >>> facts = dict(name="nvidia-cuda-toolkit", distribution="Debian", suite="", component="", sha256="", size=0)
    >>> label_of(DebianPackage(version="11.8.89~11.8.0-5~deb12u1", **facts))
    '11.8.0'
    """
    match = re.match(r"(?:[0-9.]+~)?([0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3})-", package.version)
    return match[1] if match else None
