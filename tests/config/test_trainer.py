"""The values that are told for "auto" are those that a real TrainingArguments puts there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.cases import FOR_TRAINER
from tests.config.many import ask_many

REAL = """
import json, sys
from transformers import TrainingArguments
for config, arguments in json.load(sys.stdin):
    made = TrainingArguments(output_dir="none", use_cpu=True, deepspeed=config, **arguments)
    print("REAL " + json.dumps(made.hf_deepspeed_config.config))
"""


@pytest.mark.launch
def test_a_real_training_arguments_fills_the_same_values_in(tmp_path: Path) -> None:
    cases = list(FOR_TRAINER.values())
    files = []
    for number, (_, arguments) in enumerate(cases):
        files.append(str(tmp_path / f"{number}.json"))
        Path(files[-1]).write_text(json.dumps(arguments))
    environment = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29797",
    }
    command = [sys.executable, "-c", REAL]
    done = subprocess.run(
        command, input=json.dumps(cases), capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    real = [json.loads(line.removeprefix("REAL ")) for line in done.stdout.splitlines() if line.startswith("REAL ")]

    for asked, theirs in zip(ask_many([config for config, _ in cases], arguments=files), real, strict=True):
        assert asked.filled is not None
        for each in asked.filled.filled:
            value = theirs
            for key in each.path.split("."):
                value = value[key]
            # what needs the model and the number of steps is filled in later, when it trains
            assert value in (json.loads(each.value), "auto"), each
