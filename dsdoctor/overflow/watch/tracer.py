"""Chosen batches -> a trace file per rank, and the same in the guide's text format beside it."""

import contextlib
import io
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import open_new
from dsdoctor.core.release import __version__
from dsdoctor.core.script import write_stderr
from dsdoctor.overflow.frames import frame as guide_format
from dsdoctor.overflow.frames.frame import Header, StepEnd
from dsdoctor.overflow.hooks import engine as engine_facts
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.trace.trace_file import SCHEMA, TraceWriter, file_name

FOLDER = "dsdoctor-trace"


class Tracer:
    """Writes records as they come: the forward when it is over, the backward when the step is.

    A process that was forked from this one has the same open files, and writes nothing: the trace is its parent's.
    """

    def __init__(self, engine: Any, options: Options) -> None:
        self._pid = os.getpid()
        path = unused(Path(options.trace_dir or FOLDER) / file_name(ranks.this_rank()))
        try:
            self._writer = TraceWriter(path, header_of(engine))
            self._text = io.TextIOWrapper(open_new(path.with_suffix(".txt")), encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written: {error.strerror}", hint="name another folder with trace_dir"
            ) from error
        self._open: list[tuple[BatchRecord, int]] = []
        self._warned = False

    def forward(self, record: BatchRecord) -> None:
        """A forward is over. A record without gradients is complete with that."""
        if not self._is_of_this_process():
            return
        record.readings.peek()
        self._write(record, 0)
        if torch.is_grad_enabled():
            self._open.append((record, len(record.calls)))
        else:
            record.settle()

    def step_ends(self, overflow: bool | None, losses: list[Tensor], batches: int, scale: float | None) -> None:
        """Write the gradients of the step's records, and DeepSpeed's decision. ``scale``: the loss scale in the gradients."""
        if not self._open or not self._is_of_this_process():
            return
        for record, written in self._open:
            record.settle()
            self._write(record, written, scale)
        loss = ", ".join(f"{float(value):g}" for value in losses if value.numel() == 1)
        step = self._open[-1][0].position.step
        self._open = []
        self._writer.write((StepEnd(step=step, batch=batches - 1, overflow=overflow, loss_scale=scale, loss=loss),))

    def __del__(self) -> None:
        # the engine was dropped before the end of the script
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Write what is left, and close. A second call does nothing."""
        if not self._is_of_this_process():
            return
        self.step_ends(None, [], 0, None)
        self._writer.close()
        with contextlib.suppress(OSError):  # a full disk was reported before
            self._text.close()

    def _is_of_this_process(self) -> bool:
        return self._pid == os.getpid()

    def _write(self, record: BatchRecord, first: int, scale: float | None = None) -> None:
        frames = tuple(record.frames())[first:]
        if scale is not None and scale != 1:
            frames = tuple(msgspec.structs.replace(frame, loss_scale=scale) for frame in frames)
        self._writer.write(frames)
        try:
            self._text.write(guide_format.text(frames) + "\n")
            self._text.flush()
        except OSError as error:
            self._writer.broken = self._writer.broken or str(error.strerror)
        if self._writer.broken and not self._warned:
            self._warned = True
            write_stderr(
                f"dsdoctor: {self._writer.path}: {self._writer.broken}; the trace ends, the training goes on\n"
            )


def header_of(engine: Any) -> Header:
    """Who writes the trace."""
    deepspeed = sys.modules.get("deepspeed")
    return Header(
        schema=SCHEMA,
        dsdoctor=__version__,
        rank=ranks.this_rank(),
        world=ranks.world(),
        host=platform.node(),
        torch=str(torch.__version__),
        deepspeed=str(getattr(deepspeed, "__version__", "")),
        zero_stage=engine_facts.zero_stage(engine),
        stage=engine_facts.pipeline_stage(engine)[0] if engine_facts.is_pipeline(engine) else None,
        dtype=str(engine_facts.dtype(engine)).removeprefix("torch."),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def unused(path: Path) -> Path:
    """The path, or one beside it with a number: a second engine, or a job that is started again, overwrites no trace."""
    number = 2
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.stem}-{number}{path.suffix}")
        number += 1
    return free
