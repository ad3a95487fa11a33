"""dsdoctor gets DeepSpeed built and keeps it running right. Importing it imports neither torch nor deepspeed."""

import importlib
from typing import TYPE_CHECKING, Any

from dsdoctor.core.version import __version__ as __version__

if TYPE_CHECKING:
    from dsdoctor.overflow.hooks.ranks import OverflowDetected
    from dsdoctor.overflow.replay.remedy import fp32_forward, keep_in_fp32
    from dsdoctor.overflow.watch.debug import DebugUnderflowOverflow, detect_overflow
    from dsdoctor.overflow.watch.engine import initialize, watch

__all__ = [
    "DebugUnderflowOverflow",
    "OverflowDetected",
    "detect_overflow",
    "fp32_forward",
    "initialize",
    "keep_in_fp32",
    "watch",
]

_PLACES = {
    "DebugUnderflowOverflow": "watch.debug",
    "OverflowDetected": "hooks.ranks",
    "detect_overflow": "watch.debug",
    "fp32_forward": "replay.remedy",
    "initialize": "watch.engine",
    "keep_in_fp32": "replay.remedy",
    "watch": "watch.engine",
}
"""Where each name of ``__all__`` is in ``dsdoctor.overflow``: looked up when it is asked for, because torch is there."""


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"dsdoctor.overflow.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
