"""A run that is planned to load a checkpoint, in the user's terms and in DeepSpeed's, and the verdict on it. Data alone."""

import enum
from dataclasses import dataclass

from dsdoctor.checkpoint.contents import Facts
from dsdoctor.core.errors import UsageError

PROVEN_WITH = "0.19.8"
ALL, NO_OPTIMIZER, MODULE = "all", "no-optimizer", "module"
"""How load_checkpoint is called: as it is, with load_optimizer_states=False, with load_module_only=True."""
LOAD_UNIVERSAL = '"checkpoint": {"load_universal": true}'
SIZES = "RuntimeError: The size of tensor a (...) must match the size of tensor b (...)"
"""At stage 3 each rank copies its piece of each frozen parameter (engine.py, load_module_state_dict)."""


class Verdict(enum.Enum):
    """What load_checkpoint does with it in the planned run."""

    LOADS = "loads"
    UNIVERSAL = "needs a universal checkpoint"
    CANNOT = "cannot be loaded"
    UNKNOWN = "not known"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The run that is planned; None for as it was saved. ``world``: all ranks. ``load``: ALL, NO_OPTIMIZER or MODULE.

    ``evaluation``: whether the engine that loads has no optimizer."""

    world: int | None = None
    stage: int | None = None
    dtype: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    load: str = ALL
    evaluation: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A verdict, why, what DeepSpeed itself says in that case, and what helps where that is no other checkpoint ("" else)."""

    verdict: Verdict
    why: str
    words: str = ""
    fix: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run in DeepSpeed's own terms. ``data``: data-parallel ranks, None where the world is not known."""

    stage: int
    dtype: str
    data: int | None
    tensor: int | None
    pipeline: int | None


def planned(facts: Facts, plan: Plan) -> Run | None:
    """The planned run, with what was saved where nothing else is said; None without a stage.

    Raises UsageError for ranks that do not divide.
    """
    stage = facts.stage if plan.stage is None else plan.stage
    if stage is None:
        return None
    tensor, pipeline = plan.tensor or facts.tensor, plan.pipeline or facts.pipeline
    data = facts.data
    if plan.world is not None:
        model = (tensor or 1) * (pipeline or 1)
        if plan.world % model:
            raise UsageError(
                f"--world {plan.world} is no multiple of {model}, the ranks that share a model",
                hint="--tensor-parallel and --pipeline say how many those are",
            )
        data = plan.world // model
    elif (tensor, pipeline) != (facts.tensor, facts.pipeline):
        data = None
    return Run(stage=stage, dtype=plan.dtype or facts.dtype, data=data, tensor=tensor, pipeline=pipeline)
