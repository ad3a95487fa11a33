"""torch's flight recorder, which tells a hang's first different call: older releases must be told to keep it before they start."""

import importlib.metadata
import re
from collections.abc import Mapping

RECORDERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
"""torch's variables for how many collectives are remembered: the name of older releases first."""
ENTRIES, REMEMBERS_SINCE = "2000", (2, 7)
"""From this torch on as many are remembered without a word."""


def recorder_variables(watched: bool, environment: Mapping[str, str], torch: str) -> dict[str, str]:
    """What torch must be told before it starts to remember its last collectives. ``torch``: its version, "" where there is none.

    >>> recorder_variables(True, {}, "2.5.1"), recorder_variables(True, {}, "2.13.0+cpu"), recorder_variables(False, {}, "2.5.1")
    ({'TORCH_NCCL_TRACE_BUFFER_SIZE': '2000'}, {}, {})
    """
    version = tuple(int(number) for number in re.findall(r"\d+", torch)[:2])
    wanted = watched and version and version < REMEMBERS_SINCE
    return {RECORDERS[0]: ENTRIES} if wanted and not any(name in environment for name in RECORDERS) else {}


def installed_torch() -> str:
    """The version of this environment's torch, which is not imported; "" for none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
