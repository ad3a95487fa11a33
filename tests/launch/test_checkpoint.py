"""Checkpoints that two real ranks saved: none is alarmed, verdicts are what real ranks do, a merge is zero_to_fp32's bit by bit.

Needs DeepSpeed and safetensors. Takes about a minute; the whole table is ``python benchmarks/checkpoint.py``.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint_faults
from benchmarks.checkpoint import table
from dsdoctor.checkpoint.deep import judge_values
from dsdoctor.checkpoint.facts import Examined
from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import CheckpointOrder, judge, judge_checkpoint
from dsdoctor.checkpoint.loading import ALL, MODULE, NO_OPTIMIZER, Plan, Verdict
from dsdoctor.checkpoint.merge import MergeOrder, merge_checkpoint
from dsdoctor.checkpoint.parameters import says_nothing
from dsdoctor.checkpoint.universal import UniversalOrder, convert_checkpoint
from dsdoctor.core.finding import Finding
from tests.checkpoint import real
from tests.checkpoint.test_merge import Nobody

MISSING = [name for name in ("deepspeed", "safetensors", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} is not installed"),
]
REFERENCE = Path(__file__).parents[1] / "checkpoint/merge_reference.py"
KINDS = (
    "zero0-bf16", "zero1-bf16", "zero2-fp32", "zero3-bf16", "frozen1-fp32", "frozen3-fp32", "experts1-bf16", "pipeline1-bf16",
)  # fmt: skip
"""A sample of those that the benchmark makes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, real.make(folder, *KINDS)


Saved = tuple[Path, dict[str, list[float]]]


def deep(examined: Examined) -> tuple[Finding, ...]:
    return tuple(judge_values(examined, lambda count: None))


def tags(folder: Path) -> list[tuple[Path, str]]:
    return [(kind, tag.name) for kind in sorted(folder.iterdir()) if kind.is_dir() for tag in look(kind).tags]


def test_nothing_is_said_against_what_real_ranks_saved(saved: Saved) -> None:
    said, seen = {}, 0
    for kind, tag in tags(saved[0]):
        found = judge(look(kind), tag, Plan(), values=deep)
        seen += 1
        expected = {"checkpoint-frozen-left-out", "checkpoint-load-not-known", "checkpoint-universal-leaves"}
        rules = {each.rule for each in found.findings} - expected
        if rules:
            said[f"{kind.name} {tag}"] = rules
    assert said == {}
    assert seen == 13


def test_each_verdict_is_what_real_ranks_do(saved: Saved) -> None:
    """A sixth of their table, for the ranks that saved it and half as many."""
    rows = table(*saved, 6, [2, 1])

    assert [row for row in rows if row["agrees"] is False or row["alarms"]] == []
    assert {row["verdict"] for row in rows} >= {Verdict.LOADS.value, Verdict.UNIVERSAL.value, Verdict.CANNOT.value}
    assert {row["load"] for row in rows} == {ALL, NO_OPTIMIZER, MODULE}


def test_a_merged_model_is_bit_equal_to_zero_to_fp32(saved: Saved, tmp_path: Path) -> None:
    folder, sums = saved
    kinds = [name for name in sums if name.startswith(("zero1", "zero2", "zero3", "frozen"))]
    arguments: list[str] = []
    for kind in kinds:
        for tag in look(folder / kind).tags:
            for dtype in ("fp32", "bf16"):
                out = tmp_path / f"{kind}-{tag.name}-{dtype}"
                if tag.step != 2:
                    continue
                order = CheckpointOrder(folder=folder / kind, tag=tag.name)
                judged, done = merge_checkpoint(order, MergeOrder(out=out, dtype=dtype, largest=300), Nobody())
                assert done is not None, judged.findings
                arguments += [str(folder / kind), str(out), dtype]
    answers = ask(arguments)

    assert [answer["differ"] for answer in answers] == [[]] * len(answers)
    assert len(answers) == 16
    assert min(answer["compared"] for answer in answers) >= 6
    # only the frozen layers of stage 1, which zero_to_fp32 leaves out
    more = {tuple(answer["more"]) for answer in answers}
    assert more == {(), ("first.bias", "first.weight")}


