"""A DeepSpeed engine -> a watch on it, which prints and keeps findings. Never changes what is trained.

Level guard adds nothing to the modules' calls until a step overflows; then the step's micro-batches are replayed.
"""

import dataclasses
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.overflow.frames.first_bad import RankReport, first_bad
from dsdoctor.overflow.frames.frame import Frame
from dsdoctor.overflow.hooks import engine_adapter, engine_facts, ranks
from dsdoctor.overflow.hooks.batch_record import BatchRecord, Position
from dsdoctor.overflow.hooks.module_hooks import Hook, Hooks
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.investigate import any_bad_gradient, first_report, last_frames, replayed
from dsdoctor.overflow.replay.recorder import BatchRecorder
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch.announce import Announcer
from dsdoctor.overflow.watch.debug import refuse_twice
from dsdoctor.overflow.watch.steps import OverflowCount, StepLosses
from dsdoctor.overflow.watch.trace_writer import Tracer

MOST_RECORDS = 64
"""Forwards whose records are kept for the step that judges them."""
NOTHING_TRACED = (
    "the engine is compiled, and level trace sees nothing inside its graphs: trace a run without engine.compile(), or take "
    "level frames before it"
)


def watch(engine: Any, **options: Any) -> "Watch":
    """Watch a DeepSpeed engine; the options are those of ``Options``. Raises UsageError for what makes no sense."""
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
        if "dsdoctor" in vars(engine):
            raise UsageError("this engine is watched already", hint="engine.dsdoctor is its watch: detach() that first")
        refuse_twice(engine.module)
        self.engine, self.options = engine, options
        self._announcer = Announcer(report_file=options.report_file)
        self._findings: list[Finding] = []
        self._meters = Meters()
        self._records: list[BatchRecord] = []
        self._losses = StepLosses()
        self._overflows = OverflowCount()
        self._batches = 0
        self._first_batch = 0
        self._last_clean_step: int | None = None
        self._loss_gradient: Tensor | None = None
        self._asks_scale = engine_facts.zero_stage(engine) == 0 and engine_facts.dtype(engine) is torch.float16
        self._overflowed: bool | None = None
        self._scale: float | None = None
        self._stopped = self._has_warned = False
        # before anything is attached: if the folder cannot be written, the engine is as it was
        self._tracer = Tracer(engine, options) if options.level == "trace" else None
        self._undo: list[Callable[[], None]] = [functools.partial(vars(engine).pop, "dsdoctor", None)]
        self._warn_if_compiled()
        self._recorder = BatchRecorder(engine)
        self._adapter = engine_adapter.EngineAdapter(
            engine, on_decision=self._guarded(self._on_decision), on_step=self._on_step, on_backward=self._on_loss
        )
        self._undo += [self._adapter.detach, self._recorder.detach]
        self._undo.append(engine.module.register_forward_hook(Hook(self._count)).remove)
        self._hooks: Hooks | None = None
        try:
            self._hooks = self._hook_modules()
        except BaseException:
            self.detach()
            raise
        vars(engine)["dsdoctor"] = self

    # -- what the user holds

    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, in the order of their steps."""
        return tuple(self._findings)

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
        self._records = []
        self._losses.clear()

    close = detach

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
            on_record=self._on_record,
            position=self._position,
            wanted=self._is_wanted,
            paused=lambda: self._recorder.replaying,
            include=self.options.include,
            exclude=self.options.exclude,
            gradients=self.options.level == "trace",
            rank=ranks.rank(),
            compiled_on=self.engine.device if self.options.level == "frames" else None,
        )
        if hooks.nothing:
            hooks.detach()
            asked = ", ".join((*self.options.include, *(f"not {glob}" for glob in self.options.exclude)))
            raise UsageError(
                f"no module of the engine matches {asked}", hint="names as engine.module.named_modules() gives"
            )
        return hooks

    def _is_wanted(self, batch: int) -> bool:
        if self._stopped:
            return False
        return self.options.level == "frames" or batch in self.options.trace_batch_nums

    def _position(self) -> Position:
        step, micro = engine_facts.position(self.engine)
        stage = engine_facts.pipeline_stage(self.engine)[0] if engine_facts.is_pipeline(self.engine) else None
        return Position(step=step, micro=len(self._records) if micro < 0 else micro, stage=stage)

    def _count(self, _module: Any, _args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or self._recorder.replaying or torch._C._current_graph_task_id() != -1:
            return
        self._batches += 1
        if torch.is_grad_enabled():
            self._losses.add_output(output)

    def _on_loss(self, loss: Tensor) -> None:
        self._losses.add(loss)
        if self._asks_scale and self._loss_gradient is None and loss.requires_grad:
            loss.register_hook(self._keep_loss_gradient)

    def _keep_loss_gradient(self, gradient: Tensor) -> None:
        self._loss_gradient = gradient.detach()

    def _on_record(self, record: BatchRecord) -> None:
        if self._tracer is not None:
            self._tracer.forward(record)
        elif torch.is_grad_enabled():
            self._records.append(record)
            if len(self._records) > MOST_RECORDS:  # forwards that no step follows
                self._records.pop(0).settle()
        else:
            self._look_at_evaluation(record)

    def _look_at_evaluation(self, record: BatchRecord) -> None:
        """A forward without gradients belongs to no step, so it is judged alone, and on this rank only."""
        record.settle()
        found = first_bad(record.frames()) if record.readings.any_bad else None
        if found is not None:
            last = last_frames(record.frames(), found, self.options.max_frames_to_save)
            rank_report = RankReport(
                rank=ranks.rank(), step=record.position.step, batch=record.batch, first_bad=found, frames=last
            )
            self._conclude([rank_report], together=False)

    # -- a step is decided

    def _on_decision(self, decision: engine_adapter.Decision) -> None:
        if self._stopped or decision.late:
            return
        overflow = decision.overflow
        self._scale = decision.loss_scale
        if overflow is None:
            overflow = any_bad_gradient(self.engine, self._meters)
            if not decision.replicated:
                overflow = ranks.any_rank(overflow, self.engine.device)
        self._overflowed = overflow
        self._check_loss_scale(decision)
        live = self._live_first_bad(decision)
        if overflow:
            self._hit(decision, live)
            return
        self._last_clean_step = decision.step
        bad_loss = self._losses.any_bad()
        if self.options.on_overflow == "raise" and ranks.any_rank(bad_loss, self.engine.device):
            self._conclude(ranks.gather(live or self._rank_report(decision)))
        elif live is not None or bad_loss:
            # what is bad inside and reaches neither loss nor gradients does no harm
            self._conclude([live or self._rank_report(decision)], together=False, harmless=not bad_loss)

    def _check_loss_scale(self, decision: engine_adapter.Decision) -> None:
        """Once, in fp16 without ZeRO: whether the loss was multiplied by the loss scale that the step divides by."""
        if not self._asks_scale or self._loss_gradient is None:
            return
        self._asks_scale = False
        due = (decision.loss_scale or 1.0) / engine_facts.gradient_accumulation(self.engine)
        rank_report = self._rank_report(decision)
        with_gradient = msgspec.structs.replace(
            rank_report, losses=(), named=(), loss_gradient=float(self._loss_gradient), loss_gradient_due=due
        )
        if ranks.rank() == 0:
            self._conclude([with_gradient], together=False)

    def _rank_report(self, decision: engine_adapter.Decision) -> RankReport:
        """What this rank knows. After an error of dsdoctor's own the least there is, because the other ranks wait for a report."""
        try:
            return self._whole_report(decision)
        except Exception:
            self._announcer.say(
                f"rank {ranks.rank()} could not report what it saw. Please report this: {traceback.format_exc()}"
            )
            return RankReport(rank=ranks.rank(), world=ranks.world(), step=decision.step, batch=self._first_batch)

    def _whole_report(self, decision: engine_adapter.Decision) -> RankReport:
        losses = tuple(float(loss) for loss in self._losses.known() if loss.numel() == 1)
        rank_report = first_report(self.engine, decision, losses=losses)
        return msgspec.structs.replace(rank_report, batch=self._first_batch, skipped=self._overflows.skipped)

    def _live_first_bad(self, decision: engine_adapter.Decision) -> RankReport | None:
        """This rank's report with the first bad value that the frames level saw live in this step; None: it saw none."""
        for record in self._records:
            record.settle()
        for frames in self._live_frames():
            found = first_bad(frames)
            if found is not None:
                last = last_frames(frames, found, self.options.max_frames_to_save)
                return msgspec.structs.replace(self._rank_report(decision), first_bad=found, frames=last)
        return None

    def _live_frames(self) -> Iterator[tuple[Frame, ...]]:
        """The frames of each micro-batch that has anything bad; of a compiled engine, those of the step."""
        for record in self._records:
            if record.readings.any_bad:
                yield tuple(record.frames())
        if self._hooks is not None and self._is_compiled():
            yield tuple(self._hooks.compiled_frames())

    def _is_compiled(self) -> bool:
        return getattr(self.engine.module, "_compiled_call_impl", None) is not None

    def _hit(self, decision: engine_adapter.Decision, live: RankReport | None) -> None:
        """All ranks come here together: what DeepSpeed decided is the same on all of them."""
        applied = decision.overflow is None and not decision.dynamic
        self._overflows.add(skipped=not applied)
        since = None if self._last_clean_step is None else self._last_clean_step + 1
        rank_report = msgspec.structs.replace(
            live or self._rank_report(decision),
            skipped=self._overflows.skipped,
            applied=applied,
            weight_bad_since=since,
        )
        if self._overflows.is_replayed(dynamic=decision.dynamic):
            most = self.options.max_frames_to_save
            rank_reports = replayed(self.engine, self._recorder, rank_report, batch=self._first_batch, most_frames=most)
        else:
            rank_reports = ranks.gather(rank_report)
        self._conclude(rank_reports)

    def _conclude(self, rank_reports: list[RankReport], *, together: bool = True, harmless: bool = False) -> None:
        """Judge, announce on one rank, and stop all ranks alike if the user asked for it.

        ``harmless``: loss and gradients are finite. ``together``: all ranks call this at the same time.
        """
        findings = judge(rank_reports)
        if harmless:
            findings = tuple(replace(finding, severity=min_severity(finding.severity)) for finding in findings)
        self._findings += findings
        if ranks.rank() == 0 or not together:
            self._announcer.announce(findings, rank_reports)
        errors = [] if harmless else [finding for finding in findings if finding.severity is Severity.ERROR]
        if errors and together and self.options.on_overflow == "raise":
            raise ranks.OverflowDetected(f"dsdoctor: {errors[0].title}  [{errors[0].rule}]")

    def _on_step(self) -> None:
        if self._overflowed is False:
            self._overflows.clean_step()
        if self._tracer is not None:
            self._tracer.step_ends(self._overflowed, self._losses.known(), self._batches, self._scale)
            self._warn_if_nothing_is_traced()
        self._recorder.forget()
        self._records, self._overflowed = [], None
        self._losses.clear()
        self._first_batch = self._batches
        self._stop_after_batch()

    def _stop_after_batch(self) -> None:
        """At a step's end, on all ranks as soon as one is past the batch: they may count differently."""
        last = self.options.abort_after_batch_num
        if last is None or sys.exc_info()[0] is not None:
            return
        if ranks.any_rank(self._batches > last, self.engine.device):
            self.detach()
            raise ValueError(f"dsdoctor: stopped after batch {last}, as abort_after_batch_num asks")

    # -- what must not disturb the training

    def _guarded(self, look: Callable[[engine_adapter.Decision], None]) -> Callable[[engine_adapter.Decision], None]:
        """An error of dsdoctor's own must not end a training: it is printed once, and the watch ends."""

        @functools.wraps(look)
        def guarded(decision: engine_adapter.Decision) -> None:
            try:
                look(decision)
            except (ranks.OverflowDetected, UsageError):
                raise
            except Exception:
                self._stopped = True
                self._announcer.say("the watch failed and is off; the training goes on. Please report this:")
                self._announcer.say(traceback.format_exc())

        return guarded

    def _warn_if_nothing_is_traced(self) -> None:
        if self._is_compiled() and not self._has_warned:
            self._has_warned = True
            self._announcer.say(NOTHING_TRACED)

    def _warn_if_compiled(self) -> None:
        if self._is_compiled() and self.options.level == "frames":
            self._announcer.say(
                "the engine is compiled already, and level frames has its hooks compiled with it: what ran before is not "
                "seen inside its graphs. Watch it before engine.compile()"
            )


def min_severity(severity: Severity) -> Severity:
    """A warning at most."""
    return Severity.WARNING if severity is Severity.ERROR else severity
