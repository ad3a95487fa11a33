"""memory: a configuration, a model and a number of ranks -> a ledger of bytes per rank, whether it fits, and what to change."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding
from dsdoctor.core.host import Answer, LocalHost
from dsdoctor.memory.changes import Change, Enough, Situation, changes, enough
from dsdoctor.memory.hf_auto import filled
from dsdoctor.memory.judge import Gpus, judge, loading
from dsdoctor.memory.models import Layout, ModelShape, Prediction, ZeroSettings
from dsdoctor.memory.read import parse_model, parse_settings
from dsdoctor.memory.search import Searched, search
from dsdoctor.memory.unmeasured import Unmeasured, beside_tensors, room

PATIENCE = 600.0
"""Seconds for a child: importing DeepSpeed or following a very large model."""
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked for. ``batch``: the micro batch, None for the configuration's. ``dtype``: None for the configuration's.
    ``sequence``: None for as many tokens as the model takes, 2,048 at most."""

    config: Path
    model: str
    world: int
    batch: int | None
    sequence: int | None
    dtype: str | None
    checkpointing: bool
    gpus: Gpus | None
    search: bool
    python: str


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What came of it. ``host_loading``: host bytes of a rank that loads a checkpoint for itself. ``upper``: the ledger where
    attention holds all its scores, None where the kernel makes no difference; ``searched_upper`` alike."""

    now: Situation
    told: Prediction
    upper: Prediction | None
    beside: tuple[Unmeasured, ...]
    changes: tuple[Change, ...]
    enough: Enough | None
    searched: Searched | None
    searched_upper: Searched | None
    host_loading: int
    findings: tuple[Finding, ...]


def examine(order: Order, host: LocalHost) -> Examined:
    """Ask both children, predict, and judge. Raises UsageError for what cannot be read."""
    settings = read_settings(order, host)
    shape = read_model(order, settings, host)
    settings = filled(settings, shape.hidden_size)
    now = Situation(
        settings=settings,
        model=shape,
        run=shape.runs[0] if shape.runs else None,
        layout=Layout(world=order.world),
    )
    told, more = now.predicted(), with_all_scores(now)
    upper = more.predicted() if more else None
    beside = beside_tensors(told.peak.device, world=order.world)
    limit = room(order.gpus.memory, world=order.world) if order.gpus else None
    too_much = limit is not None and told.peak.device > limit
    together = enough(now, limit) if limit is not None and too_much else None
    return Examined(
        now=now,
        told=told,
        upper=upper,
        beside=beside,
        changes=changes(now),
        enough=together,
        searched=searched(order, now, limit),
        searched_upper=searched(order, more, limit) if more else None,
        host_loading=loading(now),
        findings=tuple(judge(now, told, order.gpus, beside, together, upper=upper)),
    )


def with_all_scores(now: Situation) -> Situation | None:
    """The same with every score of attention in memory, where the GPU's kernel decides about that."""
    if now.run is None or now.run.attention != "fused":
        return None
    run = now.model.run_like(now.run, materialized=True)
    return replace(now, run=run) if run else None


def read_settings(order: Order, host: LocalHost) -> ZeroSettings:
    """What the installed DeepSpeed makes of the configuration."""
    if not order.config.is_file():
        raise UsageError(
            f"there is no configuration {order.config}", hint="dsdoctor memory --config ds_config.json ..."
        )
    given: dict[str, bool] = {}
    if order.dtype is not None:
        given = {"bf16.enabled": order.dtype == "bf16", "fp16.enabled": order.dtype == "fp16"}
    wish = json.dumps({"world": order.world, "batch": order.batch, "given": given})
    answer = host.ask(order.python, "ask_zero_config.py", str(order.config), wish, timeout=PATIENCE)
    settings = parse_settings(parse_answer(answer, dict, "the configuration"), str(order.config))
    if {"bf16.enabled", "fp16.enabled"} & set(settings.automatic):
        raise UsageError(
            'bf16 or fp16 is "auto" in the configuration, and all sizes depend on it',
            hint="say which it will be: --dtype bf16, --dtype fp16 or --dtype fp32",
        )
    return settings


def read_model(order: Order, settings: ZeroSettings, host: LocalHost) -> ModelShape:
    """The model's parameters and its runs: as asked, and those that changes and the search need."""
    batch, sequence = settings.micro_batch, order.sequence
    runs: list[tuple[int, int | None, bool]] = [(batch, sequence, order.checkpointing)]
    if not order.checkpointing:
        runs.append((batch, sequence, True))
    runs += [(each, sequence, order.checkpointing) for each in wanted_batches(batch, order)]
    place = order.model
    file = place.rpartition(":")[0] if ".py:" in place else place
    if not Path(file).exists():
        raise UsageError(
            f"there is no model {file}", hint="a Hugging Face config.json, its folder, or file.py:function"
        )
    wish = json.dumps({"model": place, "dtype": settings.dtype, "runs": list(dict.fromkeys(runs))})
    return parse_model(parse_answer(_ask_model(order, host, wish), dict, "the model"))


def wanted_batches(batch: int, order: Order) -> list[int]:
    """Other batches that are followed: the half for the change, and two for the line that the search goes along."""
    return [*([batch // 2] if batch > 1 else []), *([1, 2] if order.search else [])]


def _ask_model(order: Order, host: LocalHost, wish: str) -> Answer:
    return host.ask(order.python, "ask_model.py", wish, timeout=PATIENCE)


def searched(order: Order, now: Situation, limit: int | None) -> Searched | None:
    """The search, where it was asked for and the model could be followed."""
    if not order.search or limit is None or now.run is None or now.run.error:
        return None
    all_scores = now.run.attention == "materialized"
    one, two = (now.model.run_like(replace(now.run, batch=batch), materialized=all_scores) for batch in (1, 2))
    if one is None or two is None:
        return None
    return search(now, one, two, limit)


def parse_gpus(text: str, host_memory: str | None) -> Gpus:
    """GPUs as they are written: 8x80G, in GiB.

    >>> parse_gpus("8x80G", "2T")
    Gpus(count=8, memory=85899345920, host=2199023255552, on_node=8)
    """
    count, _, memory = text.rpartition("x")
    if not (count or "1").isdigit() or not int(count or "1"):
        raise UsageError(f"--gpus {text!r} is no number of GPUs and their memory", hint="--gpus 8x80G")
    return Gpus(
        count=int(count or "1"),
        memory=parse_size(memory, "--gpus"),
        host=parse_size(host_memory, "--host-memory") if host_memory else None,
    )


def parse_size(text: str, option: str) -> int:
    """Bytes of a size: G for GiB, M and T alike.

    >>> parse_size("80G", "--gpus"), parse_size("1.5t", "--host-memory")
    (85899345920, 1649267441664)
    """
    units = {"M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    number, unit = text[:-1], text[-1:].upper()
    if unit not in units or not number.replace(".", "", 1).isdigit() or float(number) <= 0:
        raise UsageError(f"{option} {text!r} is no size", hint=f"a number and M, G or T: {option} 80G")
    return int(float(number) * units[unit])


def with_world(gpus: Gpus, world: int) -> Gpus:
    """The GPUs where no more than ``world`` of a node are used."""
    return replace(gpus, on_node=min(gpus.on_node, world))