def test_experts_and_pipelines_are_merged_from_the_fp32_weights_of_the_ranks_that_train_them(
    saved: Saved, tmp_path: Path
) -> None:
    arguments: list[str] = []
    for kind in ("experts1-bf16", "pipeline1-bf16"):
        order = CheckpointOrder(folder=saved[0] / kind, tag="global_step2")
        judged, done = merge_checkpoint(order, MergeOrder(out=tmp_path / kind), Nobody())
        assert done is not None, judged.findings
        arguments += [str(saved[0] / kind), str(tmp_path / kind), "model"]
    experts, pipeline = ask(arguments)

    assert [(each["differ"], each["more"]) for each in (experts, pipeline)] == [([], [])] * 2
    assert (experts["compared"], pipeline["compared"]) == (13, 8)
    # a buffer alone: all weights have more places than bf16 has
    assert (experts["rounded"], pipeline["rounded"]) == (["scale"], [])


def test_what_becomes_universal_here_is_resumed_with_other_ranks_another_stage_and_another_type(
    saved: Saved, tmp_path: Path
) -> None:
    folder, sums = saved
    planned = {"zero2-fp32": ("zero", 1, "bf16"), "zero3-bf16": ("zero", 3, "fp32"), "zero1-bf16": ("zero", 2, "bf16")}
    orders, said = [], []
    for name, (kind, stage, dtype) in planned.items():
        out = tmp_path / name / "whole"
        order = CheckpointOrder(folder=folder / name, tag="global_step2")
        judged, made = convert_checkpoint(order, UniversalOrder(out=out), Nobody(), said.append)
        assert made is not None, judged.findings
        assert sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) == made.size <= made.needs.result
        orders.append({"kind": kind, "folder": str(out.parent), "stage": stage, "dtype": dtype, "universal": True})
    answers = real.load(1, orders, tmp_path)

    assert [real.loaded(answer, sums[name]) for answer, name in zip(answers, planned, strict=True)] == [True] * 3
    assert said[0].startswith("the converter takes up to ")


def test_each_damage_is_named_and_what_is_said_of_it_is_what_real_ranks_do() -> None:
    """A sample of ``benchmarks/checkpoint_faults.py``; whole folders of what it generates are in benchmarks/results."""
    with tempfile.TemporaryDirectory() as place:
        rows, _ = checkpoint_faults.rows(Path(place), ["zero2-bf16", "zero3-bf16"], 11)

    assert [row for row in rows if row["verdict"].startswith("wrong")] == []
    assert {row["did"] for row in rows} >= {"loads", "fails on one rank"}
    assert len(rows) > 15


