"""Which releases work together, as data, each with its source. Looks at nothing and judges nothing."""

from collections.abc import Iterable

from dsdoctor.core.machine import Compiler, Cuda, Toolkit, Torch

MINOR_TOLERANT = (11, 12)
"""CUDA majors for which DeepSpeed accepts another minor than torch's (0.19.8's cuda_minor_mismatch_ok)."""

OLDEST_COMPILER = {"gcc": {14: 5, 17: 9, 20: 10, 23: 13}, "clang": {14: 5, 17: 9, 20: 12, 23: 17}}
"""Oldest compiler majors that compile torch's headers, by the C++ standard that those require."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch that runs any release of a CUDA major (minor-version compatibility, NVIDIA's release notes)."""


NEWEST_COMPILER = {
    "gcc": (((11, 8), 11), ((12, 0), 12), ((12, 4), 13), ((12, 8), 14)),
    "clang": (((11, 8), 14), ((12, 0), 14), ((12, 1), 15), ((12, 2), 16), ((12, 4), 17), ((12, 6), 18), ((12, 8), 19)),
}  # fmt: skip
"""The newest compiler majors that an nvcc takes, from a release on (crt/host_config.h): for one that is still to be fetched."""

COMPILED_FOR = (
    ((11, 8), ("3.5", "3.7", "5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0")),
    ((12, 0), ("5.0", "5.2", "5.3", "6.0", "6.1", "6.2", "7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0")),
    ((12, 8), ("10.0", "10.1", "12.0")),
    ((12, 9), ("10.3", "12.1")),
)  # fmt: skip
"""The architectures of ``nvcc --list-gpu-arch``: 11.8 and 12.0 whole, later ones what they add to it."""


def newest_compiler(release: Cuda, kind: str) -> int | None:
    """The newest major of gcc or clang that the nvcc of a release takes, None where that is not known.

    >>> newest_compiler(Cuda(12, 4), "gcc"), newest_compiler(Cuda(12, 9), "clang"), newest_compiler(Cuda(13, 0), "gcc")
    (13, 19, None)
    """
    known = [
        most for (major, minor), most in NEWEST_COMPILER[kind] if major == release.major and minor <= release.minor
    ]
    return known[-1] if known else None


def compiled_for(release: Cuda) -> tuple[str, ...]:
    """What the nvcc of a release compiles for; empty where that is not known.

    >>> "10.0" in compiled_for(Cuda(12, 8)), "10.0" in compiled_for(Cuda(12, 4)), compiled_for(Cuda(13, 0))
    (True, False, ())
    """
    found = [names for (major, minor), names in COMPILED_FOR if major == release.major and minor <= release.minor]
    return tuple(name for names in found for name in names)


def same_release(toolkit: Cuda, torch: Cuda) -> bool:
    """Whether DeepSpeed's own check lets this toolkit build for this torch."""
    return toolkit == torch or (toolkit.major == torch.major and toolkit.major in MINOR_TOLERANT)


def compiler_limits(torch: Torch, kind: str, toolkits: Iterable[Toolkit]) -> tuple[int, int | None]:
    """Oldest and newest major of a compiler kind that torch's headers and these toolkits' nvcc take (None: no limit known).

    torch's own table counts only where a toolkit is of the release that torch was built with.
    """
    toolkits = tuple(toolkits)
    oldest, newest = OLDEST_COMPILER[kind].get(torch.cxx_standard, 5), []
    bounds = torch.gcc_bounds if kind == "gcc" else torch.clang_bounds
    if bounds is not None and any(toolkit.release == torch.cuda for toolkit in toolkits):
        oldest = max(oldest, bounds[0])
        newest.append(bounds[1] - 1)
    limits = [toolkit.newest_gcc if kind == "gcc" else toolkit.newest_clang for toolkit in toolkits]
    newest += [limit for limit in limits if limit is not None]
    return oldest, min(newest, default=None)


def fits(compiler: Compiler, limits: tuple[int, int | None]) -> bool:
    """Whether a compiler is within limits."""
    oldest, newest = limits
    return compiler.major >= oldest and (newest is None or compiler.major <= newest)
