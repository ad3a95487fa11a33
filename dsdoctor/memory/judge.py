"""A ledger and a machine -> findings: does it fit, and what was left out of the ledger. Judges, never looks."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsdoctor.core.finding import Finding, step
from dsdoctor.memory.changes import Enough, Situation
from dsdoctor.memory.models import SIZES, Prediction
from dsdoctor.memory.unmeasured import Unmeasured

GIB = 1 << 30
FIX = "take the first of the listed changes that wins enough"
DECIDES = ("zero_optimization", "bf16", "fp16", "train_micro_batch_size_per_gpu")
"""Keys, or what they begin with, on which a ledger depends."""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs that are meant: how many, and the bytes of each. ``host``: bytes of a node's host memory, None unknown."""

    count: int
    memory: int
    host: int | None = None
    on_node: int = 8


def judge(
    now: Situation,
    told: Prediction,
    gpus: Gpus | None,
    beside: tuple[Unmeasured, ...],
    together: Enough | None,
    *,
    upper: Prediction | None = None,
) -> Iterator[Finding]:
    """All that is to be said of a ledger. ``upper``: the ledger with all scores of attention, where a kernel decides about
    them. ``together``: the changes that would be enough, where it does not fit."""
    yield from _positions(now)
    if gpus is not None:
        yield from _fits(told, upper or told, gpus, beside, together)
        yield from _host_fits(now, told, gpus)
    yield from _attention(told, upper)
    yield from _bucket(now)
    yield from _activations(now)
    yield from _left_out(now)
    yield from _automatic(now)


def _positions(now: Situation) -> Iterator[Finding]:
    run, limit = now.run, now.model.positions
    if run is None or not run.tokens or limit is None or run.sequence <= limit:
        return
    if now.model.position_table:
        title = (
            f"a sequence is {run.sequence:,} tokens, and the table of positions in {now.model.name} has {limit:,} rows"
        )
        fix = f"--sequence {limit}, or a model with more positions"
        yield Finding.error("sequence-exceeds-positions", title, fix=fix)
    else:
        title = f"a sequence is {run.sequence:,} tokens, and {now.model.name} is made for {limit:,}"
        yield Finding.note("sequence-exceeds-positions", title, fix="see to its scaling of positions, or take less")


def _attention(told: Prediction, upper: Prediction | None) -> Iterator[Finding]:
    if upper is None or upper.peak.device <= told.peak.device:
        return
    title = (
        f"attention's kernel decides: {_gib(told.peak.device)} of tensors with a fused one, {_gib(upper.peak.device)} where "
        "all scores are made"
    )
    said = (
        "with dropout, or a mask that is trained, torch takes its flash or memory-efficient kernel on a GPU where it can",
        "it cannot where no kernel takes the GPU, the type or the size of a head; the CPU makes all scores",
    )
    fix = "see which one it takes: python -m dsdoctor.run --memory trace; attention dropout 0 leaves no doubt"
    yield Finding.note("attention-kernel-decides", title, evidence=said, fix=fix)


def _fits(
    told: Prediction, upper: Prediction, gpus: Gpus, beside: tuple[Unmeasured, ...], together: Enough | None
) -> Iterator[Finding]:
    peak = told.peak
    low = peak.device + sum(each.low for each in beside)
    high = max(peak.device, upper.peak.device) + sum(each.high for each in beside)
    evidence = (f"tensors at the peak ({peak.point.value}): {_gib(peak.device)}", *_largest(told))
    if low > gpus.memory:
        title = f"a rank needs {_gib(low)} at least, and its GPU has {_gib(gpus.memory)}"
        yield Finding.error("memory-does-not-fit", title, evidence=evidence, fix=_together(together))
    elif high > gpus.memory:
        title = f"a rank needs {_gib(low)} to {_gib(high)}, and its GPU has {_gib(gpus.memory)}"
        yield Finding.warning("memory-fits-barely", title, evidence=evidence, fix=FIX)


