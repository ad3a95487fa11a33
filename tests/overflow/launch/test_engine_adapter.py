"""One launch: an overflow planted on rank 1 in step 1 of three, in every configuration that DeepSpeed decides otherwise."""

from typing import Any

import pytest

from tests.overflow.launch.adapter_cases import CASES, PLANTED
from tests.overflow.launch.conftest import launch

pytestmark = pytest.mark.launch


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("adapter_worker.py", CASES, tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize("name", CASES)
class TestEveryConfiguration:
    def test_every_rank_hears_one_decision_in_each_step(self, ranks: list[dict[str, Any]], name: str) -> None:
        heard = [[decision["step"] for decision in rank[name]["decisions"]] for rank in ranks]

        assert heard == [[0, 1, 2], [0, 1, 2]]
        assert [rank[name]["ended"] for rank in ranks] == [[1, 2, 3], [1, 2, 3]]
        assert not any(decision["late"] for rank in ranks for decision in rank[name]["decisions"])

    def test_the_decision_comes_before_weights_are_written(self, ranks: list[dict[str, Any]], name: str) -> None:
        assert all(decision["unwritten"] for rank in ranks for decision in rank[name]["decisions"])

    def test_every_rank_hears_the_same_verdict(self, ranks: list[dict[str, Any]], name: str) -> None:
        verdict = CASES[name]["verdict"]

        for rank in ranks:
            assert [decision["overflow"] for decision in rank[name]["decisions"]][: len(verdict)] == verdict

    def test_the_planted_parameter_is_named_and_no_other(self, ranks: list[dict[str, Any]], name: str) -> None:
        bad = {parameter for rank in ranks for parameter in rank[name]["decisions"][1]["bad"]}

        assert bad == {CASES[name].get("planted", PLANTED)}
        assert not [parameter for rank in ranks for parameter in rank[name]["decisions"][0]["bad"]]

    def test_replicated_gradients_are_bad_on_both_ranks(self, ranks: list[dict[str, Any]], name: str) -> None:
        said = {rank[name]["decisions"][1]["replicated"] for rank in ranks}
        both = all(rank[name]["decisions"][1]["bad"] for rank in ranks)

        assert said == {both}

    def test_the_loss_of_each_backward_is_heard(self, ranks: list[dict[str, Any]], name: str) -> None:
        losses = 0 if CASES[name].get("pipeline") else 3 * CASES[name].get("gas", 1)

        assert [rank[name]["losses"] for rank in ranks] == [losses, losses]

    def test_the_scale_is_the_one_in_the_gradients(self, ranks: list[dict[str, Any]], name: str) -> None:
        scales = CASES[name]["scales"]

        for rank in ranks:
            assert [decision["loss_scale"] for decision in rank[name]["decisions"]] == scales

    def test_the_engine_is_as_it_was_after_detaching(self, ranks: list[dict[str, Any]], name: str) -> None:
        assert all(rank[name]["restored"] for rank in ranks)
        assert [rank[name]["optimizer"] for rank in ranks] == [CASES[name]["class"]] * 2
