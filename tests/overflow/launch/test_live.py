"""What was live counts, also where the replay shows something else; rank 0 knows what rank 1 saw; a load that loaded nothing."""

from typing import Any

import pytest

from tests.overflow.launch.conftest import launch

pytestmark = pytest.mark.launch

CASES: dict[str, dict[str, Any]] = {
    # the first call is the live one, those after it are replays
    "nothing again, frames": {"level": "frames", "bad_calls": {"early": [0]}},
    "nothing again, guard": {"level": "guard", "bad_calls": {"early": [0]}},
    "nothing again, guard, fp16": {"level": "guard", "dtype": "fp16", "bad_calls": {"early": [0]}},
    "another module, frames": {"level": "frames", "bad_calls": {"late": [0], "early": [1, 2, 3, 4, 5]}},
    "the same again, frames": {"level": "frames", "bad_calls": {"late": [0, 1, 2, 3, 4, 5]}},
    # its own evaluation, which no other rank takes part in
    "rank 1 evaluates, frames": {"level": "frames", "bad_calls": {"late": [0]}, "ranks": [1], "evaluates": True},
    "no checkpoint": {"level": "guard", "load": "/nonexistent/runs/7"},
}
CASES = {name: {"stage": 1, "dtype": "bf16", **case} for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("live_worker.py", CASES, tmp_path_factory.mktemp("live"))


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [
        ("nothing again, frames", "early", "not as live: the replay shows nothing bad"),
        ("another module, frames", "late", "not as live: the replay shows first early, output"),
        ("the same again, frames", "late", ""),
    ],
)
def test_the_live_reading_is_reported_and_a_replay_that_disagrees_is_said(
    ranks: list[dict[str, Any]], name: str, module: str, said: str
) -> None:
    rule, _, title, *evidence = ranks[0][name]["findings"][0]

    assert (rule, title.split()[0]) == ("overflow-in-module", module)
    assert title.endswith("on all 2 ranks: the model or the data")
    assert ("not as live" in " ".join(evidence)) is bool(said)
    assert said in " ".join(evidence)
    # of another run than the live one no line is told
    assert any("first made by aten.div" in line for line in evidence) is not bool(said)


@pytest.mark.parametrize("name", ["nothing again, guard", "nothing again, guard, fp16"])
def test_without_live_frames_it_is_not_reproduced(ranks: list[dict[str, Any]], name: str) -> None:
    (found,) = ranks[0][name]["findings"]

    assert found[0] == "overflow-not-reproduced"
    assert "not as live: the model's loss is finite in the replay" in found[2]


def test_what_rank_1_saw_alone_is_in_rank_0s_findings(ranks: list[dict[str, Any]]) -> None:
    (found,) = ranks[0]["rank 1 evaluates, frames"]["findings"]

    assert found[0] == "overflow-in-module"
    assert "late (Once) made" in found[2]
    assert "on rank 1 of 2 only" in found[2]


def test_a_checkpoint_that_is_not_there_is_a_warning(ranks: list[dict[str, Any]]) -> None:
    (found,) = ranks[0]["no checkpoint"]["findings"]

    assert ranks[0]["no checkpoint"]["loaded"] == [None, None]
    assert found[:3] == [
        "checkpoint-not-loaded",
        "WARNING",
        "load_checkpoint loaded nothing from /nonexistent/runs/7: the training starts from scratch",
    ]
