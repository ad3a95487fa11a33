"""One optimizer step of a watched engine, decided by DeepSpeed -> reports of the ranks, findings, and the answer to them.

What all ranks do together here is the same on every rank, because it follows from what DeepSpeed decided for all of them.
"""

import math
import traceback
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from dsdoctor.core.finding import Severity
from dsdoctor.overflow.frames.first_bad import BadKind, Flushed, Origin, RankReport, first_bad
from dsdoctor.overflow.frames.frame import Frame
from dsdoctor.overflow.hooks import engine as deepspeed_engine
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hook, Hooks
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.measure.readings import Meters
from dsdoctor.overflow.replay.investigate import (
    HIGH_SCALE,
    any_bad_gradient,
    first_report,
    last_frames,
    replayed,
)
from dsdoctor.overflow.replay.provenance import bad_tensors, ignored_labels, with_buffers
from dsdoctor.overflow.replay.replay import BatchRecorder
from dsdoctor.overflow.replay.underflow import (
    all_zero,
    any_lost_activation,
    has_lost_gradient,
    is_suspect,
    underflow_share,
    underflowed_activation,
)
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.overflow.watch.findings import Announcer, FindingsLog, LocalFinding
from dsdoctor.overflow.watch.history import (
    OverflowCount,
    StepHistory,
    StepLosses,
    WeightUpdates,
    is_due,
    is_power_of_two,
)
from dsdoctor.overflow.watch.loss_graph import LossBackward, made_the_loss
from dsdoctor.overflow.watch.loss_line import (
    MAX_FORWARDS,
    RUNS_THE_MODEL,
    BackwardCall,
    LossLines,
    backward_call,
    loss_line,
)

_watched: list["weakref.ref[Any]"] = []
MAX_RECORDS = 64
"""Forwards whose records are kept for the step that judges them."""
MAX_LOSS_GRAPHS = 8
"""Bad losses whose graph is read."""


class BadLoss(NamedTuple):
    """What is known of a bad loss before its backward: the operation that made it, the script's statement, whether labels count."""

    made: Origin | None = None
    line: str = ""
    ignored: str = ""


NO_BAD_LOSS = BadLoss()


def register(engine: Any) -> None:
    """An engine is watched."""
    _watched[:] = [each for each in _watched if each() is not None and each() is not engine]
    _watched.append(weakref.ref(engine))


def engine_label(engine: Any) -> str:
    """The engine's model and its first weight, by which a user knows it; empty where it is the only one."""
    alive = [each() for each in _watched if each() is not None]
    if len(alive) < 2 or not any(each is engine for each in alive):
        return ""
    number = next(number for number, each in enumerate(alive, start=1) if each is engine)
    name, weight = next(iter(engine.module.named_parameters()), ("", None))
    shape = tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))
    first = f", {name} {'x'.join(map(str, shape))}" if name else ""
    return f"{type(engine.module).__name__}{first}, {number} of {len(alive)} in this process"


