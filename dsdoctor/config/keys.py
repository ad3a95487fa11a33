"""Keys that DeepSpeed does not read, refuses, or reads somewhere else. A generator of verdicts for each kind."""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsdoctor.config.answer import (
    Asked,
    ConfigContext,
    Correction,
    KeyPath,
    Refusal,
    Section,
    Verdict,
    dotted,
    lookup,
    shown,
    walk,
)
from dsdoctor.core.finding import Severity
from dsdoctor.rules import book

MAX_NAME_LENGTH = 80
"""Longer names are nobody's typing mistakes."""
ACCELERATE = ("accelerate", "utils/dataclasses.py")
TRAINER = ("transformers", "integrations/deepspeed.py")
ACCUMULATION = (("gradient_accumulation_steps",),)
PRECISIONS = (("bf16", "enabled"), ("fp16", "enabled"))
OTHER_NAMES: Mapping[KeyPath, tuple[KeyPath, ...]] = {
    ("aio", "thread_count"): (("aio", "intra_op_parallelism"),),
    ("aio", "num_threads"): (("aio", "intra_op_parallelism"),),
    ("tensorboard", "output_dir"): (("tensorboard", "output_path"),),
    ("tensorboard", "log_dir"): (("tensorboard", "output_path"),),
    ("tensorboard", "logdir"): (("tensorboard", "output_path"),),
    ("csv_monitor", "output_dir"): (("csv_monitor", "output_path"),),
    ("csv_monitor", "log_dir"): (("csv_monitor", "output_path"),),
    ("tensor_parallel", "tp_size"): (("tensor_parallel", "autotp_size"),),
    ("wandb", "entity"): (("wandb", "team"),),
    ("zero",): (("zero_optimization",),),
    ("zero_stage",): (("zero_optimization", "stage"),),
    ("offload_optimizer_device",): (("zero_optimization", "offload_optimizer", "device"),),
    ("offload_param_device",): (("zero_optimization", "offload_param", "device"),),
    ("offload_optimizer_nvme_path",): (("zero_optimization", "offload_optimizer", "nvme_path"),),
    ("offload_param_nvme_path",): (("zero_optimization", "offload_param", "nvme_path"),),
    ("zero3_save_16bit_model",): (("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),),
    ("max_grad_norm",): (("gradient_clipping",),),
    ("clip_grad",): (("gradient_clipping",),),
    ("grad_clip",): (("gradient_clipping",),),
    ("grad_accum_steps",): ACCUMULATION,
    ("accumulation_steps",): ACCUMULATION,
    ("accumulate_grad_batches",): ACCUMULATION,
    ("per_device_train_batch_size",): (("train_micro_batch_size_per_gpu",),),
    ("batch_size",): (("train_micro_batch_size_per_gpu",), ("train_batch_size",)),
    ("lr",): (("optimizer", "params", "lr"),),
    ("learning_rate",): (("optimizer", "params", "lr"),),
    ("weight_decay",): (("optimizer", "params", "weight_decay"),),
    ("optim",): (("optimizer",),),
    ("lr_scheduler",): (("scheduler",),),
    ("mixed_precision",): PRECISIONS,
    ("log_interval",): (("steps_per_print",),),
    ("logging_steps",): (("steps_per_print",),),
}
"""Key -> where DeepSpeed looks for that; several where it depends on what is meant."""
NAMED_IN: Mapping[str, tuple[str, str, str]] = {
    "entity": ("deepspeed", "monitor/wandb.py", "entity=self.team"),
    "zero_stage": (*ACCELERATE, '"zero_stage": "zero_optimization.stage"'),
    "offload_optimizer_device": (
        *ACCELERATE,
        '"offload_optimizer_device": "zero_optimization.offload_optimizer.device"',
    ),
    "offload_param_device": (*ACCELERATE, '"offload_param_device": "zero_optimization.offload_param.device"'),
    "offload_param_nvme_path": (*ACCELERATE, '"offload_param_nvme_path": "zero_optimization.offload_param.nvme_path"'),
    "offload_optimizer_nvme_path": (
        *ACCELERATE,
        '"offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path"',
    ),
    "zero3_save_16bit_model": (*ACCELERATE, "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    "max_grad_norm": (*TRAINER, '"max_grad_norm"'),
    "per_device_train_batch_size": (*TRAINER, "args.per_device_train_batch_size"),
    "learning_rate": (*TRAINER, '"learning_rate"'),
    "weight_decay": (*TRAINER, '"weight_decay"'),
}
"""For the names that another package gives: the package, its file, and the words there."""
FOREIGN: Mapping[str, tuple[str, ...]] = {
    "Megatron": (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "global_batch_size"),
        *(
            "expert_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "recompute_method",
            "recompute_granularity",
        ),
        *("recompute_num_layers", "use_distributed_optimizer", "use_flash_attn", "seq_length", "lr_decay_style"),
        *("lr_decay_iters", "lr_warmup_fraction", "checkpoint_activations", "train_iters", "overlap_grad_reduce"),
        *("overlap_param_gather", "sequence_parallel", "virtual_pipeline_model_parallel_size"),
    ),
    "NeMo": ("exp_manager", "megatron_amp_O2"),
    "Lightning": (
        *("gradient_clip_val", "gradient_clip_algorithm", "max_epochs", "accelerator", "devices", "num_nodes"),
        *("log_every_n_steps", "val_check_interval", "limit_val_batches", "strategy", "logging_batch_size_per_gpu"),
    ),
    "axolotl": ("base_model", "sequence_len", "sample_packing", "num_epochs", "flash_attention", "val_set_size"),
    "verl": ("actor_rollout_ref", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu"),
    "accelerate": ("num_processes", "num_machines", "machine_rank", "zero3_init_flag", "distributed_type"),
    "transformers": (
        *("per_device_eval_batch_size", "num_train_epochs", "output_dir", "save_steps", "save_strategy", "eval_steps"),
        *("eval_strategy", "lr_scheduler_type", "warmup_steps", "max_steps", "gradient_checkpointing"),
        *("report_to", "dataloader_num_workers", "save_total_limit", "bf16_full_eval", "tf32", "adam_beta1"),
    ),
    "FSDP": ("sharding_strategy", "auto_wrap_policy", "reshard_after_forward", "cpu_ram_efficient_loading"),
}
"""Names at the top that belong to programs whose configurations are often written into one file with DeepSpeed's."""
OWNERS = {name: owner for owner, names in FOREIGN.items() for name in names}
CHOSEN_BY_NAME = {("optimizer", "params"), ("scheduler", "params")}
"""Sections whose keys are the arguments of a class: ``optimizers.py`` judges them."""
REMARK_PREFIXES = ("_", "#", "//", "$")
"""How names begin that people give to remarks in JSON."""
OTHERS_READ = {
    "msamp": ("accelerate", "utils/dataclasses.py", 'ds_config["msamp"]'),
    "inference": ("transformers", "integrations/deepspeed.py", 'ds_config.get("inference"'),
    "data_parallel_size": ("deepspeed", "__init__.py", 'config["data_parallel_size"]'),
    "sequence_parallel_size": ("deepspeed", "__init__.py", 'config["sequence_parallel_size"]'),
}
"""Keys at the top that others than DeepSpeedConfig read: the package, its file, and the words there."""
WITH_PARAMS = {("optimizer",), ("scheduler",)}
"""Sections whose ``params`` go to what ``type`` names (engine.py, _configure_basic_optimizer); beside it nothing is read."""
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
MAX_MEANT = 3
"""More names are no answer."""
MAX_GUESSED = 200
"""Unknown keys of a file whose meaning is guessed, which takes milliseconds each: a file with more is not DeepSpeed's."""
UNLIKE = 9
STAGE_NAMES = ("stage", "zerostage", "zerooptimizationstage", "deepspeedstage", "zerooptimization", "zerolevel", "zero")
"""What people call the ZeRO stage, without what they write differently."""
COMMON_NAMES = {"enabled", "type", "params", "device", "name", "profile", "seed", "dtype", "project", "job_name"}
"""Names that stand in so many sections that none was meant."""


def unread_keys(context: ConfigContext) -> Iterator[Verdict]:
    """Keys in sections that DeepSpeed looks through by hand, which takes no notice of what it does not know."""
    unknown = 0
    for path, value in walk(context.config):
        section = context.asked.section(path[:-1])
        if section is None or section.model or path[:-1] in CHOSEN_BY_NAME or _is_known(context.asked, section, path):
            continue
        unknown += 1
        meant = meanings(context, path, value) if unknown <= MAX_GUESSED else []
        if not meant and path[:-1] in WITH_PARAMS:
            meant = [(*path[:-1], "params", path[-1])]
        if section.open:
            # who reads which key of it is not known: only a mistake in typing can be told
            if len(meant) == 1 and meant[0][:-1] == path[:-1]:
                yield _unread(context, path, value, meant, certain=False)
            continue
        if len(path) == 1 and path[-1] in OWNERS:
            yield _of_another_program(path, value)
        elif not path[-1].startswith(REMARK_PREFIXES):
            yield _unread(context, path, value, meant, certain=True)


def refused_keys(context: ConfigContext) -> Iterator[Verdict]:
    """Keys in sections that are pydantic models, which refuse what they do not know."""
    for refusal in context.asked.refusals:
        if refusal.kind == "extra_forbidden" and refusal.paths:
            yield _refused(context, refusal, refusal.paths[0])


def removed_keys(context: ConfigContext) -> Iterator[Verdict]:
    """Keys of earlier versions that this one refuses with a text of its own."""
    for refusal in context.asked.refusals:
        if refusal.kind == "DeepSpeedConfigError" and "removed" in refusal.message and len(refusal.paths) == 1:
            path = refusal.paths[0]
            found = book.finding(
                "config-key-removed",
                Severity.ERROR,
                evidence=(refusal.message.strip(),),
                key=dotted(path),
                version=context.asked.version,
            )
            off = _is_off(lookup(context.judged, path))
            yield Verdict(finding=found, path=path, correction=Correction(path=path) if off else None)


def deprecated_keys(context: ConfigContext) -> Iterator[Verdict]:
    """Keys that still work, and say themselves what replaces them."""
    for path, value in walk(context.config):
        key = context.asked.key(path)
        if key is None or not key.deprecated:
            continue
        # DeepSpeed names the field there, and its documents the field's other name
        newer = context.asked.key((*path[:-1], key.instead)) if key.instead else None
        found = book.finding(
            "config-key-deprecated",
            Severity.WARNING,
            case="replaced" if key.instead else "",
            evidence=(f"{dotted(path)}: {shown(path, value)}",),
            key=dotted(path),
            instead=f"{dotted(path[:-1])}.{newer.name if newer else key.instead}" if key.instead else "",
        )
        yield Verdict(finding=found, path=path)


def meanings(context: ConfigContext, path: KeyPath, value: Any) -> list[KeyPath]:
    """Where a key that is none may have been meant to stand, the nearest first; several where that is open."""
    asked, name, here = context.asked, path[-1], path[:-1]
    if path in OTHER_NAMES:
        return list(OTHER_NAMES[path])
    section = asked.section(here)
    near = _of_one_key(section, nearest(name, _names(asked, section), here)) if section else ()
    same = [(*here, key) for key in near if _fits(asked, (*here, key), value)]
    same = [each for each in same if lookup(context.config, each) is None] or same
    if same and plain(same[0][-1]) == plain(name):
        return same
    if value is None or (not here and name in COMMON_NAMES):
        # nothing is to be moved; or any program that reads the same file may have meant it (seed, name, device)
        return same
    elsewhere = [
        other for other in asked.sections if other.path not in CHOSEN_BY_NAME and _is_related(here, other.path)
    ]
    exact = [(*other.path, key) for other in elsewhere for key in _names(asked, other) if plain(key) == plain(name)]
    exact = [each for each in exact if _fits(asked, each, value)]
    if len(exact) == 1 or same:
        return exact if len(exact) == 1 else same
    if exact and name not in COMMON_NAMES:
        return _best(exact, here)
    similar = [
        (*other.path, key)
        for other in elsewhere
        for key in by_spelling(name, _names(asked, other))
        or by_words(_without_section(name, other.path[-1:]), _names(asked, other), worst=1)
        if len(name) > 6
    ]
    return _best([each for each in similar if _fits(asked, each, value)], here)


def nearest(name: str, names: Iterable[str], section: KeyPath = ()) -> tuple[str, ...]:
    """The names that a wrong one may have been meant for, all equally near; none where nothing is near. By spelling first, then
    by words: ``section`` is where the names stand.

    >>> nearest("zero_optimisation", ["zero_optimization", "optimizer"]), nearest("learning_rate", ["lr"])
    (('zero_optimization',), ())
    >>> nearest("f16", ["fp16", "bf16"]), nearest("micro_batch_size", ["train_micro_batch_size_per_gpu", "aio"])
    (('bf16', 'fp16'), ('train_micro_batch_size_per_gpu',))
    """
    if found := by_spelling(name, names) or by_words(name, names) or by_words(_without_section(name, section), names):
        return found
    typed = plain(name)
    within = [known for known in set(names) if 6 <= len(typed) <= MAX_NAME_LENGTH and typed in plain(known)]
    return tuple(within) if len(within) == 1 else ()


def by_spelling(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names that differ by a few letters, all equally near.

    >>> by_spelling("offload_optimzer", ["offload_optimizer", "offload_param"]), by_spelling("gradient", ["gradient_clipping"])
    (('offload_optimizer',), ())
    >>> by_spelling("max_train_batch_size", ["train_batch_size"])
    ()
    """
    typed = plain(name)
    if len(name) > MAX_NAME_LENGTH or len(typed) < 2:
        return ()
    scores = {
        known: distance(typed, plain(known))
        for known in set(names)
        if abs(len(plain(known)) - len(typed)) <= 4 and not _has_a_word_more(words(name), words(known))
    }
    allowed = 1 if len(typed) <= 5 else 2 if len(typed) <= 12 else 3
    best = min(scores.values(), default=allowed + 1)
    if best > allowed:
        return ()
    # AdamW of torch and adamw of DeepSpeed are one name for who types it
    found = {plain(known): known for known in sorted(scores, reverse=True) if scores[known] == best}
    return tuple(sorted(found.values()))


def by_words(name: str, names: Iterable[str], *, worst: int = 3) -> tuple[str, ...]:
    """The names of the same words, all equally near: shortened (0), in another order (1), with words missing at the end (2), or
    between (3).

    >>> by_words("stage3_max_live_params", ["stage3_max_live_parameters", "stage3_max_reuse_distance"])
    ('stage3_max_live_parameters',)
    >>> by_words("gradient_accumulation", ["gradient_accumulation_steps", "managed_gradient_accumulation"])
    ('gradient_accumulation_steps',)
    >>> by_words("optimizer_offload", ["offload_optimizer"]), by_words("zero_stage", ["stage"])
    (('offload_optimizer',), ())
    >>> by_words("bucket_size", ["reduce_bucket_size", "allgather_bucket_size", "stage"])
    ('allgather_bucket_size', 'reduce_bucket_size')
    """
    typed = words(name) if len(name) <= MAX_NAME_LENGTH else []
    ranks = {known: rank for known in set(names) if typed and (rank := _alike(typed, words(known))) <= worst}
    best = {plain(known): known for known in sorted(ranks, reverse=True) if ranks[known] == min(ranks.values())}
    return tuple(sorted(best.values())) if len(best) <= MAX_MEANT else ()


def stages_written(config: Mapping[str, Any]) -> set[int]:
    """Every ZeRO stage that a configuration names, under whatever key and wherever it stands.

    >>> stages_written({"zero": {"stage": 3}, "zero_optimization": {"stge": "2"}, "pipeline": {"stages": 1}})
    {2, 3}
    """
    found = set()
    for path, value in walk(config):
        name = plain(path[-1])
        named = name in STAGE_NAMES or any(distance(name, each) <= 1 for each in STAGE_NAMES if len(each) >= 5)
        if (
            named
            and path[0] != "pipeline"
            and not isinstance(value, bool)
            and str(value).strip() in {"0", "1", "2", "3"}
        ):
            found.add(int(value))
    return found


def words(name: str) -> list[str]:
    """The words of a name.

    >>> words("stage3_maxLive-params")
    ['stage3', 'max', 'live', 'params']
    """
    return [word.lower() for word in WORD.findall(name)]


def plain(name: str) -> str:
    """A name without what people write differently.

    >>> plain("offloadOptimizer") == plain("offload-optimizer") == plain("offload_optimizer")
    True
    """
    return "".join(char for char in name.lower() if char.isalnum())


def distance(one: str, other: str) -> int:
    """How many letters were left out, put in, exchanged or swapped with their neighbour.

    >>> distance("stage", "satge"), distance("zero", "zeros"), distance("fp16", "bf16")
    (1, 1, 2)
    """
    before: list[int] = []
    last = list(range(len(other) + 1))
    for row, left in enumerate(one, 1):
        now = [row]
        for column, right in enumerate(other, 1):
            cost = min(last[column] + 1, now[-1] + 1, last[column - 1] + (left != right))
            if row > 1 and column > 1 and left == other[column - 2] and one[row - 2] == right:
                cost = min(cost, before[column - 2] + 1)
            now.append(cost)
        before, last = last, now
    return last[-1]


def _alike(typed: list[str], known: list[str]) -> int:
    """How near two names are by their words, 0 the nearest."""
    if len(typed) == len(known):
        if all(map(_same_word, typed, known)):
            return 0
        left = list(known)
        for word in typed:
            same = next((each for each in left if _same_word(word, each)), None)
            left = [each for each in left if each != same]
        return UNLIKE if left else 1
    if 1 < len(typed) < len(known):
        return 2 if all(map(_same_word, typed, known)) else 3 if _in_order(typed, known) else UNLIKE
    return UNLIKE


def _has_a_word_more(typed: list[str], known: list[str]) -> bool:
    """Whether a whole word of some letters is what a name has more: that is another name, and no slip of the finger.

    >>> _has_a_word_more(["max", "size"], ["size"]), _has_a_word_more(["a", "size"], ["size"])
    (True, False)
    """
    rest = list(typed)
    for word in known:
        if word not in rest:
            return False
        rest.remove(word)
    return len(rest) == 1 and len(rest[0]) >= 3


def _in_order(few: list[str], many: list[str]) -> bool:
    """Whether all words stand in a longer list, in this order."""
    rest = iter(many)
    return all(any(_same_word(word, each) for each in rest) for word in few)


def _same_word(one: str, other: str) -> bool:
    """Whether one shortens the other: params, param and parameters; accum and accumulation."""
    short, long = sorted((one.removesuffix("s"), other.removesuffix("s")), key=len)
    return one == other or (len(short) >= 3 and long.startswith(short))


def _is_related(here: KeyPath, there: KeyPath) -> bool:
    """Whether a key could have slipped from one section to the other: out of it, into it, or within the same of the top."""
    return here != there and (not here or not there or here[0] == there[0])


def _best(paths: list[KeyPath], here: KeyPath) -> list[KeyPath]:
    """Those nearest to where the key stands: inside it, or around it; else those nearest to the top."""
    if not paths:
        return []
    inside = [each for each in paths if each[: len(here)] == here and here] or [
        each for each in paths if here[:1] == each[:1]
    ]
    paths = inside or paths
    shortest = min(map(len, paths))
    return [each for each in dict.fromkeys(paths) if len(each) == shortest]


def _of_one_key(section: Section, names: tuple[str, ...]) -> tuple[str, ...]:
    """One name where all are names of one key."""
    known = [key.name for name in names if (key := section.key(name))]
    return tuple(known[:1]) if len(names) > 1 and len(set(known)) == 1 else names


def _without_section(name: str, section: KeyPath) -> str:
    """A name without the words of its section before it: stage for zero_stage in zero_optimization; "" for one without such.

    >>> _without_section("zero_stage", ("zero_optimization",)), _without_section("max_live", ("zero_optimization",))
    ('stage', '')
    """
    typed, around = words(name), {word for part in section for word in words(part)}
    own = list(itertools.dropwhile(lambda word: any(_same_word(word, each) for each in around), typed))
    return "_".join(own) if len(own) < len(typed) else ""


def _fits(asked: Asked, path: KeyPath, value: Any) -> bool:
    """Whether a value could stand there: a section for a section, and no section for a value."""
    section = asked.section(path)
    if section is None or not isinstance(value, dict):
        return (section is None) != isinstance(value, dict) or (section is not None and isinstance(value, bool))
    # another program's section of nearly the same name has other keys
    telling = [str(key) for key in value if key not in COMMON_NAMES]
    by_class = section.open or path in CHOSEN_BY_NAME
    return not telling or by_class or any(key in section.names or nearest(key, section.names) for key in telling)


def _names(asked: Asked, section: Section) -> list[str]:
    return [name for name in section.names if section.path or name not in asked.removed]


def _is_known(asked: Asked, section: Section, path: KeyPath) -> bool:
    return path[-1] in section.names or (not section.path and (path[-1] in OTHERS_READ or path[-1] in asked.removed))


def _of_another_program(path: KeyPath, value: Any) -> Verdict:
    found = book.finding(
        "config-key-ignored",
        Severity.WARNING,
        case="of-another-program",
        evidence=(f"{dotted(path)}: {shown(path, value)}",),
        key=dotted(path),
        owner=OWNERS[path[-1]],
    )
    return Verdict(finding=found, path=path)


def _unread(context: ConfigContext, path: KeyPath, value: Any, meant: list[KeyPath], *, certain: bool) -> Verdict:
    evidence = (f"{dotted(path)}: {shown(path, value)}",)
    if not meant:
        version = context.asked.version
        found = book.finding(
            "config-key-ignored", Severity.WARNING, evidence=evidence, version=version, key=dotted(path)
        )
        return Verdict(finding=found, path=path)
    is_there = any(lookup(context.config, each) is not None for each in meant)
    found = book.finding(
        "config-key-misplaced" if meant[0][:-1] != path[:-1] else "config-key-misspelt",
        Severity.ERROR if certain else Severity.WARNING,
        case="there-too" if is_there else "",
        evidence=evidence,
        key=dotted(path),
        right=" or ".join(map(dotted, meant)),
    )
    return Verdict(finding=found, path=path, correction=_rename(context, path, meant))


def _refused(context: ConfigContext, refusal: Refusal, path: KeyPath) -> Verdict:
    value = lookup(context.judged, path)
    meant = meanings(context, path, value)
    evidence = (f"{refusal.model}: {refusal.message} ({dotted(path)}: {shown(path, value)})",)
    if not meant:
        found = book.finding(
            "config-key-refused",
            Severity.ERROR,
            evidence=evidence,
            section=dotted(path[:-1]),
            key=path[-1],
            version=context.asked.version,
        )
        empty = _is_empty(value) or path[-1].startswith(REMARK_PREFIXES)
        return Verdict(finding=found, path=path, correction=Correction(path=path) if empty else None)
    found = book.finding(
        "config-key-misplaced" if meant[0][:-1] != path[:-1] else "config-key-misspelt",
        Severity.ERROR,
        case="refused",
        evidence=evidence,
        key=dotted(path),
        right=" or ".join(map(dotted, meant)),
    )
    return Verdict(finding=found, path=path, correction=_rename(context, path, meant))


def _is_empty(value: Any) -> bool:
    """Whether a value says nothing of what is wanted, so that its key can go."""
    return value in (None, "", {}, []) and value is not False


def _is_off(value: Any) -> bool:
    """Whether a feature that DeepSpeed no longer has is off all the same.

    >>> _is_off({"enabled": False, "min_gpus": 1}), _is_off({"min_gpus": 1}), _is_off(False), _is_off(0.1)
    (True, False, True, False)
    """
    return _is_empty(value) or value is False or (isinstance(value, dict) and value.get("enabled") is False)


def _rename(context: ConfigContext, path: KeyPath, meant: list[KeyPath]) -> Correction | None:
    """The correction, where one name only is meant and nothing stands there yet."""
    if len(meant) != 1 or lookup(context.config, meant[0]) is not None:
        return None
    if meant[0][:-1] in CHOSEN_BY_NAME and lookup(context.config, (meant[0][0], "type")) is None:
        # parameters alone are no optimizer
        return None
    return Correction(path=path, to=meant[0])
