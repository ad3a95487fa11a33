"""A DeepSpeed configuration (``ds_config.json``) -> what in it decides which ops a training loads. Judges nothing else in it.

It is read as DeepSpeed reads it, with hjson. What is misspelt among the keys that decide, or has a value that DeepSpeed would
refuse or misread, is an error. "auto", which Transformers and Accelerate fill in, stands for every value that could come there.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hjson

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import read_limited
from dsdoctor.core.text import nearest

MAX_DIGITS = 300
MAX_CONFIG_BYTES = 1 << 20
"""A large configuration has a hundredth of it."""

OPTIMIZERS = ("adagrad", "adam", "adamw", "lamb", "lion", "muadam", "muadamw", "musgd", "muon")
"""DeepSpeed's own, which it knows in any case of letters; every other name is taken from torch.optim as it is written."""

FORMER_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""DeepSpeed's until 0.19.6; on CUDA and on a CPU they load no op."""

TORCH_OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adamax",
    "LBFGS",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What decides the ops. ``optimizer`` is "" where the program brings its own; ``writer`` is "" without a checkpoint writer.

    ``optimizer_device`` and ``param_device`` are "none", "cpu" or "nvme"; ``quantized_layers`` are weights that are kept
    quantized (``weight_quantization``); ``parallel_pass`` is a pass of DeepCompile that works without its op.
    """

    optimizer: str = ""
    torch_adam: bool = False
    own_cpu_optimizer: bool = True
    stage: int = 0
    optimizer_device: str = "none"
    param_device: str = "none"
    pipelined: bool = False
    super_offload: bool = False
    zenflow_overlap: bool = False
    quantized_weights: bool = False
    quantized_nontrainable: bool = False
    quantized_gradients: bool = False
    quantized_layers: bool = False
    use_gds: bool = False
    writer: str = ""
    hybrid_engine: bool = False
    kernel_injection: bool = False
    deepcompile: bool = False
    parallel_pass: bool = False
    random_ltd: bool = False

    @property
    def on_host(self) -> bool:
        """Whether the optimizer steps on the host's processor."""
        return self.optimizer_device != "none"


class _Wrong(Exception):
    """A value that its key cannot have; the text says what it can have."""


def _switch(value: object) -> tuple[object, ...]:
    """A key that DeepSpeed reads with pydantic."""
    words = {"1": True, "0": False, "on": True, "off": False, "t": True, "f": False, "true": True, "false": False}
    words |= {"y": True, "n": False, "yes": True, "no": False}
    if value == "auto":
        return False, True
    if isinstance(value, bool) or value in (0, 1):
        return (bool(value),)
    if isinstance(value, str) and value.lower() in words:
        return (words[value.lower()],)
    raise _Wrong("true or false")


def _truth(value: object) -> tuple[object, ...]:
    """A key of which DeepSpeed takes Python's truth: text, also "false", would count as true."""
    if value == "auto":
        return False, True
    if isinstance(value, str) and value.lower() != "true":
        raise _Wrong("true or false without quotes (DeepSpeed takes any text as true)")
    if isinstance(value, bool | int | str) or value is None:
        return (bool(value),)
    raise _Wrong("true or false")


def _stage(value: object) -> tuple[object, ...]:
    if value == "auto":
        return 0, 1, 2, 3
    if isinstance(value, str) and value in {"0", "1", "2", "3"}:
        return (int(value),)
    if isinstance(value, int | float) and value in (0, 1, 2, 3):
        return (int(value),)
    raise _Wrong("0, 1, 2 or 3")


def _device(value: object) -> tuple[object, ...]:
    if value == "auto":
        # nvme is added where a path for it is given
        return "none", "cpu"
    if value in ("none", "cpu", "nvme"):
        return (value,)
    raise _Wrong('"none", "cpu" or "nvme"')


def _old_offload(value: object) -> tuple[object, ...]:
    """The key of before 0.4: true was the host."""
    return tuple("cpu" if on else "none" for on in _switch(value))


def _optimizer(value: object) -> tuple[object, ...]:
    if not isinstance(value, str):
        raise _Wrong('the name of an optimizer, such as "AdamW"')
    if value.lower() in (*OPTIMIZERS, *FORMER_OPTIMIZERS):
        return (value.lower(),)
    if value in TORCH_OPTIMIZERS:
        return (value,)
    meant = {name.lower(): name for name in TORCH_OPTIMIZERS} | {name: name for name in OPTIMIZERS}
    near = nearest(value.lower(), meant)
    guess = f": did you mean {meant[near]}?" if near else ""
    raise _Wrong(f"an optimizer of DeepSpeed ({', '.join(OPTIMIZERS)}) or a class of torch.optim{guess}")


