"""Frames and rank reports, written out for the tests of the verdict."""

from typing import Any

from dsdoctor.overflow.frames.first_bad import RankReport, first_bad
from dsdoctor.overflow.frames.frame import CallPhase, Frame, TensorStats


def tensor(name: str, dtype: str = "float16", absmax: float | None = 3.0, **counts: Any) -> TensorStats:
    """Eight elements, finite up to 3 unless it says otherwise."""
    return TensorStats(name=name, dtype=dtype, shape=(2, 4), count=8, absmin=0.5, absmax=absmax, **counts)


def frame(order: int, module: str, *tensors: TensorStats, **more: Any) -> Frame:
    """One call; of class Linear unless it says otherwise."""
    return Frame(**{"batch": 0, "order": order, "module": module, "kind": "Linear", "tensors": tensors, **more})


def good(order: int, module: str, **more: Any) -> Frame:
    return frame(order, module, tensor("weight"), tensor("input[0]"), tensor("output"), **more)


def backward(order: int, module: str, *tensors: TensorStats, **more: Any) -> Frame:
    return frame(order, module, *tensors, phase=CallPhase.BACKWARD, **more)


def rank_report(rank: int, *frames: Frame, **more: Any) -> RankReport:
    """What a rank tells that saw these frames in its replay, in fp16 at a scale of 2**16."""
    from dsdoctor.overflow.frames.first_bad import Scale

    told = {
        "dtype": "float16",
        "zero_stage": 2,
        "scale": Scale(value=65536.0, floor=1.0),
        "step": 7,
        "replayed": "forward and backward",
        "frames": frames,
        **more,
    }
    return RankReport(rank=rank, first_bad=first_bad(frames), **told)
