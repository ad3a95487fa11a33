"""What a load asks for beside the files, and what stands in a folder and is not loaded: told, and no healthy one is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import Judged, judge
from dsdoctor.checkpoint.loading import NO_OPTIMIZER, Plan, Verdict
from dsdoctor.checkpoint.text import checkpoint_lines, verdict_line
from dsdoctor.cli.app import run
from dsdoctor.core.finding import Severity, has_error
from tests.checkpoint.written import KINDS, Called, Kind, floats, model_states, optimizer_states, save, write

SHARDED = [kind for kind in KINDS if kind.stage and not kind.experts and not kind.pipeline]


def judged(folder: Path, tag: str | None = None) -> Judged:
    return judge(look(folder), tag, Plan())


def rules(found: Judged) -> set[str]:
    return {finding.rule for finding in found.findings}


def verdict(found: Judged) -> Verdict | None:
    return found.outcome.verdict if found.outcome else None


def resave(tag: Path, kind: Kind, more: dict[str, Any]) -> None:
    """Write the model states anew, with more in them."""
    for file in tag.glob("*model_states.pt"):
        save(file, {**model_states(kind, kind.world, 1), **more})


@pytest.mark.parametrize("kind", SHARDED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("module", ["__main__", "my_project.arguments", "omegaconf.dictconfig"])
def test_objects_of_other_packages_are_named(tmp_path: Path, kind: Kind, module: str) -> None:
    tag = write(tmp_path, kind)
    resave(tag, kind, {"args": [Called(module, "Arguments", (), {"lr": 1})]})

    found = judged(tmp_path)

    assert rules(found) >= {"checkpoint-needs-classes"}
    assert f"{module}.Arguments" in found.findings[0].title
    assert verdict(found) is Verdict.UNKNOWN


def test_objects_that_every_run_has_are_none_of_them(tmp_path: Path) -> None:
    tag = write(tmp_path, KINDS[4])
    more = [
        Called("argparse", "Namespace"),
        Called("__builtin__", "set", ([1, 2],)),
        Called("collections", "OrderedDict"),
        Called("pathlib", "PosixPath", ("a",)),
    ]
    resave(tag, KINDS[4], {"args": more, "frozen_param_shapes": {}})

    found = judged(tmp_path)

    assert found.findings == ()
    assert verdict(found) is Verdict.LOADS


@pytest.mark.parametrize("kind", SHARDED, ids=lambda kind: kind.name)
def test_excluded_frozen_parameters_are_told_where_deepspeed_notes_them(tmp_path: Path, kind: Kind) -> None:
    tag = write(tmp_path, kind)
    resave(tag, kind, {"frozen_param_shapes": None})

    found = judged(tmp_path)

    # below stage 2 DeepSpeed never writes them, and None means nothing
    told = kind.stage >= 2
    assert ("checkpoint-frozen-excluded" in rules(found)) == told
    assert verdict(found) is (Verdict.UNKNOWN if told else Verdict.LOADS)


@pytest.mark.parametrize("kind", SHARDED, ids=lambda kind: kind.name)
def test_files_of_ranks_that_a_larger_run_left_are_no_fault_of_the_tag(tmp_path: Path, kind: Kind) -> None:
    larger = write(tmp_path / "larger", Kind(stage=kind.stage, dtype=kind.dtype, world=3, step=kind.step))
    tag = write(tmp_path / "saved", kind)
    left = [file.name for file in larger.iterdir() if not (tag / file.name).exists()]
    for name in left:
        shutil.copy(larger / name, tag / name)

    found = judged(tmp_path / "saved")

    (finding,) = found.findings
    assert (finding.rule, finding.severity) == ("checkpoint-leftover-shards", Severity.WARNING)
    assert "with ranks that" in finding.title
    assert sorted(finding.evidence) == sorted(left)
    assert verdict(found) is Verdict.LOADS


@pytest.mark.parametrize("stage", [1, 2])
def test_what_elastic_checkpoint_saved_without_the_step_cannot_be_loaded_whole(tmp_path: Path, stage: int) -> None:
    kind = Kind(stage=stage)
    for rank, file in enumerate(sorted(write(tmp_path, kind).glob("*optim_states.pt"))):
        content = optimizer_states(kind, rank, kind.world)
        states = content["optimizer_state_dict"]
        states["base_optimizer_state"] = list(states["base_optimizer_state"]["state"].values())
        save(file, content)

    whole, alone = judged(tmp_path), judge(look(tmp_path), None, Plan(load=NO_OPTIMIZER))

    assert [verdict(whole), verdict(alone)] == [Verdict.CANNOT, Verdict.LOADS]
    assert whole.outcome is not None
    assert "load_optimizer_states=False" in whole.outcome.fix


def test_files_of_the_optimizer_that_a_run_of_another_type_left_are_no_fault_of_the_tag(tmp_path: Path) -> None:
    wrong = []
    for kind in SHARDED:
        folder = tmp_path / kind.name
        left = write(folder / "other", Kind(stage=kind.stage, dtype="fp32" if kind.dtype == "bf16" else "bf16"))
        tag = write(folder / "saved", kind)
        names = sorted(Path(shutil.copy(file, tag)).name for file in left.glob("*optim_states.pt"))
        found = judged(folder / "saved")
        told = [(each.rule, each.title.partition("with ")[2], sorted(each.evidence)) for each in found.findings]
        of_type = "a type that the last save did not have"
        if told != [("checkpoint-leftover-shards", of_type, names)] or verdict(found) is not Verdict.LOADS:
            wrong.append((kind.name, told, verdict(found)))

    assert wrong == []


@pytest.mark.parametrize("kind", SHARDED, ids=lambda kind: kind.name)
def test_a_tag_further_down_is_found_as_deepspeed_finds_it(tmp_path: Path, kind: Kind) -> None:
    tag = write(tmp_path / "run1", kind, latest=False)
    (tmp_path / "latest").write_text(f"run1/{tag.name}")

    assert verdict(judged(tmp_path)) is Verdict.LOADS
    assert verdict(judged(tmp_path, f"run1/{tag.name}")) is Verdict.LOADS
    assert judged(tmp_path).findings == ()


def test_a_whole_path_in_latest_loads_and_is_told(tmp_path: Path) -> None:
    tag = write(tmp_path, KINDS[4])
    (tmp_path / "latest").write_text(str(tag))

    found = judged(tmp_path)

    assert rules(found) == {"checkpoint-latest-absolute"}
    assert verdict(found) is Verdict.LOADS


def test_bf16_files_without_their_mark_are_to_be_renamed(tmp_path: Path) -> None:
    kind = next(kind for kind in SHARDED if kind.dtype == "bf16")
    tag = write(tmp_path, kind)
    for file in list(tag.glob("bf16_*")):
        file.rename(tag / file.name.removeprefix("bf16_"))

    found = judged(tmp_path)

    assert has_error(found.findings)
    assert found.findings[0].rule == "checkpoint-shards-mixed"
    assert "bf16_ prefix" in found.findings[0].title
    assert found.outcome is None


def test_folders_of_tags_further_down_and_copies_that_were_cut_off_are_named(tmp_path: Path) -> None:
    tag = write(tmp_path / "checkpoint-500", KINDS[4])
    (finding,) = judged(tmp_path).findings
    assert finding.fix is not None
    assert [step.line for step in finding.fix.steps] == [f"python -m dsdoctor checkpoint {tmp_path}/checkpoint-500"]

    file = next(tag.glob("*optim_states.pt"))
    file.rename(tag / f".{file.name}.aB3xYz")
    found = judged(tmp_path / "checkpoint-500")
    assert any(f".{file.name}.aB3xYz" in line for each in found.findings for line in each.evidence)


def test_a_merge_is_told_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "saved", KINDS[4])

    status = run(["checkpoint", str(tmp_path / "saved"), "--merge", str(tmp_path / "out"), "--json"])

    told = json.loads(capsys.readouterr().out)
    assert status == 0
    assert told["merged"]["out"] == str(tmp_path / "out")
    assert told["merged"]["tensors"] == 3


def test_a_conversion_that_is_refused_is_one_document_with_the_same_parts(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "saved", SHARDED[0])
    parts = []
    for more in ([], ["--universal", str(tmp_path / "out")]):
        run(["checkpoint", str(tmp_path / "saved"), *more, "--json"])
        parts.append(json.loads(capsys.readouterr().out))

    assert parts[0].keys() == parts[1].keys()
    assert "needs Adam's states" in parts[1]["findings"][0]["title"]
    assert parts[1]["universal"] is None


LORA = {"base.q_proj.lora_A.default.weight": (2, 3), "base.q_proj.lora_B.default.weight": (3, 2)}


def with_module(tag: Path, kind: Kind, module: dict[str, Any], **more: Any) -> None:
    """Write the model states anew, with more tensors in the module, of no optimizer."""
    whole = model_states(kind, kind.world, 1)
    resave(tag, kind, {"module": {**whole["module"], **module}, **more})


@pytest.mark.parametrize("stage", [0, 1])
def test_below_stage_2_what_must_be_there_and_is_not_tells_that_frozen_parameters_were_excluded(
    tmp_path: Path, stage: int
) -> None:
    kind, wrong = Kind(stage=stage), {}
    adapters = {name: floats([0.5]) for name in LORA}
    base = {"base.q_proj.base_layer.weight": floats([1.0])}
    cases: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {
        "adapters alone": (adapters, {}, True),
        "adapters and what they adapt": ({**adapters, **base}, {}, False),
        "an embedding's adapter alone": ({"wte.lora_embedding_A.default": floats([1.0])}, {}, True),
        "DeepSpeed's own names": ({**adapters, "base.q_proj.weight": floats([1.0])}, {}, False),
        "a second name without the first": ({"head.weight": floats([1.0])}, {"head.weight": "wte.weight"}, True),
        "both names": (
            {"head.weight": floats([1.0]), "wte.weight": floats([1.0])}, {"head.weight": "wte.weight"}, False,
        ),
        "no adapters": ({}, {}, False),
    }  # fmt: skip
    tag = write(tmp_path, kind)
    for name, (module, shared, excluded) in cases.items():
        with_module(tag, kind, module, shared_params=shared)
        found = judged(tmp_path)
        told = ("checkpoint-frozen-excluded" in rules(found), verdict(found))
        if told != (excluded, Verdict.UNKNOWN if excluded else Verdict.LOADS):
            wrong[name] = told

    assert wrong == {}


def test_a_verdict_says_where_no_file_tells_whether_frozen_parameters_were_left_out(tmp_path: Path) -> None:
    said: dict[int | str, bool] = {}
    for stage in (0, 1, 2, 3):
        kind = Kind(stage=stage)
        tag = write(tmp_path / str(stage), kind)
        said[stage] = "whether frozen parameters" in verdict_line(judged(tmp_path / str(stage)))
        if stage == 1:
            with_module(tag, kind, {"frozen.weight": floats([1.0])})
            said["seen"] = "whether frozen parameters" in verdict_line(judged(tmp_path / str(stage)))

    assert said == {0: True, 1: True, "seen": False, 2: False, 3: False}


def test_frozen_parameters_of_stage_3_fit_the_ranks_that_saved_them_alone(tmp_path: Path) -> None:
    kind, verdicts = Kind(stage=3), {}
    for name, frozen in (("none", {}), ("frozen", {"frozen.weight": (4,)})):
        tag = write(tmp_path / name, kind)
        resave(tag, kind, {"frozen_param_shapes": frozen, "frozen_param_fragments": {}})
        for world in (1, 2):
            found = judge(look(tmp_path / name), None, Plan(load=NO_OPTIMIZER, world=world))
            verdicts[name, world] = verdict(found)

    whole = judge(look(tmp_path / "frozen"), None, Plan(world=1))
    assert whole.outcome is not None
    assert whole.outcome.words.startswith("RuntimeError: The size of tensor")
    loads, cannot = Verdict.LOADS, Verdict.CANNOT
    assert verdicts == {("none", 1): loads, ("none", 2): loads, ("frozen", 1): cannot, ("frozen", 2): loads}


def test_the_screen_begins_with_what_is_most_harmful_says_it_once_and_ends_in_a_command(tmp_path: Path) -> None:
    kind = Kind(stage=1)
    with_module(write(tmp_path / "ranks", kind), kind, {"frozen.weight": floats([1.0])})
    ranks = judge(look(tmp_path / "ranks"), None, Plan(world=3))
    universal = tmp_path / "ranks" / "global_step2_universal" / "zero"
    universal.mkdir(parents=True)
    ready = judge(look(tmp_path / "ranks"), None, Plan(world=3))
    resave(write(tmp_path / "excluded", Kind()), Kind(), {"frozen_param_shapes": None})
    excluded = list(checkpoint_lines(judged(tmp_path / "excluded"), None))
    lines = list(checkpoint_lines(ready, None))

    assert "checkpoint-needs-universal" in next(line for line in lines if line.startswith(("✗", "!", "·")))
    assert f"--universal {universal.parent}" in list(checkpoint_lines(ranks, None))[-1]
    assert lines[-1] == f"  next: $ python -m dsdoctor checkpoint {tmp_path}/ranks --tag global_step2_universal"
    assert len([line for line in excluded if "was saved with exclude_frozen_parameters" in line]) == 1
