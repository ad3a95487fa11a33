"""The guide's class and function, with its names, its signatures and its printed format, for any module.

A gradient that only a loss scale makes too large is normal; where that cannot be known, nothing is ended.
"""

from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.core.script import write_stderr
from dsdoctor.overflow.frames import frame as guide_format
from dsdoctor.overflow.frames.first_bad import FirstBad, RankReport, Scale, first_bad
from dsdoctor.overflow.frames.frame import CallPhase, Frame
from dsdoctor.overflow.hooks import ranks
from dsdoctor.overflow.hooks.module_hooks import BatchRecord, Hook, Hooks
from dsdoctor.overflow.hooks.options import Options
from dsdoctor.overflow.measure.readings import stats_of_tensor, tensors_of
from dsdoctor.overflow.replay.investigate import local_gradients
from dsdoctor.overflow.replay.provenance import with_buffers
from dsdoctor.overflow.verdict.evidence import bad_gradient
from dsdoctor.overflow.verdict.verdict import judge
from dsdoctor.rules import book

SCALE_NOT_KNOWN = 0.0
"""The loss scale where the loss is no output of the model, and float16 is among the gradients."""


def backward_report(frames: tuple[Frame, ...], found: FirstBad | None, began: Tensor, *, batch: int) -> RankReport:
    """What a rank knows of a backward. ``began``: the gradient of the model's output, which is the loss scale if that is a loss."""
    backward = [frame for frame in frames if frame.phase is CallPhase.BACKWARD]
    is_half = any(stats.dtype == "float16" for frame in backward for stats in frame.measured)
    if not is_half:
        scale = 1.0
    elif began.dim() == 0 and bool(torch.isfinite(began)):
        scale = max(1.0, float(began.abs()))
    else:
        scale = SCALE_NOT_KNOWN
    bad = tuple(stats for stats in local_gradients(backward) if stats.is_bad)
    return RankReport(
        rank=ranks.this_rank(),
        world=ranks.world(),
        batch=batch,
        dtype="float16" if is_half else "float32",
        first_bad=found,
        scale=Scale(value=scale),
        named=bad,
        local=bad,
    )


def backward_words(reports: list[RankReport]) -> tuple[str, bool]:
    """What is said of the gradients of all ranks, and whether that ends the training."""
    first = next(report for report in reports if report.first_bad is not None)
    if any(report.scale.value == SCALE_NOT_KNOWN for report in reports):
        made = bad_gradient(first, tuple(reports))
        return f"{made}; its loss is computed outside of the model, so that a loss scale may be the cause", False
    findings = judge(reports)
    if findings and findings[0].severity is Severity.ERROR:
        return findings[0].title, True
    made = bad_gradient(first, tuple(reports))
    return f"{made}, at a loss scale of {first.scale.value:g}, which may be the cause", False


