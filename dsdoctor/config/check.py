"""config: a DeepSpeed configuration -> what the installed DeepSpeed will make of it, as findings; and a corrected text."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsdoctor.builder.plan.choices import accelerator_of
from dsdoctor.builder.source.fetch import lay_out
from dsdoctor.builder.source.op_loads import ops_of_config
from dsdoctor.builder.source.training_config import MAX_CONFIG_BYTES, training_configs
from dsdoctor.config.answer import Asked, ConfigContext, Correction, Request, Verdict, ask, dotted, walk
from dsdoctor.config.document import ReadConfig, correct, exists, parse, text_of
from dsdoctor.config.huggingface import filled_lines
from dsdoctor.config.judge import ConfigJudged, Fixed, corrections_of, judge
from dsdoctor.config.keys import stages_written
from dsdoctor.config.other_file import refuse_other
from dsdoctor.config.releases import recorded, versions
from dsdoctor.config.schema import json_schema
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.files import check_target, refuse_large, write_text
from dsdoctor.core.finding import Finding, Severity, Step, has_error, step
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Gap
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.workspace import cache_folder, private_folder, workspace
from dsdoctor.probe.observe import Observation, observe
from dsdoctor.rules import book
from dsdoctor.ui.screen import first_step, next_line, screen_lines
from dsdoctor.ui.terminal import VerdictLine, finding_lines

OP_OF_EVERY_CPU_TRAINING = "deepspeed_shm_comm"
MAX_PASSES = 3


@dataclass(frozen=True, kw_only=True)
class ConfigOrder:
    """What the user asks. ``arguments``: a file of TrainingArguments; ``accelerate``: accelerate's file; ``model``: what
    transformers reads; ``world``: data-parallel ranks; ``ranks``: all of them; ``source``: another DeepSpeed than the one that is
    installed."""

    file: str
    python: str
    arguments: Path | None = None
    accelerate: Path | None = None
    model: Path | None = None
    world: int | None = None
    ranks: int | None = None
    machine: Path | None = None
    source: str | None = None


def judge_config(order: ConfigOrder) -> ConfigJudged:
    """Judge a configuration. Raises UsageError for what is none, ImpossiblePlan where no DeepSpeed answers."""
    found = _read(order.file)
    _check_files(order)
    return _judge(order, found, observe(order.python, order.machine, whole=False))


def config_schema(order: ConfigOrder) -> dict[str, Any]:
    """The JSON schema of ds_config.json: of the DeepSpeed that is installed, of ``source``, else of the newest known release."""
    return json_schema(_ask(order, None, observe(order.python, None, whole=False)))


def fix_config(order: ConfigOrder, out: Path) -> Fixed:
    """Judge a configuration, write a corrected one to ``out``, and judge that. Raises UsageError where it cannot be written."""
    found = _read(order.file)
    _check_files(order)
    check_target(out)
    if out.exists() and exists(order.file) and out.samefile(order.file):
        raise UsageError(f"--fix {out} is the input file, which dsdoctor never changes", hint="--fix corrected.json")
    observation = observe(order.python, order.machine, whole=False)
    before = after = _judge(order, found, observation)
    made: list[Correction] = []
    in_place, plain = True, bool(order.arguments or order.accelerate)
    # a section that had another name is judged only once it has the right one
    for _ in range(MAX_PASSES):
        corrections = tuple(corrections_of(after.verdicts))
        if not corrections and (after.read.plain_json or not plain):
            break
        corrected = correct(after.read.text, after.read.config, corrections, plain_json=plain)
        if not corrected.made and corrected.text == after.read.text:
            break
        made += corrected.made
        in_place = in_place and corrected.in_place
        after = _judge(order, parse(corrected.text, found.name), observation)
    fixed = Fixed(
        before=before, after=after, corrections=tuple(made), in_place=in_place, refused=refusal_to_fix(found, after)
    )
    if fixed.refused is None:
        write_text(out, after.read.text)
    return fixed


def refusal_to_fix(found: ReadConfig, after: ConfigJudged) -> Finding | None:
    """Why a correction is not written: it would train with a ZeRO stage that the file names nowhere."""
    written, facts = stages_written(found.config), after.asked.facts
    if facts is None or not written or facts.stage in written:
        return None
    stages = " and ".join(map(str, sorted(written)))
    return book.finding("config-fix-changes-stage", Severity.ERROR, stage=facts.stage, written=stages, file=found.name)


def config_lines(judged: ConfigJudged, file: str, *, verbose: bool = False) -> Iterator[str]:
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


def fixed_lines(fixed: Fixed, out: str) -> Iterator[str]:
    """What was corrected, and what is left to do by hand."""
    if fixed.refused is not None:
        yield from config_lines(
            replace(fixed.before, verdicts=(Verdict(finding=fixed.refused), *fixed.before.verdicts)), ""
        )
        return
    for correction in fixed.corrections:
        yield f"· {_correction_words(correction)}"
    kept = "" if fixed.in_place else ", rewritten without comments"
    many = len(fixed.corrections)
    yield f"{many or 'no'} correction{'' if many == 1 else 's'} in {out}{kept}"
    left = [finding for finding in fixed.after.findings if finding.severity is not Severity.NOTE]
    if left:
        yield "to fix by hand:"
    yield from finding_lines(left)
    yield ""
    yield VerdictLine(verdict_line(replace(fixed.after, read=replace(fixed.after.read, name=out))))


def verdict_line(judged: ConfigJudged) -> str:
    """How it ends: errors, or what the training will be."""
    errors = sum(finding.severity is Severity.ERROR for finding in judged.findings)
    by = f"DeepSpeed {judged.asked.version}"
    if errors:
        return f"✗ {errors} error{'s' if errors > 1 else ''}: {by} will not honor {judged.read.name}"
    facts = judged.asked.facts
    if judged.asked.recorded:
        return f"! no error in {judged.read.name} by the keys and types of {by}, which is not installed"
    if facts is None or any(finding.rule == "config-not-judged" for finding in judged.findings):
        return f"! {by} could not check all of {judged.read.name}"
    precision = "fp16" if facts.fp16 else "bf16" if facts.bf16 else "fp32"
    offload = "".join(
        f", {what} on {device}"
        for what, device in (("optimizer", facts.offload_optimizer), ("parameters", facts.offload_param))
        if device != "none"
    )
    trains = f"ZeRO stage {facts.stage}, {precision}{offload}"
    if warnings := sum(finding.severity is Severity.WARNING for finding in judged.findings):
        return f"! {by} accepts {judged.read.name}, with {warnings} warning{'s' * (warnings > 1)}: {trains}"
    return f"✓ {by} accepts {judged.read.name} as written: {trains}"


def parse_gpus(text: str) -> int:
    """How many GPUs ``8x80G`` are. Raises UsageError for what says no such thing.

    >>> parse_gpus("8x80G"), parse_gpus("4")
    (8, 4)
    """
    found = re.fullmatch(r"([1-9]\d{0,5})(?:x\d+(?:\.\d+)?G(?:i?B)?)?", text)
    if not found:
        raise UsageError(f"--gpus {text!r} is not a number of GPUs", hint="--gpus 8x80G: eight GPUs of 80 GB")
    return int(found[1])


def _read(file: str) -> ReadConfig:
    """Read what the user names. Raises UsageError for another program's file."""
    text, name = text_of(file)
    refuse_other(text, name)
    return parse(text, name)


