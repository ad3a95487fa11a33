""" "auto": who fills it in, and what becomes of it where nobody does."""

from collections.abc import Iterator

from dsdoctor.config.answer import Path, dotted, walk
from dsdoctor.config.keys import CHOSEN_BY_NAME
from dsdoctor.config.question import Question, Verdict
from dsdoctor.core.finding import Finding, instead, step
from dsdoctor.core.text import and_more

FILLED_BY_TRAINER = (
    *("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.params.lr", "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay"),
    *("scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps"),
    *("scheduler.params.total_num_steps", "fp16.enabled", "bf16.enabled", "zero_optimization.reduce_bucket_size"),
    *("zero_optimization.stage3_prefetch_bucket_size", "zero_optimization.stage3_param_persistence_threshold"),
)
"""The keys of transformers' integrations/deepspeed.py, trainer_config_process and trainer_config_finalize."""

FILLED_BY_ACCELERATE = (
    *(
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    ),
    *("zero_optimization.offload_param.nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
)
"""Those that only accelerate fills, for the Trainer too: plugin_to_config_mapping in its utils/dataclasses.py."""


def autos_for_others(question: Question) -> Iterator[Verdict]:
    """ "auto" in a file of which nobody said who fills it in, although somebody could."""
    if question.filled_by or question.in_training:
        return
    left = [path for path, _ in left_autos(question) if dotted(path) in {*FILLED_BY_TRAINER, *FILLED_BY_ACCELERATE}]
    if not left:
        return
    names = and_more([dotted(path) for path in left], 4)
    title = f'{len(left)} values are "auto", which only transformers\' Trainer and accelerate fill in'
    if len(left) == 1:
        title = f'{names} is "auto", which only transformers\' Trainer and accelerate fill in'
    steps = (
        step("python -m dsdoctor config {file} --hf ARGUMENTS.json", file=question.file),
        instead("python -m dsdoctor config {file} --accelerate ACCELERATE.yaml", file=question.file),
    )
    fix = "say who fills them in, and their values are judged too; a script of your own needs numbers there"
    yield Verdict(
        finding=Finding.warning("config-auto-for-trainer", title, evidence=(names,), fix=fix, steps=steps), path=left[0]
    )


def autos_for_nobody(question: Question) -> Iterator[Verdict]:
    """ "auto" where it is no value, and nobody fills it in."""
    for path, in_model in left_autos(question):
        fillable = dotted(path) in {*FILLED_BY_TRAINER, *FILLED_BY_ACCELERATE}
        if fillable and not question.filled_by and not question.in_training:
            continue
        yield _left(question, path, in_model=in_model)
    for name in question.asked.filled.unfilled if question.asked.filled else ():
        title = f'{name} is "auto", and accelerate, which makes the engine, refuses it: nobody fills that key in'
        path = tuple(name.split("."))
        yield Verdict(finding=Finding.error("config-auto-stays", title, fix=_number(question, path)), path=path)


def left_autos(question: Question) -> Iterator[tuple[Path, bool]]:
    """Each key that DeepSpeed gets as "auto", and whether its section drops it (else it stays text).

    None where whoever fills them in refused the whole before: that is told, and what would be left is not known.
    """
    if question.asked.filled and question.asked.filled.refused and not question.asked.filled.filled:
        return
    later = question.asked.filled.unknown if question.asked.filled else ()
    for path, value in walk(question.judged):
        if value != "auto" or dotted(path) in later:
            continue
        section, key = question.asked.section(path[:-1]), question.asked.key(path)
        if path[:-1] in CHOSEN_BY_NAME:
            yield path, False
        elif section is not None and not section.open and key is not None and key.default != '"auto"':
            yield path, bool(section.model)


def _left(question: Question, path: Path, *, in_model: bool) -> Verdict:
    key = question.asked.key(path)
    default = key.default if key and key.default else "null"
    if in_model:
        title = f'{dotted(path)} is "auto", which nobody fills in: DeepSpeed drops it and takes its default, {default}'
        return Verdict(finding=Finding.warning("config-auto-dropped", title, fix=_number(question, path)), path=path)
    title = f'{dotted(path)} is "auto", which nobody fills in: for DeepSpeed that is text, not a number'
    return Verdict(finding=Finding.error("config-auto-stays", title, fix=_number(question, path)), path=path)


def _number(question: Question, path: Path) -> str:
    key = question.asked.key(path)
    default = f", its default is {key.default}" if key and key.default not in {"", "null"} else ""
    return f"give {dotted(path)} a value{default}"
