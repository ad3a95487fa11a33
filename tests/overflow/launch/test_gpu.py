"""What the other files of this folder ask on a CPU, asked on one GPU with two NCCL ranks; and a GPU without a compiler.

``benchmarks/gpu.py`` runs these where there is a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.overflow.launch.conftest import launch
from tests.overflow.launch.fault_cases import judged, on_a_gpu, sample

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
LEVELS = ["guard", "frames", "trace"]
BITS: dict[str, dict[str, Any]] = {
    "zero 0 fp32": {"stage": 0, "dtype": "fp32", "levels": LEVELS, "gas": 2},
    "zero 0 fp32, CUDA autocast": {"stage": 0, "dtype": "fp32", "levels": LEVELS[:2], "config": AUTOCAST, "bad": 3},
    "zero 1 bf16": {"stage": 1, "dtype": "bf16", "levels": LEVELS, "bad": 3},
    "zero 2 fp16": {"stage": 2, "dtype": "fp16", "levels": LEVELS, "gas": 2, "power": 20},
    "zero 3 bf16": {"stage": 3, "dtype": "bf16", "levels": LEVELS[:2], "bad": 3},
    "own generators": {"stage": 2, "dtype": "fp16", "levels": ["guard"], "power": 20, "noisy": True},
}
"""``bad`` and ``power``: steps that overflow and are replayed, with dropout, whose random numbers must be put back."""


def test_a_replay_leaves_weights_states_and_random_numbers_as_they_were(tmp_path: Path) -> None:
    ranks = launch("bits_worker.py", BITS, tmp_path, device="cuda")

    for name, case in BITS.items():
        for level in case["levels"]:
            assert [rank[name][level]["same"] for rank in ranks] == [True, True], f"{name}, {level}"
        if "bad" in case or "power" in case:
            seen = {rule for level in case["levels"] for rule in ranks[0][name][level]["rules"]}
            assert seen & {"nan-in-the-batch", "gradient-above-scale"}, name


@pytest.mark.parametrize("level", ["guard", "frames"])
def test_module_line_rank_and_kind_are_named_right(tmp_path: Path, level: str) -> None:
    planted = {**sample(25, seed=11), **on_a_gpu()}
    cases = {name: {**case, "level": level} for name, case in planted.items()}
    ranks = launch("fault_worker.py", cases, tmp_path, device="cuda")

    for name, case in cases.items():
        verdict = judged(case, ranks[0][name]["findings"])
        said = verdict.pop("said")
        assert [rank[name]["problem"] for rank in ranks] == ["", ""], name
        assert set(verdict.values()) <= {"right", "silent"}, f"{name}: {said}"
        assert (verdict["kind"], verdict["module"], verdict["rank"]) == ("right",) * 3, f"{name}: {said}"


WITHOUT_A_COMPILER = """
import torch
from dsdoctor.overflow.measure.measure import Meter, backend_of, why_no_kernel
device = torch.device("cuda")
meter = Meter(device)
meter.scan(torch.tensor([1.0, float("inf"), -4.0], device=device))
row = meter.read()[0].tolist()
print(backend_of(device), meter.backend, row[:3], bool(why_no_kernel(device)))
"""


def test_without_a_compiler_torch_measures_and_the_reason_is_known(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    env |= {"PATH": str(tmp_path / "empty"), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_COMPILER],
        env=env,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert child.stdout.strip() == "torch torch [0, 1, 0] True", child.stderr
