"""What the two child scripts answer -> settings and shapes, or an error with the next step."""

import shlex
from typing import Any

import msgspec

from dsdoctor.core.errors import UsageError
from dsdoctor.core.machine import Gap
from dsdoctor.memory.models import ModelShape, ZeroSettings


def parse_model(answer: dict[str, Any] | Gap) -> ModelShape:
    """A model's shape, of the answer of ``ask_model.py``. Raises UsageError."""
    fields = _checked(answer, "the model", "torch and transformers")
    return msgspec.convert({**fields, "name": fields.get("class", "")}, ModelShape)


def parse_settings(answer: dict[str, Any] | Gap, name: str) -> ZeroSettings:
    """A configuration's values, of the answer of ``ask_zero_config.py``; ``name``: its file. Raises UsageError."""
    judges = f"it says why, and what to change: dsdoctor config {shlex.quote(name)}"
    return msgspec.convert(_checked(answer, "the configuration", "DeepSpeed", judges), ZeroSettings)


def _checked(
    answer: dict[str, Any] | Gap, what: str, package: str, hint: str = "dsdoctor memory --help"
) -> dict[str, Any]:
    if isinstance(answer, Gap):
        raise UsageError(f"{what} could not be read: {answer.reason}", hint="--python names another environment")
    if missing := answer.get("missing"):
        raise UsageError(
            f"{what} is read with {package}, and that Python has no {missing}",
            hint="name an environment that has it: --python PATH",
        )
    if error := answer.get("error"):
        raise UsageError(f"{what} could not be read: {error}", hint=answer.get("hint") or hint)
    return answer
