"""What the DeepSpeed of an environment answers about a configuration (``child_scripts/ask_config.py``). Data only."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Path = tuple[str, ...]
"""The keys from the top of a configuration to a value."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """A key that DeepSpeed reads. ``also`` is its other name, ``default`` its default as JSON, ``instead`` what replaces it.

    ``kind``: of a key that is read by hand what its default is ("int", "bool", ..., "" where that tells nothing).
    """

    name: str
    also: str = ""
    kind: str = ""
    default: str = ""
    deprecated: bool = False
    instead: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A place where keys stand. ``model``: the pydantic class that refuses others; "" where DeepSpeed looks for each key by hand.

    ``open``: its content is handed on as a whole, and who reads which key of it cannot be told.
    """

    path: Path
    model: str = ""
    open: bool = False
    keys: tuple[Key, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """All keys, by both names."""
        return frozenset(name for key in self.keys for name in (key.name, key.also) if name)

    def key(self, name: str) -> Key | None:
        """The key of a name."""
        return next((key for key in self.keys if name in (key.name, key.also)), None)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What DeepSpeedConfig refuses, and the keys without each of which it does not.

    ``kind``: pydantic's, or the exception's name.
    """

    paths: tuple[Path, ...]
    kind: str
    message: str
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Warned:
    """What DeepSpeed logs for the value of a parameter, and goes on. ``choices``: the words for which it logs nothing."""

    parameter: str
    message: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Construction:
    """What became of the optimizer or the scheduler that a configuration names. ``made``: the class, "" where it was not made.

    ``known``: parameters and of what kind they are; ``choices``: the words that some take. ``unknown`` are refused, ``dropped``
    are taken no notice of. ``at_step``: it is not refused before its first step. ``step_wants``: arguments of a scheduler's step().
    """

    name: str
    made: str = ""
    known: dict[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    refused: str = ""
    refused_by: tuple[str, ...] = ()
    at_step: bool = False
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    warned: tuple[Warned, ...] = ()
    step_wants: tuple[str, ...] = ()
    not_asked: str = ""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The optimizers and schedulers there are: DeepSpeed's own, and torch's."""

    optimizers: tuple[str, ...] = ()
    torch_optimizers: tuple[str, ...] = ()
    schedulers: tuple[str, ...] = ()
    torch_schedulers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Effective:
    """What DeepSpeed will train with, the refused parts left out."""

    stage: int
    micro_batch_size: float | None = None
    accumulation: float | None = None
    train_batch_size: float | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    fp16: bool = False
    bf16: bool = False
    reduce_bucket_size: int = 0
    allgather_bucket_size: int = 0


@dataclass(frozen=True, kw_only=True)
class FilledValue:
    """An "auto" and the value it gets, as JSON, and where from: an argument of the Trainer, "accelerate", ..."""

    path: str
    value: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """A value of the file that is another than that of TrainingArguments."""

    path: str
    value: str
    argument: str | None
    wanted: str


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What transformers or accelerate make of the configuration. ``unknown``: they fill it, with a value that is not known here.

    ``unfilled``: "auto" that they leave, and refuse. ``refused``: their own words.
    """

    config: Any
    filled: tuple[FilledValue, ...] = ()
    mismatches: tuple[Mismatch, ...] = ()
    refused: tuple[str, ...] = ()
    unfilled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Accelerate:
    """What accelerate's configuration says beside: how many processes, whether it uses DeepSpeed, and its DeepSpeed file."""

    processes: int | None = None
    uses_deepspeed: bool = False
    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The whole answer. ``config`` is what was judged: as it was given, or with each "auto" filled in.

    ``removed``: keys that this version refuses, with its words. ``stages``: where a field of zero_optimization is read.
    ``not_tried``: why no engine could be made of it here, where that is not for the configuration.
    """

    version: str
    location: str = ""
    world: int | None = None
    sections: tuple[Section, ...] = ()
    removed: dict[str, str] = field(default_factory=dict)
    stages: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    config: Any = None
    refusals: tuple[Refusal, ...] = ()
    facts: Effective | None = None
    optimizer: Construction | None = None
    scheduler: Construction | None = None
    filled: Filled | None = None
    accelerate: Accelerate | None = None
    parameters: int | None = None
    not_filled: str = ""
    not_asked: str = ""
    not_tried: str = ""

    def section(self, path: Path) -> Section | None:
        """The section at a path; None where DeepSpeed has none."""
        return next((section for section in self.sections if section.path == path), None)

    def key(self, path: Path) -> Key | None:
        """What is known of a key."""
        section = self.section(path[:-1])
        return section.key(path[-1]) if section else None


def walk(config: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every key with its path, a section before what is in it."""
    for name, value in config.items():
        yield (*path, str(name)), value
        if isinstance(value, dict):
            yield from walk(value, (*path, str(name)))


def lookup(config: Any, path: Path) -> Any:
    """The value at a path, None where there is none."""
    for name in path:
        config = config.get(name) if isinstance(config, dict) else None
    return config


def dotted(path: Path) -> str:
    """A path as a user writes it.

    >>> dotted(("zero_optimization", "stage"))
    'zero_optimization.stage'
    """
    return ".".join(path)
