"""A load that leaves the optimizer out: what it needs, what it takes, and what it leaves behind without a word."""

from pathlib import Path

import pytest

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import Judged, judge
from dsdoctor.checkpoint.loading import MODULE, NO_OPTIMIZER, Plan, Verdict
from tests.checkpoint.written import Kind, write


def judged(folder: Path, load: str, tag: str | None = None, **plan: int) -> Judged:
    return judge(look(folder), tag, Plan(load=load, **plan))


def rules(found: Judged) -> list[str]:
    return [each.rule for each in found.findings]


@pytest.mark.parametrize("load", [NO_OPTIMIZER, MODULE])
@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_the_optimizers_files_need_not_be_there_and_ranks_do_not_matter(
    tmp_path: Path, load: str, stage: int
) -> None:
    tag = write(tmp_path, Kind(stage=stage, dtype="bf16"))
    for file in tag.glob("*optim_states.pt"):
        file.unlink()

    found = judged(tmp_path, load, world=3, stage=2)

    assert found.outcome is not None
    assert found.outcome.verdict is Verdict.LOADS
    assert rules(found) == ["checkpoint-optimizer-skipped"]
    assert any("rounded to bf16" in line for line in found.findings[0].evidence)
    assert any("step" in line and "start over" in line for line in found.findings[0].evidence) == (load == MODULE)


def test_at_stage_3_the_weights_lie_in_the_optimizers_files(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind(stage=3))

    whole = judged(tmp_path, NO_OPTIMIZER)
    more = judged(tmp_path, NO_OPTIMIZER, world=3)
    module = judged(tmp_path, MODULE)
    next(tag.glob("*optim_states.pt")).unlink()
    gone = judged(tmp_path, NO_OPTIMIZER)

    assert rules(whole) == ["checkpoint-optimizer-skipped"]
    assert [each.outcome and each.outcome.verdict for each in (more, module)] == [Verdict.CANNOT] * 2
    assert rules(gone) == ["checkpoint-shard-missing"]


def test_at_stage_3_the_weights_are_those_of_the_tag_that_latest_names(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, Kind(stage=3, step=step))

    named = judged(tmp_path, NO_OPTIMIZER, "global_step1")
    latest = judged(tmp_path, NO_OPTIMIZER, "global_step2")
    (tmp_path / "latest").unlink()
    without = judged(tmp_path, NO_OPTIMIZER, "global_step2")

    assert rules(named) == ["checkpoint-weights-of-latest", "checkpoint-optimizer-skipped"]
    assert "'global_step2'" in named.findings[0].title
    assert rules(latest) == ["checkpoint-optimizer-skipped"]
    assert rules(without)[0] == "checkpoint-weights-of-latest"


def test_without_zero_in_bf16_the_first_step_undoes_the_load(tmp_path: Path) -> None:
    write(tmp_path, Kind(stage=1, dtype="bf16"))

    undone = judged(tmp_path, NO_OPTIMIZER, stage=0)
    refreshed = judged(tmp_path, MODULE, stage=0)
    sharded = judged(tmp_path, NO_OPTIMIZER, stage=2)

    assert rules(undone) == ["checkpoint-weights-undone", "checkpoint-optimizer-skipped"]
    assert rules(refreshed) == rules(sharded) == ["checkpoint-optimizer-skipped"]


def test_what_was_not_tried_is_said_to_be_unknown(tmp_path: Path) -> None:
    for kind in (Kind(stage=1, dtype="bf16", experts=2), Kind(stage=1, pipeline=True), Kind(stage=1, dtype="fp16")):
        write(tmp_path / kind.name, kind)
        found = judged(tmp_path / kind.name, NO_OPTIMIZER)
        assert found.outcome is not None
        assert found.outcome.verdict is Verdict.UNKNOWN


def test_where_the_whole_does_not_load_the_weights_alone_are_offered(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind(stage=2))

    (other,) = judge(look(tmp_path), None, Plan(world=4)).findings
    next(tag.glob("*optim_states.pt")).unlink()
    (missing,) = judge(look(tmp_path), None, Plan()).findings

    assert any("load_optimizer_states=False" in line for line in other.evidence)
    assert missing.fix is not None
    assert any("--load no-optimizer" in line for line in missing.fix.commands)
