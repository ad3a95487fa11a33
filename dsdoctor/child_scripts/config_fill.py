"""The values that transformers' Trainer and accelerate put in the place of "auto", by their own functions. Part of ask_config.py.

Nothing is started: TrainingArguments is made without what it does to the machine. What depends on data that is not here (the
number of training steps, the batch size of a dataloader) is told as not known.
"""

import _io
import copy
import dataclasses
import json
import os
import re

open_file = _io.open
"""This runs in a script's process, too, which may have put another one in the place of ``io.open``."""

UNKNOWN_STEPS = 1_000_003
"""Stands for a number of training steps that nobody knows yet; no warm-up is as long."""
NOT_FOUND = re.compile(r"`([\w.]+)` not found in kwargs")
HIDDEN = (
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
)


WRITTEN_AS = {
    "train_batch_size": "per_device_train_batch_size gradient_accumulation_steps",
    "scheduler.params.total_num_steps": "max_steps num_train_epochs",
    "scheduler.params.warmup_num_steps": "warmup_steps warmup_ratio",
}
"""Arguments of which transformers computes a value."""


class Filled:
    """A configuration on its way, and what was noted."""

    def __init__(self, config):
        self.config = copy.deepcopy(config)
        self.filled = []
        self.mismatches = []
        self.refused = []
        self.unfilled = []
        self.unknown = []

    def answer(self):
        return {
            "config": self.config,
            "filled": self.filled,
            "mismatches": self.mismatches,
            "refused": self.refused,
            "unfilled": self.unfilled,
            "unknown": self.unknown,
        }

    def note(self, path, value, source):
        self.filled.append({"path": path, "value": json.dumps(value), "source": source})


def read_arguments(path):
    """The mapping in a JSON or YAML file."""
    with open_file(path, encoding="utf-8") as file:
        text = file.read()
    if path.endswith((".yaml", ".yml")):
        import yaml

        return yaml.safe_load(text)
    return json.loads(text)


def autos(config, prefix=""):
    found = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += autos(value, f"{prefix}{key}.")
        elif value == "auto":
            found.append(f"{prefix}{key}")
    return found


def take(config, path):
    """Take a value out that nobody can know here: DeepSpeed then computes it, or takes its default."""
    *sections, name = path.split(".")
    for section in sections:
        config = config.get(section, {})
    config.pop(name, None)


class Model:
    """What of a model the fillers look at."""

    def __init__(self, config):
        self.config = config


def model_of(path):
    """The model's configuration, as transformers reads it; None where none is given."""
    if not path:
        return None
    from transformers import AutoConfig

    return Model(AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False))


def training_arguments(given, world):
    """TrainingArguments with its own defaults and methods, made without its effects."""
    import transformers

    class Cold(transformers.TrainingArguments):
        world_size = world or 1

        def __post_init__(self):
            pass

    fields = {field.name: field for field in dataclasses.fields(transformers.TrainingArguments) if field.init}
    values = {name: converted(value, fields[name]) for name, value in given.items() if name in fields}
    return Cold(**{"output_dir": "none", **values})


def converted(value, field):
    """YAML reads 1e-4 as text; the parsers of training scripts make a number of it."""
    if isinstance(value, str) and field.type in (float, "float"):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def fill_by_trainer(config, given, world, model):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    filled = Filled(config)
    args = training_arguments(given, world)
    steps = args.max_steps if args.max_steps and args.max_steps > 0 else UNKNOWN_STEPS

    class Noting(HfTrainerDeepSpeedConfig):
        def fill_match(self, ds_key_long, hf_val, hf_key=None, must_match=True):
            was_auto, before = self.is_auto(ds_key_long), len(self.mismatches)
            known = known_value(ds_key_long, hf_val, world, steps)
            # what nobody knows yet cannot mismatch
            super().fill_match(ds_key_long, hf_val, hf_key, must_match and known)
            if was_auto and known:
                filled.note(ds_key_long, hf_val, hf_key or "transformers")
            elif was_auto:
                filled.unknown.append(ds_key_long)
            if len(self.mismatches) > before:
                theirs = {"path": ds_key_long, "value": json.dumps(self.get_value(ds_key_long)), "argument": hf_key}
                written = any(name in given for name in re.findall(r"\w+", WRITTEN_AS.get(ds_key_long, hf_key or "")))
                filled.mismatches.append({**theirs, "wanted": json.dumps(hf_val), "written": written})

        def fill_only(self, ds_key_long, hf_val, hf_key=None):
            self.fill_match(ds_key_long, hf_val, hf_key, must_match=False)

    made = Noting(config)
    made.trainer_config_process(args)
    mixed = "fp16" if args.fp16 else "bf16" if args.bf16 else os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    plugin = fill_by_plugin(made, mixed, filled)
    without_model(made, model, filled)
    try:
        made.trainer_config_finalize(args, model, steps)
    except ValueError as error:
        if not filled.mismatches:
            filled.refused.append(str(error))
    filled.config = made.config
    if plugin is not None:
        leftovers(plugin, filled)
    if "train_batch_size" in filled.unknown:
        take(filled.config, "train_batch_size")
    return filled


