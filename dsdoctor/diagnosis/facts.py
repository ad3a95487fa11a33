"""Lines of a log -> what they say of its machine: versions, folders, flags, the op being built."""

import re
from typing import Any

from dsdoctor.diagnosis.catalogue import Clue
from dsdoctor.diagnosis.models import Facts
from dsdoctor.rules.store import forms

MAX_LISTED = 40

FORMS = forms("facts")


INSTALL_OPS = "install_ops"
"""The clue of DeepSpeed's own list of ops."""


class FactReader:
    """Collects the facts of one log while it is read."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lists: dict[str, dict[str, None]] = {"architectures": {}, "asked": {}}
        self.ops: dict[str, bool] = {}

    def read(self, clue: Clue, text: str) -> bool:
        """Take a clue's fact from a line that may hold it. True: no other line needs to be searched for it."""
        if clue.every:
            values = self.lists[clue.name]
            for value in re.findall(clue.pattern, text)[:MAX_LISTED]:
                if len(values) < MAX_LISTED:
                    values.setdefault(value)
        elif clue.name == INSTALL_OPS:
            if found := re.search(clue.pattern, text):
                pairs = re.findall(r"'(\w+)': (\w+)", found[1])
                self.ops = {op: state not in {"False", "0"} for op, state in pairs[:100]}
        elif (clue.last or clue.name not in self.values) and (found := re.search(clue.pattern, text)):
            self.values[clue.name] = _normal(clue.name, next(value for value in found.groups() if value))
        return not clue.last and clue.name in self.values

    def facts(self) -> Facts:
        """What was found."""
        asked = tuple(op_of(variable) for variable in self.lists["asked"])
        lists: dict[str, Any] = {
            "architectures": tuple(self.lists["architectures"]),
            "asked": asked,
            "built": tuple(op for op, built in self.ops.items() if built),
            "left_out": tuple(op for op, built in self.ops.items() if not built),
        }
        values: dict[str, Any] = {**self.values}
        return Facts(**values, **lists)


def op_of(variable: str) -> str:
    """The op that DS_BUILD_<variable> builds.

    >>> op_of("AIO"), op_of("CPU_ADAM")
    ('async_io', 'cpu_adam')
    """
    return str(FORMS["variables"].get(variable.lower(), variable.lower()))


def _normal(name: str, value: str) -> str:
    """``118`` -> ``11.8``; ``310`` -> ``3.10``."""
    if name == "cuda" and value.isdigit():
        return f"{value[:-1]}.{value[-1]}"
    if name == "python" and value.isdigit():
        return f"{value[0]}.{value[1:]}"
    if name == "zero_stage" and not value.isdigit():
        return "3"  # why: only that stage divides the parameters
    if name == "experts" and value in {"expert_layer", "self.experts", "self.moe", "router_logits"}:
        return f"the log has {value}"
    if name == "project":
        return _package(value)
    return value


def _package(value: str) -> str:
    """The name of a package as pip takes it; nothing for words that only say that a build is over.

    >>> _package("flash_attn"), _package("TransformerEngine"), _package("Successfully")
    ('flash-attn', 'transformer-engine', '')
    """
    if value in {"Processing", "Obtaining", "Successfully", "as PyTorch extensions root"}:
        return ""
    name = value.lower().replace("_", "-").rstrip(".")
    return str(FORMS["folder_names"].get(name, name))
