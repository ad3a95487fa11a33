"""A toolkit in one folder: its parts fetched, linked together, given a libcuda.so to link against, and tried.

Parts are wheels of PyPI by pip, NVIDIA's archives, a distribution's package by apt. Every part comes with the sha256 that its index
or manifest names for it, and is compared with that before it is unpacked. NVIDIA's ``redistrib_X.Y.Z.json`` lists the components of
a release with its path, sha256 and size; $DSDOCTOR_CUDA_REDIST names a mirror of that folder (https://..., file:///...), or "none".

It is tried as an extension of torch would use it: ``nvcc -V``, ``nvcc -c`` of a small kernel for each architecture, and
``g++ -shared -lcudart``. A whole program is not linked: that needs libcudadevrt.a and libcudart_static.a, which no extension does.
"""

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from filelock import FileLock

from dsdoctor.builder.source.fetch import untar
from dsdoctor.builder.toolkit.debian import fetch_package
from dsdoctor.builder.toolkit.download import QUIET, Say, download, download_wheels, read_document, shown
from dsdoctor.builder.toolkit.parts import (
    MARK,
    MIRROR,
    NVIDIA,
    PYPI,
    KeptPart,
    NvidiaRelease,
    altered,
    read_mark,
    write_digests,
    write_mark,
)
from dsdoctor.core.build_models import Archive, DebianPackage, Layer, ToolkitPlan
from dsdoctor.core.errors import BuildFailed, DoctorError, UsageError, is_full
from dsdoctor.core.files import real_path, sha256_of, write_text
from dsdoctor.core.host import Host, LocalHost
from dsdoctor.core.machine import Cuda
from dsdoctor.core.pip import run_pip, why_failed
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
        raise _Refused(f"redistrib_{label}.json is not a valid manifest ({error})") from None
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
        f"fetching {package.name} {package.version} ({package.size / 1e6:.0f} MB) from {origin} ({package.component}) with apt"
    )
    say(f"NVIDIA's terms apply to it (CUDA Toolkit): {LICENCE}; its copyright file is kept with it")
    fetch_package(host, package, apt, folder / package.name, say)
    name = package.distribution.lower()
    return KeptPart(origin=name, name=package.name, version=package.version, sha256=package.sha256)


PROFILE = """\
TOP = $(_HERE_)/..
CICC_PATH = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(CICC_PATH):$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64/stubs" "-L$(TOP)/lib64"
"""

KERNEL = """\
#include <cuda_runtime.h>
#include <cuda_fp16.h>
#include <cuda/std/type_traits>
__global__ void scale(float* values, float factor, int count) {
    int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index < count) values[index] *= factor;
}
extern "C" int launch() {
    scale<<<1, 32>>>(nullptr, 2.0f, 0);
    return cudaGetLastError() == cudaSuccess ? 0 : 1;
}
"""

FOLDERS = {"cccl"}
"""Names in a plan's headers that are folders; in CUDA 12 they lie elsewhere."""

USED = ("home/bin/*", "home/nvvm/bin/*", "home/include", "home/lib64", "parts")
"""What of a kept toolkit runs, or is compiled and linked into ops: nobody else may write to it, or on the way to it."""

COMPILE_TIMEOUT_SECONDS = 600.0


def assemble(
    host: LocalHost, plan: ToolkitPlan, *, python: str, architectures: Sequence[str], compiler: str, say: Say
) -> Path:
    """Make the toolkit of a plan and return its root. ``compiler`` is the host compiler that nvcc uses.

    Raises BuildFailed when a part cannot be fetched or the result does not compile.
    """
    home = Path(plan.root)
    toolkits = private_folder(home.parent.parent)
    home = toolkits / home.parent.name / home.name
    for part in USED:
        private_folder(toolkits, f"{glob.escape(home.parent.name)}/{part}")
    with FileLock(home.parent.with_suffix(".lock")), _full_disk_named(home.parent.parent):
        whole = _is_whole(home) and _is_unaltered(home, say)
        if whole:
            say(f"using the toolkit assembled in {home}")
            parts = read_mark(home)
        else:
            parts = _make(host, plan, home, python=python, compiler=compiler, say=say)
        try:
            try_toolkit(host, home, plan, architectures=architectures, compiler=compiler)
        except BuildFailed:
            if not whole:
                # one that was whole before stays: another build may be using it
                shutil.rmtree(home.parent, ignore_errors=True)
            raise
        if not whole:
            write_mark(home, parts)
            forget_downloads(plan, home.parents[2])
    return home


