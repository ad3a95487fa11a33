"""CUDA release + architecture -> the archives that NVIDIA publishes of it. Reads manifests, fetches nothing else.

``redistrib_X.Y.Z.json`` lists every component of a release with its path, sha256 and size. $DSDOCTOR_CUDA_REDIST names a mirror of
that folder (https://..., file:///...), or "none".
"""

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dsdoctor.builder.toolkit.download import read_document, shown
from dsdoctor.builder.toolkit.offers import MIRROR, NvidiaRelease
from dsdoctor.core.build_models import Archive
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import Host
from dsdoctor.core.machine import Cuda

ADDRESS = "https://developer.download.nvidia.com/compute/cuda/redist"
LICENCE = "https://docs.nvidia.com/cuda/eula/"
PLATFORMS = {"x86_64": "linux-x86_64", "aarch64": "linux-sbsa"}
COMPONENTS = (
    *("cuda_nvcc", "cuda_crt", "libnvvm", "cuda_cudart", "cuda_cccl", "cuda_profiler_api"),
    *("libcublas", "libcusparse", "libcusolver", "libcurand", "libcufile"),
)
"""What a toolkit for extensions of torch is made of; crt and libnvvm are components of their own since CUDA 13."""

PATCHES = 8
LARGEST_MANIFEST = 4 << 20
LARGEST_ARCHIVE = 4 << 30
ANSWER_LIMIT = 10.0


class _Refused(Exception):
    """A manifest that is not taken."""


def address(host: Host) -> str | None:
    """Where the manifests and archives are; None where the user wants none. Raises UsageError for what is no address."""
    named = (host.variable(MIRROR) or ADDRESS).rstrip("/")
    if named == "none":
        return None
    if urlsplit(named).scheme not in {"https", "http", "file"}:
        raise UsageError(
            f"{MIRROR}={named} is not an address",
            hint=f"export {MIRROR}=https://mirror/cuda/redist, or file:///folder, or none",
        )
    return named


def ask_nvidia(host: Host, release: Cuda, architecture: str) -> NvidiaRelease | str:
    """The newest patch of a release that is published there; else why there is none."""
    base, platform = address(host), PLATFORMS.get(architecture)
    if base is None:
        return f"NVIDIA's archives are not asked ({MIRROR}=none)"
    if platform is None:
        return f"NVIDIA publishes no archives for {architecture}"
    found: NvidiaRelease | None = None
    try:
        for patch in range(PATCHES):
            label = f"{release}.{patch}"
            content = read_document(f"{base}/redistrib_{label}.json", most=LARGEST_MANIFEST, timeout=ANSWER_LIMIT)
            if content is None and found:
                break
            if content is not None:
                found = parse_manifest(content, label, platform)
    except OSError as error:
        return f"NVIDIA's archives cannot be reached: {error}"
    except _Refused as error:
        return f"the manifest of NVIDIA's archives at {shown(base)} is not taken: {error}"
    return found or f"{shown(base)} has no archives of CUDA {release}"


def parse_manifest(content: bytes, label: str, platform: str) -> NvidiaRelease:
    """The components of a manifest for a platform. Nothing in it is believed that could lead out of the address it came from."""
    try:
        manifest = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"redistrib_{label}.json is not what a manifest looks like ({error})") from None
    if manifest.get("release_label", label) != label:
        raise _Refused(f"redistrib_{label}.json says that it is of {str(manifest['release_label'])[:40]!r}")
    return NvidiaRelease(label=label, archives=tuple(_archives(manifest, platform)))


def _archives(manifest: dict[str, Any], platform: str) -> Iterator[Archive]:
    for name in COMPONENTS:
        component = manifest.get(name)
        file = component.get(platform) if isinstance(component, dict) else None
        if isinstance(component, dict) and file is not None:
            yield _archive(name, component, file)


def _archive(name: str, component: dict[str, Any], file: Any) -> Archive:
    if not isinstance(file, dict):
        raise _Refused(f"{name} is not described")
    version, path, sha256, size = (
        str(value) for value in (component.get("version"), *map(file.get, ("relative_path", "sha256", "size")))
    )
    steps = path.split("/")
    if not all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,150}", step) for step in steps) or len(steps) > 8:
        raise _Refused(f"{name} lies in {path[:100]!r}")
    if not path.endswith((".tar.xz", ".tar.gz")):
        raise _Refused(f"{name} is {path[:100]!r}, not a .tar.xz")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise _Refused(f"{name} has no sha256")
    if not re.fullmatch(r"[0-9]{1,11}", size) or not 0 < int(size) <= LARGEST_ARCHIVE:
        raise _Refused(f"{name} has {size[:40]!r} bytes")
    if not re.fullmatch(r"[0-9][0-9.]{0,30}", version):
        raise _Refused(f"{name} is of version {version[:40]!r}")
    licence = str(component.get("license", ""))[:100]
    return Archive(name=name, version=version, path=path, sha256=sha256.lower(), size=int(size), license=licence)
