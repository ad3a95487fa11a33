"""--deep: a flipped byte anywhere in the tensors is named with its file, a nan with its parameter, and padding with nothing."""

import math
import random
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.checkpoint.deep import judge_values
from dsdoctor.checkpoint.facts import Examined
from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import Plan
from dsdoctor.checkpoint.tensor_bytes import not_finite
from dsdoctor.cli.app import run
from dsdoctor.core.finding import Finding
from tests.checkpoint import written
from tests.checkpoint.written import KINDS, Kind, write

SOME = (KINDS[6], KINDS[8])


def deep(examined: Examined) -> tuple[Finding, ...]:
    return tuple(judge_values(examined, lambda count: None))


def judged(folder: Path) -> tuple[Finding, ...]:
    return judge(look(folder), None, Plan(), values=deep).findings


@pytest.mark.parametrize(("dtype", "form"), [("F16", "<e"), ("BF16", ""), ("F32", "<f"), ("F64", "<d")])
def test_each_number_is_found_that_is_not_finite_and_no_other(dtype: str, form: str) -> None:
    choice = random.Random(3)
    width = struct.calcsize(form) if form else 2
    special = [
        b"\xff" * width,
        bytes(width - 1) + b"\x7f",
        bytes(width - 2) + b"\x80\x7f",
        bytes(width - 2) + b"\xf0\x7f",
    ]
    numbers = [choice.randbytes(width) for _ in range(3000)] + special
    if width == 2:
        numbers = [struct.pack("<H", number) for number in range(0, 1 << 16, 3)] + special

    found = dict(not_finite(b"".join(numbers), dtype))

    values = [struct.unpack(form or "<f", number if form else b"\0\0" + number)[0] for number in numbers]
    expected = {
        place: "nan" if math.isnan(value) else "inf" for place, value in enumerate(values) if not math.isfinite(value)
    }
    assert found == expected


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_nothing_is_said_against_healthy_tensors(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, kind)

    assert judged(tmp_path) == ()


def test_a_byte_that_flipped_in_any_tensor_of_any_file_is_named(tmp_path: Path) -> None:
    unnamed = []
    for kind in SOME:
        tag = write(tmp_path / kind.name, kind)
        for file in sorted(tag.glob("*.pt")):
            content = file.read_bytes()
            with zipfile.ZipFile(file) as archive:
                entries = [info for info in archive.infolist() if "/data/" in info.filename and info.file_size]
            for info in entries:
                changed = bytearray(content)
                begin = info.header_offset + 30 + len(info.filename)
                changed[begin + info.file_size // 2] ^= 0x40
                file.write_bytes(bytes(changed))
                found = judged(tmp_path / kind.name)
                lines = [line for each in found if each.rule == "checkpoint-bytes-changed" for line in each.evidence]
                if not any(line.startswith(file.name) for line in lines):
                    unnamed.append(f"{kind.name}: {file.name} {info.filename}")
            file.write_bytes(content)
    assert unnamed == []


@pytest.mark.parametrize("stage", [2, 3])
def test_a_nan_is_named_with_its_parameter_and_padding_is_let_alone(tmp_path: Path, stage: int) -> None:
    """Two parameters of 6 and 5 elements on two ranks: rank 1 has one element of padding."""
    shares = {
        2: ["0.first"] * 6 + ["1.second"] * 5 + [None],
        3: ["0.first"] * 3 + ["1.second"] * 3 + ["0.first"] * 3 + ["1.second"] * 2 + [None],
    }
    for place, parameter in [(place, shares[stage][place]) for place in (0, 3, 5, 6, 8, 10, 11)]:
        tag = write(tmp_path, replace(Kind(stage=stage), nan=divmod(place, 6)))
        found = judged(tmp_path)
        if parameter is None:
            assert found == ()
            continue
        assert [each.rule for each in found] == ["checkpoint-not-finite"]
        assert (
            f"zero_pp_rank_{place // 6}_mp_rank_00_optim_states.pt: fp32 weights of {parameter}: nan"
            in found[0].evidence[0]
        )
        assert tag.is_dir()


def test_a_buffer_may_be_infinite(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind(stage=1))
    content = written.model_states(Kind(stage=1), 2, 1)
    content["module"]["scale"] = written.floats([float("-inf")])
    written.save(tag / "mp_rank_00_model_states.pt", content)

    assert judged(tmp_path) == ()


def test_a_file_of_another_training_is_told_from_its_place(tmp_path: Path) -> None:
    """Of the same step and shapes: nothing but the values says it, and those that stand twice do."""
    tag = write(tmp_path, Kind(stage=2))
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = written.optimizer_states(Kind(stage=2), 1, 2)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [written.floats([7.5] * 6)]
    written.save(file, content)

    (found,) = judged(tmp_path)

    assert found.rule == "checkpoint-values-disagree"
    assert found.evidence == (f"1.second in mp_rank_00_model_states.pt differs from that of {file.name}",)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(
    ("stage", "dtype", "shows"), [(0, "bf16", None), (1, "bf16", True), (2, "fp32", True), (3, "bf16", False)]
)
def test_the_verdict_says_whether_a_file_of_another_training_would_show(
    tmp_path: Path, stage: int, dtype: str, shows: bool | None, deep: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ZeRO there is one file, and nothing to be mixed."""
    write(tmp_path, Kind(stage=stage, dtype=dtype))

    assert run(["checkpoint", str(tmp_path), *(["--deep"] if deep else [])]) == 0

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("✓ global_step2 loads: ")
    assert ("every byte was read" in last, "without values" in last) == (deep, not deep)
    assert ("--deep checks whether" in last) == (shows is True and not deep)
    assert ("would go undetected" in last) == (shows is False)


@pytest.mark.parametrize(
    "name", ["mp_rank_00_model_states.pt", *(f"zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1))]
)
@pytest.mark.parametrize("stage", [1, 2])
def test_two_trainings_in_one_tag_do_not_load_whatever_file_is_the_other(
    tmp_path: Path, stage: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every file in turn; the quick look says in its verdict what it cannot see."""
    tag = write(tmp_path, Kind(stage=stage))
    if name.startswith("mp"):
        content = written.model_states(Kind(stage=stage), 2, 1)
        first = content["module"]["0.first"]
        content["module"]["0.first"] = written.Weights(first.shape, written.floats([7.5] * 6).content)
    else:
        content = written.optimizer_states(Kind(stage=stage), int(name.split("_")[3]), 2)
        content["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [written.floats([7.5] * 6)]
    written.save(tag / name, content)

    quick, seen = run(["checkpoint", str(tmp_path)]), capsys.readouterr().out
    deep, read = run(["checkpoint", str(tmp_path), "--deep"]), capsys.readouterr().out

    assert (quick, deep) == (0, 1)
    assert "--deep checks whether" in seen.splitlines()[-1]
    assert "checkpoint-values-disagree" in read
    assert "✓" not in read


def test_learning_rates_that_differ_between_ranks_are_told_by_the_quick_look(tmp_path: Path) -> None:
    tag = write(tmp_path, Kind(stage=1))
    content = written.optimizer_states(Kind(stage=1), 1, 2)
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"] = [{"lr": 0.5}]
    written.save(tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt", content)

    (found,) = judge(look(tmp_path), None, Plan()).findings

    assert (found.rule, found.title) == (
        "checkpoint-shards-mixed",
        "the files of global_step2 disagree on the learning rate",
    )
