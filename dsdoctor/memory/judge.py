"""A configuration, a model and a number of ranks -> a ledger of bytes per rank, as findings, and what to change."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.core.children import parse_answer
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import refuse_large
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.host import Answer, LocalHost
from dsdoctor.memory.models import (
    SIZES,
    Layout,
    ModelShape,
    Prediction,
    ZeroSettings,
    filled,
    parse_model,
    parse_settings,
)
from dsdoctor.memory.predict import (
    Change,
    CombinedChanges,
    Overhead,
    Searched,
    Situation,
    changes,
    combine,
    overheads_of,
    room,
    search,
)
from dsdoctor.rules import book

GIB = 1 << 30
NODE = 8
"""GPUs of a node, where nobody says how many."""
DECIDES = ("zero_optimization", "bf16", "fp16", "train_micro_batch_size_per_gpu")
"""Keys, or what they begin with, on which a ledger depends."""
CHILD_TIMEOUT_SECONDS = 600.0
"""For a child: importing DeepSpeed or following a very large model."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that are meant: how many, and the bytes of each. ``host``: bytes of a node's host memory, None unknown."""

    count: int
    memory: int
    host: int | None = None
    on_node: int = NODE


@dataclass(frozen=True, kw_only=True)
class MemoryOrder:
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
class MemoryReport:
    """What came of it. ``host_loading``: host bytes of a rank that loads a checkpoint for itself. ``upper``: the ledger where
    attention holds all its scores, None where the kernel makes no difference; ``searched_upper`` alike. ``searched_safe``:
    what fits with the highest overhead, too. ``on_node``: ranks on one node."""

    now: Situation
    prediction: Prediction
    upper: Prediction | None
    overheads: tuple[Overhead, ...]
    changes: tuple[Change, ...]
    combined: CombinedChanges | None
    searched: Searched | None
    searched_upper: Searched | None
    searched_safe: Searched | None
    host_loading: int
    on_node: int
    findings: tuple[Finding, ...]


def examine(order: MemoryOrder, host: LocalHost) -> MemoryReport:
    """Ask both children, predict, and judge. Raises UsageError for what cannot be read, ImpossiblePlan for a missing package."""
    check_files(order)
    settings = read_settings(order, host)
    shape = read_model(order, settings, host)
    settings = filled(settings, shape.hidden_size)
    now = Situation(
        settings=settings,
        model=shape,
        run=shape.runs[0] if shape.runs else None,
        layout=Layout(world=order.world),
    )
    prediction, more = now.predicted(), with_all_scores(now)
    upper = more.predicted() if more else None
    overheads = overheads_of(prediction.peak.device, world=order.world)
    limit = room(order.gpus.memory, world=order.world) if order.gpus else None
    too_much = limit is not None and prediction.peak.device > limit
    combined = combine(now, limit) if limit is not None and too_much else None
    return MemoryReport(
        now=now,
        prediction=prediction,
        upper=upper,
        overheads=overheads,
        changes=changes(now),
        combined=combined,
        searched=searched(order, now, limit),
        searched_upper=searched(order, more, limit) if more else None,
        searched_safe=searched(order, more or now, room(order.gpus.memory, world=order.world, safe=True))
        if order.gpus
        else None,
        on_node=min(order.gpus.on_node if order.gpus else NODE, order.world),
        host_loading=loading(now),
        findings=tuple(judge(now, prediction, order.gpus, overheads, combined, upper=upper)),
    )


def judge(
    now: Situation,
    prediction: Prediction,
    gpus: Gpus | None,
    overheads: tuple[Overhead, ...],
    combined: CombinedChanges | None,
    *,
    upper: Prediction | None = None,
) -> Iterator[Finding]:
    """All that is to be said of a ledger. ``upper``: the ledger with all scores of attention, where a kernel decides about
    them. ``combined``: the changes that would be enough, where it does not fit."""
    yield from _positions(now)
    if gpus is not None:
        yield from _fits(prediction, upper or prediction, gpus, overheads, combined)
        yield from _host_fits(now, prediction, gpus)
    yield from _attention(prediction, upper)
    yield from _bucket(now)
    yield from _activations(now)
    yield from _left_out(now)
    yield from _automatic(now)


def parse_gpus(text: str, host_memory: str | None) -> Gpus:
    """GPUs as they are written: 8x80G, in GiB.

    >>> parse_gpus("8x80G", "2T")
    Gpus(count=8, memory=85899345920, host=2199023255552, on_node=8)
    """
    count, _, memory = text.rpartition("x")
    if not re.fullmatch(r"\d{0,6}", count, re.ASCII) or count.strip("0") == "" != count:
        raise UsageError(f"--gpus {text!r} is not a number of GPUs with their memory", hint="--gpus 8x80G")
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
    if unit not in units or not re.fullmatch(r"\d{1,9}(\.\d{0,9})?", number, re.ASCII) or float(number) <= 0:
        raise UsageError(f"{option} {text!r} is not a size", hint=f"pass a number and M, G or T: {option} 80G")
    return int(float(number) * units[unit])


