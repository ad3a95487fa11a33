"""A judged configuration -> lines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dsdoctor.config.answer import dotted
from dsdoctor.config.judge import ConfigJudged, Fixed, corrections_of
from dsdoctor.config.question import Correction
from dsdoctor.core.finding import Severity, Step, has_error, step
from dsdoctor.ui.screen import first_step, next_line, screen_lines
from dsdoctor.ui.terminal import VerdictLine, finding_lines


def config_lines(judged: ConfigJudged, file: str, *, verbose: bool) -> Iterator[str]:
    """The worst findings, each "auto" with its value, what DeepSpeed trains with, and the next step."""
    yield from screen_lines(judged.findings, shows_all="" if verbose else "-v")
    if judged.filled:
        yield f'"auto" in {judged.read.name}:'
        yield from judged.filled
    if judged.findings or judged.filled:
        yield ""
    yield VerdictLine(verdict_line(judged))
    if command := _next_step(judged, file):
        yield next_line(command)


def _next_step(judged: ConfigJudged, file: str) -> Step | None:
    """What can be corrected is corrected, in another file; else the first command that a fix has."""
    if has_error(judged.findings) and any(corrections_of(judged.verdicts)) and Path(file).is_file():
        return step("python -m dsdoctor config {file} --fix fixed.json", file=file)
    return first_step(judged.findings)


def fixed_lines(fixed: Fixed, out: str) -> Iterator[str]:
    """What was corrected, and what is left to do by hand."""
    for correction in fixed.corrections:
        yield f"· {_said(correction)}"
    kept = "" if fixed.in_place else ", written anew and without comments"
    many = len(fixed.corrections)
    yield f"{many or 'no'} correction{'' if many == 1 else 's'} in {out}{kept}"
    left = [finding for finding in fixed.after.findings if finding.severity is not Severity.NOTE]
    if left:
        yield "left to you:"
    yield from finding_lines(left)
    yield ""
    yield VerdictLine(verdict_line(replace(fixed.after, read=replace(fixed.after.read, name=out))))


def _said(correction: Correction) -> str:
    path = dotted(correction.path)
    if correction.to is not None:
        return f"{path} is {dotted(correction.to)} now"
    return f"{path} is taken out" if correction.value is None else f"{path} is {correction.value} now"


def verdict_line(judged: ConfigJudged) -> str:
    """How it ends: errors, or what the training will be."""
    errors = sum(finding.severity is Severity.ERROR for finding in judged.findings)
    by = f"DeepSpeed {judged.asked.version}"
    if errors:
        return f"✗ {errors} error{'s' if errors > 1 else ''}: {by} does not do what {judged.read.name} says"
    facts = judged.asked.facts
    if facts is None or any(finding.rule == "config-not-judged" for finding in judged.findings):
        return f"! {by} could not judge all of {judged.read.name}"
    precision = "fp16" if facts.fp16 else "bf16" if facts.bf16 else "fp32"
    offload = "".join(
        f", {what} on {device}"
        for what, device in (("optimizer", facts.offload_optimizer), ("parameters", facts.offload_param))
        if device != "none"
    )
    trains = f"ZeRO stage {facts.stage}, {precision}{offload}"
    if warnings := sum(finding.severity is Severity.WARNING for finding in judged.findings):
        return f"! {by} reads {judged.read.name}, with {warnings} warning{'s' * (warnings > 1)}: {trains}"
    return f"✓ {by} reads {judged.read.name} as it is written: {trains}"
