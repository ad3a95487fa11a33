"""A DeepSpeed engine -> a watch on it, which prints and keeps findings. Never changes what is trained.

Level guard adds nothing to the modules' calls until a step overflows; then the step's micro-batches are replayed.
"""

import contextlib
import dataclasses
import functools
import inspect
import io
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from dsdoctor.checkpoint.folder import checkpoint_near
from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import open_new
from dsdoctor.core.finding import Finding
from dsdoctor.core.release import __version__
from dsdoctor.core.script import CHECKPOINT_WATCH, write_stderr
from dsdoctor.overflow.frames import frame as guide_format
from dsdoctor.overflow.frames.frame import Header, StepEnd
from dsdoctor.overflow.hooks import engine as deepspeed_engine
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hook, Hooks, Position, outside_modes
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.measure.measure import backend_of, why_no_kernel
from dsdoctor.overflow.replay.replay import BatchRecorder
from dsdoctor.overflow.trace.trace_file import SCHEMA, TraceWriter, file_name
from dsdoctor.overflow.watch import decisions
from dsdoctor.overflow.watch.debug import is_watched
from dsdoctor.overflow.watch.decisions import Decisions
from dsdoctor.overflow.watch.findings import Announcer
from dsdoctor.overflow.watch.loss_line import LossLines
from dsdoctor.rules import book

FOLDER = "dsdoctor-trace"
NOTHING_TRACED = (
    "the engine is compiled, and level trace sees nothing inside its graphs: trace a run without engine.compile(), or take "
    "level frames before it"
)


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
            write_stderr(f"dsdoctor: {self._writer.path}: {self._writer.broken}; the trace ends; training continues\n")


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
        zero_stage=deepspeed_engine.zero_stage(engine),
        stage=deepspeed_engine.pipeline_stage(engine)[0] if deepspeed_engine.is_pipeline(engine) else None,
        dtype=str(deepspeed_engine.dtype(engine)).removeprefix("torch."),
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


def watch(engine: Any, **options: Any) -> "Watch":
    """Watch a DeepSpeed engine; the options are those of ``Options``. Raises UsageError for what makes no sense.

    An engine that is watched already keeps its first watch, which is returned.
    """
    known = [field.name for field in dataclasses.fields(Options)]
    if wrong := [name for name in options if name not in known]:
        raise UsageError(f"watch has no option {wrong[0]!r}", hint=f"one of {', '.join(known)}")
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    chosen = Options(**given)
    chosen.check()
    if not hasattr(engine, "global_steps") or not isinstance(getattr(engine, "module", None), nn.Module):
        raise UsageError(
            f"watch takes a DeepSpeed engine, not {type(engine).__name__}",
            hint="DebugUnderflowOverflow(model) watches any module",
        )
    if isinstance(first := vars(engine).get("dsdoctor"), Watch):
        if first.options != chosen:
            write_stderr("dsdoctor: this engine is watched already, and its first watch stays, with its options\n")
        return first
    if is_watched(engine.module) and chosen.level != "guard":
        write_stderr(
            "dsdoctor: another watch observes the modules of this model already; this engine is watched at level guard\n"
        )
        chosen = dataclasses.replace(chosen, level="guard")
    return Watch(engine, chosen)


