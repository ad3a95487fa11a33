"""``--config-check``: the configuration of each engine is judged before `deepspeed.initialize`, by the DeepSpeed of the process."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.run.__main__ import parse_command_line
from dsdoctor.run.config_check import config_of

BAD = {"train_batch_size": 4, "zero_optimisation": {"stage": 2}, "gradient_clipping": "auto"}
GOOD = {"train_batch_size": 4, "zero_optimization": {"stage": 1}}
OF_ACCELERATE = {**GOOD, "steps_per_print": float("inf")}
TRAIN = """
import deepspeed, json, sys, torch
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # gloo does without an op that would be compiled
deepspeed.init_distributed("gloo")
for config in json.load(open(sys.argv[1])):
    model = torch.nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    print("stage", engine.zero_optimization_stage(), flush=True)
"""


def initialize(args: Any = None, model: Any = None, config: Any = None, config_params: Any = None) -> None:
    """As much of DeepSpeed's signature as it takes."""


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"config": GOOD}),
        ((None, "model", GOOD), {}),
        ((), {"config_params": GOOD}),
        ((SimpleNamespace(deepspeed_config=base64.urlsafe_b64encode(json.dumps(GOOD).encode()).decode()),), {}),
    ],
)
def test_the_configuration_is_found_wherever_deepspeed_takes_it_from(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    found = config_of(initialize, args, kwargs)

    assert found is not None
    assert found["zero_optimization"] == {"stage": 1}


def test_a_call_without_a_configuration_is_left_to_deepspeed() -> None:
    assert config_of(initialize, (), {"args": SimpleNamespace()}) is None
    assert config_of(initialize, (), {"config": 5}) is None


def test_the_option_is_understood(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()

    assert parse_command_line([str(script)], {}).config_check == "warn"
    assert parse_command_line(["--config-check", "strict", str(script)], {}).config_check == "strict"
    with pytest.raises(UsageError, match="unknown --config-check 'loud'"):
        parse_command_line(["--config-check=loud", str(script)], {})


def trained(folder: Path, mode: str, port: int, *configs: dict[str, Any]) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(TRAIN)
    (folder / "configs.json").write_text(json.dumps(configs))
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [
        sys.executable,
        "-m",
        "dsdoctor.run",
        "--overflow",
        "off",
        "--config-check",
        mode,
        "train.py",
        "configs.json",
    ]
    environment = {**os.environ, **variables, "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.launch
def test_a_bad_configuration_is_told_once_and_a_good_one_is_not(tmp_path: Path) -> None:
    done = trained(tmp_path, "warn", 29791, OF_ACCELERATE, BAD, BAD)
    said = [line for line in done.stderr.splitlines() if line.startswith("dsdoctor [rank 0]: ")]

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("stage 0") == 2
    assert sum("config-key-misspelt" in line for line in said) == 1
    assert sum("config-auto-stays" in line for line in said) == 1
    assert sum("✗" in line for line in said) == 2


@pytest.mark.launch
def test_strict_refuses_to_start_with_an_error(tmp_path: Path) -> None:
    done = trained(tmp_path, "strict", 29793, GOOD, BAD)

    assert done.returncode == 2
    assert [line for line in done.stdout.splitlines() if line.startswith("stage")] == ["stage 1"]
    assert "--config-check strict" in done.stderr