def with_world(gpus: Gpus, world: int) -> Gpus:
    """The GPUs where no more than ``world`` of a node are used."""
    return replace(gpus, on_node=min(gpus.on_node, world))


def check_files(order: MemoryOrder) -> None:
    """Raise UsageError for a configuration or a model that is not there, before anybody is asked to read it."""
    if not order.config.is_file():
        raise UsageError(
            f"configuration {order.config} does not exist", hint="dsdoctor memory --config ds_config.json ..."
        )
    file = order.model.rpartition(":")[0] if ".py:" in order.model else order.model
    if not Path(file).exists():
        raise UsageError(
            f"model {file} does not exist", hint="pass a Hugging Face config.json, its folder, or file.py:function"
        )
    refuse_large(order.config, f"configuration {order.config}")
    refuse_large(Path(file), f"model {file}")


def read_settings(order: MemoryOrder, host: LocalHost) -> ZeroSettings:
    """What the installed DeepSpeed makes of the configuration."""
    given: dict[str, bool] = {}
    if order.dtype is not None:
        given = {"bf16.enabled": order.dtype == "bf16", "fp16.enabled": order.dtype == "fp16"}
    wish = json.dumps({"world": order.world, "batch": order.batch, "given": given})
    answer = host.ask(order.python, "ask_zero_config.py", str(order.config), wish, timeout=CHILD_TIMEOUT_SECONDS)
    settings = parse_settings(parse_answer(answer, dict, "the configuration"), str(order.config))
    if {"bf16.enabled", "fp16.enabled"} & set(settings.automatic):
        raise UsageError(
            'bf16 or fp16 is "auto" in the configuration, but all sizes depend on it',
            hint="pass --dtype bf16, --dtype fp16 or --dtype fp32",
        )
    return settings


def read_model(order: MemoryOrder, settings: ZeroSettings, host: LocalHost) -> ModelShape:
    """The model's parameters and its runs: as asked, and those that changes and the search need."""
    batch, sequence = settings.micro_batch, order.sequence
    runs: list[tuple[int, int | None, bool]] = [(batch, sequence, order.checkpointing)]
    if not order.checkpointing:
        runs.append((batch, sequence, True))
    runs += [(each, sequence, order.checkpointing) for each in wanted_batches(batch, order)]
    wish = json.dumps({"model": order.model, "dtype": settings.dtype, "runs": list(dict.fromkeys(runs))})
    return parse_model(parse_answer(_ask_model(order, host, wish), dict, "the model"))


