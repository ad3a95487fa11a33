"""Real engines on two ranks, a defect planted in each: the verdict names the module or parameter, the rank and the step."""

from pathlib import Path
from typing import Any

import pytest

from tests.overflow.launch.conftest import launch
from tests.overflow.launch.verdict_cases import CASES, PIPELINES, SAID

pytestmark = pytest.mark.launch
HEALTHY = ("step 0,", "step 0:", "step 1,", "step 1:", "ZeRO stage 0, float16, step 0,")
"""How findings of the steps before the planted one begin a line; how large something was in them is said of a later one too."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("verdict_worker.py", CASES, tmp_path_factory.mktemp("verdicts"))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("pipeline_worker.py", PIPELINES, tmp_path_factory.mktemp("pipelines"))


def cause(ranks: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The first finding of the step with the defect, from the rank that reported it."""
    found = [
        finding
        for rank in ranks
        for finding in rank[name]["findings"]
        if any("step 2," in line for line in finding["evidence"])
    ]
    return found[0]


@pytest.mark.parametrize("name", CASES)
class TestEveryConfiguration:
    def test_the_verdict_names_what_was_planted(self, ranks: list[dict[str, Any]], name: str) -> None:
        rule, words = SAID[CASES[name]["plant"]]
        found = cause(ranks, name)

        assert (found["rule"], words in found["title"]) == (rule, True), found["title"]

    def test_the_verdict_names_the_rank(self, ranks: list[dict[str, Any]], name: str) -> None:
        only = CASES[name].get("only")
        found = cause(ranks, name)
        who = next(line for line in found["evidence"] if line.startswith("step 2,"))

        if only is not None:
            assert f"rank {only}" in who
            assert f"on rank {only} of 2 only" in found["title"] or SAID["loss"][0] == found["rule"]
        else:
            assert "only" not in found["title"]
            # the element lies in the first half, which ZeRO-3 gave to rank 0
            assert ("rank 0 of 2 holds" in found["title"]) is (name == "zero 3 fp16 weight")

    def test_nothing_was_said_of_the_healthy_steps(self, ranks: list[dict[str, Any]], name: str) -> None:
        if CASES[name]["plant"] != "scale":
            told = [
                finding
                for rank in ranks
                for finding in rank[name]["findings"]
                if any(line.startswith(HEALTHY) for line in (finding["title"], *finding["evidence"]))
            ]

            unscaled = ["loss-not-scaled"] if name.startswith("zero 0 fp16") else []  # a defect of DeepSpeed 0.19.8

            assert [finding["rule"] for finding in told] == unscaled

    def test_a_stop_is_the_same_exception_on_every_rank(self, ranks: list[dict[str, Any]], name: str) -> None:
        raised = {rank[name]["raised"] for rank in ranks}

        assert len(raised) == 1
        assert raised.pop().startswith("OverflowDetected" if CASES[name].get("answer") == "raise" else "")
        assert (ranks[0][name]["raised"] != "") is (CASES[name].get("answer") == "raise")


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_names_the_layer_and_its_stage(stages: list[dict[str, Any]], name: str) -> None:
    planted = PIPELINES[name]["plant"]
    found = cause(stages, name)
    home = next(rank for rank in (0, 1) if planted in stages[rank][name]["names"])

    assert f"{planted} (Gain) made" in found["title"] or f"out of the backward of {planted}" in found["title"]
    assert any(f"rank {home}, stage {home}" in line for line in found["evidence"])


def test_one_bad_rank_of_four_stops_all_four_within_seconds(tmp_path: Path) -> None:
    case = {"stage": 3, "dtype": "bf16", "plant": "activation", "only": 2, "answer": "raise"}
    ranks = launch("verdict_worker.py", {"four": case}, tmp_path, ranks=4)

    raised = {rank["four"]["raised"] for rank in ranks}
    assert len(raised) == 1
    assert "on rank 2 of 4 only" in raised.pop()
    assert max(rank["four"]["seconds_to_stop"] for rank in ranks) < 20