def initialize(*args: Any, overflow: str = "guard", watch_options: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, and the engine is watched; ``engine.dsdoctor`` is the watch. Returns what that returns."""
    import deepspeed

    Options(level=overflow, **(watch_options or {})).check()
    # under dsdoctor.run deepspeed.initialize watches by itself; the options given here take precedence
    made = inspect.unwrap(deepspeed.initialize)(*args, **kwargs)
    watch(made[0], level=overflow, **(watch_options or {}))
    return made


class Watch:
    """A watch on one engine. A context manager; ``detach`` ends it, ``findings`` and ``report`` give what it found."""

    def __init__(self, engine: Any, options: Options) -> None:
        book.prepare("overflow")
        self.engine, self.options = engine, options
        self._announcer = Announcer(report_file=options.report_file)
        self._batches = 0
        self._stopped = self._has_warned = False
        # before anything is attached: if the folder cannot be written, the engine is as it was
        self._tracer = Tracer(engine, options) if options.level == "trace" else None
        self._undo: list[Callable[[], None]] = [functools.partial(vars(engine).pop, "dsdoctor", None)]
        self._warn_if_compiled()
        self._warn_without_kernel()
        self._recorder = BatchRecorder(engine)
        self._decisions = Decisions(engine, options, self._announcer, self._recorder)
        self._step_ends = self._guarded(self._decisions.step_ends)
        self._adapter = deepspeed_engine.EngineAdapter(
            engine,
            on_decision=self._guarded(self._on_decision),
            on_step=Hook(self._on_step),
            on_backward=self._guarded(self._decisions.on_loss),
            on_load=self._guarded(self._on_load),
            on_destroy=self._guarded(self._forget),
        )
        self._undo += [self._adapter.detach, self._recorder.detach]
        self._undo.append(engine.module.register_forward_hook(Hook(self._count)).remove)
        self._hooks: Hooks | None = None
        try:
            self._hooks = self._decisions.hooks = self._hook_modules()
        except BaseException:
            self.detach()
            raise
        vars(engine)["dsdoctor"] = self
        decisions.register(engine)

    # -- what the user holds

    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, in the order of their steps; on rank 0 also what other ranks found by themselves."""
        return self._decisions.found.all()

    def report(self) -> str:
        """All lines that were printed so far."""
        return "\n".join(self._announcer.lines)

    def detach(self) -> None:
        """End the watch: the engine is as it was before."""
        if self._tracer is not None:
            self._tracer.close()
        if self._hooks is not None:
            self._hooks.detach()
        while self._undo:
            self._undo.pop()()
        self._decisions.forget()

    close = detach

    def at_end(self, undo: Callable[[], None]) -> None:
        """Have something end with this watch."""
        self._undo.append(undo)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    # -- what the hooks report

    def _hook_modules(self) -> Hooks | None:
        if self.options.level == "guard":
            return None
        hooks = Hooks(
            self.engine.module,
            on_record=self._decisions.on_record if self._tracer is None else self._tracer.forward,
            position=self._position,
            wanted=self._is_wanted,
            paused=lambda: self._recorder.replaying,
            include=self.options.include,
            exclude=self.options.exclude,
            gradients=self.options.level == "trace",
            rank=ranks.this_rank(),
            compiled_on=self.engine.device if self.options.level == "frames" else None,
        )
        if hooks.nothing:
            hooks.detach()
            asked = ", ".join((*self.options.include, *(f"not {glob}" for glob in self.options.exclude)))
            raise UsageError(
                f"no module of the engine matches {asked}", hint="use names from engine.module.named_modules()"
            )
        return hooks

    def _is_wanted(self, batch: int) -> bool:
        if self._stopped:
            return False
        return self.options.level == "frames" or batch in self.options.trace_batch_nums

    def _position(self) -> Position:
        if LossLines.is_on:  # a forward begins, perhaps of another model than that whose loss is waited for
            LossLines.end()
        step, micro = deepspeed_engine.position(self.engine)
        stage = deepspeed_engine.pipeline_stage(self.engine)[0] if deepspeed_engine.is_pipeline(self.engine) else None
        return Position(step=step, micro=self._decisions.forwards if micro < 0 else micro, stage=stage)

    def _forget(self) -> None:
        """The engine is destroyed: what is kept of its step, graphs of other engines among it, holds no memory any more."""
        self._recorder.forget()
        self._decisions.forget()

    def _count(self, _module: Any, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._recorder.replaying or torch._C._current_graph_task_id() != -1:
            return
        self._batches += 1
        if torch.is_grad_enabled():
            self._decisions.losses.add_output(output)
            if self._decisions.wants_lines:
                self._decisions.forward_ends(output)

    def _on_decision(self, decision: deepspeed_engine.Decision) -> None:
        if not self._stopped and not decision.late:
            self._decisions.on_decision(decision)

    def _on_load(self, folder: str) -> None:
        # the other watch reports it, too, but keeps no record of it; a first start it reports as a note
        is_reported = hasattr(getattr(type(self.engine), "load_checkpoint", None), CHECKPOINT_WATCH)
        if ranks.this_rank() == 0 and not (is_reported and not checkpoint_near(Path(folder))):
            self._decisions.not_loaded(folder)

    def _on_step(self) -> None:
        decided = self._decisions
        if self._tracer is not None:
            self._tracer.step_ends(decided.overflowed, decided.losses.known(), self._batches, decided.scale)
            if deepspeed_engine.is_compiled(self.engine) and not self._has_warned:
                self._has_warned = True
                self._announcer.say(NOTHING_TRACED)
        self._recorder.forget()
        self._step_ends()
        decided.next_batch(self._batches)
        if self.options.abort_after_batch_num is not None:
            self._stop_after_batch(self.options.abort_after_batch_num)

    def _stop_after_batch(self, last: int) -> None:
        """At a step's end, on all ranks as soon as one is past the batch: they may count differently."""
        if sys.exc_info()[0] is not None:
            return
        if ranks.any_rank(self._batches > last, self.engine.device):
            self.detach()
            raise ValueError(f"dsdoctor: stopped after batch {last}, as abort_after_batch_num asks")

    # -- what must not disturb the training

    def _guarded(self, look: Callable[..., None]) -> Callable[..., None]:
        """An error of dsdoctor's own must not end a training: it is printed once, and the watch ends."""

        @functools.wraps(look)
        def guarded(*args: Any) -> None:
            try:
                with outside_modes():
                    look(*args)
            except (ranks.OverflowDetected, UsageError):
                raise
            except Exception:
                self._stopped = True
                self._announcer.say("the watch failed and is off; training continues. Please report this:")
                self._announcer.say(traceback.format_exc())

        return guarded

    def _warn_without_kernel(self) -> None:
        """Here the kernel is tried, once in a process: before the training, where a second of compiling does not matter."""
        device = torch.device(self.engine.device)
        if device.type == "cuda" and backend_of(device) == "torch" and ranks.this_rank() == 0:
            self._announcer.say(
                f"the measuring kernel does not run here, and torch's operations measure instead, more slowly "
                f"({why_no_kernel(device)})"
            )

    def _warn_if_compiled(self) -> None:
        if deepspeed_engine.is_compiled(self.engine) and self.options.level == "frames":
            self._announcer.say(
                "the engine is compiled already, and level frames has its hooks compiled with it: what ran before is not "
                "seen inside its graphs. Watch it before engine.compile()"
            )