def _together(together: Enough | None) -> str:
    if together is None or not together.what:
        return "no change of the configuration that dsdoctor knows wins anything: more or larger GPUs"
    names = "; ".join(together.what)
    if together.fits:
        return f"enough together (tensors {_gib(together.peak)}): {names}"
    return f"more or larger GPUs, for all of this together leaves {_gib(together.peak)}: {names}"


def _largest(told: Prediction) -> tuple[str, ...]:
    rows = [row for row in told.peak.rows if row.place == "device"][:3]
    return tuple(f"{row.what}: {_gib(row.size)}" for row in rows)


def loading(now: Situation) -> int:
    """Host bytes of a rank that loads a checkpoint of the model's type for itself: from_pretrained without zero.Init."""
    return now.model.elements * SIZES[now.settings.dtype]


def _host_fits(now: Situation, told: Prediction, gpus: Gpus) -> Iterator[Finding]:
    if gpus.host is None:
        return
    ranks = min(gpus.on_node, now.layout.world)
    kept = max(moment.host for moment in told.moments) * ranks
    most = max(kept, loading(now) * ranks)
    if most > gpus.host:
        what = "offloaded" if kept >= most else "loading a checkpoint, once per rank"
        title = f"{ranks} ranks on a node take {_gib(most)} of the host, and it has {_gib(gpus.host)}"
        yield Finding.error(
            "host-memory-does-not-fit", title, evidence=(what,), fix="offload less, or fewer ranks on a node"
        )


def _bucket(now: Situation) -> Iterator[Finding]:
    settings = now.settings
    trained = sum(now.model.parameters[number][1] for number in now.model.trained)
    if settings.stage and settings.contiguous_gradients and settings.reduce_bucket_size > trained:
        many = 2 if settings.overlap_comm and settings.stage < 3 else 1
        size = many * settings.reduce_bucket_size * SIZES[settings.communication_dtype]
        yield Finding.warning(
            "reduce-bucket-exceeds-model",
            f"reduce_bucket_size is {settings.reduce_bucket_size:,} elements, and the model has {trained:,} trained",
            evidence=(f"{_gib(size)} on each rank",),
            fix=f'set "reduce_bucket_size" to {trained} or less in zero_optimization',
        )


def _activations(now: Situation) -> Iterator[Finding]:
    if now.run is None or now.run.error:
        why = now.run.error if now.run else "the model was not run"
        yield Finding.warning(
            "activations-not-told",
            "activations are not in the ledger, and the real peak is higher",
            evidence=(why,),
            fix="measure a few steps",
            steps=(step("python -m dsdoctor.run --memory trace train.py"),),
        )


def _left_out(now: Situation) -> Iterator[Finding]:
    settings = now.settings
    parts = {
        "offload to NVMe": "nvme" in {settings.offload_optimizer, settings.offload_param},
        "quantized weights (ZeRO++)": settings.quantized_weights,
        f"zero_hpz_partition_size {settings.hpz_partition_size}": settings.hpz_partition_size > 1,
        "ZenFlow": settings.zenflow,
        "torch_autocast": settings.autocast,
        f"offload_optimizer.ratio {settings.offload_ratio:g}": settings.offload_ratio < 1,
        "an optimizer of the script's own, and takes Adam's states": settings.optimizer is None,
        "16-bit master weights": settings.gradients_in_master_dtype,
    }
    if used := [name for name, is_used in parts.items() if is_used]:
        yield Finding.note(
            "memory-part-not-followed",
            f"the ledger does not follow {', '.join(used)}",
            fix="measure a few steps beside it",
        )


def _automatic(now: Situation) -> Iterator[Finding]:
    keys = [key for key in now.settings.automatic if key.startswith(DECIDES)]
    if keys:
        yield Finding.note(
            "configuration-left-auto",
            f'"auto" in the file: {", ".join(keys)}',
            evidence=("the Trainer's formula for buckets, DeepSpeed's default for the rest",),
            fix="name the values that will be used",
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / (1 << 20):.1f} MiB"