class Decisions:
    """What this rank knows of the step that runs, and what it makes of DeepSpeed's decision on it."""

    def __init__(self, engine: Any, options: Options, announcer: Announcer, recorder: BatchRecorder) -> None:
        self.engine, self.options = engine, options
        self.found = FindingsLog()
        self.losses = StepLosses()
        self.overflowed: bool | None = None
        self.scale: float | None = None
        self.hooks: Hooks | None = None
        self._announcer, self._recorder = announcer, recorder
        self._meters = Meters()
        self._records: list[BatchRecord] = []
        self._backward_call: BackwardCall | None = None
        self._overflows = OverflowCount()
        self._history = StepHistory(engine)
        self._first_batch = 0
        self._bad_losses: dict[int, BadLoss] = {}
        self._looks = self._expects = 0
        self._loss_backward = LossBackward()
        self.wants_lines = self._watches_backward = self._always_lines = (
            options.level == "frames" and torch.device(engine.device).type == "cpu"
        )
        self._suspects = self._lost = 0
        self._were_zero = False
        self._updates: WeightUpdates | None = None
        self._was_unchanged = False
        self._last_clean_step: int | None = None
        self._bad_applied: int | None = None
        self._loss_gradient: Tensor | None = None
        self._asks_scale = deepspeed_engine.zero_stage(engine) == 0 and deepspeed_engine.dtype(engine) is torch.float16

    @property
    def forwards(self) -> int:
        """How many forwards were recorded in this step."""
        return len(self._records)

    def forget(self) -> None:
        """Drop what is kept of the step."""
        if LossLines.is_on:
            LossLines.end()
        self._records = []
        self._bad_losses = {}
        self._loss_backward.forget()
        self.losses.clear()

    # -- what the hooks report

    def on_loss(self, loss: Tensor) -> None:
        """``engine.backward`` was called, before anything in it."""
        if LossLines.is_on:
            LossLines.end()
        self.losses.add(loss)
        self._backward_call = backward_call()
        # on a GPU reading it would wait for the forward: only after a loss that was bad
        if (loss.is_cpu or self.wants_lines) and loss.numel() == 1 and not math.isfinite(loss.detach().item()):
            self._look_at_loss(loss)
        elif self._watches_backward:
            self._loss_backward.begin(loss)
        if self._asks_scale and self._loss_gradient is None and loss.requires_grad:
            held = weakref.ref(self)

            def keep(gradient: Tensor) -> None:
                if (here := held()) is not None:
                    here._loss_gradient = gradient.detach()

            loss.register_hook(Hook(keep))

    def _look_at_loss(self, loss: Tensor) -> None:
        """A bad loss whose graph is whole, and whose script's variables are those of this micro-batch."""
        if self._looks >= MAX_LOSS_GRAPHS or self._backward_call is None:
            return
        self._looks += 1
        try:
            made = made_the_loss(loss)
        except Exception as error:
            self._announcer.say(f"the graph of the loss could not be read: {type(error).__name__}: {error}")
            made = None
        line, labels = loss_line(self._backward_call, self.engine)
        self._bad_losses[len(self.losses.known()) - 1] = BadLoss(made, line, ignored_labels(labels))
        self._expect(MAX_FORWARDS)

    def forward_ends(self, output: Any) -> None:
        """A forward with gradients is over, and the script computes its loss, of which lines are wanted."""
        if self._watches_backward:
            self._loss_backward.forward_ends(output)
        self._expects -= 1
        self.wants_lines = self._expects > 0 or self._always_lines
        self._watches_backward = self._always_lines or (self._watches_backward and self._expects > 0)
        LossLines.begin()

    def _expect(self, forwards: int) -> None:
        self._expects = forwards
        self.wants_lines = forwards > 0 or self._always_lines

    def on_record(self, record: BatchRecord) -> None:
        """A forward of the level frames is over."""
        if torch.is_grad_enabled():
            self._records.append(record)
            if len(self._records) > MAX_RECORDS:  # forwards that no step follows
                self._records.pop(0).settle()
        else:
            self._look_at_evaluation(record)

    def _look_at_evaluation(self, record: BatchRecord) -> None:
        """A forward without gradients belongs to no step, so it is judged alone, and on this rank only."""
        record.settle()
        found = first_bad(record.frames()) if record.readings.any_bad else None
        if found is not None:
            found = with_buffers(self.engine.module, found)
            last = last_frames(record.frames(), found, self.options.max_frames_to_save)
            rank_report = RankReport(
                rank=ranks.this_rank(),
                world=ranks.world(),
                step=record.position.step,
                batch=record.batch,
                evaluation="a forward without gradients" if record.training else "an evaluation",
                engine=engine_label(self.engine),
                first_bad=found,
                frames=last,
            )
            self._conclude_alone(rank_report)

    # -- a step is decided

    def on_decision(self, decision: deepspeed_engine.Decision) -> None:
        """DeepSpeed has decided on the gradients, and nothing is written yet."""
        overflow = decision.overflow
        self.scale = decision.loss_scale
        if overflow is None:
            overflow = any_bad_gradient(self.engine, self._meters)
            if not decision.replicated:
                overflow = ranks.any_rank(overflow, self.engine.device)
        self.overflowed = overflow
        self._history.note_rates(decision.step)
        if self._asks_scale:
            self._check_loss_scale(decision)
        live = self._live_first_bad(decision) if self.hooks is not None else None
        if overflow:
            self._hit(decision, live)
            return
        self._last_clean_step, self._bad_applied = decision.step, None
        self._look_for_small(decision)
        bad_loss = self.losses.any_bad()
        if self.options.on_overflow == "raise" and ranks.any_rank(bad_loss, self.engine.device):
            self._conclude(ranks.gather(live or self._rank_report(decision)))
        elif live is not None or bad_loss:
            # what is bad inside and reaches neither loss nor gradients does no harm
            self._conclude_alone(live or self._rank_report(decision), harmless=not bad_loss)

    def step_ends(self) -> None:
        """The step is over, whatever became of it."""
        if self.overflowed is False:
            self._overflows.clean_step()
            self._look_at_updates()
        self.overflowed = None
        self.forget()

    def next_batch(self, number: int) -> None:
        """The guide's number of the next step's first micro-batch."""
        self._first_batch = number

    def not_loaded(self, folder: str) -> None:
        """``load_checkpoint`` found nothing in a folder, on all ranks."""
        step = int(self.engine.global_steps)
        self._conclude([RankReport(rank=ranks.this_rank(), world=ranks.world(), step=step, not_loaded=folder)])

    def _look_for_small(self, decision: deepspeed_engine.Decision) -> None:
        """In some steps, the same on all ranks: whether gradients or updates are too small to count."""
        self._updates = None
        if not is_due(decision.step):
            return
        self._history.note_weights(decision.step)
        self._history.note_inputs(decision.step, (frame for record in self._records for frame in record.frames()))
        self._updates = WeightUpdates(self.engine)
        if deepspeed_engine.dtype(self.engine) is not torch.float16 or deepspeed_engine.is_pipeline(self.engine):
            return
        self._look_for_lost_activations(decision.step)
        scale = decision.loss_scale or deepspeed_engine.loss_scale(self.engine) or 1.0
        if deepspeed_engine.zero_stage(self.engine) == 0 and scale > 1:
            # DeepSpeed 0.19.8 does not multiply the loss by it there, which has a finding of its own
            return
        suspect = ranks.any_rank(is_suspect(self.engine, self._meters), self.engine.device)
        self._suspects += suspect
        if suspect and is_power_of_two(self._suspects):
            seen = underflow_share(self.engine, self._recorder, scale)
            nothing = not ranks.any_rank(not all_zero(self.engine, self._meters), self.engine.device)
            if nothing and self._were_zero:
                # not even a far larger gradient at the model's output shows any: what came there is nothing already
                seen = seen or Flushed(share=1.0, worst=(), scale=scale, fits=0.0)
            self._were_zero = nothing
            mine = RankReport(
                rank=ranks.this_rank(), world=ranks.world(), step=decision.step, flushed=seen, dtype="float16"
            )
            self._conclude(ranks.gather(mine))

    def _look_for_lost_activations(self, step: int) -> None:
        """Whether a layer's activations are nothing in float16. The gradients behind such a layer are nothing too."""
        lost = has_lost_gradient(self.engine, self._meters) or any_lost_activation(
            frame for record in self._records for frame in record.frames()
        )
        suspect = ranks.any_rank(lost, self.engine.device)
        self._lost += suspect
        if suspect and is_power_of_two(self._lost):
            seen = underflowed_activation(self.engine, self._recorder)
            mine = RankReport(rank=ranks.this_rank(), world=ranks.world(), step=step, vanished=seen, dtype="float16")
            self._conclude(ranks.gather(mine))

    def _look_at_updates(self) -> None:
        """After a step that was looked at: the same weights again. Two checks, because a learning rate may begin at nothing."""
        updates, self._updates = self._updates, None
        if updates is None or ranks.this_rank() != 0:
            return
        unchanged = updates.unchanged()
        if unchanged and self._was_unchanged:
            step = int(self.engine.global_steps) - 1
            dtype = str(next(self.engine.module.parameters()).dtype).removeprefix("torch.")
            report = RankReport(rank=0, world=ranks.world(), step=step, dtype=dtype, unchanged=unchanged)
            self._conclude_alone(report, harmless=True)
        self._was_unchanged = bool(unchanged)

    def _check_loss_scale(self, decision: deepspeed_engine.Decision) -> None:
        """Once, in fp16 without ZeRO: whether the loss was multiplied by the loss scale that the step divides by."""
        if self._loss_gradient is None:
            return
        self._asks_scale = False
        due = (decision.loss_scale or 1.0) / deepspeed_engine.gradient_accumulation(self.engine)
        rank_report = self._rank_report(decision)
        with_gradient = msgspec.structs.replace(
            rank_report, losses=(), named=(), loss_gradient=float(self._loss_gradient), loss_gradient_due=due
        )
        if ranks.this_rank() == 0:
            self._conclude_alone(with_gradient)

    def _rank_report(self, decision: deepspeed_engine.Decision) -> RankReport:
        """What this rank knows. After an error of dsdoctor's own the least there is, because the other ranks wait for a report."""
        try:
            return self._whole_report(decision)
        except Exception:
            self._announcer.say(
                f"rank {ranks.this_rank()} could not report what it saw. Please report this: {traceback.format_exc()}"
            )
            return RankReport(rank=ranks.this_rank(), world=ranks.world(), step=decision.step, batch=self._first_batch)

    def _whole_report(self, decision: deepspeed_engine.Decision) -> RankReport:
        losses = tuple(float(loss) for loss in self.losses.known() if loss.numel() == 1)
        rank_report = first_report(self.engine, decision, losses=losses)
        bad = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        # where the model was given the labels, and its losses are those of the step
        batches = self._recorder.batches
        ignored = ignored_labels(batches[bad[0]].kwargs) if bad and len(batches) == len(losses) else ""
        seen = self._bad_losses.get(bad[0], NO_BAD_LOSS) if bad else NO_BAD_LOSS
        # the script's variables are those of the last micro-batch
        if bad and bad[0] == len(losses) - 1 and self._backward_call is not None and not seen.line:
            line, labels = loss_line(self._backward_call, self.engine)
            seen = BadLoss(seen.made, line, ignored_labels(labels))
        if bad and seen.made is None and not self._looks:
            self._expect(MAX_FORWARDS)
        bad_output = bool(bad) and self.losses.any_bad_output()
        return msgspec.structs.replace(
            rank_report,
            batch=self._first_batch,
            micro=bad[0] if bad else 0,
            accumulation=deepspeed_engine.gradient_accumulation(self.engine),
            engine=engine_label(self.engine),
            skipped=self._overflows.skipped,
            # a loss that the model gave bad says nothing of the statement that called it
            loss_line="" if bad_output and seen.line.endswith(RUNS_THE_MODEL) else seen.line,
            loss_made=seen.made,
            loss_backward=self._loss_backward.made,
            ignored=ignored or seen.ignored,
            # an overflow is replayed, and shows what was read
            bad_tensors=bad_tensors(self.engine.module) if bad and not self.overflowed else (),
            bad_output=bad_output,
        )

    def _live_first_bad(self, decision: deepspeed_engine.Decision) -> RankReport | None:
        """This rank's report with the first bad value that the frames level saw live in this step; None: it saw none."""
        for record in self._records:
            record.settle()
        for frames in self._live_frames():
            found = first_bad(frames)
            if found is not None:
                found = with_buffers(self.engine.module, found)
                last = last_frames(frames, found, self.options.max_frames_to_save)
                return msgspec.structs.replace(self._rank_report(decision), first_bad=found, frames=last)
        return None

    def _live_frames(self) -> Iterator[tuple[Frame, ...]]:
        """The frames of each micro-batch that has anything bad; of a compiled engine, those of the step."""
        for record in self._records:
            if record.readings.any_bad:
                yield tuple(record.frames())
        if self.hooks is not None and deepspeed_engine.is_compiled(self.engine):
            yield tuple(self.hooks.compiled_frames())

    def _hit(self, decision: deepspeed_engine.Decision, live: RankReport | None) -> None:
        """All ranks come here together: what DeepSpeed decided is the same on all of them."""
        applied = decision.overflow is None and not decision.dynamic
        self._overflows.add(skipped=not applied)
        last = self._last_clean_step
        # a checkpoint of an earlier step was loaded: what was clean before says nothing of its weights
        since = None if last is None or last >= decision.step else last + 1
        rank_report = msgspec.structs.replace(
            live or self._rank_report(decision),
            skipped=self._overflows.skipped,
            applied=applied,
            weight_bad_since=since,
            bad_applied=self._bad_applied,
        )
        if applied and self._bad_applied is None:
            self._bad_applied = decision.step
        searches = self._searches_scale(decision, live)
        if not searches and self._overflows.is_replayed(dynamic=decision.dynamic):
            most = self.options.max_frames_to_save
            rank_reports = replayed(self.engine, self._recorder, rank_report, batch=self._first_batch, most_frames=most)
            if any(report.rank == ranks.this_rank() and report.began_bad for report in rank_reports):
                self._watches_backward = True
                self._expect(MAX_FORWARDS)
            rank_reports = self._history.examined(self._recorder, rank_reports)
        else:
            rank_reports = ranks.gather(msgspec.structs.replace(rank_report, again=not searches))
        self._conclude(rank_reports)

    def _searches_scale(self, decision: deepspeed_engine.Decision, live: RankReport | None) -> bool:
        """Whether DeepSpeed is looking for the loss scale that fits, as it does at the start of every fp16 training and every
        thousand steps or so: the scale is high, and no rank has seen anything bad but gradients. A replay would call the script's
        forward once more for what is normal. What stays bad is replayed when the scale has come down."""
        if not decision.dynamic:
            return False
        scale = decision.loss_scale or deepspeed_engine.loss_scale(self.engine) or 1.0
        found = live.first_bad if live is not None else None
        is_bad_before = found is not None and found.kind is not BadKind.GRADIENT
        bad = is_bad_before or self.losses.any_bad() or scale < HIGH_SCALE
        return not ranks.any_rank(bad, self.engine.device)

    def _conclude(self, rank_reports: list[RankReport]) -> None:
        """All ranks together: judge, announce on one rank, and stop all ranks alike if the user asked for it."""
        findings = judge(rank_reports)
        self.found.add_together(rank_reports[0].step, findings)
        if ranks.this_rank() == 0:
            self._announcer.announce(findings, rank_reports)
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        if errors and self.options.on_overflow == "raise":
            raise ranks.OverflowDetected(f"dsdoctor: {errors[0].title}  [{errors[0].rule}]")

    def _conclude_alone(self, rank_report: RankReport, *, harmless: bool = False) -> None:
        """This rank by itself: announce, and let rank 0 know. ``harmless``: loss and gradients are finite."""
        findings = self.found.add_alone(LocalFinding(rank_report, harmless))
        self._announcer.announce(findings, [rank_report], notes_once=harmless)
