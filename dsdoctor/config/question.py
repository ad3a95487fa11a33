"""What is judged together: a configuration, what DeepSpeed answers about it, and what the user says of the run. Data only."""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from dsdoctor.config.answer import Asked, Path
from dsdoctor.core.finding import Finding

SECRET = re.compile(r"(^|_)(api_?key|token|secret|password)$", re.IGNORECASE)
LONGEST = 60


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A change to the file. Without ``to`` the key goes, with it it moves or is renamed; ``value`` (JSON) is its new value."""

    path: Path
    to: Path | None = None
    value: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A finding, the key it is about, and the correction where only one is possible."""

    finding: Finding
    path: Path = ()
    correction: Correction | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """``config`` as it stands in the file. ``plain_json``: whether transformers and accelerate can read the file.

    ``filled_by``: who fills "auto" in, as the user says: "transformers", "accelerate", "" for nobody named.
    ``capabilities`` of the GPUs it will run on. ``missing_ops`` are loaded by it and
    not built into the DeepSpeed that is installed. ``folders``: for each folder named in it whether it is there.
    ``in_training``: it is judged in the training's own process, where nobody fills anything in any more.
    """

    config: dict[str, Any]
    asked: Asked
    file: str = "ds_config.json"
    plain_json: bool = True
    filled_by: str = ""
    capabilities: tuple[str, ...] = ()
    missing_ops: dict[str, str] = field(default_factory=dict)
    folders: dict[str, bool] = field(default_factory=dict)
    in_training: bool = False

    @property
    def judged(self) -> dict[str, Any]:
        """The configuration that DeepSpeed gets."""
        return self.asked.config if isinstance(self.asked.config, dict) else self.config


def shown(path: Path, value: Any) -> str:
    """A value as it may be printed: text that is named like a secret is not.

    >>> shown(("comet", "api_key"), "abc"), shown(("a",), "auto"), shown(("a",), True), shown(("max_out_token",), 512)
    ('"..."', '"auto"', 'true', '512')
    """
    if path and _is_secret(path[-1], value):
        return '"..."'
    try:
        text = json.dumps(without_secrets(value), ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def without_secrets(value: Any) -> Any:
    """The same with every value that is named like a secret cut."""
    if isinstance(value, dict):
        return {
            name: "..." if _is_secret(str(name), inner) else without_secrets(inner) for name, inner in value.items()
        }
    return [without_secrets(inner) for inner in value] if isinstance(value, list) else value


def _is_secret(name: str, value: Any) -> bool:
    """A number is none: max_out_token is a count."""
    return bool(SECRET.search(name)) and not isinstance(value, int | float | None)