def _judge(order: ConfigOrder, found: ReadConfig, observation: Observation) -> ConfigJudged:
    if order.arguments or order.accelerate:
        found = replace(found, config=found.by_json())
    asked = _ask(order, found.config, observation)
    context = ConfigContext(
        config=found.config,
        asked=asked,
        file=order.file if found.name == order.file else "ds_config.json",
        plain_json=found.plain_json,
        filled_by="transformers" if order.arguments else "accelerate" if order.accelerate else "",
        capabilities=_capabilities(observation),
        missing_ops={},
        folders={
            str(value): Path(str(value)).is_dir() for path, value in walk(found.config) if path[-1] == "nvme_path"
        },
    )
    context = replace(context, missing_ops=_missing_ops(context, observation))
    return ConfigJudged(read=found, asked=asked, verdicts=judge(context), filled=tuple(filled_lines(context)))


def _check_files(order: ConfigOrder) -> None:
    """The files beside it are looked for before anything is asked."""
    for option, path in (("--hf", order.arguments), ("--accelerate", order.accelerate)):
        if path is not None and not path.is_file():
            raise UsageError(f"{option} {path} does not exist", hint=f"{option} FILE, a JSON or YAML file")
        if path is not None:
            refuse_large(path, f"{option} {path}", MAX_CONFIG_BYTES)
    if order.model is not None and not order.model.exists():
        raise UsageError(
            f"--model {order.model} does not exist", hint="--model config.json, or the folder that holds it"
        )
    if order.model is not None:
        refuse_large(order.model, f"--model {order.model}")


