"""What the DeepSpeed of an environment answers about a configuration (``child_scripts/ask_config.py``), and what is judged by it:
the context of every check, its verdicts and corrections."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import CHILD_SCRIPTS, Host
from dsdoctor.core.machine import Gap

KeyPath = tuple[str, ...]
"""The keys from the top of a configuration to a value."""
ASK_TIMEOUT_SECONDS = 300.0
"""Importing DeepSpeed and transformers from a slow network disk takes minutes."""
MAX_VARIABLE_BYTES = 100_000
"""The largest environment variable on Linux is 128 KiB."""
MAX_REQUEST_BYTES = 1_000_000
SECRET = re.compile(r"(^|_)(api_?key|token|secret|password)$", re.IGNORECASE)
MAX_VALUE_LENGTH = 60


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

    path: KeyPath
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

    ``kind``: pydantic's, or the exception's name. ``ranks``: it is refused for this number of ranks, not for every one.
    """

    paths: tuple[KeyPath, ...]
    kind: str
    message: str
    model: str = ""
    ranks: int = 0


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
    """A value of the file that is another than that of TrainingArguments. ``written``: their file sets it, else it is a default."""

    path: str
    value: str
    argument: str | None
    wanted: str
    written: bool = True


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
    ``recorded``: no DeepSpeed was asked, the answer is what this release is known to read.
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
    recorded: bool = False

    def section(self, path: KeyPath) -> Section | None:
        """The section at a path; None where DeepSpeed has none."""
        return next((section for section in self.sections if section.path == path), None)

    def key(self, path: KeyPath) -> Key | None:
        """What is known of a key."""
        section = self.section(path[:-1])
        return section.key(path[-1]) if section else None


@dataclass(frozen=True, kw_only=True)
class Request:
    """``config``: None asks only for what DeepSpeed knows. ``world``: data-parallel ranks, None for unknown; ``ranks``: all of
    them. ``source``: a folder to import DeepSpeed from. ``arguments``, ``accelerate`` and ``model`` are files that transformers
    and accelerate read."""

    config: Mapping[str, Any] | None
    world: int | None = None
    ranks: int | None = None
    source: str = ""
    arguments: str = ""
    accelerate: str = ""
    model: str = ""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """A change to the file. Without ``to`` the key goes, with it it moves or is renamed; ``value`` (JSON) is its new value."""

    path: KeyPath
    to: KeyPath | None = None
    value: str | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A finding, the key it is about, and the correction where only one is possible."""

    finding: Finding
    path: KeyPath = ()
    correction: Correction | None = None


@dataclass(frozen=True, kw_only=True)
class ConfigContext:
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


def ask(host: Host, python: str, request: Request, *, accelerator: str = "") -> Asked | Gap:
    """The answer of the DeepSpeed that an interpreter imports, or why there is none. Raises UsageError for a request too large.

    ``accelerator``: "cuda" or "cpu", what DeepSpeed is to take itself for; "" leaves that to it.
    """
    # not on the command line, which everybody on the machine can read: a configuration may hold keys of services
    text = json.dumps(asdict(request))
    if len(text) > MAX_REQUEST_BYTES:
        raise UsageError("the configuration is larger than 1 MB", hint="pass a ds_config.json")
    pieces = [text[start : start + MAX_VARIABLE_BYTES] for start in range(0, len(text), MAX_VARIABLE_BYTES)]
    variables = {f"DSDOCTOR_CONFIG_{number}": piece for number, piece in enumerate(pieces)}
    if accelerator and not host.variable("DS_ACCELERATOR"):
        # a node without a GPU judges for those that have one
        variables["DS_ACCELERATOR"] = accelerator
    if host.variable("PYTHONUTF8") is None:
        # torch reads files of its own as the locale says
        variables["PYTHONUTF8"] = "1"
    answer = host.run([python, str(CHILD_SCRIPTS / "ask_config.py")], timeout=ASK_TIMEOUT_SECONDS, env=variables)
    return parse_answer(answer, Asked, "DeepSpeed")


def walk(config: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every key with its path, a section before what is in it."""
    for name, value in config.items():
        yield (*path, str(name)), value
        if isinstance(value, dict):
            yield from walk(value, (*path, str(name)))


def lookup(config: Any, path: KeyPath) -> Any:
    """The value at a path, None where there is none."""
    for name in path:
        config = config.get(name) if isinstance(config, dict) else None
    return config


def dotted(path: KeyPath) -> str:
    """A path as a user writes it.

    >>> dotted(("zero_optimization", "stage"))
    'zero_optimization.stage'
    """
    return ".".join(path)


def shown(path: KeyPath, value: Any) -> str:
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
    return text if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}..."


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
