"""Files that are no DeepSpeed configuration: each is named for what it is, with the command for it, and nothing is written."""

import base64
import json
from pathlib import Path

import pytest

from dsdoctor.config.other_file import other_file
from tests.cli.runner import run
from tests.config.cases import bad, healthy
from tests.each import each

ACCELERATE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 1
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
"""
TRAINER = {"output_dir": "out", "per_device_train_batch_size": 4, "learning_rate": 2e-5, "bf16": True}
OURS = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 3}}

OTHERS: dict[str, tuple[str, str]] = {
    "accelerate": (ACCELERATE, "accelerate's configuration, which sets no deepspeed_config_file"),
    "accelerate, JSON": (
        json.dumps({"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 2}}),
        "--accelerate",
    ),
    "accelerate with a file": (
        ACCELERATE.replace("  zero_stage: 3", "  deepspeed_config_file: conf/ds.json"),
        "dsdoctor config conf/ds.json --accelerate",
    ),
    "accelerate, a comment first": (f"# made by accelerate config\n{ACCELERATE}", "--accelerate"),
    "Trainer": (json.dumps(TRAINER), "dsdoctor config ds_config.json --hf"),
    "Trainer with a file": (json.dumps({**TRAINER, "deepspeed": "my ds.json"}), "dsdoctor config 'my ds.json' --hf"),
    "Trainer, YAML": ("output_dir: out\nlearning_rate: 2e-5\ndeepspeed: ds.json\n", "dsdoctor config ds.json --hf"),
    "Trainer, its whole configuration": (json.dumps({**TRAINER, "deepspeed": OURS}), "has one under deepspeed"),
    "wrapped": (json.dumps({"name": "x", "ds_config": OURS}), "has one under ds_config"),
    "a framework's YAML": ("base_model: a/b\nmicro_batch_size: 2\ndeepspeed: ds/zero3.json\n", "config ds/zero3.json"),
    "a model": (json.dumps({"model_type": "llama", "hidden_size": 64, "vocab_size": 9}), "--model"),
    "YAML": ("train_batch_size: 8\nzero_optimization:\n  stage: 3\n", "is YAML"),
    "YAML with a list": ("train_batch_size: 8\nbetas:\n- 0.9\n- 0.99\n", "is YAML"),
    "YAML with a head": ("---\ntrain_batch_size: 8\n", "is YAML"),
    "a list": ("[{}, {}]", "is a list of 2"),
    "NaN": ('{"train_batch_size": 8, "gradient_clipping": NaN}', "has NaN"),
    "infinity": ('{"train_batch_size": 8, "x": [Infinity, -Infinity]}', "has Infinity and -Infinity"),
    "cut off": ('{\n "train_batch_size": 8,\n "zero_optimization": {"stage": 3, "offl', "ends at line 3"),
    "cut off in a name": ('{"train_batch_size": 8, "fp16": {"enabled": tr', "ends at line 1"),
    "empty": ("", "is empty"),
    "nothing but remarks": ("// nothing\n# here\n", "is empty"),
    "a hostfile": ("node1 slots=8\nnode2 slots=8\n", "is a hostfile"),
    "binary": ("PK\3\4\0\0", "is a binary file"),
}
CONFIGURATIONS = {
    "Hjson without braces": "train_batch_size: 8\nzero_optimization: {stage: 3}\n",
    "Hjson, a brace on the next line": "train_batch_size: 8\nzero_optimization:\n  {\n  stage: 3\n  }\n",
    "with a Trainer's key": '{"zero_optimization": {"stage": 2}, "learning_rate": 1, "warmup_steps": 5, "output_dir": "x"}',
    "with what accelerate has": '{"train_batch_size": 8, "num_processes": 8, "num_machines": 1}',
    "with a brace in a text": '{"train_batch_size": 8, "x": "{"}',
    "nothing set": "{}",
}


@each(("text", "says"), list(OTHERS.values()), ids=list(OTHERS))
def test_what_it_is_is_told(text: str, says: str) -> None:
    found = other_file(text, "some file.json")

    assert found is not None
    assert found.fix is not None
    assert says in f"{found.title}: {found.fix.text}"


@each("text", list(CONFIGURATIONS.values()), ids=list(CONFIGURATIONS))
def test_a_configuration_is_one(text: str) -> None:
    assert other_file(text, "x") is None


def test_every_configuration_of_the_other_tests_is_one() -> None:
    every = [*bad(), *healthy()]

    assert [case.name for case in every if other_file(json.dumps(case.config), "x")] == []


@pytest.mark.parametrize("name", ["accelerate", "Trainer", "YAML", "NaN", "cut off", "a list"])
def test_nothing_is_written_for_it(name: str, tmp_path: Path) -> None:
    file, out = tmp_path / "given", tmp_path / "out.json"
    file.write_text(OTHERS[name][0])
    done = run("config", str(file), "--fix", str(out))

    assert done.returncode == 2
    assert OTHERS[name][1] in done.stderr
    assert not out.exists()


def test_base64_of_it_is_told_too() -> None:
    done = run("config", base64.urlsafe_b64encode(OTHERS["Trainer"][0].encode()).decode())

    assert (done.returncode, "holds TrainingArguments" in done.stderr) == (2, True)