class DebugUnderflowOverflow:
    """Watches every call of every module of ``model`` and stops at the first nan or inf, as the guide describes.

    At a hit the last ``max_frames_to_save`` frames are printed and ValueError is raised, on all ranks alike when the model
    trains on several. Batches are calls of ``model``, from 0. Those of ``trace_batch_nums`` are printed whole and not
    judged. ``abort_after_batch_num`` raises ValueError after that batch. Unlike the guide's class it also sees keyword
    inputs and outputs of any nesting, works with a ZeRO-3 engine's module, and does not stop at masks of -inf. On several
    ranks a forward without gradients is reported and raises nothing, because the other ranks may not take part in it.

    The attributes of transformers' class are here too: ``frames`` (texts of the last calls), ``frame``, ``total_calls``,
    ``detected_overflow``, ``module_names``, ``prefix``, ``reset_saved_frames``, ``dump_saved_frames``, ``trace_frames``; the
    functions that it builds its frames with are not. A part of the model that is called by itself (``model.encoder(x)``) is a
    batch of its own.

    ``collective``: whether ranks agree when a backward begins; False where they do not run backward equally often
    (pipelines, uneven data). ``gradients``: also judge the gradients when the backward has ended; those that only the loss scale
    makes too large are told and raise nothing. Raises UsageError for numbers that make no sense and for a model watched already.
    """

    prefix = guide_format.PREFIX

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: list[int] | None = None,
        abort_after_batch_num: int | None = None,
        *,
        collective: bool = True,
        gradients: bool = False,
    ) -> None:
        traced = tuple(trace_batch_nums or ())
        Options(
            level="trace" if traced else "frames",
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=traced,
            abort_after_batch_num=abort_after_batch_num,
        ).check()
        # each tensor would be measured twice
        if is_watched(model):
            raise UsageError(
                f"this {type(model).__name__} is watched already",
                hint="call detach() on the first watch, or keep only the first",
            )
        book.prepare("overflow")
        if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
            write_stderr(
                "DebugUnderflowOverflow: the model is compiled, and hooks do not run inside its graphs; watch it before "
                "compiling, or run with torch.compiler.set_stance('force_eager')\n"
            )
        self.model = model
        self.trace_batch_nums = traced
        self.abort_after_batch_num = abort_after_batch_num
        self.max_frames_to_save = max_frames_to_save
        self._collective = collective
        self._records: deque[BatchRecord] = deque(maxlen=2)
        self.frame: list[str] = []
        self.detected_overflow = False
        self.module_names = {module: name for name, module in model.named_modules()}
        self._gradients = gradients
        self._calls_before = 0
        self._hooks = Hooks(
            model,
            on_record=self._on_record,
            integers=True,
            rank=ranks.this_rank(),
            gradients=gradients,
            gradients_apart=gradients,
            parts_end=self._after_part,
        )
        self._waiting: BatchRecord | None = None
        self._found: FirstBad | None = None
        self._root = model.register_forward_hook(Hook(self._after_root), with_kwargs=False)

    @property
    def batch_number(self) -> int:
        """How many batches have ended."""
        return self._hooks.batch

    @property
    def frames(self) -> deque[str]:
        """The texts of the last calls, of the batches that have ended."""
        return deque((guide_format.text([frame]) for frame in self._kept()), self.max_frames_to_save)

    @property
    def total_calls(self) -> int:
        """How many calls of modules were seen."""
        open_record = self._hooks.record
        return self._calls_before + (0 if open_record is None else _forward_calls(open_record))

    def reset_saved_frames(self) -> None:
        """Forget the frames that are kept."""
        self._records.clear()

    def dump_saved_frames(self) -> None:
        """Print the frames that are kept, as at a hit, and forget them."""
        print(guide_format.detected(self.batch_number, tuple(self._kept())))
        self.reset_saved_frames()

    def trace_frames(self) -> None:
        """Print the frames that are kept and nothing else, and forget them."""
        print(guide_format.text(self._kept()))
        self.reset_saved_frames()

    def _kept(self) -> deque[Frame]:
        frames = (frame for record in self._records for frame in record.frames())
        return deque((frame for frame in frames if frame.phase is CallPhase.FORWARD), self.max_frames_to_save)

    def detach(self) -> None:
        """Take every hook away."""
        self._hooks.detach()
        self._root.remove()

    def __enter__(self) -> "DebugUnderflowOverflow":
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _on_record(self, record: BatchRecord) -> None:
        record.settle_forward()
        self._calls_before += _forward_calls(record)
        self._records.append(record)
        if record.batch in self.trace_batch_nums:
            print(guide_format.text(record.frames()))
        else:
            self._judge(record)
        if self.abort_after_batch_num is not None and record.batch >= self.abort_after_batch_num:
            raise ValueError(
                f"DebugUnderflowOverflow: stopped after batch {record.batch}, as abort_after_batch_num asks"
            )

    def _judge(self, record: BatchRecord) -> None:
        found = first_bad(record.frames()) if record.readings.any_bad else None
        found = None if found is None else with_buffers(self.model, found)
        self.detected_overflow = self.detected_overflow or found is not None
        together = self._collective and ranks.is_together()
        if (together or self._gradients) and torch.is_grad_enabled() and (together or found is None):
            self._waiting, self._found = record, found
        elif found is not None and together:
            # perhaps this rank evaluates alone: an exception here would leave the others waiting
            self._print_reports([self._rank_report(record, found)])
        elif found is not None:
            self._stop([self._rank_report(record, found)])

    def _after_part(self, output: Any) -> None:
        self._after_root(self.model, (), output)

    def _after_root(self, _model: nn.Module, _args: Any, output: Any) -> None:
        """Ranks agree when the backward begins, which all of them do together; a forward on one rank alone has none."""
        record, self._waiting = self._waiting, None
        if record is None:
            return
        heads = [tensor for _, tensor in tensors_of("", output) if tensor.requires_grad]
        if not heads and self._found is not None:
            self._print_reports([self._rank_report(record, self._found)])
        found, agreed = self._found, False

        def agree(gradient: Tensor) -> None:
            nonlocal agreed
            if agreed:
                return
            agreed = True
            if self._collective and ranks.any_rank(found is not None, device_of(self.model)):
                self._stop(ranks.gather(self._rank_report(record, found)))
            if self._gradients:
                began = gradient.detach()
                torch.autograd.Variable._execution_engine.queue_callback(
                    partial(Hook(self._judge_gradients), record, began)
                )

        for head in heads:
            head.register_hook(Hook(agree))

    def _judge_gradients(self, record: BatchRecord, began: Tensor) -> None:
        """The backward has ended. ``began``: the gradient of the model's output, which is the loss scale if that is a loss."""
        record.settle()
        frames = tuple(record.frames())
        found = first_bad(frames)
        together = self._collective and ranks.is_together()
        if not (ranks.any_rank(found is not None, device_of(self.model)) if together else found is not None):
            return
        report = backward_report(frames, found, began, batch=record.batch)
        reports = ranks.gather(report) if together else [report]
        words, ends = backward_words(reports)
        if ranks.this_rank() == 0 or not together:
            for each in reports:
                if each.first_bad is not None:
                    print(guide_format.COLUMNS, *guide_format.lines(each.first_bad.frame), sep="\n")
            print(f"DebugUnderflowOverflow: batch_number={record.batch}: {words}")
        if ends:
            self.detected_overflow = True
            raise ranks.OverflowDetected(
                f"DebugUnderflowOverflow: inf/nan detected during batch_number={record.batch}: {words}"
            )

    def _rank_report(self, record: BatchRecord, found: FirstBad | None) -> RankReport:
        last = () if found is None else self._last_frames(found)
        return RankReport(rank=ranks.this_rank(), world=ranks.world(), batch=record.batch, first_bad=found, frames=last)

    def _last_frames(self, found: FirstBad) -> tuple[Frame, ...]:
        """The frames up to the first bad call, from the batch before too if this one is short."""
        kept: deque[Frame] = deque(maxlen=self.max_frames_to_save)
        for record in self._records:
            for frame in record.frames():
                if frame.batch < found.frame.batch or frame.order <= found.frame.order:
                    kept.append(frame)
        return tuple(kept)

    def _stop(self, rank_reports: list[RankReport]) -> None:
        """Print what every rank saw, then raise."""
        raise ranks.OverflowDetected(self._print_reports(rank_reports))

    def _print_reports(self, rank_reports: list[RankReport]) -> str:
        """Print what every rank saw, in rank order and once. Returns the verdict in a line."""
        findings = judge(rank_reports)
        if ranks.this_rank() == min(rank_report.rank for rank_report in rank_reports):
            for rank_report in rank_reports:
                if rank_report.first_bad is not None:
                    print(f"rank {rank_report.rank}:\n" if len(rank_reports) > 1 else "", end="")
                    print(*guide_format.first_words(rank_report.first_bad.frame), sep="\n")
                    print(guide_format.detected(rank_report.batch, rank_report.frames))
        titles = "; ".join(finding.title for finding in findings)
        verdict = f"DebugUnderflowOverflow: inf/nan detected during batch_number={rank_reports[0].batch}: {titles}"
        if len(rank_reports) < ranks.world() and self._collective:
            print(f"rank {ranks.this_rank()}: {verdict}")
        return verdict


