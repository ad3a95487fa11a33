"""Logs without an error line that are not well all the same: losses that are no numbers, an end in the middle of something."""

import re

from dsdoctor.core.finding import Finding, step
from dsdoctor.diagnosis.models import Facts
from dsdoctor.diagnosis.scan import Scan
from dsdoctor.diagnosis.timeline import Timeline

SERIES = 3
"""So many losses in a row that are no numbers are no accident."""

SKIPPED = re.compile(rb"\bstep=(\d{1,9}), skipped=(\d{1,9})\b")
SCALE = re.compile(
    rb"(?:OVERFLOW!|[Oo]verflow detected\.).{0,80}Attempted loss scale: (\d{1,12}(?:\.\d{1,9})?), reducing to"
)
FEW_STEPS, MOSTLY_SKIPPED = 20, 0.8
HALVED, LOW_SCALE, AT_THE_END = 10, 16, 12
"""A search for the loss scale at the start ends far above this; one that goes on so low, up to the last lines, does not end."""

LAST_LINES = 6
BAR = re.compile(rb"\d{1,3}%\|[^|]{0,200}\|\s{0,9}(\d{1,9})/(\d{1,9}) \[")
ENDED = re.compile(rb"\b(?:100%|done|finished|completed?|saved|train_runtime|[Ss]uccess)")


def losses_are_nan(timeline: Timeline, last_line: int, facts: Facts) -> Finding | None:
    """Losses, or gradient norms, that became nan and stayed so."""
    series = timeline.nans
    if series.count < SERIES or series.finite_again(last_line, timeline.recent):
        return None
    what = "the gradient norm is" if series.of_norms else "the loss is"
    since = f" from step {series.step} on" if series.step is not None else ""
    if series.before:
        return _nan_in_the_backward(timeline, facts)
    return Finding.error(
        "losses-are-nan",
        f"{what} nan{since}, to the end of the log: nothing is learned any more",
        evidence=(
            f"line {series.first}: {series.text}",
            f"{series.count} such lines, the last one is line {series.last}",
        ),
        fix="find the module and the batch where the first inf or nan arises; in fp16 try bf16, else a lower learning rate; in "
        "bf16 with ZeRO try overlap_comm false and a newer DeepSpeed (gradients that are reduced while they are still written)",
        steps=(step("python -m dsdoctor.run SCRIPT.py"),),
    )


def _nan_in_the_backward(timeline: Timeline, facts: Facts) -> Finding:
    """A loss that was a number, whose gradients were none: the backward pass made them, not the data nor the learning rate."""
    series = timeline.nans
    kernel = {"sdpa": "torch's SDPA", "eager": "eager attention"}.get((facts.attention or "").lower(), facts.attention)
    used = f" (the log says: {kernel})" if kernel else ""
    return Finding.error(
        "losses-are-nan",
        f"the gradient norm is nan although the loss of that step was a number: the backward pass made it{used}, and nothing is "
        "learned from there on",
        evidence=(
            series.before,
            f"line {series.first}: {series.text}",
            f"{series.count} such lines, the last one is line {series.last}",
        ),
        fix="try another attention first (attn_implementation flash_attention_2, sdpa or eager): rows that are masked whole, by "
        "padding, give nan in some backward kernels. If it stays, try overlap_comm false and a newer DeepSpeed (gradients reduced "
        "while they are written), then find the first module whose gradient is nan",
        steps=(step("python -m dsdoctor.run SCRIPT.py"),),
    )


def steps_are_skipped(read: Scan) -> Finding | None:
    """fp16 overflows on nearly every step up to the end of the log: the counter of skipped steps, or a loss scale that sinks."""
    recent = list(read.timeline.recent)
    counted = [found for raw in recent for found in SKIPPED.finditer(raw)]
    if counted:
        steps, skipped = int(counted[-1][1]), int(counted[-1][2])
        if steps >= FEW_STEPS and skipped >= MOSTLY_SKIPPED * steps:
            return _skipped(f"{skipped} of {steps} steps were skipped for overflow", counted[-1][0])
    scales = [(age, float(found[1]), found[0]) for age, raw in enumerate(recent) if (found := SCALE.search(raw))]
    values = list(dict.fromkeys(value for _, value, _ in scales))
    sinks = len(values) >= HALVED and values == sorted(values, reverse=True) and values[-1] <= LOW_SCALE
    if sinks and len(recent) - scales[-1][0] <= AT_THE_END:
        return _skipped(f"the loss scale sank from {values[0]:g} to {values[-1]:g} without a stop", scales[-1][2])
    return None


def _skipped(what: str, text: bytes) -> Finding:
    return Finding.error(
        "fp16-loss-scale-floor",
        f"{what}: fp16 overflows in this model, and nothing is learned",
        evidence=(f"near the end of the log: {text.decode('utf-8', 'replace')}",),
        fix="train in bf16 where the GPU has it, or find the module where the first inf arises; a lower learning rate and "
        "gradient clipping help where it began in the middle of training",
        steps=(step("python -m dsdoctor.run SCRIPT.py"),),
    )


def cut_off(read: Scan) -> Finding | None:
    """A log that stops within a traceback, or within a progress bar."""
    begun = [one for mine in read.timeline.tracebacks.open.values() for one in mine]
    if begun and read.last_line - max(one.last for one in begun) < 20 and not read.timeline.failures:
        first = min(begun, key=lambda one: one.since)
        at = f"line {first.frames[-1].line} of {first.frames[-1].path}" if first.frames else f"line {first.since}"
        return Finding.error(
            "log-cut-off",
            f"the log stops within a traceback (last frame: {at}): the line with the exception is missing",
            evidence=(f"line {first.since}: Traceback (most recent call last):",),
            fix="give the log to its end, the error stream of every rank too",
            steps=(step("COMMAND 2>&1 | tee run.log"), step("python -m dsdoctor diagnose run.log")),
        )
    lines = [raw for raw in list(read.timeline.recent)[-LAST_LINES:] if raw.strip()]
    if _is_cut_json(read, lines):
        return _stopped("the log stops within a JSON document", "its last line")
    bars = [found for raw in lines[-1:] for found in BAR.finditer(raw[-600:])]
    if bars and int(bars[-1][1]) < int(bars[-1][2]) and not any(ENDED.search(raw[-400:]) for raw in lines[-1:]):
        state = f"{int(bars[-1][1])} of {int(bars[-1][2])}"
        return _stopped(f"the log stops within a progress bar, at {state}, without an end or an error", state)
    return None


def _is_cut_json(read: Scan, lines: list[bytes]) -> bool:
    return read.begins_with_json and bool(lines) and lines[-1].strip()[-1:] not in {b"}", b"]"}


def _stopped(title: str, where: str) -> Finding:
    return Finding.warning(
        "log-cut-off",
        f"{title}: it still runs, was killed without a word, or hangs",
        evidence=(f"the log ends at {where}",),
        fix="if it does not run any more, see how it ended: the launcher's last lines, the scheduler's record, the kernel's log; "
        "if it hangs, ask where each process stands",
        steps=(step("dmesg -T | grep -i -E 'killed process|out of memory'"), step("py-spy dump --pid PID")),
    )
