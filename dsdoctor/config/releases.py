"""What each release of DeepSpeed reads in a ds_config.json, kept in the package: an answer where no DeepSpeed is installed.

``releases.json`` is what the releases answered themselves (``ci/write_config_releases.py``). Keys, types, choices, defaults and
stages are in it; what only running DeepSpeed decides is not, and an answer of this module says so (``Asked.recorded``).
"""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dsdoctor.config.answer import Asked, Construction, Effective, KeyPath, Names, Refusal, Section, lookup, walk

FILE = Path(__file__).with_name("releases.json")
ZERO = "zero_optimization"
WHOLE = re.compile(r"\s*[+-]?\d+\s*")
SCALARS = {"int": int, "float": float, "bool": bool, "str": str}
DEFAULT_BUCKET = 500_000_000
"""reduce_bucket_size and allgather_bucket_size where a release says nothing: its zero/config.py."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """What one release reads; ``sections`` are indices into the sections of all releases, most of which are alike."""

    sections: tuple[int, ...]
    removed: tuple[str, ...]
    stages: dict[str, tuple[str, ...]]
    names: Names


class Releases(msgspec.Struct, frozen=True, kw_only=True):
    """The document: distinct sections, and the releases, oldest first."""

    sections: tuple[Section, ...]
    releases: dict[str, Release]


def pack(answers: Mapping[str, Asked]) -> Releases:
    """The document of what these releases answered, oldest first; sections that are alike are kept once."""
    pool: dict[Section, int] = {}
    releases = {
        version: Release(
            sections=tuple(pool.setdefault(section, len(pool)) for section in asked.sections),
            removed=tuple(asked.removed),
            stages=asked.stages,
            names=asked.names,
        )
        for version, asked in answers.items()
    }
    return Releases(sections=tuple(pool), releases=releases)


def versions() -> tuple[str, ...]:
    """The releases that are known, newest first."""
    return tuple(reversed(_document().releases))


def recorded(version: str, config: Any = None, world: int | None = None) -> Asked:
    """The answer of a release about a configuration, without DeepSpeed. Raises KeyError for a release that is not known."""
    document = _document()
    release = document.releases[version]
    known = Asked(
        version=version,
        world=world,
        sections=tuple(document.sections[index] for index in release.sections),
        removed=dict.fromkeys(release.removed, f"removed in DeepSpeed {version} or before"),
        stages=release.stages,
        names=release.names,
        config=config,
        recorded=True,
    )
    if not isinstance(config, dict):
        return known
    names = known.names
    return replace(
        known,
        refusals=tuple(_refusals(known, config)),
        facts=_effective(config),
        optimizer=_named(config, "optimizer", names.torch_optimizers, "not supported", any_case=names.optimizers),
        scheduler=_named(config, "scheduler", (*names.schedulers, *names.torch_schedulers), "not known"),
    )


def accepts(kind: str, value: Any) -> bool:
    """Whether a field of this type takes a value, as pydantic's lax mode does; True for types that only it can judge.

    >>> accepts("int", 2e8), accepts("int", "five"), accepts("Optional[bool]", None), accepts('one of "cpu", "nvme"', "gpu")
    (True, False, True, False)
    """
    if value == "auto" or isinstance(value, (dict, list)):
        # sections drop "auto", and what is in an object is judged by its own keys
        return True
    if kind.startswith("one of "):
        return value in json.loads(f"[{kind.removeprefix('one of ')}]")
    if inner := re.fullmatch(r"Optional\[(.*)\]", kind):
        return value is None or accepts(inner[1], value)
    if kind not in SCALARS:
        return True
    if kind == "str" or (kind == "int" and isinstance(value, str)):
        return isinstance(value, str) and (kind == "str" or WHOLE.fullmatch(value) is not None)
    try:
        msgspec.convert(value, SCALARS[kind], strict=False)
    except msgspec.ValidationError:
        return False
    return value is not None


@functools.cache
def _document() -> Releases:
    return msgspec.json.decode(FILE.read_bytes(), type=Releases)


def _refusals(known: Asked, config: dict[str, Any]) -> Iterator[Refusal]:
    """What the classes of sections refuse by their fields alone, and what every release refuses."""
    has_size = "train_batch_size" in config or "train_micro_batch_size_per_gpu" in config
    if not has_size and not _is_on(config, "elasticity"):
        yield Refusal(paths=(), kind="no batch size", message="neither batch size is set")
    if _is_on(config, "fp16") and (_is_on(config, "bf16") or _is_on(config, "bfloat16")):
        other = "bf16" if _is_on(config, "bf16") else "bfloat16"
        paths = (("fp16", "enabled"), (other, "enabled"))
        yield Refusal(paths=paths, kind="AssertionError", message="fp16 and bf16 are both enabled")
    for name, message in known.removed.items():
        if name in config:
            yield Refusal(paths=((name,),), kind="DeepSpeedConfigError", message=message)
    for path, value in walk(config):
        yield from _of_a_key(known, path, value)


def _of_a_key(known: Asked, path: KeyPath, value: Any) -> Iterator[Refusal]:
    section, holder = known.section(path), known.section(path[:-1])
    if section is not None and section.model and value is not None and not isinstance(value, dict) and value != "auto":
        yield Refusal(paths=(path,), kind="model_type", message=f"{path[-1]} is an object", model=section.model)
    elif holder is not None and holder.model:
        key = holder.key(path[-1])
        if key is None:
            yield Refusal(paths=(path,), kind="extra_forbidden", message="not a key here", model=holder.model)
        elif section is None and not accepts(key.kind, value):
            choices = key.kind.startswith("one of ")
            message = key.kind.replace('"', "'") if choices else f"not of type {key.kind}"
            yield Refusal(paths=(path,), kind="enum" if choices else "value_type", message=message, model=holder.model)


def _effective(config: dict[str, Any]) -> Effective:
    zero = config.get(ZERO)
    zero = zero if isinstance(zero, dict) else {}
    stage = _number(zero.get("stage"))

    def bucket(name: str) -> int:
        value = _number(zero.get(name))
        return DEFAULT_BUCKET if value is None else int(value)

    return Effective(
        stage=int(stage) if stage in {0, 1, 2, 3} else 0,
        micro_batch_size=_number(config.get("train_micro_batch_size_per_gpu")),
        accumulation=_number(config.get("gradient_accumulation_steps")),
        train_batch_size=_number(config.get("train_batch_size")),
        offload_optimizer=_device(zero.get("offload_optimizer")),
        offload_param=_device(zero.get("offload_param")),
        fp16=_is_on(config, "fp16"),
        bf16=_is_on(config, "bf16") or _is_on(config, "bfloat16"),
        reduce_bucket_size=bucket("reduce_bucket_size"),
        allgather_bucket_size=bucket("allgather_bucket_size"),
    )


def _named(
    config: dict[str, Any], what: str, known: tuple[str, ...], unknown: str, *, any_case: tuple[str, ...] = ()
) -> Construction | None:
    name = lookup(config, (what, "type"))
    if not isinstance(name, str):
        return None
    return Construction(name=name, refused="" if name in known or name.lower() in any_case else unknown)


def _is_on(config: dict[str, Any], section: str) -> bool:
    return lookup(config, (section, "enabled")) is True


def _device(section: Any) -> str:
    device = section.get("device", "none") if isinstance(section, dict) else "none"
    return device if isinstance(device, str) else "none"


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
