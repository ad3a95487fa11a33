"""`dsdoctor memory` as a user calls it: real children ask DeepSpeed and follow real models by their shapes."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.memory.judge import parse_gpus, parse_size
from dsdoctor.memory.models import parse_model, parse_settings
from tests.cli.runner import run

TINY = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 503,
    "n_positions": 64,
}
CONFIG = """{
  // a comment, and no quotes: DeepSpeed reads hjson
  train_micro_batch_size_per_gpu: 2
  zero_optimization: {"stage": 2}
  bf16: {"enabled": true}
  optimizer: {"type": "AdamW", "params": {"lr": "auto"}}
}"""
needs_children = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("deepspeed", "transformers")),
    reason="DeepSpeed or transformers is not installed",
)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def memory(files: Path, *more: str, model: str | None = None, config: str = "ds.json") -> tuple[int, dict[str, object]]:
    words = ["--config", str(files / config), "--model", model or str(files), "--sequence", "32", "--json", *more]
    done = run("memory", *words)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("large", ["ds.json", "config.json"])
def test_a_file_that_is_too_large_is_handed_to_nobody(large: str, files: Path) -> None:
    with (files / large).open("ab") as made:
        made.truncate((64 << 20) + 1)

    done = run("memory", "--world", "2", "--config", str(files / "ds.json"), "--model", str(files))

    assert (done.returncode, done.stderr.count("✗")) == (2, 1)
    assert "is larger than 64 MiB" in done.stderr


@needs_children
@pytest.mark.launch
def test_a_document_has_the_prediction_the_ledger_and_what_to_change(files: Path) -> None:
    status, said = memory(files, "--gpus", "2x4G", "--search")
    prediction = said["prediction"]

    assert status == 0
    assert isinstance(prediction, dict)
    assert prediction["after_initialize"] < prediction["after_step"] < prediction["peak"]
    assert {moment["point"] for moment in said["ledger"]} >= {"after_initialize", "backward", "save"}  # type: ignore[attr-defined]
    # a bucket of 1 GB for a model of 135,000 parameters
    assert prediction["peak"] > 1_000_000_000
    assert said["changes"][0]["set"] == [["zero_optimization.reduce_bucket_size", "136384"]]  # type: ignore[index]
    assert said["changes"][0]["won"] > 990_000_000  # type: ignore[index]
    assert said["search"]["batch"] > 1000  # type: ignore[index]
    assert said["search"]["ranks"] == 1  # type: ignore[index]
    assert "reduce-bucket-exceeds-model" in {finding["rule"] for finding in said["findings"]}  # type: ignore[attr-defined]


@needs_children
@pytest.mark.launch
def test_what_does_not_fit_is_an_error_and_says_what_would_be_enough(files: Path) -> None:
    status, said = memory(files, "--gpus", "2x1G", "--host-memory", "1M", "--batch", "4")

    rules = {finding["rule"] for finding in said["findings"]}  # type: ignore[attr-defined]
    assert status == 1
    assert "memory-does-not-fit" in rules
    assert said["enough"] == {**said["enough"], "fits": True, "what": ["a smaller bucket for gradients"]}  # type: ignore[dict-item]


@needs_children
@pytest.mark.launch
def test_a_model_that_depends_on_numbers_is_told_as_one_that_cannot_be_followed(files: Path) -> None:
    (files / "models.py").write_text(
        "import torch\n"
        "class Chooses(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 8)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x[x.sum(-1).nonzero()[:, 0]]).sum()\n"
        "def make():\n"
        "    return Chooses(), lambda batch, sequence: {'x': torch.zeros(batch, 8)}\n"
    )
    status, said = memory(files, "--gpus", "2x80G", model=f"{files}/models.py:make")

    assert status == 0
    assert "activations-not-told" in {finding["rule"] for finding in said["findings"]}  # type: ignore[attr-defined]
    assert "forward" not in said["prediction"]  # type: ignore[operator]
    assert said["model"]["parameters"] == 72  # type: ignore[index]


T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "num_layers": 1,
    "num_heads": 2,
    "vocab_size": 99,
}


@needs_children
@pytest.mark.launch
def test_models_that_are_followed_in_more_than_one_way(files: Path) -> None:
    models = (TINY, {**TINY, "attn_pdrop": 0.0}, T5, {"model_type": "lama"})
    told = followed(files, models, (False, True))
    plain, without, with_bias = (parse_model(each).runs for each in told[:3])
    (fused, every, again, every_again), without = plain, without[0]

    # a fused kernel with dropout takes what it takes without; the plain one all scores: batch, heads, tokens, tokens, bytes
    assert (fused.attention, every.attention, without.attention) == ("fused", "materialized", "")
    assert fused.events == without.events
    assert max(event[3] for event in every.events) > max(event[3] for event in fused.events) + 2 * (2 * 2 * 64 * 64 * 2)
    # what is computed again goes by the same kernel as the first time, and leaves less alive between
    assert (again.attention, every_again.attention, again.error) == ("fused", "materialized", "")
    assert max(event[3] for event in again.events) < max(event[3] for event in fused.events)
    assert max(event[2] for event in again.events) < max(event[2] for event in every_again.events)
    # nobody said how long a sample is: as long as the model has positions
    assert fused.sequence == 64
    # T5 names no first token of the decoder here; the mask of its positions has a gradient with either kernel
    assert [each.error for each in with_bias] == [""] * 4
    assert len({tuple(event[:2] for event in each.events) for each in with_bias if not each.checkpointing}) == 1
    with pytest.raises(UsageError) as unknown:
        parse_model(told[3])
    assert "has no model_type 'lama': did you mean llama" in str(unknown.value)
    assert "whose transformers has it" in unknown.value.hint


def followed(files: Path, models: Sequence[dict[str, object]], more: Sequence[bool] = (False,)) -> list[dict[str, Any]]:
    """What the child says of each; transformers is imported once. ``more``: with checkpointing or without."""
    wishes = []
    for number, fields in enumerate(models):
        (files / f"{number}.json").write_text(json.dumps(fields))
        runs = [(2, None, checkpointing) for checkpointing in more]
        wishes.append({"model": str(files / f"{number}.json"), "dtype": "bfloat16", "runs": runs})
    command = [sys.executable, str(Path(__file__).with_name("follow_many.py")), str(CHILD_SCRIPTS)]
    done = subprocess.run(command, input=json.dumps(wishes), capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.launch
def test_a_python_without_deepspeed_is_named(files: Path) -> None:
    bare = files / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    done = run(
        "memory", "--config", str(files / "ds.json"), "--model", str(files), "--world", "2", "--python", str(bare)
    )

    assert done.returncode == 3
    assert "that Python has no hjson" in done.stderr or "that Python has no deepspeed" in done.stderr
    assert "Fix: python -m pip install deepspeed; or name an environment" in done.stderr


@needs_children
@pytest.mark.launch
def test_a_python_without_transformers_is_told_how_to_get_it(files: Path) -> None:
    """A package of that name that fails as an absent one does, in front of the real one."""
    blocked = files / "blocked" / "transformers.py"
    blocked.parent.mkdir()
    blocked.write_text("raise ModuleNotFoundError(\"No module named 'transformers'\", name='transformers')")
    path = os.pathsep.join(filter(None, (str(blocked.parent), os.environ.get("PYTHONPATH"))))
    done = run("memory", "--config", str(files / "ds.json"), "--model", str(files), "--world", "2", PYTHONPATH=path)

    assert done.returncode == 3
    assert "that Python has no transformers" in done.stderr
    assert "Fix: python -m pip install transformers; or" in done.stderr


def test_a_model_that_is_not_there_is_named_before_what_would_read_it(files: Path) -> None:
    bare = files / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    for model in ("none.json", "none.py:make"):
        words = ("--config", str(files / "ds.json"), "--model", str(files / model), "--python", str(bare))
        done = run("memory", "--world", "2", *words)

        assert (done.returncode, done.stderr.count("✗")) == (2, 1)
        assert "does not exist" in done.stderr


@needs_children
@pytest.mark.launch
def test_auto_in_the_type_of_all_numbers_is_asked_back(files: Path) -> None:
    (files / "auto.json").write_text('{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}}')
    status, said = memory(files, "--world", "2", config="auto.json")

    assert status == 2
    assert "--dtype" in json.dumps(said["findings"])


REFUSED = [
    ((), "the number of ranks is unknown"),
    (("--gpus", "8x"), "not a size"),
    (("--gpus", "0x80G"), "not a number of GPUs"),
    (("--gpus", "8x80"), "not a size"),
    (("--gpus", "²x80G"), "not a number of GPUs"),
    (("--gpus", "00x80G"), "not a number of GPUs"),
    (("--gpus", "8x²G"), "not a size"),
    (("--gpus", f"8x{'9' * 400}G"), "not a size"),
    (("--gpus", "8x80G", "--host-memory", "many"), "not a size"),
    (("--world", "-2"), "unknown"),
    (("--world", "2", "--batch", "0"), "a batch of 0 holds nothing"),
    (("--world", "2", "--sequence", "0"), "a sequence of 0 holds nothing"),
    (("--world", "2", "--search"), "no GPU is named"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(words: tuple[str, ...], said: str) -> None:
    done = run("memory", "--config", os.devnull, "--model", "x", *words)

    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize("place", ["config", "model"])
def test_what_is_not_there_is_named(place: str, files: Path) -> None:
    here = {"config": str(files / "ds.json"), "model": str(files)}
    here[place] = str(files / "none.json")
    done = run("memory", "--world", "2", *(word for name, path in here.items() for word in (f"--{name}", path)))

    assert done.returncode == 2
    assert "none.json" in done.stderr


def test_sizes_are_gibibytes() -> None:
    assert parse_gpus("4x24G", None).memory == 24 << 30
    with pytest.raises(UsageError):
        parse_size("80GB", "--gpus")


def test_a_configuration_that_deepspeed_refuses_leads_to_the_command_that_judges_it() -> None:
    with pytest.raises(UsageError) as refused:
        parse_settings({"error": "DeepSpeedConfigError: Elastic training has been removed"}, "my config.json")

    assert "Elastic training has been removed" in refused.value.message
    assert refused.value.hint == "for the reason and the fix: dsdoctor config 'my config.json'"
