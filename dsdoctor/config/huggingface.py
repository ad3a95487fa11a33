"""The configuration against TrainingArguments and accelerate's file, as their own functions told. Generators of verdicts."""

import json
import re
from collections.abc import Iterator

from dsdoctor.config.answer import Correction, Question, Verdict, lookup
from dsdoctor.core.finding import Finding, step

NO_TEXT = re.compile(r"UnicodeDecodeError: '\w+' codec can't decode")


def mismatches(question: Question) -> Iterator[Verdict]:
    """Values that are not those of TrainingArguments: the Trainer refuses to train."""
    for each in question.asked.filled.mismatches if question.asked.filled else ():
        path = tuple(each.path.split("."))
        argument = each.argument or each.path
        title = (
            f"{each.path} is {each.value} here, and {each.wanted} in TrainingArguments ({argument}): no training begins"
        )
        fix = f'write "auto" for {each.path}, and TrainingArguments decides; or change {argument} there'
        found = Finding.error("config-trainer-mismatch", title, fix=fix)
        yield Verdict(finding=found, path=path, correction=Correction(path=path, value='"auto"'))


def refusals(question: Question) -> Iterator[Verdict]:
    """What transformers or accelerate refuse in their own words."""
    for message in question.asked.filled.refused if question.asked.filled else ():
        who = question.filled_by
        first, *more = message.strip().splitlines()
        title = f"{who} refuses this configuration: {first}"
        found = Finding.error("config-trainer-refuses", title, evidence=more[:6], fix="change what it names")
        yield Verdict(finding=found)


def plain_json(question: Question) -> Iterator[Verdict]:
    """Comments and names without quotes, which DeepSpeed reads and the others do not."""
    if question.filled_by and not question.plain_json:
        title = (
            f"{question.file} is no plain JSON: DeepSpeed reads comments and bare names, {question.filled_by} does not"
        )
        by_trainer = step("python -m dsdoctor config {file} --hf ARGUMENTS.json --fix PLAIN.json", file=question.file)
        by_file = step(
            "python -m dsdoctor config {file} --accelerate ACCELERATE.yaml --fix PLAIN.json", file=question.file
        )
        steps = (by_trainer if question.filled_by == "transformers" else by_file,)
        fix = "take comments out, quote names, and put commas between values"
        yield Verdict(finding=Finding.error("config-not-plain-json", title, fix=fix, steps=steps))


def accelerate_file(question: Question) -> Iterator[Verdict]:
    """accelerate's own configuration: does it use DeepSpeed, and this file?"""
    said = question.asked.accelerate
    if said is None:
        return
    if not said.uses_deepspeed:
        title = "accelerate's configuration does not use DeepSpeed: it never sees this file"
        fix = "set distributed_type: DEEPSPEED, and deepspeed_config.deepspeed_config_file"
        yield Verdict(finding=Finding.error("config-accelerate-without-file", title, fix=fix))
    elif not said.file:
        title = (
            "accelerate's configuration names no deepspeed_config_file: it makes a DeepSpeed configuration of its own"
        )
        fix = f"add to deepspeed_config: deepspeed_config_file: {question.file}"
        yield Verdict(finding=Finding.error("config-accelerate-without-file", title, fix=fix))
    elif said.file.rpartition("/")[2] != question.file.rpartition("/")[2]:
        title = f"accelerate's configuration names {said.file}, and {question.file} is judged here"
        fix = "judge the file that it names, or name this one there"
        yield Verdict(finding=Finding.warning("config-accelerate-other-file", title, fix=fix))


def not_filled(question: Question) -> Iterator[Verdict]:
    """transformers or accelerate could not be asked."""
    if question.asked.not_filled:
        title = f'{question.filled_by} could not be asked, so no "auto" was filled in and nothing compared'
        fix = "name the Python of the environment that trains with --python, or correct the file that was named"
        yield Verdict(
            finding=Finding.warning("config-not-judged", title, evidence=(question.asked.not_filled,), fix=fix)
        )


def not_asked(question: Question) -> Iterator[Verdict]:
    """What could not be judged for another reason."""
    made = {"optimizer": question.asked.optimizer, "scheduler": question.asked.scheduler}
    reasons = [f"{name} {each.name}: {each.not_asked}" for name, each in made.items() if each and each.not_asked]
    if question.asked.not_asked:
        reasons.append(question.asked.not_asked)
    if question.asked.facts is None:
        reasons.append(
            "DeepSpeed refuses the configuration as a whole, so stage, optimizer and scheduler were not looked at"
        )
    if reasons:
        title = "a part of the configuration could not be judged"
        fix = "correct what else is named, and judge it again"
        if any(NO_TEXT.search(reason) for reason in reasons):
            fix = "Python reads its files in a locale without UTF-8 here: unset PYTHONUTF8, and export LC_ALL=C.UTF-8"
        yield Verdict(finding=Finding.warning("config-not-judged", title, evidence=reasons, fix=fix))
    elif question.asked.not_tried:
        title = "no engine could be made of it here: what only deepspeed.initialize refuses is not told"
        fix = "see what it says when the training starts"
        yield Verdict(finding=Finding.note("config-not-judged", title, evidence=(question.asked.not_tried,), fix=fix))


def filled_lines(question: Question) -> Iterator[str]:
    """Each "auto" with the value it gets, and where from."""
    filled = question.asked.filled
    if filled is None:
        return
    autos = {each.path: each for each in filled.filled}
    width = max((len(path) for path in (*autos, *filled.unknown)), default=0)
    for path, each in autos.items():
        yield f"  {path:<{width}}  {_value(each.value)}  from {each.source}"
    for path in dict.fromkeys(filled.unknown):
        if lookup(question.config, tuple(path.split("."))) == "auto":
            yield f"  {path:<{width}}  is filled in when it trains: {_depends_on(path)}"


def _value(text: str) -> str:
    return text if len(text) <= 40 else json.dumps(json.loads(text))[:40] + "..."


def _depends_on(path: str) -> str:
    if path.startswith("zero_optimization"):
        return "with the model's hidden size (--model)"
    if path == "train_batch_size":
        return "with the number of ranks (--world)"
    if path.startswith("scheduler"):
        return "with the number of training steps"
    return "by what the script hands to accelerator.prepare()"
