"""Memory in real ranks: what is predicted is what they hold, and a rank that runs out of it is told why.

Needs DeepSpeed and transformers. `python -m pytest -m launch tests/launch/test_memory.py` takes about a minute and a half; the
whole table is `python benchmarks/memory.py`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.core.children import parse_answer
from dsdoctor.core.host import LocalHost
from dsdoctor.memory.models import parse_settings
from tests.launch.test_run_launchers import free_port

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tests/launch/train_memory.py"
MISSING = [name for name in ("deepspeed", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed"),
]
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3, "reduce_bucket_size": 200_000, "stage3_param_persistence_threshold": 100},
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": True},
}
POINTS = (
    "after_initialize",
    "first_forward",
    "first_backward",
    "first_step",
    "after_step",
    "forward",
    "backward",
    "step",
    "save",
)
CLOSE = 0.05
MIXTURES = {"Mixtral", "Qwen3-MoE", "DeepSeek-V3"}


def test_real_ranks_hold_what_is_predicted_at_each_point(tmp_path: Path) -> None:
    """Each 61st of 600 cases: stages, offloads and types, one to four ranks, accumulation and checkpointing are among them."""
    rows = measured(tmp_path, "--every", "61")

    assert len({row["architecture"] for row in rows}) >= 6
    assert {row["stage"] for row in rows} == {0, 1, 2, 3}
    assert {row["offload"] for row in rows} == {"none", "optimizer", "both"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32", "float16"}
    assert {row["world"] for row in rows} == {1, 2, 4}
    assert any(row["accumulation"] > 1 for row in rows)
    assert any(row["checkpointing"] for row in rows)
    assert far_off(rows) == {}
    assert all(set(row["points"]) == set(POINTS) for row in rows)


def test_experts_that_run_again_in_the_backward_pass_are_kept_once(tmp_path: Path) -> None:
    """Mixtral, Qwen3-MoE and DeepSeek-V3 at stage 3: a view of an expert's gathered weights is saved for its gradient."""
    chosen = ("--only", "stage 3 offload none bfloat16 bucket 20000 world 2 accumulation 1 checkpointing")
    rows = [row for row in measured(tmp_path, *chosen) if row["architecture"] in MIXTURES]

    assert {row["architecture"] for row in rows} == MIXTURES
    assert far_off(rows) == {}


def measured(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of the benchmark for some of its cases."""
    table = folder / "table.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/memory.py"), *options, "--again", "--json", str(table)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(table.read_text())["rows"])


def far_off(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        f"{row['architecture']} {row['stage']} {row['offload']} {row['dtype']} {row['bucket']} {point}": each["error"]
        for row in rows
        for point, each in row["points"].items()
        if abs(each["error"]) > CLOSE
    }


def ranks(*options: str) -> list[tuple[int, str]]:
    """Exit status and stderr of two ranks under dsdoctor.run."""
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "dsdoctor.run", *options],
            env={
                **os.environ,
                **address,
                "PYTHONPATH": str(ROOT),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = []
    for each in started:
        try:
            _, stderr = each.communicate(timeout=40 if said and said[0][0] else 180)
        except subprocess.TimeoutExpired:  # the other rank has ended, and this one waits for it
            each.kill()
            _, stderr = each.communicate()
        said.append((each.returncode, stderr))
    return said


def ours(stderr: str) -> list[str]:
    return [line.partition("]: ")[2] for line in stderr.splitlines() if line.startswith("dsdoctor [rank")]


def test_a_rank_that_runs_out_is_told_what_it_holds_and_a_trace_measures_the_steps(tmp_path: Path) -> None:
    told, config = tmp_path / "engine.json", tmp_path / "ds_config.json"
    config.write_text(json.dumps(CONFIG))
    (status, stderr), _ = ranks(
        "--memory", "trace", str(TRAIN), "--config", str(config), "--fail", "0", "--say", str(told)
    )
    lines = ours(stderr)
    text = "\n".join(lines)

    # the trace: states between steps are as predicted
    pairs = re.findall(r"(after (?:initialize|step 1)) +cpu ([\d.]+) MiB \(predicted ([\d.]+) MiB\)", text)
    assert [name for name, _, _ in pairs] == ["after initialize", "after step 1"], stderr[-3000:]
    assert all(abs(float(measured) - float(predicted)) <= 0.1 for _, measured, predicted in pairs), pairs
    assert len([line for line in lines if re.match(r" +(forward|backward|step) \d", line)]) == 9
    # the end: status, traceback, line, the planted tensor, the changes
    assert status == 1
    assert "Traceback (most recent call last)" in stderr
    assert f"this rank ran out of memory at {TRAIN}:" in text
    assert "held.append(torch.empty(1 << 46))" in text
    assert "[500000] torch.float32: 1.9 MiB" in text
    assert "predicted without activations" in text
    # no change wins what was asked for here, and none is advised
    assert "what refused it: the machine: it has " in text
    assert "262144.0 GiB were requested at once, while all tensors are " in text
    assert "activation checkpointing" not in text
    # what was read of the engine is what DeepSpeed makes of its configuration
    engine = json.loads(told.read_text())
    wish = json.dumps({"world": 2, "batch": None, "given": {}})
    answer = LocalHost().ask(sys.executable, "ask_zero_config.py", str(config), wish, timeout=120)
    asked = parse_settings(parse_answer(answer, dict, "the configuration"), "ds_config.json")
    differ = {name: value for name, value in engine["settings"].items() if value not in (getattr(asked, name), [])}
    assert differ == {"optimizer": "adamw", "torch_adam": True}
    assert sum(count for _, count, _ in engine["shape"]["parameters"]) == 3 * (128 * 128 + 128) + 129
    assert engine["layout"] == {"world": 2, "rank": 0, "together": True}


def test_a_model_of_transformers_that_runs_out_is_told_what_was_to_be_expected_of_its_last_batch(
    tmp_path: Path,
) -> None:
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", "dsdoctor.run", str(TRAIN.with_name("train_oom.py"))],
        env={**os.environ, **address, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    text = "\n".join(ours(done.stderr))

    assert done.returncode == 1
    assert "train_oom.py:" in text
    measured = re.search(r"measured now: ([\d.]+) MiB", text)
    told = re.search(r"predicted for 4 x 96, at the peak of: forward ([\d.]+) MiB, backward ([\d.]+) MiB", text)
    assert measured, done.stderr[-3000:]
    assert told, done.stderr[-3000:]
    # it ran out at the end of forward, before the loss
    assert 0.6 * float(told[1]) < float(measured[1]) < float(told[1])
    assert "activation checkpointing: model.gradient_checkpointing_enable(): " in text
    assert "micro batch 2, accumulated over 2 steps: " in text
