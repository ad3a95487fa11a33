"""The command that says how much memory a training takes: memory."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from dsdoctor.cli.ending import FOUND, OK, columns, print_result
from dsdoctor.cli.options import Json, Verbose
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Step, has_error, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.options import HOW, WHAT, flag, option
from dsdoctor.core.requests import PythonPath
from dsdoctor.memory.judge import MemoryOrder, MemoryReport, examine, parse_gpus, with_world
from dsdoctor.memory.text import memory_lines
from dsdoctor.ui.screen import first_step, next_line, screen_lines
from dsdoctor.ui.terminal import VerdictLine

MAX_RANKS = 1 << 16
CERTAIN = {"memory-does-not-fit", "memory-fits-barely", "host-memory-does-not-fit"}
"""Rules that have said all there is to say of whether it fits."""
DOUBTS = {
    "activations-not-told",
    "memory-part-not-followed",
    "configuration-left-auto",
    "sequence-exceeds-positions",
}
"""Rules with which no tick is given: a part of the ledger is missing or not certain."""
Config = Annotated[
    Path, option(name="--config", metavar="FILE", group=WHAT, help="DeepSpeed's configuration: --config ds_config.json")
]
Model = Annotated[
    str,
    option(
        name="--model",
        metavar="CONFIG.json|DIR|FILE.py:FUNCTION",
        group=WHAT,
        help="Hugging Face configuration, its folder, or a function that returns the model, or the model and its inputs: "
        "--model train.py:make_model runs that file; a configuration runs nothing.",
    ),
]
World = Annotated[
    int | None,
    option(name="--world", metavar="N", group=WHAT, help="Total ranks: --world 8. Default: those of --gpus."),
]
Batch = Annotated[
    int | None,
    option(
        name="--batch", metavar="B", group=WHAT, help="Micro batch per rank: --batch 4. Default: the configuration's."
    ),
]
Sequence = Annotated[
    int | None,
    option(
        name="--sequence", metavar="S", group=WHAT,
        help="Tokens per sample: --sequence 4096. Default: the model's maximum, up to 2048.",
    ),
]  # fmt: skip
Dtype = Annotated[
    Literal["bf16", "fp16", "fp32"] | None,
    option(
        name="--dtype",
        group=WHAT,
        help='Override the configuration, or resolve "auto": --dtype bf16',
    ),
]
Checkpointing = Annotated[
    bool, flag(name="--checkpointing", group=WHAT, help="Recompute the model's layers in the backward pass.")
]
Gpus = Annotated[
    str | None,
    option(
        name="--gpus", metavar="8x80G", group=HOW, help="GPUs and the memory of each in GiB, to check whether it fits."
    ),
]
HostMemory = Annotated[
    str | None,
    option(name="--host-memory", metavar="512G", group=HOW, help="Memory of a node with eight GPUs, for offloading."),
]
Search = Annotated[
    bool,
    flag(name="--search", group=HOW, help="Find the largest micro batch that fits, and the fewest GPUs. Needs --gpus."),
]
Html = Annotated[
    Path | None,
    option(
        name="--html", metavar="FILE", help="Also write a page with a chart: --html memory.html. Needs the extra plot."
    ),
]


def memory_command(
    *,
    config: Config,
    model: Model,
    world: World = None,
    batch: Batch = None,
    sequence: Sequence = None,
    dtype: Dtype = None,
    checkpointing: Checkpointing = False,
    gpus: Gpus = None,
    host_memory: HostMemory = None,
    search: Search = False,
    html: Html = None,
    python: PythonPath = sys.executable,
    verbose: Verbose = False,
    as_json: Json = False,
) -> int:
    """Estimate the memory that each rank needs, before training.

    Suggests changes where it does not fit. Parameters, gradients, optimizer states and buckets follow the formulas of the
    installed DeepSpeed. Activations follow the model's shapes through forward and backward. No GPU is needed, and a model of
    70 B parameters takes half a GB here.
    Needs torch, transformers and DeepSpeed in the environment of --python.

    Example: dsdoctor memory --config ds_config.json --model CONFIG.json --gpus 8x80G
    """
    fitted = parse_gpus(gpus, host_memory) if gpus else None
    ranks = world or (fitted.count if fitted else 0)
    _check(ranks, batch, sequence, search=search, has_gpus=fitted is not None)
    if html is not None:
        _check_page(html)
    order = MemoryOrder(
        config=config,
        model=model,
        world=ranks,
        batch=batch,
        sequence=sequence,
        dtype=dtype,
        checkpointing=checkpointing,
        gpus=with_world(fitted, ranks) if fitted else None,
        search=search,
        python=python,
    )
    done = examine(order, LocalHost())
    if html is not None:
        _write_page(done, html, gpus)
    told = [*screen_lines(done.findings, shows_all="" if verbose else "-v"), *fits(done, gpus)]
    lines = [
        *memory_lines(done, columns()),
        *(["", *told] if told else []),
        *map(next_line, next_steps(order, done, gpus)),
    ]
    print_result("memory", as_json, lines, done.findings, **parts(done))
    return FOUND if has_error(done.findings) else OK


def next_steps(order: MemoryOrder, done: MemoryReport, gpus: str | None) -> tuple[Step, ...]:
    """One next step where it does not fit: the search, or what it did not find; none where it fits."""
    if not has_error(done.findings):
        return ()
    run = done.now.run
    if order.search or gpus is None or run is None or run.error or not run.tokens:
        return tuple(filter(None, [first_step(done.findings)]))
    return (
        step(
            "python -m dsdoctor memory --config {config} --model {model} --gpus {gpus} --sequence {tokens} --search",
            config=str(order.config),
            model=order.model,
            gpus=gpus,
            tokens=run.sequence,
        ),
    )


def _check_page(path: Path) -> None:
    """A page that cannot be drawn or written is refused before anything is asked."""
    from dsdoctor.ui.page import check_extra, check_target

    check_target(path)
    check_extra(plotly=True)


def _write_page(done: MemoryReport, path: Path, gpus: str | None) -> None:
    from dsdoctor.memory.page import page_of
    from dsdoctor.ui import page

    limit = parse_gpus(gpus, None).memory if gpus else None
    page.write_page(page_of(done, limit=limit, fits=" ".join(fits(done, gpus))), path)


def parts(done: MemoryReport) -> dict[str, object]:
    """What the document has."""
    told = done.prediction
    moments = {moment.point.value: moment.device for moment in told.moments}
    return {
        "model": {
            "class": done.now.model.name,
            "parameters": done.now.model.elements,
            "attention": done.now.model.attention,
        },
        "settings": done.now.settings,
        "run": {name: getattr(done.now.run, name) for name in ("batch", "sequence", "checkpointing", "shape", "error")}
        if done.now.run
        else None,
        "prediction": {
            **moments,
            "peak": told.peak.device,
            "peak_is_whole": "activations-not-told" not in {finding.rule for finding in done.findings},
            "peak_with_all_scores": done.upper.peak.device if done.upper else None,
            "peak_at": told.peak.point,
            "host_peak": max(moment.host for moment in told.moments),
            "host_loading": done.host_loading,
        },
        "ledger": told.moments,
        "unmeasured": done.overheads,
        "changes": done.changes,
        "enough": done.combined,
        "search": done.searched,
        "search_safe": done.searched_safe,
        "search_with_all_scores": done.searched_upper,
    }


def _check(ranks: int, batch: int | None, sequence: int | None, *, search: bool, has_gpus: bool) -> None:
    if not 0 < ranks <= MAX_RANKS:
        raise UsageError("the number of ranks is unknown", hint="--world 8, or --gpus 8x80G")
    for name, number in (("batch", batch), ("sequence", sequence)):
        if number is not None and number < 1:
            raise UsageError(f"a {name} of {number} holds nothing", hint="--batch 1 --sequence 2048")
    if search and not has_gpus:
        raise UsageError("--search looks for a setup that fits, but no GPU is named", hint="--gpus 8x80G")


def fits(done: MemoryReport, gpus: str | None) -> list[str]:
    """The line that says that it fits: only where everything was followed."""
    rules = {finding.rule for finding in done.findings}
    if gpus is None or rules & CERTAIN:
        return []
    if doubts := sorted(rules & DOUBTS):
        return [VerdictLine(f"! the ledger fits {gpus}, but is incomplete or uncertain: {', '.join(doubts)}")]
    return [VerdictLine(f"✓ fits {gpus}, even with the highest overhead estimate")]