def try_toolkit(host: LocalHost, home: Path, plan: ToolkitPlan, *, architectures: Sequence[str], compiler: str) -> None:
    """Raise BuildFailed with the tool's own words where the toolkit does not serve. ``compiler`` is the host compiler."""
    release = plan.release
    nvcc = str(home / "bin" / "nvcc")
    answer = host.run([nvcc, "-V"], timeout=60)
    if f"release {release}," not in answer.stdout:
        raise BuildFailed(
            f"the assembled {nvcc} is not the nvcc of CUDA {release}: {(answer.stdout + answer.stderr).strip()[-200:]}",
            hint="python -m dsdoctor toolkit --toolkit pypi",
        )
    missing = [name for name in plan.headers if name not in FOLDERS and not (home / "include" / name).exists()]
    if missing:
        raise BuildFailed(
            f"the toolkit assembled in {home} lacks {', '.join(missing)}",
            hint="python -m dsdoctor toolkit --toolkit pypi",
        )
    scratch = home.parent / f".try.{os.getpid()}"
    scratch.mkdir()
    try:
        _compile_kernel(host, home, plan, scratch, architectures=architectures, compiler=compiler)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def link_layers(temporary: Path, final: Path, layers: Iterable[Layer]) -> None:
    """One folder of links to the files of all layers; where several layers have a name, the first one is linked."""
    home = temporary / "home"
    for name in ("bin", "include", "lib64/stubs"):
        (home / name).mkdir(parents=True)

    def present(folder: str) -> Path:
        """Where a folder of the finished toolkit is now, under its temporary name."""
        path = Path(folder)
        return temporary / path.relative_to(final) if path.is_relative_to(final) else path

    for layer in layers:
        if layer.tools is not None and not (home / "bin" / "nvcc").is_symlink():
            _link_all(present(layer.tools), Path(layer.tools), home / "bin")
            (home / "nvvm").symlink_to(Path(layer.tools).parent / "nvvm")
        for folder in layer.include:
            _link_all(present(folder), Path(folder), home / "include")
        for folder in layer.libraries:
            if not folder.endswith("/stubs"):
                _link_all(present(folder), Path(folder), home / "lib64")
    _unversioned(home / "lib64")
    (home / "lib").symlink_to("lib64")
    target = home / "targets" / f"{os.uname().machine}-linux"
    target.mkdir(parents=True)
    (target / "include").symlink_to("../../include")
    (target / "lib").symlink_to("../../lib64")


def settle_nvcc(home: Path) -> None:
    """Make the nvcc of a toolkit look for everything in that toolkit, whatever part it came with.

    Some releases look beside the name that they are called by, others beside the file that it leads to: here both are one.
    """
    nvcc, profile = home / "bin" / "nvcc", home / "bin" / "nvcc.profile"
    file = Path(real_path(nvcc))
    nvcc.unlink()
    nvcc.hardlink_to(file)
    profile.unlink(missing_ok=True)
    write_text(profile, PROFILE)


def make_stub(host: LocalHost, home: Path, compiler: str) -> None:
    """Make a libcuda.so to link against, with every function of cuda.h and no code: the real one comes with the driver."""
    # the functions must be in it: a linker with --as-needed would drop a library that defines nothing
    header = (home / "include" / "cuda.h").read_text(encoding="utf-8", errors="replace")
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    path = home / "lib64" / "stubs" / "libcuda.so"
    source = path.with_suffix(".c")
    write_text(source, "".join(f"void {name}(void) {{}}\n" for name in names))
    argv = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(path), str(source)]
    answer = host.run(argv, timeout=120)
    source.unlink()
    if not answer.ok:
        raise BuildFailed(
            f"cannot compile the libcuda.so stub: {why_failed(host, answer.stderr)}",
            hint="check the host compiler (CC) above",
        )


