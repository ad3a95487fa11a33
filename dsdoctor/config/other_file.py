"""What a file is that is named as a DeepSpeed configuration and is none: accelerate's, a Trainer's, a model's, YAML, a list, a text
that is cut off. It is told before anything in it is judged, and nothing is ever written in its place."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hjson

from dsdoctor.config.document import FROM_BASE64
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

OURS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "zero_optimization", "zero_allow_untested_optimizer"),
    *("wall_clock_breakdown", "steps_per_print", "activation_checkpointing", "prescale_gradients", "zero"),
}
"""Keys that stand at the top of DeepSpeed's configurations, and of no other's."""
ACCELERATE = {
    *("compute_environment", "distributed_type", "deepspeed_config", "num_machines", "num_processes", "machine_rank"),
    *("main_training_function", "fsdp_config", "downcast_bf16", "rdzv_backend", "same_network", "tpu_use_cluster"),
}
TRAINER = {
    *("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "learning_rate"),
    *("lr_scheduler_type", "logging_steps", "save_steps", "save_strategy", "eval_strategy", "evaluation_strategy"),
    *("warmup_ratio", "warmup_steps", "max_steps", "gradient_checkpointing", "report_to", "dataloader_num_workers"),
    *("save_total_limit", "weight_decay", "adam_beta1", "adam_beta2", "remove_unused_columns", "model_name_or_path"),
}
MODEL = {"model_type", "architectures", "hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"}
HOLDERS = ("deepspeed", "deepspeed_config", "ds_config", "deepspeed_plugin", "strategy", "config")
"""Keys under which others hold the configuration, or the name of its file."""
TOP_KEY = re.compile(r"^[\"']?([A-Za-z_][\w.-]*)[\"']?[ \t]*:", re.MULTILINE)
YAML_SECTION = re.compile(
    r"^([ ]*)[\w.-]+:[ \t]*(?:#[^\n]*)?\n(?:[ \t]*(?:#[^\n]*)?\n)*(?:\1[ ]+[\w.-]+:(?:\s|$)|\1[ ]*- )", re.MULTILINE
)
"""A key alone on its line, with others below it: Hjson reads the first of them as text."""
HOST_LINE = re.compile(r"^\S+[ \t]+slots=\d+[ \t]*$", re.MULTILINE)
WITHOUT_STRINGS = re.compile(r"\"(?:[^\"\\\n]|\\.)*\"|#[^\n]*|//[^\n]*|/\*.*?\*/", re.DOTALL)


def refuse_other(text: str, file: str) -> None:
    """Raise UsageError for a text that is something else than a configuration, with the command for what it is."""
    if found := other_file(text, file):
        raise UsageError(found.title, hint=found.fix.text if found.fix else "")


def other_file(text: str, file: str) -> Finding | None:
    """What a text is that is no configuration; None for a configuration, and for what nobody knows."""
    if "\0" in text:
        return book.finding("config-other-file", Severity.ERROR, case="binary", file=file)
    if not WITHOUT_STRINGS.sub("", text).strip():
        return book.finding("config-other-file", Severity.ERROR, case="empty", file=file)
    content = _content(text)
    if isinstance(content, list):
        return book.finding("config-other-file", Severity.ERROR, case="list", file=file, count=len(content))
    is_yaml = not text.lstrip().startswith(("{", "[")) and (text.startswith("---") or bool(YAML_SECTION.search(text)))
    members = content if isinstance(content, dict) and not is_yaml else {}
    names = set(members) or set(TOP_KEY.findall(text))
    if not names & OURS and (found := _of_another_program(names, members, text, file)):
        return found
    if is_yaml and names:
        return book.finding("config-other-file", Severity.ERROR, case="yaml", file=file, quoted=_quoted(file))
    return None if isinstance(content, dict) else _broken(text, file)


def _broken(text: str, file: str) -> Finding | None:
    """What is wrong with a text that DeepSpeed's parser cannot read."""
    if HOST_LINE.search(text) and not re.search("[{:]", text):
        return book.finding("config-other-file", Severity.ERROR, case="hostfile", file=file)
    if constants := _constants(text):
        named = " and ".join(constants)
        return book.finding("config-other-file", Severity.ERROR, case="nan", file=file, constants=named)
    plain = WITHOUT_STRINGS.sub("", text)
    if text.lstrip().startswith("{") and plain.count("{") > plain.count("}"):
        line = text.rstrip().count("\n") + 1
        return book.finding("config-other-file", Severity.ERROR, case="cut-off", file=file, line=line)
    return None


def _quoted(file: str) -> str | None:
    """A file as a command names it."""
    return None if file == FROM_BASE64 else shlex.quote(file)


def _content(text: str) -> Any:
    """What DeepSpeed's parser makes of it; None where it fails."""
    try:
        return hjson.loads(text)
    except Exception:
        return None


def _of_another_program(names: set[str], members: Mapping[str, Any], text: str, file: str) -> Finding | None:
    named, quoted = _named_file(members, text), _quoted(file)
    if len(names & ACCELERATE) > 1:
        return book.finding(
            "config-other-file",
            Severity.ERROR,
            case="accelerate-file" if named else "accelerate",
            file=file,
            quoted=quoted,
            named=named,
        )
    holder = next((key for key in HOLDERS if isinstance(members.get(key), dict) and set(members[key]) & OURS), "")
    if holder:
        return book.finding("config-other-file", Severity.ERROR, case="wrapped", file=file, holder=holder)
    if len(names & TRAINER) > 1:
        return book.finding(
            "config-other-file",
            Severity.ERROR,
            case="trainer-file" if named else "trainer",
            file=file,
            quoted=quoted,
            named=named,
        )
    if len(names & MODEL) > 1:
        return book.finding("config-other-file", Severity.ERROR, case="model", file=file, quoted=quoted)
    if named and len(names) > 1:
        return book.finding("config-other-file", Severity.ERROR, case="framework", file=file, named=named)
    return None


def _named_file(content: Mapping[str, Any], text: str) -> str:
    """The DeepSpeed file that another program's configuration names, quoted for a shell."""
    plugin = content.get("deepspeed_config")
    given = plugin.get("deepspeed_config_file") if isinstance(plugin, dict) else None
    given = given or content.get("deepspeed") or content.get("deepspeed_config")
    if not isinstance(given, str):
        found = re.search(
            r"^[ ]*(?:deepspeed_config_file|deepspeed|deepspeed_config):[ \t]*[\"']?([^\s\"'#{]+\.json)\b",
            text,
            re.MULTILINE,
        )
        given = found[1] if found else ""
    return shlex.quote(given) if Path(given).suffix == ".json" else ""


def _constants(text: str) -> list[str]:
    """NaN and infinities, which JSON parsers take and Hjson does not."""
    found: list[str] = []
    try:
        json.loads(text, parse_constant=found.append)
    except (ValueError, RecursionError):
        return []
    return list(dict.fromkeys(found))
