"""TrainingArguments(debug="underflow_overflow") under dsdoctor.run: an unmodified Trainer script is stopped by ours."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch
TRAINER = Path(__file__).parents[2] / "launch" / "hf_trainer.py"


def trained(zero: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    more = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more |= {"ZERO": zero, "BF16": "1", "PLANT": "transformer.h.1.mlp", "DEBUG_OPTION": "underflow_overflow"}
    command = [sys.executable, "-m", "dsdoctor.run", "--hang", "off", str(TRAINER)]
    return subprocess.run(
        command,
        env={**os.environ, "DS_ACCELERATOR": "cpu", **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_without_an_engine_ours_stands_in_the_place_of_transformers_class() -> None:
    done = trained("none")

    assert done.returncode == 1
    assert done.stderr.count("dsdoctor's DebugUnderflowOverflow replaces transformers'") == 1
    assert "OverflowDetected: DebugUnderflowOverflow: inf/nan detected during batch_number=2" in done.stderr
    assert "transformer.h.1.mlp (GPT2MLP) made" in done.stderr


def test_with_an_engine_its_watch_takes_over_and_ends_the_training() -> None:
    done = trained("2")

    assert done.returncode == 1
    assert "the engine's watch takes over at level frames" in done.stderr
    assert "OverflowDetected: dsdoctor: transformer.h.1.mlp (GPT2MLP) made" in done.stderr
