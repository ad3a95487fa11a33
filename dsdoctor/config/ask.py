"""Asks the DeepSpeed of an environment about a configuration, in a child process."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dsdoctor.config.answer import Asked
from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import CHILD_SCRIPTS, Host
from dsdoctor.core.machine import Gap

LIMIT = 300.0
"""Seconds. Importing DeepSpeed and transformers from a slow network disk takes minutes."""
PIECE = 100_000
"""Bytes of the largest environment variable on Linux are 128 KiB."""
MOST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Request:
    """``config``: None asks only for what DeepSpeed knows. ``world``: ranks, None for unknown. ``source``: a folder to import
    DeepSpeed from. ``arguments``, ``accelerate`` and ``model`` are files that transformers and accelerate read."""

    config: Mapping[str, Any] | None
    world: int | None = None
    source: str = ""
    arguments: str = ""
    accelerate: str = ""
    model: str = ""


def ask(host: Host, python: str, request: Request, *, accelerator: str = "") -> Asked | Gap:
    """The answer of the DeepSpeed that an interpreter imports, or why there is none. Raises UsageError for a request too large.

    ``accelerator``: "cuda" or "cpu", what DeepSpeed is to take itself for; "" leaves that to it.
    """
    # not on the command line, which everybody on the machine can read: a configuration may hold keys of services
    text = json.dumps(asdict(request))
    if len(text) > MOST:
        raise UsageError("the configuration is larger than a megabyte", hint="name a ds_config.json")
    pieces = [text[start : start + PIECE] for start in range(0, len(text), PIECE)]
    variables = {f"DSDOCTOR_CONFIG_{number}": piece for number, piece in enumerate(pieces)}
    if accelerator and not host.variable("DS_ACCELERATOR"):
        # a node without a GPU judges for those that have one
        variables["DS_ACCELERATOR"] = accelerator
    if host.variable("PYTHONUTF8") is None:
        # torch reads files of its own as the locale says
        variables["PYTHONUTF8"] = "1"
    answer = host.run([python, str(CHILD_SCRIPTS / "ask_config.py")], timeout=LIMIT, env=variables)
    return parse_answer(answer, Asked, "DeepSpeed")
