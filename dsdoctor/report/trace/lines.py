"""Traces -> lines for a terminal in the guide's format, and the one JSON document; both streamed."""

from collections.abc import Iterable, Iterator
from typing import Any

from dsdoctor.core.text import encode
from dsdoctor.overflow.frames import guide_format
from dsdoctor.overflow.frames.frame import CallPhase, Frame, StepEnd
from dsdoctor.overflow.trace.selection import Ranked, RankTrace, Traces
from dsdoctor.ui.screen import SCHEMA
from dsdoctor.ui.terminal import printable

WHOLE = "(the whole model)"


def counted(count: int, singular: str, plural: str) -> str:
    """A number and its unit, in the singular or the plural.

    >>> counted(1, "batch", "batches"), counted(1200, "batch", "batches")
    ('1 batch', '1,200 batches')
    """
    return f"{count:,} {singular if count == 1 else plural}"


def clean(line: str) -> str:
    """A line whose control characters are shown and not obeyed. Fast where there are none."""
    return line if line.isprintable() else printable(line)


def source_line(source: RankTrace) -> str:
    """Who wrote a trace.

    >>> from pathlib import Path
    >>> from dsdoctor.overflow.frames.frame import Header
    >>> header = Header(schema="", dsdoctor="0.1", rank=3, world=8, torch="2.13.0", zero_stage=2, dtype="float16")
    >>> source_line(RankTrace(path=Path("a.jsonl"), header=header))
    'a.jsonl: rank 3 of 8, float16, ZeRO-2, torch 2.13.0, dsdoctor 0.1'
    """
    head = source.header
    parts = [
        f"rank {head.rank} of {head.world}",
        head.host and f"on {head.host}",
        "" if head.stage is None else f"pipeline stage {head.stage}",
        head.dtype,
        "" if head.zero_stage is None else f"ZeRO-{head.zero_stage}",
        head.torch and f"torch {head.torch}",
        head.deepspeed and f"DeepSpeed {head.deepspeed}",
        head.dsdoctor and f"dsdoctor {head.dsdoctor}",
        head.started and f"started {head.started}",
    ]
    return f"{source.path}: {', '.join(part for part in parts if part)}"


def source_lines(traces: Traces, name: str = "") -> Iterator[str]:
    """Who wrote the traces: the first in full, of the others the number."""
    more = f" and {len(traces.sources) - 1} more of this run" if len(traces.sources) > 1 else ""
    yield f"{name}{source_line(traces.sources[0])}{more}"
    yield from (f"! {note}" for note in traces.notes)


def shown_lines(lines: Iterable[Ranked], *, with_rank: bool) -> Iterator[str]:
    """Frames as the guide prints them. A head whenever the batch, the rank or the phase is another one."""
    place: tuple[int, int, CallPhase] | None = None
    for rank, line in lines:
        if isinstance(line, StepEnd):
            yield step_line(rank if with_rank else None, line)
            continue
        here = (line.batch, rank, line.phase)
        if here != place:
            yield from _head(line, rank if with_rank else None)
            place = here
        yield from map(clean, guide_format.lines(line))


def _head(frame: Frame, rank: int | None) -> Iterator[str]:
    of_rank = "" if rank is None else f" rank={rank}"
    what = "Starting batch" if frame.phase is CallPhase.FORWARD else "Backward of batch"
    yield from ("", "", f"{guide_format.PREFIX} *** {what} number={frame.batch}{of_rank} ***", guide_format.COLUMNS)


def step_line(rank: int | None, step: StepEnd) -> str:
    """The end of a step in the guide's manner.

    >>> step_line(None, StepEnd(step=4, batch=9, overflow=True, loss_scale=65536.0, loss="nan")).strip()
    '*** Step 4 after batch 9: overflow, skipped; loss scale 65536; loss nan ***'
    """
    parts = [
        "" if step.overflow is None else "overflow, skipped" if step.overflow else "no overflow",
        "" if step.loss_scale is None else f"loss scale {step.loss_scale:g}",
        step.loss and f"loss {step.loss}",
    ]
    said = "; ".join(part for part in parts if part) or "over"
    of_rank = "" if rank is None else f" rank={rank}"
    return clean(f"{guide_format.PREFIX} *** Step {step.step} after batch {step.batch}{of_rank}: {said} ***")


def shown_document(traces: Traces, lines: Iterable[Ranked]) -> Iterator[str]:
    """The document of ``trace show`` up to its findings, piece by piece: what was selected may be gigabytes."""
    head = {"schema": SCHEMA, "command": "trace show", "traces": [_source_part(source) for source in traces.sources]}
    yield encode(head).decode()[:-1]
    yield ',"lines":['
    comma = ""
    for rank, line in lines:
        kind = "step" if isinstance(line, StepEnd) else "frame"
        yield f'{comma}{{"rank":{rank},"{kind}":{encode(line).decode()}}}'
        comma = ","


def shown_document_end(findings: tuple[Any, ...]) -> str:
    """The rest of the document of ``trace show``."""
    return f'],"findings":{encode(findings).decode()}}}\n'


def _source_part(source: RankTrace) -> dict[str, Any]:
    return {"file": str(source.path), "header": source.header}


def source_parts(traces: Traces) -> list[dict[str, Any]]:
    """The traces as a document names them."""
    return [_source_part(source) for source in traces.sources]