def _forward_calls(record: BatchRecord) -> int:
    return sum(call.phase is CallPhase.FORWARD for call in record.calls)


def detect_overflow(var: Any, ctx: str) -> bool:
    """Whether a tensor holds nan or inf, and if so print it: ``ctx has nans``, ``ctx has infs``, then the figures.

    One wait for the device, whatever the tensor. None, empty tensors, whole numbers and booleans hold neither.
    """
    if not isinstance(var, Tensor):
        return False
    stats = stats_of_tensor(var, ctx)
    if stats is None or not stats.is_bad:
        return False
    if stats.nan:
        print(f"{ctx} has nans")
    if stats.posinf or stats.neginf:
        print(f"{ctx} has infs")
    shape = "x".join(map(str, stats.shape)) or "0-d"
    finite = "no finite element" if stats.absmax is None else f"finite up to {stats.absmax:.2e}"
    print(
        f"  {stats.nan} nan, {stats.posinf} inf, {stats.neginf} -inf of {stats.count}; {finite}; {stats.dtype} {shape}"
    )
    return True


def is_watched(model: nn.Module) -> bool:
    """Whether a watch measures what the model's modules give."""
    functions = (hook.function for hook in model._forward_hooks.values() if isinstance(hook, Hook))
    return any(isinstance(getattr(function, "__self__", None), Hooks) for function in functions)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter; the CPU for a model without any."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
