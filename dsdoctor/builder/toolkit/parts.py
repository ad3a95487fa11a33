"""A toolkit's folder -> the Python packages that it was made of. Reads files only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SAMPLE_FILES = (
    *("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h", "include/cublas_v2.h"),
    *("include/cusparse.h", "include/cusolverDn.h", "include/curand_kernel.h", "include/cuda_profiler_api.h"),
    *("include/cufile.h", "include/nccl.h", "include/cccl/cuda/std/version", "include/cuda/std/version"),
)
"""One file of each part of a toolkit; that of cccl has one place before CUDA 13 and another since."""


@dataclass(frozen=True, kw_only=True, order=True)
class Part:
    """A Python package that provides a part of a toolkit."""

    name: str
    version: str


def toolkit_parts(root: Path) -> tuple[Part, ...]:
    """The Python packages that a toolkit's files belong to; none for a toolkit that was not installed by pip."""
    return tuple(sorted({part for sample in SAMPLE_FILES for part in _owners((root / sample).resolve())}))


def _owners(file: Path) -> Iterator[Part]:
    """The package whose RECORD lists a file."""
    # all of NVIDIA's wheels unpack into one folder called nvidia
    for folder in (parent.parent for parent in file.parents if parent.name == "nvidia"):
        line = re.compile(rf"^{re.escape(file.relative_to(folder).as_posix())},", re.MULTILINE)
        for record in sorted(folder.glob("nvidia_*.dist-info/RECORD")):
            name, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
            if line.search(record.read_text(encoding="utf-8", errors="replace")):
                yield Part(name=name.replace("_", "-"), version=version)
