"""One launch: each configuration is trained with a replay in every step and without, and both are compared bit for bit."""

from typing import Any

import pytest

from tests.overflow.launch.conftest import launch
from tests.overflow.launch.replay_cases import CASES, HINDERED

pytestmark = pytest.mark.launch

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return launch("replay_worker.py", CASES | HINDERED, tmp_path_factory.mktemp("replay"))


@pytest.mark.parametrize("name", CASES | HINDERED)
def test_training_goes_on_as_if_nothing_had_been_replayed(ranks: Ranks, name: str) -> None:
    assert [rank[name]["first_step_apart"] for rank in ranks] == [None, None]
    assert all(rank[name]["moved"] for rank in ranks)


@pytest.mark.parametrize("name", CASES)
def test_the_replay_sees_what_was_seen_live(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        assert rank[name]["different"] == []
        assert rank[name]["compared"] > 0


@pytest.mark.parametrize("name", CASES)
def test_every_micro_batch_is_run_again(ranks: Ranks, name: str) -> None:
    micro_batches = CASES[name]["steps"] * CASES[name]["gas"]
    backward = micro_batches if CASES[name].get("backward", True) else 0

    for rank in ranks:
        assert [rank[name][each] for each in ("replayed", "forward", "backward")] == [
            micro_batches,
            micro_batches,
            backward,
        ]
        assert rank[name]["why_not"] == []


def test_gradients_that_were_not_kept_leave_the_forward(ranks: Ranks) -> None:
    for rank in ranks:
        result = rank["outputs' gradients too big"]
        assert (result["forward"], result["backward"]) == (6, 0)
        assert result["why_not"] == ["its outputs' gradients were not kept (limit)"]


def test_inputs_that_were_not_kept_leave_the_other_micro_batch(ranks: Ranks) -> None:
    for rank in ranks:
        result = rank["inputs too big"]
        assert (result["forward"], result["backward"]) == (3, 3)
        assert result["why_not"] == ["its inputs were not kept (limit)"]


def test_a_forward_that_no_backward_followed_is_not_replayed(ranks: Ranks) -> None:
    for rank in ranks:
        result = rank["a forward without a backward"]
        assert (result["replayed"], result["forward"], result["backward"]) == (6, 6, 6)


def test_inputs_that_were_written_to_since_are_told(ranks: Ranks) -> None:
    assert [rank["inputs written to"]["changed_inputs"] for rank in ranks] == [[0], [0]]
    assert [rank["zero 1 fp32"]["changed_inputs"] for rank in ranks] == [[], []]


def test_a_rank_that_fails_does_not_keep_another_from_its_replay(ranks: Ranks) -> None:
    well, failed = (rank["rank 1 fails"] for rank in ranks)

    assert (well["forward"], well["backward"], well["why_not"]) == (6, 6, [])
    assert (failed["forward"], failed["backward"], failed["why_not"]) == (0, 0, ["RuntimeError: planted"])


@pytest.mark.parametrize("name", ["rank 0 fails under zero 3", "rank 0 fails under zero 3 and checkpointing"])
def test_a_rank_that_fails_keeps_gathering_weights_with_the_others(ranks: Ranks, name: str) -> None:
    failed, well = (rank[name] for rank in ranks)

    assert (well["forward"], well["backward"], well["why_not"]) == (6, 0, ["another rank could not continue"])
    assert (failed["forward"], failed["backward"], failed["why_not"]) == (0, 0, ["RuntimeError: planted"])
