"""A toolkit's folder -> the packages and archives that it was made of. Reads files only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.toolkit.kept import PYPI, read_mark

SAMPLE_FILES = (
    *("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h", "include/cublas_v2.h"),
    *("include/cusparse.h", "include/cusolverDn.h", "include/curand_kernel.h", "include/cuda_profiler_api.h"),
    *("include/cufile.h", "include/nccl.h", "include/cccl/cuda/std/version", "include/cuda/std/version"),
)
"""One file of each part of a toolkit; that of cccl has one place before CUDA 13 and another since."""


@dataclass(frozen=True, kw_only=True, order=True)
class Part:
    """What provides a part of a toolkit: a Python package, one of NVIDIA's archives ("nvidia"), or a package of a distribution,
    by whose name ``origin`` goes then. ``sha256`` is known of what dsdoctor fetched."""

    name: str
    version: str
    origin: str = "pypi"
    sha256: str | None = None


def toolkit_parts(root: Path) -> tuple[Part, ...]:
    """What a toolkit's files belong to; nothing for one that was installed neither by pip nor by dsdoctor."""
    kept = read_mark(root)
    digests = {(part.name, part.version): part.sha256 for part in kept if part.origin == PYPI}
    wheels = {part for sample in SAMPLE_FILES for part in _owners((root / sample).resolve())}
    others = [
        Part(name=part.name, version=part.version, origin=part.origin, sha256=part.sha256)
        for part in kept
        if part.origin != PYPI
    ]
    return (*(replace(part, sha256=digests.get((part.name, part.version))) for part in sorted(wheels)), *others)


def _owners(file: Path) -> Iterator[Part]:
    """The package whose RECORD lists a file."""
    # all of NVIDIA's wheels unpack into one folder called nvidia
    for folder in (parent.parent for parent in file.parents if parent.name == "nvidia"):
        line = re.compile(rf"^{re.escape(file.relative_to(folder).as_posix())},", re.MULTILINE)
        for record in sorted(folder.glob("nvidia_*.dist-info/RECORD")):
            name, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
            if line.search(record.read_text(encoding="utf-8", errors="replace")):
                yield Part(name=name.replace("_", "-"), version=version)
