"""What a prediction is made of, and what it is: data only. Sizes are bytes, counts of elements say so."""

import enum
import shlex
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.machine import Gap

Place = Literal["device", "host"]
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
PACKAGES = {name: name for name in ("deepspeed", "torch", "transformers")} | {"hjson": "deepspeed"}
"""What pip installs for a module that is missing."""
ZERO = "zero_optimization."


class Kind(enum.IntEnum):
    """What happened at an event of a step; the numbers are those of ``child_scripts/ask_model.py``."""

    PRE_FORWARD = 0
    POST_FORWARD = 1
    LOSS = 2
    PRE_BACKWARD = 3
    POST_BACKWARD = 4
    GRADIENT = 5
    END = 6


class Point(enum.Enum):
    """A moment of training at which memory is told: a state between calls, or the peak inside one."""

    AFTER_INITIALIZE = "after_initialize"
    FIRST_FORWARD = "first_forward"
    FIRST_BACKWARD = "first_backward"
    FIRST_STEP = "first_step"
    AFTER_STEP = "after_step"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"
    SAVE = "save"


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """The values of a DeepSpeed configuration that memory depends on, as the installed DeepSpeed reads them.

    ``automatic``: keys that were left to "auto", for which DeepSpeed's default stands here.
    """

    version: str
    stage: int
    dtype: str
    accumulation_dtype: str
    communication_dtype: str
    micro_batch: int
    accumulation_steps: int = 1
    clipping: float = 0.0
    optimizer: str | None = None
    torch_adam: bool = False
    autocast: bool = False
    checkpoint_activations_in_cpu: bool = False
    offload_optimizer: str = "none"
    offload_param: str = "none"
    optimizer_pinned: bool = False
    param_pinned: bool = False
    offload_ratio: float = 1.0
    max_in_cpu: int = 0
    buffer_count: int = 0
    buffer_size: int = 0
    hpz_partition_size: int = 1
    quantized_weights: bool = False
    gather_on_save: bool = False
    gradients_in_master_dtype: bool = False
    zenflow: bool = False
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = 1 << 62
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    automatic: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A module that has parameters of its own: their numbers."""

    name: str
    parameters: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One forward and backward pass: (kind, index, most, now) for each event, bytes beside the parameters.

    ``error`` says why there is none. ``shape`` of the input, ``tokens``: it is of tokens. ``attention``: where the GPU's kernel
    decides, "fused" for one that makes no scores and "materialized" for all of them; "" where it makes no difference.
    """

    batch: int
    sequence: int
    checkpointing: bool
    events: tuple[tuple[int, int, int, int], ...] = ()
    logits: int = 0
    inputs: int = 0
    shape: tuple[int, ...] = ()
    tokens: bool = True
    attention: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's parameters (name, elements, whether it is trained), who owns them, and its runs.

    ``kept``: parameters of which a view is saved for the backward pass, so that ZeRO-3 cannot free them before it.
    ``positions``: tokens that it has positions for, None where nothing tells; ``position_table``: they are rows of a table.
    """

    parameters: tuple[tuple[str, int, int], ...]
    modules: tuple[Owner, ...]
    buffers: int
    kept: tuple[int, ...] = ()
    runs: tuple[Run, ...] = ()
    name: str = field(default="")
    attention: str = ""
    hidden_size: int | None = None
    positions: int | None = None
    position_table: bool = False
    seconds: float = 0.0
    own_memory: int = 0

    @property
    def trained(self) -> tuple[int, ...]:
        """The numbers of the parameters that are trained."""
        return tuple(number for number, (_, _, trained) in enumerate(self.parameters) if trained)

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(count for _, count, _ in self.parameters)

    def run_like(self, run: Run, *, materialized: bool = False) -> Run | None:
        """The run of the same size, with all scores of attention in memory where that is asked; None where there is none."""
        size = (run.batch, run.sequence, run.checkpointing)
        found = [
            each for each in self.runs if (each.batch, each.sequence, each.checkpointing) == size and not each.error
        ]
        return next((each for each in found if (each.attention == "materialized") == materialized), None)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """On what it runs. ``rank``: whose ledger it is. ``together``: the accelerator is the CPU, so there is one memory."""

    world: int
    rank: int = 0
    together: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a ledger: bytes of one thing at one moment."""

    what: str
    place: Place
    size: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A rank's memory at a point: ``device`` and ``host`` in all, and of what when the device had most."""

    point: Point
    device: int
    host: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A rank's ledger: a moment for each point."""

    layout: Layout
    moments: tuple[Moment, ...]

    def at(self, point: Point) -> Moment:
        """The moment of a point. Raises KeyError where it was not computed."""
        found = next((moment for moment in self.moments if moment.point is point), None)
        if found is None:
            raise KeyError(point)
        return found

    @property
    def peak(self) -> Moment:
        """The moment with most on the device."""
        return max(self.moments, key=lambda moment: moment.device)


def parse_model(answer: dict[str, Any] | Gap) -> ModelShape:
    """A model's shape, of the answer of ``ask_model.py``. Raises UsageError, ImpossiblePlan for what is missing."""
    fields = _checked(answer, "the model", "torch and transformers")
    return msgspec.convert({**fields, "name": fields.get("class", "")}, ModelShape)


def parse_settings(answer: dict[str, Any] | Gap, name: str) -> ZeroSettings:
    """A configuration's values, of the answer of ``ask_zero_config.py``; ``name``: its file. Raises UsageError."""
    judges = f"for the reason and the fix: dsdoctor config {shlex.quote(name)}"
    return msgspec.convert(_checked(answer, "the configuration", "DeepSpeed", judges), ZeroSettings)


def filled(settings: ZeroSettings, hidden_size: int | None) -> ZeroSettings:
    """The settings with the Trainer's values for buckets and thresholds. Others keep DeepSpeed's defaults.

    The Trainer's are those of HfTrainerDeepSpeedConfig.trainer_config_finalize (transformers/integrations/deepspeed.py).
    """
    if hidden_size is None:
        return settings
    values = {
        "reduce_bucket_size": (ZERO + "reduce_bucket_size", hidden_size * hidden_size),
        "prefetch_bucket_size": (ZERO + "stage3_prefetch_bucket_size", int(0.9 * hidden_size * hidden_size)),
        "param_persistence_threshold": (ZERO + "stage3_param_persistence_threshold", 10 * hidden_size),
    }
    chosen = {field: value for field, (key, value) in values.items() if key in settings.automatic}
    return replace(settings, **chosen)  # type: ignore[arg-type]


def _checked(
    answer: dict[str, Any] | Gap, what: str, package: str, hint: str = "dsdoctor memory --help"
) -> dict[str, Any]:
    if isinstance(answer, Gap):
        raise UsageError(f"{what} could not be read: {answer.reason}", hint="--python names another environment")
    if missing := answer.get("missing"):
        installed = PACKAGES.get(missing)
        raise ImpossiblePlan(
            f"{what} is read with {package}, but that Python has no {missing}",
            hint=f"python -m pip install {installed}; or name an environment that has it: --python PATH"
            if installed
            else f"name an environment that has {missing}: --python PATH",
        )
    if error := answer.get("error"):
        raise UsageError(f"{what} could not be read: {error}", hint=answer.get("hint") or hint)
    return answer