def _make(
    host: LocalHost, plan: ToolkitPlan, home: Path, *, python: str, compiler: str, say: Say
) -> tuple[KeptPart, ...]:
    final = home.parent
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    # who holds the lock is alone: what other processes left here is of killed ones
    for left in (*final.parent.glob(f".{final.name}.*"), final):
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(mode=0o700)
        layers = list(plan.layers)
        parts: tuple[KeptPart, ...] = ()
        if plan.fetches:
            parts = fetch_parts(host, plan, temporary / "parts", cache=final.parent.parent, python=python, say=say)
            layers[:0] = fetched_layers(temporary / "parts", final / "parts")
            write_digests(temporary)
        link_layers(temporary, final, layers)
        temporary.rename(final)
        if plan.archives or plan.packages:
            settle_nvcc(home)
        make_stub(host, home, compiler)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return parts


def _is_whole(home: Path) -> bool:
    """Whether an assembled toolkit is there and none of its links dangles."""
    if not (home / MARK).is_file() or not (home / "nvvm" / "bin" / "cicc").exists():
        return False
    entries = [*(home / "bin").iterdir(), *(home / "include").iterdir(), *(home / "lib64").iterdir()]
    return all(entry.exists() for entry in entries)


def _is_unaltered(home: Path, say: Say) -> bool:
    wrong = altered(home.parent)
    if wrong:
        say(f"the toolkit in {home} is assembled again: {wrong[0]} was modified after download")
    return not wrong


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """A disk that is full is a failure with a name."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        free = shutil.disk_usage(folder).free
        raise BuildFailed(
            f"the disk is full: {error.filename or folder} could not be written, only {free / 1e6:.0f} MB free",
            hint="free some space, or move the cache: export DSDOCTOR_CACHE=/path/with/room",
        ) from None


def _link_all(present: Path, named: Path, into: Path) -> None:
    """Link every entry that no earlier layer has; a folder is linked as a whole."""
    for entry in sorted(present.iterdir()) if present.is_dir() else ():
        link = into / entry.name
        if not link.is_symlink() and not link.exists():
            link.symlink_to(named / entry.name)


def _unversioned(folder: Path) -> None:
    """Add a libX.so for each libX.so.N: PyPI's wheels have only the latter, the linker looks for the former."""
    for library in sorted(folder.glob("lib*.so.*")):
        plain = folder / f"{library.name.split('.so.')[0]}.so"
        if not plain.is_symlink() and not plain.exists():
            plain.symlink_to(library.name)


def _compile_kernel(
    host: LocalHost, home: Path, plan: ToolkitPlan, scratch: Path, *, architectures: Sequence[str], compiler: str
) -> None:
    source, made, library = scratch / "try.cu", scratch / "try.o", scratch / "try.so"
    write_text(source, KERNEL)
    options = ["-std=c++17", "-Xcompiler", "-fPIC", f"-I{home / 'include'}"]
    options += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in _numbers(architectures)]
    nvcc = [str(home / "bin" / "nvcc"), "-ccbin", compiler, *options, "-c", str(source), "-o", str(made)]
    answer = host.run(nvcc, timeout=COMPILE_TIMEOUT_SECONDS)
    if not answer.ok:
        error_line = first_error_line(answer.stderr + answer.stdout, ("error", "fatal"))
        raise BuildFailed(
            f"the toolkit assembled in {home} (nvcc {plan.release}) does not compile: {error_line}",
            hint="check the architectures (--arch) and the host compiler above, or use --toolkit DIR",
        )
    answer = host.run(
        [compiler, "-shared", "-o", str(library), str(made), f"-L{home / 'lib64'}", "-lcudart"],
        timeout=COMPILE_TIMEOUT_SECONDS,
    )
    if not answer.ok:
        error_line = first_error_line(answer.stderr + answer.stdout, ("ld: ", "ld.", "undefined", "error"))
        raise BuildFailed(
            f"the toolkit assembled in {home} (nvcc {plan.release}) compiles, but its output does not link: {error_line}",
            hint="see the linker's error, or use --toolkit DIR",
        )


def first_error_line(text: str, words: Sequence[str]) -> str:
    """The first line with the first of the words that is in any line.

    >>> first_error_line("in function f:\\n/usr/bin/ld: cannot find -lcudart\\ncollect2: error: ld returned 1", ("ld: ", "error"))
    '/usr/bin/ld: cannot find -lcudart'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = (line for word in words for line in lines if word in line)
    return next(found, (lines or ["no message"])[-1])


def _numbers(architectures: Sequence[str]) -> list[str]:
    return [name.removesuffix("+PTX").replace(".", "") for name in architectures]
