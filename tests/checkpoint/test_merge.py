"""--merge: each parameter with its own values, in files any reader of safetensors takes; a kill leaves nothing half-written.

That it is bit-equal to zero_to_fp32 on real checkpoints is tested in tests/launch/test_checkpoint.py.
"""

import json
import random
import shlex
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.judge import CheckpointOrder
from dsdoctor.checkpoint.merge import MergeOrder, merge_checkpoint
from dsdoctor.checkpoint.tensor_bytes import converted
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from tests.checkpoint.written import (
    EXPERTS,
    KINDS,
    Kind,
    Weights,
    address,
    floats,
    model_states,
    optimizer_states,
    save,
    write,
)


class Nobody:
    """Is told how far it is, and does nothing with it."""

    def total(self, count: int) -> None: ...

    def read(self, count: int) -> None: ...


def merged(folder: Path, out: Path, **how: Any) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Merge, and read what was written as the format says: name -> type, shape, bytes."""
    judged, done = merge_checkpoint(CheckpointOrder(folder=folder), MergeOrder(out=out, **how), Nobody())
    assert done is not None, judged.findings
    return read(out)


def read(out: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    found = {}
    for path in sorted(out.glob("*.safetensors")):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        table = json.loads(content[8 : 8 + length])
        for name, entry in table.items():
            if name != "__metadata__":
                begin, end = (8 + length + place for place in entry["data_offsets"])
                found[name] = (entry["dtype"], tuple(entry["shape"]), content[begin:end])
    return found


def expected(stage: int) -> dict[str, list[float]]:
    """What ``written`` puts into the flat weights of two ranks: rank 0 counts from 0, rank 1 from 6."""
    if stage == 3:
        return {"0.first": [0, 1, 2, 6, 7, 8], "1.second": [3, 4, 5, 9, 10]}
    return {"0.first": [0, 1, 2, 3, 4, 5], "1.second": [6, 7, 8, 9, 10]}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("largest", [10, 5_000_000_000])
def test_each_parameter_has_its_own_values(tmp_path: Path, stage: int, largest: int) -> None:
    write(tmp_path / "saved", Kind(stage=stage))

    found = merged(tmp_path / "saved", tmp_path / "out", largest=largest)

    values = {name: [*struct.unpack(f"<{len(content) // 4}f", content)] for name, (_, _, content) in found.items()}
    assert values == {**expected(stage), "scale": [1.0]}
    assert {name: shape for name, (_, shape, _) in found.items()} == {
        "0.first": (3, 2),
        "1.second": (5,),
        "scale": (1,),
    }
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (largest == 10)
    if index.exists():
        where = json.loads(index.read_text())
        assert set(where["weight_map"]) == set(found)
        assert where["metadata"]["total_size"] == sum(len(content) for _, _, content in found.values())


def test_numbers_become_bf16_as_rounding_to_the_nearest_even_makes_them() -> None:
    choice = random.Random(5)
    bits = [choice.getrandbits(32) for _ in range(4000)]
    bits += [
        high << 16 | low
        for high in (0, 1, 0x3F80, 0x3F81, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80)
        for low in (0, 0x7FFF, 0x8000, 0x8001)
    ]

    found = struct.unpack(f"<{len(bits)}H", converted(struct.pack(f"<{len(bits)}I", *bits), "F32", "BF16"))

    def rounded(number: int) -> int:
        if number & 0x7FFFFFFF > 0x7F800000:
            return 0x7FC0
        return (number + 0x7FFF + ((number >> 16) & 1)) >> 16 & 0xFFFF

    assert list(found) == [rounded(number) for number in bits]


@pytest.mark.parametrize(("dtype", "form"), [("F16", "e"), ("F64", "d"), ("BF16", "")])
def test_other_types_become_fp32(dtype: str, form: str) -> None:
    numbers = [0.0, -0.0, 1.5, -2.25, 65504.0, float("inf")]
    content = struct.pack(f"<6{form}", *numbers) if form else b"".join(struct.pack("<f", each)[2:] for each in numbers)

    found = converted(content, dtype, "F32")

    assert found == struct.pack("<6f", *numbers[:4], 65504.0 if form else 65280.0, numbers[5])


def test_a_merge_goes_on_where_it_ended_and_takes_nothing_of_another_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "saved", Kind(stage=2))
    whole = merged(tmp_path / "saved", tmp_path / "out", largest=10)
    first = tmp_path / "out" / "model-00001-of-00003.safetensors"
    second = tmp_path / "out" / "model-00002-of-00003.safetensors"
    stamp = first.stat().st_mtime_ns
    second.unlink()
    (tmp_path / "out" / "model.safetensors.index.json").unlink()

    again = merged(tmp_path / "saved", tmp_path / "out", largest=10)

    assert again == whole
    assert first.stat().st_mtime_ns == stamp
    write(tmp_path / "other", Kind(stage=3))
    with pytest.raises(UsageError, match="holds other weights"):
        merged(tmp_path / "other", tmp_path / "out", largest=10)
    assert read(tmp_path / "out") == whole


def test_what_is_not_whole_or_not_merged_writes_nothing(tmp_path: Path) -> None:
    tag = write(tmp_path / "sick", Kind(stage=2))
    next(tag.glob("*optim*")).unlink()
    judged, done = merge_checkpoint(
        CheckpointOrder(folder=tmp_path / "sick"), MergeOrder(out=tmp_path / "out"), Nobody()
    )

    assert done is None
    assert [each.rule for each in judged.findings] == ["checkpoint-shard-missing"]
    cut = {"mp_world_size": 2, "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2}}
    tensors = write(tmp_path / "tensors", Kind(stage=1, dtype="bf16", pipeline=True))
    for file in tensors.glob("layer_*"):
        file.unlink()
    for file in tensors.glob("mp_rank_*"):
        save(file, {**model_states(Kind(stage=1, dtype="bf16"), 1, 2), **cut})
    with pytest.raises(ImpossiblePlan, match="convert it first"):
        merged(tmp_path / "tensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_experts_and_the_layers_of_a_pipeline_are_in_a_merged_model(tmp_path: Path) -> None:
    experts, pipeline = KINDS[8:]
    write(tmp_path / "experts", experts)
    write(tmp_path / "pipeline", pipeline)

    one = merged(tmp_path / "experts", tmp_path / "one")
    other = merged(tmp_path / "pipeline", tmp_path / "other")

    assert {name for name in one if name.startswith(EXPERTS)} == {f"{EXPERTS}.0.weight", f"{EXPERTS}.1.weight"}
    assert struct.unpack("<f", one[f"{EXPERTS}.1.weight"][2]) == (1.0,)
    assert set(other) == {"0.first", "1.second", "0.weight", "1.weight"}
    assert struct.unpack("<5f", other["1.second"][2]) == (6.0, 7.0, 8.0, 9.0, 10.0)


def test_the_experts_of_four_ranks_are_put_together_from_those_that_train_them(tmp_path: Path) -> None:
    """Two ranks share each expert's optimizer: 0 and 2, 1 and 3. Each of a layer's two has the name 0 on its ranks."""
    tag = write(tmp_path, Kind(stage=1, world=4, experts=2))
    for rank in range(4):
        begin = 2 * (rank // 2)
        mine = {f"{EXPERTS}.0.weight": address(0, 2)}
        flat = floats([10 * (rank % 2) + begin, 10 * (rank % 2) + begin + 1])
        resaved(tag / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", Kind(stage=1, world=4), rank, flat, mine)
    for expert in range(2):
        name = f"{EXPERTS}.{expert}.weight"
        save(tag / f"layer_0_expert_{expert}_mp_rank_00_model_states.pt", {name: floats([0] * 4)})

    found = merged(tmp_path, tmp_path / "out")

    assert struct.unpack("<4f", found[f"{EXPERTS}.0.weight"][2]) == (0, 1, 2, 3)
    assert struct.unpack("<4f", found[f"{EXPERTS}.1.weight"][2]) == (10, 11, 12, 13)


def resaved(file: Path, kind: Kind, rank: int, flat: Weights, mapping: dict[str, Any]) -> None:
    """A rank's optimizer states with one more group, of the experts that it trains."""
    content = optimizer_states(kind, rank, kind.world)
    state = content["optimizer_state_dict"]
    state["single_partition_of_fp32_groups"].append(flat)
    state["param_slice_mappings"].append(mapping)
    state["partition_count"].append(2)
    state["base_optimizer_state"]["param_groups"].append({"lr": 0.001, "moe": True})
    save(file, content)


