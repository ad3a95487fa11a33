"""What an assembled toolkit is made of, kept with it: each part with the sha256 it was fetched by, each file with its own.

``dsdoctor-toolkit.txt`` lists the parts, ``parts.sha256`` the files, as sha256sum writes it: ``sha256sum --check parts.sha256``.
"""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.toolkit.plan_assembly import MARK
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.files import real_path, sha256_of, write_text
from dsdoctor.core.finding import step
from dsdoctor.core.text import and_more

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