def _ask(order: ConfigOrder, config: dict[str, Any] | None, observation: Observation) -> Asked:
    if observation.is_here and observation.machine.torch is None and _is_known(order):
        return recorded(order.source or versions()[0], config, order.world)
    host = LocalHost()
    python = (
        observation.machine.python.executable if observation.is_here and observation.machine.python else order.python
    )
    request = Request(
        config=config,
        world=order.world,
        ranks=order.ranks,
        arguments=_name(order.arguments),
        accelerate=_name(order.accelerate),
        model=_name(order.model),
    )
    accelerator = accelerator_of(observation.machine, BuildRequest())
    if order.source is None:
        return answered(ask(host, python, request, accelerator=accelerator), order, config)
    with workspace(private_folder(cache_folder(host))) as place:
        laid = lay_out(host, order.source, place / "source", cache=cache_folder(host), python=python, offline=False)
        request = replace(request, source=str(laid.folder))
        return answered(ask(host, python, request, accelerator=accelerator), order, config)


def answered(answer: Asked | Gap, order: ConfigOrder, config: dict[str, Any] | None) -> Asked:
    """DeepSpeed's answer, or where none is installed what its releases read. Raises ImpossiblePlan for one that is broken."""
    if not isinstance(answer, Gap):
        return answer
    missing = re.search(r"No module named '(\w+)'", answer.reason)
    name = missing[1] if missing else ""
    if name in {"deepspeed", "torch"} and _is_known(order):
        return recorded(order.source or versions()[0], config, order.world)
    if name == "deepspeed":
        message = f"no DeepSpeed is installed for {order.python}"
        hint = "run dsdoctor install, or use another one with --source 0.19.8"
    else:
        message = f"DeepSpeed could not be queried: {answer.reason}"
        hint = "dsdoctor check shows why"
    raise ImpossiblePlan(message, hint=hint)


def _is_known(order: ConfigOrder) -> bool:
    """Whether the package's own table answers: a release that it has, and nothing that only transformers or accelerate fill in."""
    return (order.source is None or order.source in versions()) and not (order.arguments or order.accelerate)


def _name(path: Path | None) -> str:
    return str(path.absolute()) if path else ""


def _capabilities(observation: Observation) -> tuple[str, ...]:
    machine = observation.machine
    by_torch = machine.torch.capabilities if machine.torch else ()
    return tuple(sorted({*by_torch, *(gpu.capability for gpu in machine.gpus if gpu.capability)}))


def _missing_ops(context: ConfigContext, observation: Observation) -> dict[str, str]:
    """Ops that the configuration loads and the installed DeepSpeed does not hold, with the reason."""
    installed = observation.machine.deepspeed
    if installed is None:
        return {}
    try:
        decided = training_configs(context.judged, name=context.file)
    except UsageError:
        # what is wrong in it is told by the other checks
        return {}
    wanted = ops_of_config(decided, accelerator=accelerator_of(observation.machine, BuildRequest()))
    ours = {op: why for op, why in wanted.items() if op not in installed.installed_ops}
    return {} if set(ours) == {OP_OF_EVERY_CPU_TRAINING} else ours


def _next_step(judged: ConfigJudged, file: str) -> Step | None:
    """What can be corrected is corrected, in another file; else the first command that a fix has."""
    if has_error(judged.findings) and any(corrections_of(judged.verdicts)) and exists(file):
        return step("python -m dsdoctor config {file} --fix fixed.json", file=file)
    return first_step(judged.findings)


def _correction_words(correction: Correction) -> str:
    path = dotted(correction.path)
    if correction.to is not None:
        return f"{path} -> {dotted(correction.to)}"
    return f"{path} removed" if correction.value is None else f"{path} = {correction.value}"