def known_value(path, value, world, steps):
    if path == "train_batch_size":
        return world is not None
    return not (
        isinstance(value, int) and steps == UNKNOWN_STEPS and path.startswith("scheduler.params") and value > 10_000
    )


def without_model(made, model, filled):
    """The keys that take the model's hidden size, where there is no model to ask."""
    if model is None:
        for path in [each for each in HIDDEN if made.is_auto(each)]:
            filled.unknown.append(path)
            take(made.config, path)


def fill_by_plugin(made, mixed, filled):
    """accelerate's plugin, which the Trainer makes too; None where it refuses."""
    from accelerate import DeepSpeedPlugin

    before = autos(made.config)
    try:
        plugin = DeepSpeedPlugin(hf_ds_config=made)
        plugin.set_mixed_precision(mixed)
    except Exception as error:
        filled.refused.append(str(error))
        return None
    note_gone(before, plugin.deepspeed_config, filled)
    return plugin


def note_gone(before, config, filled):
    left = autos(config)
    for path in before:
        if path not in left:
            filled.note(path, value_at(config, path), "accelerate")


def value_at(config, path):
    for key in path.split("."):
        config = config[key]
    return config


def leftovers(plugin, filled):
    """What is still "auto": accelerate fills some of it in prepare(), and refuses the rest."""
    config = filled.config
    given = {"gradient_clipping": 1.0, "zero_optimization.stage3_gather_16bit_weights_on_model_save": False}
    for path in autos(config):
        if path in given:
            *sections, name = path.split(".")
            holder = value_at(config, ".".join(sections)) if sections else config
            holder[name] = given[path]
            filled.note(path, given[path], "accelerate")
        elif path in WHEN_PREPARED:
            filled.unknown.append(path)
            if ".params." not in path:
                take(config, path)
    later = dict.fromkeys(filled.unknown, 1)
    for _ in range(100):
        try:
            plugin.deepspeed_config_process(config=copy.deepcopy(config), must_match=False, **later)
            return
        except ValueError as error:
            found = NOT_FOUND.search(str(error))
            if not found or found[1] not in autos(config):
                return
            filled.unfilled.append(found[1])
            take(config, found[1])


WHEN_PREPARED = (
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    *HIDDEN,
    "optimizer.params.lr",
    "optimizer.params.weight_decay",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.total_num_steps",
)
"""What accelerator.prepare() fills of the dataloaders, the model, DummyOptim and DummyScheduler that a script hands to it."""


def fill_by_accelerate(config, path, model):
    """(filled, what accelerate's configuration says beside it)."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    filled = Filled(config)
    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args, defaults, precision_of_file = _validate_launch_command(args)
    facts = {
        "processes": args.num_processes,
        "uses_deepspeed": bool(args.use_deepspeed),
        "file": args.deepspeed_config_file or "",
    }
    if not args.use_deepspeed:
        return filled, facts
    # as accelerate's launch_command does before it calls the launcher
    fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if precision_of_file else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    # only its variables are taken; no port is looked for
    args.main_process_port = args.main_process_port or 29500
    _, environment = prepare_deepspeed_cmd_env(args)
    os.environ.update({name: value for name, value in environment.items() if name.startswith("ACCELERATE_")})
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "none"
    made = HfDeepSpeedConfig(config)
    plugin = fill_by_plugin(made, args.mixed_precision or "no", filled)
    if plugin is None:
        return filled, facts
    filled.config = plugin.deepspeed_config
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    if hidden:
        for key, value in zip(HIDDEN, (hidden * hidden, int(0.9 * hidden * hidden), 10 * hidden), strict=True):
            if key in autos(filled.config):
                *sections, name = key.split(".")
                value_at(filled.config, ".".join(sections))[name] = value
                filled.note(key, value, "the model's hidden size")
    leftovers(plugin, filled)
    return filled, facts