def large(folder: Path) -> None:
    """A tag of two parameters of 40 MB on one rank."""
    count = 10_000_000
    tag = folder / "global_step1"
    model = {
        "module": {}, "buffer_names": [], "param_shapes": [{"a": (count,), "b": (count,)}], "shared_params": {},
        "global_steps": 1, "dp_world_size": 1, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1}, "ds_config": {"zero_optimization": {"stage": 1}},
    }  # fmt: skip
    save(tag / "mp_rank_00_model_states.pt", model)
    state = {
        "single_partition_of_fp32_groups": [Weights((2 * count,), bytes(range(1, 251)) * (8 * count // 250))],
        "zero_stage": 1,
        "partition_count": [1],
    }
    save(tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"optimizer_state_dict": state})
    (folder / "latest").write_text(tag.name)


@pytest.mark.slow
def test_a_kill_and_a_full_disk_leave_no_file_that_is_not_whole(tmp_path: Path) -> None:
    large(tmp_path / "saved")
    whole = merged(tmp_path / "saved", tmp_path / "whole", largest=50_000_000)
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "dsdoctor",
        "checkpoint",
        str(tmp_path / "saved"),
        "--merge",
        str(out),
        "--largest-file",
        "0.05",
    ]

    for size in (1, 10_000_000, 30_000_000):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(path.stat().st_size >= size for path in hidden(out)):
            time.sleep(0.001)
        process.kill()
        process.wait()
        assert all(path.stat().st_size > 40_000_000 for path in out.glob("model*.safetensors"))
    limited = subprocess.run(
        ["bash", "-c", f"ulimit -f 20000; exec {shlex.join([*command[:-3], str(tmp_path / 'full'), *command[-2:]])}"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert limited.returncode not in {0, 1}, limited.stdout
    assert "model-00001-of-00002.safetensors" in limited.stderr
    assert not (tmp_path / "full").exists()
    assert done.returncode == 0, done.stderr
    assert read(out) == whole


def hidden(out: Path) -> list[Path]:
    return list(out.glob(".dsdoctor-*.tmp"))


@pytest.mark.slow
def test_what_cannot_be_written_leaves_no_empty_folder(tmp_path: Path) -> None:
    write(tmp_path / "saved", KINDS[0])
    out = tmp_path / "new" / "out"
    words = [sys.executable, "-m", "dsdoctor", "checkpoint", str(tmp_path / "saved"), "--merge", str(out)]

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stderr.count("✗")) == (3, 1), done.stderr
    assert "ulimit -f" in done.stderr
    assert not out.parent.exists()
