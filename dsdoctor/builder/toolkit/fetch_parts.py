"""The parts of a toolkit in one folder: wheels of PyPI by pip, NVIDIA's archives, a distribution's package by apt.

Every part comes with the sha256 that its index or manifest names for it, and is compared with that before it is unpacked. NVIDIA's
``redistrib_X.Y.Z.json`` lists every component of a release with its path, sha256 and size; $DSDOCTOR_CUDA_REDIST names a mirror of
that folder (https://..., file:///...), or "none".
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from filelock import FileLock

from dsdoctor.builder.source.fetch import untar
from dsdoctor.builder.toolkit.debian import fetch_package
from dsdoctor.builder.toolkit.download import QUIET, Say, download, download_wheels, read_document, shown
from dsdoctor.builder.toolkit.kept import NVIDIA, PYPI, KeptPart
from dsdoctor.builder.toolkit.plan_assembly import MIRROR, NvidiaRelease
from dsdoctor.core.build_models import Archive, DebianPackage, Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed, DoctorError, UsageError
from dsdoctor.core.files import sha256_of
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.machine import Cuda
from dsdoctor.core.pip import run_pip
from dsdoctor.core.workspace import private_folder

ADDRESS = "https://developer.download.nvidia.com/compute/cuda/redist"
LICENCE = "https://docs.nvidia.com/cuda/eula/"
PLATFORMS = {"x86_64": "linux-x86_64", "aarch64": "linux-sbsa"}
COMPONENTS = (
    *("cuda_nvcc", "cuda_crt", "libnvvm", "cuda_cudart", "cuda_cccl", "cuda_profiler_api"),
    *("libcublas", "libcusparse", "libcusolver", "libcurand", "libcufile"),
)
"""What a toolkit for extensions of torch is made of; crt and libnvvm are components of their own since CUDA 13."""

MAX_PATCHES = 8
MAX_MANIFEST_BYTES = 4 << 20
MAX_ARCHIVE_BYTES = 4 << 30
ANSWER_TIMEOUT_SECONDS = 10.0
DOWNLOADS = "downloads"
APT = "apt"
MAX_UNPACKED_BYTES = 8 << 30
"""Bytes that an archive may unpack to: libcublas has 2 GB, with its static libraries."""


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
        return f"NVIDIA's archives are disabled ({MIRROR}=none)"
    if platform is None:
        return f"NVIDIA publishes no archives for {architecture}"
    found: NvidiaRelease | None = None
    try:
        for patch in range(MAX_PATCHES):
            label = f"{release}.{patch}"
            content = read_document(
                f"{base}/redistrib_{label}.json", most=MAX_MANIFEST_BYTES, timeout=ANSWER_TIMEOUT_SECONDS
            )
            if content is None and found:
                break
            if content is not None:
                found = parse_manifest(content, label, platform)
    except OSError as error:
        return f"NVIDIA's archives cannot be reached: {error}"
    except _Refused as error:
        return f"the manifest of NVIDIA's archives at {shown(base)} was rejected: {error}"
    return found or f"{shown(base)} has no archives of CUDA {release}"


def parse_manifest(content: bytes, label: str, platform: str) -> NvidiaRelease:
    """The components of a manifest for a platform. Nothing in it is believed that could lead out of the address it came from."""
    try:
        manifest = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"redistrib_{label}.json is not what a manifest looks like ({error})") from None
    if manifest.get("release_label", label) != label:
        raise _Refused(f"redistrib_{label}.json says that it is of {str(manifest['release_label'])[:40]!r}")
    return NvidiaRelease(label=label, archives=tuple(_redist_archives(manifest, platform)))


def fetch_parts(
    host: LocalHost, plan: ToolkitPlan, folder: Path, *, cache: Path, python: str, say: Say
) -> tuple[KeptPart, ...]:
    """Fetch and unpack everything that a plan names. Raises BuildFailed for what cannot be had, or is not what was announced."""
    parts: list[KeptPart] = []
    folder.mkdir()
    if plan.archives:
        downloads = private_folder(cache / DOWNLOADS)
        with FileLock(downloads / ".lock"):
            parts += _archives(host, plan.archives, folder, downloads, say)
    for package in plan.packages:
        parts.append(_package(host, package, folder, cache / APT, say))
    if plan.fetch:
        say(f"fetching {', '.join(plan.fetch)} from PyPI")
        parts += _wheels(host, plan.fetch, folder, python=python, say=say)
    return tuple(parts)


def forget_downloads(plan: ToolkitPlan, cache: Path) -> None:
    """Remove the archives of a toolkit that is finished: it has them unpacked."""
    for archive in plan.archives:
        _downloaded(cache / DOWNLOADS, archive).unlink(missing_ok=True)


def fetched_layers(parts: Path, final: Path) -> list[Layer]:
    """The layers inside the fetched parts, with the paths that they will have after the rename."""
    layers = []
    for folder in sorted(_part_folders(parts)):
        there = final / folder.relative_to(parts)
        layers.append(
            Layer(
                include=(str(there / "include"),) if (folder / "include").is_dir() else (),
                libraries=(str(there / "lib"),) if (folder / "lib").is_dir() else (),
                tools=str(there / "bin") if (folder / "bin" / "nvcc").is_file() else None,
            )
        )
    return layers


def _redist_archives(manifest: dict[str, Any], platform: str) -> Iterator[Archive]:
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
    if not re.fullmatch(r"[0-9]{1,11}", size) or not 0 < int(size) <= MAX_ARCHIVE_BYTES:
        raise _Refused(f"{name} has {size[:40]!r} bytes")
    if not re.fullmatch(r"[0-9][0-9.]{0,30}", version):
        raise _Refused(f"{name} is of version {version[:40]!r}")
    licence = str(component.get("license", ""))[:100]
    return Archive(name=name, version=version, path=path, sha256=sha256.lower(), size=int(size), license=licence)


def _part_folders(parts: Path) -> Iterator[Path]:
    """The folders with a part each: wheels share one that is called nvidia."""
    for folder in parts.iterdir():
        if folder.name == "nvidia":
            yield from folder.iterdir()
        elif (folder / "include").is_dir() or (folder / "bin").is_dir():
            yield folder


def _wheels(host: LocalHost, requirements: Sequence[str], target: Path, *, python: str, say: Say) -> list[KeptPart]:
    """Let pip fetch wheels and put them into a folder of their own; the environment itself stays as it is."""
    wheels = target.with_name("wheels")
    what = ", ".join(requirements)
    hint = "check the network; --offline shows what would be needed; --toolkit DIR takes one that you have"
    files = download_wheels(host, requirements, wheels, python=python, hint=hint, say=say)
    # pip has compared each with the index's digest; it is taken from there, and nothing else is looked for
    inward = ["install", *QUIET, "--no-warn-script-location", "--no-index", "--no-deps", "--target", str(target)]
    run_pip(host, python, [*inward, *map(str, files)], what=what, hint=hint)
    found = [_kept_wheel(file) for file in files]
    shutil.rmtree(wheels)
    return found


def _kept_wheel(file: Path) -> KeptPart:
    name, version = file.name.split("-")[:2]
    return KeptPart(origin=PYPI, name=name.replace("_", "-"), version=version, sha256=sha256_of(file))


def _archives(
    host: LocalHost, archives: Sequence[Archive], folder: Path, downloads: Path, say: Say
) -> Iterator[KeptPart]:
    base = address(host)
    if base is None:
        raise BuildFailed("NVIDIA's archives are disabled (DSDOCTOR_CUDA_REDIST=none)", hint="unset it")
    licences = ", ".join(sorted({archive.license for archive in archives if archive.license})) or "its own licence"
    megabytes = sum(archive.size for archive in archives) / 1e6
    say(f"fetching {len(archives)} of NVIDIA's archives ({megabytes:.0f} MB) from {shown(base)}")
    if base.startswith("http://"):
        say("the mirror uses http: its manifest and the digests in it can't be verified")
    say(f"NVIDIA's terms apply to them ({licences}): {LICENCE}; each part keeps its LICENSE file")
    for archive in archives:
        file = _downloaded(downloads, archive)
        url, name = f"{base}/{archive.path}", f"{archive.name} {archive.version}"
        download(url, file, sha256=archive.sha256, size=archive.size, name=name, say=say)
        _unpack(archive, file, folder / archive.name)
        yield KeptPart(origin=NVIDIA, name=archive.name, version=archive.version, sha256=archive.sha256)


def _downloaded(downloads: Path, archive: Archive) -> Path:
    return downloads / f"{archive.sha256[:16]}-{archive.path.rpartition('/')[2]}"


def _unpack(archive: Archive, file: Path, target: Path) -> None:
    """An archive's single top folder as the part's folder."""
    scratch = target.with_name(f".{target.name}.unpack")
    scratch.mkdir()
    try:
        untar(file, scratch, largest=MAX_UNPACKED_BYTES, most="one of NVIDIA's components")
    except DoctorError as error:
        raise BuildFailed(f"{archive.name} was not unpacked: {error.message}", hint="name another mirror") from None
    tops = list(scratch.iterdir())
    if len(tops) != 1 or not tops[0].is_dir() or tops[0].is_symlink():
        raise BuildFailed(
            f"{archive.name} is not one of NVIDIA's archives: it has {len(tops)} top-level entries",
            hint="look at the archive",
        )
    tops[0].rename(target)
    scratch.rmdir()


def _package(host: LocalHost, package: DebianPackage, folder: Path, apt: Path, say: Say) -> KeptPart:
    origin = f"{package.distribution} {package.suite}"
    say(
        f"fetching {package.name} {package.version} ({package.size / 1e6:.0f} MB) from {origin} ({package.component}) by apt"
    )
    say(f"NVIDIA's terms apply to it (CUDA Toolkit): {LICENCE}; its copyright file is kept with it")
    fetch_package(host, package, apt, folder / package.name, say)
    name = package.distribution.lower()
    return KeptPart(origin=name, name=package.name, version=package.version, sha256=package.sha256)
