"""A watch changes nothing: ten steps, dropout, accumulation, overflows on the way, every stage and level, bit for bit."""

from typing import Any

import pytest

from tests.overflow.launch.conftest import launch

pytestmark = pytest.mark.launch

LEVELS = ["guard", "frames", "trace"]
CASES: dict[str, dict[str, Any]] = {
    "zero 0 fp32": {"stage": 0, "dtype": "fp32", "levels": LEVELS, "gas": 2},
    "zero 0 fp16": {"stage": 0, "dtype": "fp16", "levels": LEVELS, "bad": 3},
    "zero 1 bf16": {"stage": 1, "dtype": "bf16", "levels": LEVELS, "bad": 3},
    "zero 2 fp16": {"stage": 2, "dtype": "fp16", "levels": LEVELS, "gas": 2, "power": 20},
    "zero 3 fp16": {"stage": 3, "dtype": "fp16", "levels": LEVELS, "gas": 2, "power": 20},
    "zero 3 bf16": {"stage": 3, "dtype": "bf16", "levels": ["guard"], "bad": 3, "offload": True},
    "generators": {"stage": 2, "dtype": "fp16", "levels": ["guard"], "power": 20, "noisy": True},
    "reentrant": {"stage": 2, "dtype": "bf16", "levels": ["frames"], "bad": 3, "checkpointing": "reentrant"},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("bits_worker.py", CASES, tmp_path_factory.mktemp("bits"))


@pytest.mark.parametrize("name", CASES)
def test_weights_and_states_are_the_same_bit_for_bit(ranks: list[dict[str, Any]], name: str) -> None:
    assert {level: [rank[name][level]["same"] for rank in ranks] for level in CASES[name]["levels"]} == {
        level: [True, True] for level in CASES[name]["levels"]
    }


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "bad" in case or "power" in case])
def test_the_overflows_on_the_way_were_seen(ranks: list[dict[str, Any]], name: str) -> None:
    seen = {rule for level in CASES[name]["levels"] for rule in ranks[0][name][level]["rules"]}

    assert seen & {"nan-in-the-batch", "gradient-above-scale"}
