"""The gradients that the guide's class saw in one backward -> what is said of them, and whether the training ends there.

A gradient that only a loss scale makes too large is normal; where that cannot be known, nothing is ended.
"""

import torch
from torch import Tensor

from dsdoctor.core.finding import Severity
from dsdoctor.overflow.frames.first_bad import FirstBad, RankReport, Scale
from dsdoctor.overflow.frames.frame import CallPhase, Frame
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.replay.investigate import local_gradients
from dsdoctor.overflow.verdict.evidence import bad_gradient
from dsdoctor.overflow.verdict.verdict import judge

NOT_KNOWN = 0.0
"""The loss scale where the loss is no output of the model, and float16 is among the gradients."""


def backward_report(frames: tuple[Frame, ...], found: FirstBad | None, began: Tensor, *, batch: int) -> RankReport:
    """What a rank knows of a backward. ``began``: the gradient of the model's output, which is the loss scale if that is a loss."""
    backward = [frame for frame in frames if frame.phase is CallPhase.BACKWARD]
    is_half = any(stats.dtype == "float16" for frame in backward for stats in frame.measured)
    if not is_half:
        scale = 1.0
    elif began.dim() == 0 and bool(torch.isfinite(began)):
        scale = max(1.0, float(began.abs()))
    else:
        scale = NOT_KNOWN
    bad = tuple(stats for stats in local_gradients(backward) if stats.is_bad)
    return RankReport(
        rank=ranks.rank(),
        world=ranks.world(),
        batch=batch,
        dtype="float16" if is_half else "float32",
        first_bad=found,
        scale=Scale(value=scale),
        named=bad,
        local=bad,
    )


def backward_words(reports: list[RankReport]) -> tuple[str, bool]:
    """What is said of the gradients of all ranks, and whether that ends the training."""
    first = next(report for report in reports if report.first_bad is not None)
    if any(report.scale.value == NOT_KNOWN for report in reports):
        made = bad_gradient(first, tuple(reports))
        return f"{made}; its loss is computed outside of the model, so that a loss scale may be the cause", False
    findings = judge(reports)
    if findings and findings[0].severity is Severity.ERROR:
        return findings[0].title, True
    return (
        f"{bad_gradient(first, tuple(reports))}, at a loss scale of {first.scale.value:g}, which may be the cause",
        False,
    )