def test_a_checkpoint_of_transformers_is_compared_with_its_configuration(tmp_path: Path) -> None:
    tiny = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 64,
    }
    other = {**tiny, "vocab_size": 65}
    for name, fields in (("tiny", tiny), ("other", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    real.start(1, "hugging-face", str(tmp_path / "saved"), str(tmp_path / "tiny"))

    def judged(stage: int, model: str) -> dict[str, tuple[str, ...]]:
        order = CheckpointOrder(folder=tmp_path / f"saved/stage{stage}", model=tmp_path / model)
        return {each.rule: each.evidence for each in judge_checkpoint(order)[0].findings}

    assert [judged(stage, "tiny") for stage in (1, 2, 3)] == [{}] * 3
    lines = judged(3, "other")["checkpoint-model-differs"]
    assert "transformer.wte.weight is 64x16 there and 65x16 in the model" in lines


def test_a_watched_training_is_told_before_it_loads_and_when_nothing_was_loaded(saved: Saved, tmp_path: Path) -> None:
    order = {"kind": "zero", "folder": str(saved[0] / "zero1-bf16"), "stage": 1, "dtype": "bf16"}
    orders = [order, {**order, "stage": 3}, {**order, "folder": str(tmp_path / "nowhere")}]
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    under = ("-m", "dsdoctor.run", "--overflow", "off", "--memory", "off", "--hang", "off", "--config-check", "off")

    (said,) = real.start(1, "load", str(tmp_path / "orders.json"), str(tmp_path / "answers.json"), under=under)

    ours = [line for line in said.splitlines() if line.startswith("dsdoctor [rank 0]: ") and line.endswith("]")]
    rules = [line.rpartition("[")[2][:-1] for line in ours]
    assert rules == ["checkpoint-needs-universal", "checkpoint-cannot-load", "checkpoint-nothing-loaded"]


def ask(arguments: list[str]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(REFERENCE), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def test_a_nan_planted_in_any_weight_of_a_real_rank_is_named_with_its_parameter(saved: Saved, tmp_path: Path) -> None:
    """Every element of the flat weights of rank 1, of stages 1 and 3: each belongs to a parameter, or is padding at the end."""
    for kind in ("zero1-bf16", "zero3-bf16"):
        shutil.copytree(saved[0] / kind, tmp_path / kind)
        file = tmp_path / kind / "global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        examined = judge(look(tmp_path / kind), "global_step2", Plan()).examined
        assert examined is not None
        shard = next(each for each in examined.tag.shards if each.file.path == file)
        state = shard.file.content["optimizer_state_dict"]
        (flat,) = state.get("single_partition_of_fp32_groups") or state["fp32_flat_groups"]
        named = [planted(file, f"data/{flat.storage.key}", place, tmp_path / kind) for place in range(0, flat.count, 5)]
        assert {len(each) for each in named[:-1]} == {1}
        assert len({each for found in named for each in found}) >= 3


def planted(file: Path, entry: str, place: int, folder: Path) -> list[str]:
    """What is said of a nan at one element: the parameters. The file is put back."""
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        parts = {info.filename: bytearray(archive.read(info)) for info in archive.infolist()}
    name = next(each for each in parts if each.endswith(f"/{entry}"))
    parts[name][4 * place : 4 * place + 4] = b"\x00\x00\xc0\x7f"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for each, part in parts.items():
            archive.writestr(each, bytes(part))
    found = judge(look(folder), "global_step2", Plan(), values=deep).findings
    file.write_bytes(content)
    return [line.split(" of ")[1].split(":")[0] for each in found for line in each.evidence]


def test_what_is_said_of_frozen_parameters_is_what_real_ranks_do(tmp_path: Path) -> None:
    made = [f"{kind}{stage}-fp32" for kind in ("frozen", "excluded") for stage in (1, 2, 3)] + ["excluded0-fp32"]
    sums = real.make(tmp_path, *made, env={"UNIVERSAL": " ".join(each for each in made if each != "excluded0-fp32")})
    asked = [
        (name, strict, universal)
        for name in made
        for strict in (True, False)
        for universal in (False, True)
        if name != "excluded0-fp32" or not universal
    ]
    orders = [
        {
            "kind": name.rstrip("0123-fp"), "stage": int(name[-6]), "dtype": "fp32", "folder": str(tmp_path / name),
            "tag": None if universal else "global_step2", "universal": universal, "load": {"load_module_strict": strict},
        }
        for name, strict, universal in asked
    ]  # fmt: skip
    wrong = {}
    for each, answer in zip(asked, real.load(2, orders, tmp_path), strict=True):
        name, strict, universal = each
        judged = judge(look(tmp_path / name), "global_step2_universal" if universal else "global_step2", Plan())
        rules, raised = {found.rule for found in judged.findings}, "error" in answer["ranks"][0]
        whole = real.loaded(answer, sums[name])
        left = universal or name.startswith("excluded")
        told = bool(rules & {"checkpoint-universal-leaves", "checkpoint-frozen-excluded"})
        unsaid = judged.examined is not None and says_nothing(judged.examined)
        if raised != (left and strict and not universal) or whole == left or left != (told or unsaid):
            wrong[each] = (raised, whole, told, unsaid, answer["ranks"][0])

    assert wrong == {}
    assert len(asked) == 26