def wanted_batches(batch: int, order: MemoryOrder) -> list[int]:
    """Other batches that are followed: the half for the change, and two for the line that the search goes along."""
    return [*([batch // 2] if batch > 1 else []), *([1, 2] if order.search else [])]


def with_all_scores(now: Situation) -> Situation | None:
    """The same with every score of attention in memory, where the GPU's kernel decides about that."""
    if now.run is None or now.run.attention != "fused":
        return None
    run = now.model.run_like(now.run, materialized=True)
    return replace(now, run=run) if run else None


def searched(order: MemoryOrder, now: Situation, limit: int | None) -> Searched | None:
    """The search, where it was asked for and the model could be followed."""
    if not order.search or limit is None or now.run is None or now.run.error:
        return None
    all_scores = now.run.attention == "materialized"
    one, two = (now.model.run_like(replace(now.run, batch=batch), materialized=all_scores) for batch in (1, 2))
    if one is None or two is None:
        return None
    return search(now, one, two, limit, on_node=NODE)


def loading(now: Situation) -> int:
    """Host bytes of a rank that loads a checkpoint of the model's type for itself: from_pretrained without zero.Init."""
    return now.model.elements * SIZES[now.settings.dtype]


def _positions(now: Situation) -> Iterator[Finding]:
    run, limit = now.run, now.model.positions
    if run is None or not run.tokens or limit is None or run.sequence <= limit:
        return
    has_table = now.model.position_table
    yield book.finding(
        "sequence-exceeds-positions",
        Severity.ERROR if has_table else Severity.NOTE,
        case="" if has_table else "computed",
        tokens=f"{run.sequence:,}",
        model=now.model.name,
        positions=f"{limit:,}",
        limit=limit,
    )


def _attention(prediction: Prediction, upper: Prediction | None) -> Iterator[Finding]:
    if upper is None or upper.peak.device <= prediction.peak.device:
        return
    evidence = (
        "with dropout or a trained mask, torch uses its flash or memory-efficient kernel on a GPU where it can",
        "it cannot if no kernel supports the GPU, the type or the head size; the CPU stores all scores",
    )
    yield book.finding(
        "attention-kernel-decides",
        Severity.NOTE,
        evidence=evidence,
        fused=_gib(prediction.peak.device),
        plain=_gib(upper.peak.device),
    )


def _fits(
    prediction: Prediction,
    upper: Prediction,
    gpus: Gpus,
    overheads: tuple[Overhead, ...],
    combined: CombinedChanges | None,
) -> Iterator[Finding]:
    peak = prediction.peak
    low = peak.device + sum(each.low for each in overheads)
    high = max(peak.device, upper.peak.device) + sum(each.high for each in overheads)
    evidence = (f"tensors at the peak ({peak.point.value}): {_gib(peak.device)}", *_largest(prediction))
    if low > gpus.memory:
        yield book.finding(
            "memory-does-not-fit",
            Severity.ERROR,
            case="no-change" if combined is None or not combined.what else "enough" if combined.fits else "not-enough",
            evidence=evidence,
            needed=_gib(low),
            memory=_gib(gpus.memory),
            peak=_gib(combined.peak) if combined else "",
            changes="; ".join(combined.what) if combined else "",
        )
    elif high > gpus.memory:
        yield book.finding(
            "memory-fits-barely",
            Severity.WARNING,
            evidence=evidence,
            low=_gib(low),
            high=_gib(high),
            memory=_gib(gpus.memory),
        )


def _largest(prediction: Prediction) -> tuple[str, ...]:
    rows = [row for row in prediction.peak.rows if row.place == "device"][:3]
    return tuple(f"{row.what}: {_gib(row.size)}" for row in rows)


def _host_fits(now: Situation, prediction: Prediction, gpus: Gpus) -> Iterator[Finding]:
    if gpus.host is None:
        return
    ranks = min(gpus.on_node, now.layout.world)
    kept = max(moment.host for moment in prediction.moments) * ranks
    most = max(kept, loading(now) * ranks)
    if most > gpus.host:
        yield book.finding(
            "host-memory-does-not-fit",
            Severity.ERROR,
            evidence=("offloaded tensors" if kept >= most else "loading a checkpoint, once per rank",),
            ranks=ranks,
            needed=_gib(most),
            memory=_gib(gpus.host),
        )


def _bucket(now: Situation) -> Iterator[Finding]:
    settings = now.settings
    trained = sum(now.model.parameters[number][1] for number in now.model.trained)
    if settings.stage and settings.contiguous_gradients and settings.reduce_bucket_size > trained:
        many = 2 if settings.overlap_comm and settings.stage < 3 else 1
        size = many * settings.reduce_bucket_size * SIZES[settings.communication_dtype]
        yield book.finding(
            "reduce-bucket-exceeds-model",
            Severity.WARNING,
            evidence=(f"{_gib(size)} on each rank",),
            elements=f"{settings.reduce_bucket_size:,}",
            trained=f"{trained:,}",
            limit=trained,
        )


def _activations(now: Situation) -> Iterator[Finding]:
    if now.run is None or now.run.error:
        why = now.run.error if now.run else "the model was not run"
        yield book.finding("activations-not-told", Severity.WARNING, evidence=(why,))


def _left_out(now: Situation) -> Iterator[Finding]:
    settings = now.settings
    parts = {
        "offload to NVMe": "nvme" in {settings.offload_optimizer, settings.offload_param},
        "quantized weights (ZeRO++)": settings.quantized_weights,
        f"zero_hpz_partition_size {settings.hpz_partition_size}": settings.hpz_partition_size > 1,
        "ZenFlow": settings.zenflow,
        "torch_autocast": settings.autocast,
        f"offload_optimizer.ratio {settings.offload_ratio:g}": settings.offload_ratio < 1,
        "the script's own optimizer (assuming Adam's states)": settings.optimizer is None,
        "16-bit master weights": settings.gradients_in_master_dtype,
    }
    if used := [name for name, is_used in parts.items() if is_used]:
        yield book.finding("memory-part-not-followed", Severity.NOTE, parts=used)


def _automatic(now: Situation) -> Iterator[Finding]:
    keys = [key for key in now.settings.automatic if key.startswith(DECIDES)]
    if keys:
        assumed = "the Trainer's formula for buckets, DeepSpeed's default for the rest"
        yield book.finding("configuration-left-auto", Severity.NOTE, evidence=(assumed,), keys=keys)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"


def _ask_model(order: MemoryOrder, host: LocalHost, wish: str) -> Answer:
    return host.ask(order.python, "ask_model.py", wish, timeout=CHILD_TIMEOUT_SECONDS)
