"""The configuration against TrainingArguments and accelerate's file, as their own functions told. Generators of verdicts."""

import json
import re
from collections.abc import Iterator

from dsdoctor.config.answer import ConfigContext, Correction, Verdict, lookup
from dsdoctor.core.finding import Severity
from dsdoctor.rules import book

NO_TEXT = re.compile(r"UnicodeDecodeError: '\w+' codec can't decode")


def mismatches(context: ConfigContext) -> Iterator[Verdict]:
    """Values that are not those of TrainingArguments: the Trainer refuses to train."""
    for each in context.asked.filled.mismatches if context.asked.filled else ():
        path = tuple(each.path.split("."))
        found = book.finding(
            "config-trainer-mismatch",
            Severity.ERROR,
            key=each.path,
            value=str(each.value),
            wanted=str(each.wanted),
            argument=each.argument or each.path,
        )
        # a default of TrainingArguments, which nobody wrote, does not replace what was written here
        correction = Correction(path=path, value='"auto"') if each.written else None
        yield Verdict(finding=found, path=path, correction=correction)


def refusals(context: ConfigContext) -> Iterator[Verdict]:
    """What transformers or accelerate refuse in their own words."""
    for message in context.asked.filled.refused if context.asked.filled else ():
        first, *more = message.strip().splitlines()
        found = book.finding(
            "config-trainer-refuses", Severity.ERROR, evidence=more[:6], who=context.filled_by, message=first
        )
        yield Verdict(finding=found)


def plain_json(context: ConfigContext) -> Iterator[Verdict]:
    """Comments and names without quotes, which DeepSpeed reads and the others do not."""
    if context.filled_by and not context.plain_json:
        found = book.finding(
            "config-not-plain-json",
            Severity.ERROR,
            case="" if context.filled_by == "transformers" else "accelerate",
            file=context.file,
            who=context.filled_by,
        )
        yield Verdict(finding=found)


def accelerate_file(context: ConfigContext) -> Iterator[Verdict]:
    """accelerate's own configuration: does it use DeepSpeed, and this file?"""
    said = context.asked.accelerate
    if said is None:
        return
    if not said.uses_deepspeed:
        yield Verdict(finding=book.finding("config-accelerate-without-file", Severity.ERROR, case="without-deepspeed"))
    elif not said.file:
        yield Verdict(finding=book.finding("config-accelerate-without-file", Severity.ERROR, file=context.file))
    elif said.file.rpartition("/")[2] != context.file.rpartition("/")[2]:
        found = book.finding("config-accelerate-other-file", Severity.WARNING, other=said.file, file=context.file)
        yield Verdict(finding=found)


def not_filled(context: ConfigContext) -> Iterator[Verdict]:
    """transformers or accelerate could not be queried."""
    if reason := context.asked.not_filled:
        found = book.finding(
            "config-not-judged", Severity.WARNING, case="auto", evidence=(reason,), who=context.filled_by
        )
        yield Verdict(finding=found)


def not_asked(context: ConfigContext) -> Iterator[Verdict]:
    """What could not be judged for another reason."""
    if context.asked.recorded:
        version = context.asked.version
        yield Verdict(finding=book.finding("config-not-judged", Severity.NOTE, case="recorded", version=version))
        return
    made = {"optimizer": context.asked.optimizer, "scheduler": context.asked.scheduler}
    reasons = [f"{name} {each.name}: {each.not_asked}" for name, each in made.items() if each and each.not_asked]
    if context.asked.not_asked:
        reasons.append(context.asked.not_asked)
    if context.asked.facts is None:
        reasons.append(
            "DeepSpeed rejects the configuration as a whole, so stage, optimizer and scheduler were not checked"
        )
    if reasons:
        no_utf8 = any(NO_TEXT.search(reason) for reason in reasons)
        found = book.finding("config-not-judged", Severity.WARNING, case="locale" if no_utf8 else "", evidence=reasons)
        yield Verdict(finding=found)
    elif reason := context.asked.not_tried:
        yield Verdict(finding=book.finding("config-not-judged", Severity.NOTE, case="engine", evidence=(reason,)))


def filled_lines(context: ConfigContext) -> Iterator[str]:
    """Each "auto" with the value it gets, and where from."""
    filled = context.asked.filled
    if filled is None:
        return
    autos = {each.path: each for each in filled.filled}
    width = max((len(path) for path in (*autos, *filled.unknown)), default=0)
    for path, each in autos.items():
        yield f"  {path:<{width}}  {_value(each.value)}  from {each.source}"
    for path in dict.fromkeys(filled.unknown):
        if lookup(context.config, tuple(path.split("."))) == "auto":
            yield f"  {path:<{width}}  is filled in at training time: {_depends_on(path)}"


def _value(text: str) -> str:
    return text if len(text) <= 40 else json.dumps(json.loads(text))[:40] + "..."


def _depends_on(path: str) -> str:
    if path.startswith("zero_optimization"):
        return "from the model's hidden size (--model)"
    if path == "train_batch_size":
        return "from the number of ranks (--world)"
    if path.startswith("scheduler"):
        return "from the number of training steps"
    return "from what the script passes to accelerator.prepare()"
