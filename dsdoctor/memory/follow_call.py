"""A call of a running engine -> what its model, one of transformers, does with it, followed by its shapes in a child process."""

import json
import os
import sys
from typing import Any

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import LocalHost
from dsdoctor.memory.last_call import Call
from dsdoctor.memory.models import ModelShape, Run
from dsdoctor.memory.read import parse_model

PATIENCE = 120.0
"""Seconds for the child, at the end of a training that is lost already."""
NOT_FOR_CHILD = ("DSDOCTOR_RUN", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def followed(module: Any, call: Call, dtype: str, *, together: bool) -> tuple[ModelShape, Run] | str:
    """The model with its runs and the one that is meant, or why it could not be followed.

    ``together``: the CPU is the accelerator, whose attention with dropout makes all scores.
    """
    config = getattr(module, "config", None)
    if config is None or not type(module).__module__.startswith("transformers."):
        return (
            f"{type(module).__name__} is no model of transformers: dsdoctor memory --model FILE.py:FUNCTION follows it"
        )
    fields = {**json.loads(config.to_json_string(use_diff=False)), "architectures": [type(module).__name__]}
    again = bool(getattr(module, "is_gradient_checkpointing", False))
    runs = [(call.batch, call.sequence, again), (call.batch, call.sequence, True)]
    runs += [(call.batch // 2, call.sequence, again)] if call.batch > 1 else []
    wish = json.dumps({"model": fields, "dtype": dtype, "runs": list(dict.fromkeys(runs))})
    answer = child_host().ask(sys.executable, "ask_model.py", wish, timeout=PATIENCE)
    try:
        shape = parse_model(parse_answer(answer, dict, "the model"))
    except UsageError as error:
        return str(error)
    first = shape.runs[0]
    if first.error:
        return first.error
    run = (shape.run_like(first, materialized=True) if together else None) or first
    return shape, run


def child_host() -> LocalHost:
    """This machine for a child that is no rank, and needs no GPU."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILD}
    return LocalHost(env={**env, "CUDA_VISIBLE_DEVICES": ""})