def _writer(value: object) -> tuple[object, ...]:
    if isinstance(value, str) and value.upper() in {"FAST", "PYTHON", "MOCK"}:
        return (value.upper(),)
    raise _Wrong('"FAST", "PYTHON" or "MOCK"')


def _passes(value: object) -> tuple[object, ...]:
    if value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        return (bool({"autosp", "autotp"}.intersection(value or ())),)
    raise _Wrong("a list of names")


def _section(value: object) -> tuple[object, ...]:
    if isinstance(value, dict):
        return (True,)
    raise _Wrong("an object")


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key that decides: where it stands, the field it fills, and what its value may be."""

    path: str
    field: str
    read: Callable[[object], tuple[object, ...]]


KEYS = (
    Key(path="optimizer.type", field="optimizer", read=_optimizer),
    Key(path="optimizer.params.torch_adam", field="torch_adam", read=_truth),
    Key(path="zero_force_ds_cpu_optimizer", field="own_cpu_optimizer", read=_truth),
    Key(path="zero_optimization.stage", field="stage", read=_stage),
    Key(path="zero_optimization.cpu_offload", field="optimizer_device", read=_old_offload),
    Key(path="zero_optimization.cpu_offload_param", field="param_device", read=_old_offload),
    Key(path="zero_optimization.offload_optimizer.device", field="optimizer_device", read=_device),
    Key(path="zero_optimization.offload_optimizer.pipeline_read", field="pipelined", read=_switch),
    Key(path="zero_optimization.offload_optimizer.pipeline_write", field="pipelined", read=_switch),
    Key(path="zero_optimization.offload_optimizer.super_offload", field="super_offload", read=_switch),
    Key(path="zero_optimization.offload_param.device", field="param_device", read=_device),
    Key(path="zero_optimization.zenflow.overlap_step", field="zenflow_overlap", read=_switch),
    Key(path="zero_optimization.zero_quantized_weights", field="quantized_weights", read=_switch),
    Key(path="zero_optimization.zero_quantized_nontrainable_weights", field="quantized_nontrainable", read=_switch),
    Key(path="zero_optimization.zero_quantized_gradients", field="quantized_gradients", read=_switch),
    Key(path="weight_quantization.quantized_initialization", field="quantized_layers", read=_section),
    Key(path="weight_quantization.post_init_quant", field="quantized_layers", read=_section),
    Key(path="aio.use_gds", field="use_gds", read=_truth),
    Key(path="checkpoint.writer.type", field="writer", read=_writer),
    Key(path="hybrid_engine.enabled", field="hybrid_engine", read=_switch),
    Key(path="kernel_inject", field="kernel_injection", read=_switch),
    Key(path="replace_with_kernel_inject", field="kernel_injection", read=_switch),
    Key(path="compile.deepcompile", field="deepcompile", read=_switch),
    Key(path="compile.passes", field="parallel_pass", read=_passes),
    Key(path="data_efficiency.data_routing.random_ltd.enabled", field="random_ltd", read=_truth),
)

MIN_SIMILARITY = 0.8
ANYWHERE = {"type", "params", "stage", "device", "enabled", "passes", "writer", "data_routing"}
"""Names that say nothing about the section they belong to."""


def load_hjson(text: str) -> Any:
    """What a text says to DeepSpeed, which reads it with the same parser and ends where that fails. Raises ValueError.

    >>> load_hjson("{stage: 2 # comment\\n}"), load_hjson("[1]")
    ({'stage': 2}, [1])
    """
    try:
        return hjson.loads(text, object_pairs_hook=_without_repeats, parse_float=_finite, parse_int=_whole)
    except (ValueError, RecursionError) as error:
        raise ValueError(str(error)) from None
    except Exception as error:
        raise ValueError(f"hjson fails with {type(error).__name__}: {error}"[:200]) from None


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file. Raises UsageError when it is no object."""
    try:
        config = load_hjson(read_limited(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a DeepSpeed configuration: {error}", hint="name a ds_config.json") from None
    if not isinstance(config, dict):
        raise UsageError(
            f"{path} is not a JSON object, as a DeepSpeed configuration must be: {str(config)[:60]!r}",
            hint="name a ds_config.json",
        )
    return config


def training_configs(config: dict[str, Any], *, name: str = "the configuration") -> tuple[TrainingConfig, ...]:
    """What decides; several where a key that decides is "auto". Raises UsageError for what is misspelt or has a wrong value.

    ``name`` is the configuration's, for the error.

    >>> training_configs({"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3}})[0].stage
    3
    """
    problems = [*_misspelt(config), *_misplaced(config)]
    values: dict[str, tuple[object, ...]] = {}
    for key in KEYS:
        try:
            found = _read(config, key)
        except _Wrong as wrong:
            problems.append(str(wrong))
            continue
        # of two keys that fill one field, the one that switches something on counts
        if found and (key.field not in values or found not in ((False,), ("none",))):
            values[key.field] = found
    if problems:
        raise UsageError(f"{name}: {'; '.join(problems)}", hint="correct it; DeepSpeed would not honor it")
    # a writer without a type is the fast one
    if "writer" not in values and isinstance(_lookup(config, ["checkpoint", "writer"]), dict):
        values["writer"] = ("FAST",)
    chosen = itertools.product(*values.values())
    return tuple(TrainingConfig(**dict(zip(values, each, strict=True))) for each in chosen)  # type: ignore[arg-type]


def _read(config: dict[str, Any], key: Key) -> tuple[object, ...]:
    """The values that a key may have; none where it is not there. Raises _Wrong."""
    *sections, name = key.path.split(".")
    if key.path == "zero_optimization.stage" and isinstance(config.get("zero_optimization"), bool):
        return (int(config["zero_optimization"]),)
    for depth in range(1, len(sections) + 1):
        section = _lookup(config, sections[:depth])
        if section is None or (depth == 1 and sections[0] == "zero_optimization" and isinstance(section, bool)):
            return ()
        if not isinstance(section, dict):
            raise _Wrong(f"{'.'.join(sections[:depth])} is {_shown(section)}, but must be an object")
    holder = _lookup(config, sections)
    if not isinstance(holder, dict) or name not in holder:
        return ()
    # a section that is null is one that is not there
    if holder[name] is None and key.read is _section:
        return ()
    if name == "device" and holder[name] == "auto" and "nvme_path" in holder:
        return "none", "cpu", "nvme"
    try:
        return key.read(holder[name])
    except _Wrong as wrong:
        raise _Wrong(f"{key.path} is {_shown(holder[name])}, but must be {wrong}") from None


def _misspelt(config: dict[str, Any]) -> Iterator[str]:
    """Keys that are none, and nearly one of those that decide."""
    for sections, names in _levels().items():
        holder = _lookup(config, list(sections))
        for name in holder if isinstance(holder, dict) else ():
            meant = nearly(str(name), names)
            if meant:
                where = ".".join((*sections, ""))
                yield f"unknown key {where}{name}; did you mean {where}{meant}?"


def _misplaced(config: dict[str, Any]) -> Iterator[str]:
    """Keys beside the sections that belong into one of them, where DeepSpeed would not look at them."""
    for sections, names in _levels().items():
        for name in names - ANYWHERE:
            if sections and name in config and name not in _levels()[()]:
                yield f"{name} must be inside {'.'.join(sections)}, where DeepSpeed looks for it"


def nearly(name: str, keys: frozenset[str]) -> str | None:
    """The key that a name which is none was meant to be, or None.

    >>> nearly("offloadOptimizer", frozenset({"offload_optimizer"})), nearly("overlap_comm", frozenset({"stage"}))
    ('offload_optimizer', None)
    """
    if name in keys:
        return None
    plain = {key.replace("_", ""): key for key in sorted(keys)}
    near = nearest(name.lower().replace("_", "").replace("-", ""), plain, min_likeness=MIN_SIMILARITY)
    return plain[near] if near else None


def _levels() -> dict[tuple[str, ...], frozenset[str]]:
    """Each section that is read -> the names that are read in it."""
    found: dict[tuple[str, ...], set[str]] = {}
    for key in KEYS:
        parts = tuple(key.path.split("."))
        for depth, part in enumerate(parts):
            found.setdefault(parts[:depth], set()).add(part)
    return {sections: frozenset(names) for sections, names in found.items()}


def _lookup(config: dict[str, Any], path: list[str]) -> object:
    value: object = config
    for name in path:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value


def _shown(value: object) -> str:
    text = hjson.dumpsJSON(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """As DeepSpeed does: a key that stands there twice is an error."""
    if repeated := sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1):
        raise ValueError(f"{', '.join(repeated)} occurs twice, which DeepSpeed rejects")
    return dict(pairs)


def _whole(number: str) -> int:
    """A number without a fraction. Raises ValueError for one that no other reader takes."""
    if len(number) > MAX_DIGITS:
        raise ValueError(f"{number[:40]}... is too large for a number")
    return int(number)


def _finite(number: str) -> float:
    """A number with a fraction or an exponent. Raises ValueError for one that is too large, at which hjson fails."""
    value = float(number)
    if math.isinf(value):
        raise ValueError(f"{number[:40]} is too large for a number")
    return value
