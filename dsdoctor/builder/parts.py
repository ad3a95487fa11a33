"""A toolkit's folder -> NVIDIA's Python packages that it is made of, by where its links lead. Reads names and RECORDs only."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WITNESSES = (
    *("bin/nvcc", "nvvm/bin/cicc", "include/crt/host_config.h", "include/cuda_runtime.h", "include/cublas_v2.h"),
    *("include/cusparse.h", "include/cusolverDn.h", "include/curand_kernel.h", "include/cuda_profiler_api.h"),
    *("include/cufile.h", "include/nccl.h", "include/cccl/cuda/std/version", "include/cuda/std/version"),
)
"""One file of each part of a toolkit; that of cccl has two places, before CUDA 13 and since."""


@dataclass(frozen=True, kw_only=True, order=True)
class Part:
    """A Python package that gives a part of a toolkit."""

    name: str
    version: str


def toolkit_parts(root: Path) -> tuple[Part, ...]:
    """The packages that own the files of a toolkit; none for one that was installed as a whole."""
    return tuple(sorted({part for witness in WITNESSES for part in _owners((root / witness).resolve())}))


def _owners(file: Path) -> Iterator[Part]:
    """The package whose RECORD lists a file: its wheels put all into one folder called nvidia."""
    for folder in (parent.parent for parent in file.parents if parent.name == "nvidia"):
        line = re.compile(rf"^{re.escape(file.relative_to(folder).as_posix())},", re.MULTILINE)
        for record in sorted(folder.glob("nvidia_*.dist-info/RECORD")):
            name, _, version = record.parent.name.removesuffix(".dist-info").partition("-")
            if line.search(record.read_text(encoding="utf-8", errors="replace")):
                yield Part(name=name.replace("_", "-"), version=version)
