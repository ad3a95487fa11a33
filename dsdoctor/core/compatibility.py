"""Which releases work together, as data, each with its source. Looks at nothing and judges nothing."""

from collections.abc import Iterable

from dsdoctor.core.machine import Compiler, Cuda, Toolkit, Torch

MINOR_TOLERANT = (11, 12)
"""CUDA majors for which DeepSpeed accepts another minor than torch's (0.19.8's cuda_minor_mismatch_ok)."""

OLDEST_COMPILER = {"gcc": {14: 5, 17: 9, 20: 10, 23: 13}, "clang": {14: 5, 17: 9, 20: 12, 23: 17}}
"""Oldest compiler majors that compile torch's headers, by the C++ standard that those require."""

OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""The oldest driver branch that runs any release of a CUDA major (minor-version compatibility, NVIDIA's release notes)."""


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
