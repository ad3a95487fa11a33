"""dsdoctor gets DeepSpeed built and keeps it running right. Importing it imports neither torch nor deepspeed."""

from dsdoctor.core.release import __version__ as __version__

# not typing's: `python -m dsdoctor.run` comes by here before it can leave the working folder, where a typing.py may lie
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from dsdoctor.overflow.hooks.ranks import OverflowDetected
    from dsdoctor.overflow.replay.remedy import fp32_forward, keep_in_fp32
    from dsdoctor.overflow.watch.debug import DebugUnderflowOverflow, detect_overflow
    from dsdoctor.overflow.watch.engine import initialize
    from dsdoctor.run.in_code import watch, watch_hangs
    from dsdoctor.run.trainer_callback import HangCallback

__all__ = [
    "DebugUnderflowOverflow",
    "HangCallback",
    "OverflowDetected",
    "detect_overflow",
    "fp32_forward",
    "initialize",
    "keep_in_fp32",
    "watch",
    "watch_hangs",
]

_PLACES = {
    "DebugUnderflowOverflow": "overflow.watch.debug",
    "HangCallback": "run.trainer_callback",
    "OverflowDetected": "overflow.hooks.ranks",
    "detect_overflow": "overflow.watch.debug",
    "fp32_forward": "overflow.replay.remedy",
    "initialize": "overflow.watch.engine",
    "keep_in_fp32": "overflow.replay.remedy",
    "watch": "run.in_code",
    "watch_hangs": "run.in_code",
}
"""Where each name of ``__all__`` is: looked up when it is asked for, because torch is there."""


def __getattr__(name: str) -> "Any":
    if name in _PLACES:
        import importlib

        return getattr(importlib.import_module(f"dsdoctor.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
