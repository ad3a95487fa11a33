"""Traces on disk: what the tests of the trace commands read."""

from pathlib import Path
from typing import Any

from dsdoctor.overflow.frames.frame import Frame, Header, Line, StepEnd
from dsdoctor.overflow.trace.trace_file import SCHEMA, TraceWriter, file_name
from tests.overflow.written import frame, tensor


def header(rank: int = 0, world: int = 1, **more: Any) -> Header:
    return Header(**{"schema": SCHEMA, "dsdoctor": "0.1.0", "rank": rank, "world": world, "dtype": "float16", **more})


def trace(folder: Path, *lines: Line, rank: int = 0, world: int = 1, **more: Any) -> Path:
    """The trace of one rank."""
    path = folder / file_name(rank)
    writer = TraceWriter(path, header(rank, world, **more))
    writer.write(tuple(lines))
    writer.close()
    return path


def chain(batch: int, *figures: float, dtype: str = "float16", **more: Any) -> tuple[Frame, ...]:
    """A batch of a model of Linear modules h.0, h.1, ... in a row: the output of each is the input of the next."""
    inputs = (1.0, *figures)
    return tuple(
        frame(
            order,
            f"h.{order}",
            tensor("weight", dtype, 0.5),
            tensor("input[0]", dtype, inputs[order]),
            tensor("output", dtype, figure),
            batch=batch,
            **more,
        )
        for order, figure in enumerate(figures)
    )


def step(batch: int, **more: Any) -> StepEnd:
    return StepEnd(step=batch, batch=batch, **more)
