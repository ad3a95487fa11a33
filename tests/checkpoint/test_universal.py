"""--universal: what stands in the way is said before, and what the converter makes is compared; nothing half-made keeps a name.

The converter is a small program here; DeepSpeed's own is in tests/launch/test_checkpoint.py.
"""

import math
import os
import struct
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.checkpoint.facts import Examined, examine
from dsdoctor.checkpoint.folder import look, read_tag
from dsdoctor.checkpoint.judge import CheckpointOrder, judge
from dsdoctor.checkpoint.loading import Plan, Verdict
from dsdoctor.checkpoint.torch_file import read_archive
from dsdoctor.checkpoint.universal import Converted, UniversalOrder, convert_checkpoint, needs, refusals, untrusted
from dsdoctor.core.errors import BuildFailed, DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.finding import Severity
from tests.checkpoint.test_merge import Nobody, expected, merged
from tests.checkpoint.written import (
    KINDS,
    SHAPES,
    Called,
    Kind,
    Weights,
    floats,
    model_states,
    optimizer_states,
    save,
    write,
)


def examined(folder: Path) -> Examined:
    seen = look(folder)
    return examine(seen, read_tag(seen.tags[0]))


def adam(folder: Path, kind: Kind) -> Path:
    """A tag whose optimizer has both of Adam's moments, as the converter wants it."""
    tag = write(folder, kind)
    for rank in range(kind.world):
        content = optimizer_states(kind, rank, kind.world)
        states = content["optimizer_state_dict"]["base_optimizer_state" if kind.stage < 3 else "optimizer_state_dict"]
        states["state"][0]["exp_avg_sq"] = states["state"][0]["exp_avg"]
        save(next(tag.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")), content)
    return tag


def universal(folder: Path, kind: Kind, changed: Callable[[dict[str, Weights]], None] = lambda _: None) -> Path:
    """What the converter makes of it."""
    values = {name: (shape, expected(kind.stage)[name]) for name, shape in SHAPES.items()}
    for name, (shape, numbers) in values.items():
        states = {
            "fp32": floats(numbers),
            **{each: floats([0.25] * math.prod(shape)) for each in ("exp_avg", "exp_avg_sq")},
        }
        changed(states)
        for state, weights in states.items():
            save(folder / "zero" / name / f"{state}.pt", {"param": Weights(shape, weights.content)})
    save(folder / "zero" / "optimizer_state.pt", {"param_groups": [{"lr": 0.001, "params": [0]}]})
    first = "zero_pp_rank_0_mp_rank_00" if kind.stage == 3 else "mp_rank_00"
    save(folder / f"{first}_model_states.pt", model_states(kind, kind.world, 1))
    return folder


def converter(path: Path, prepared: Path, after: str = "true") -> str:
    """A program that does what it is told as the converter is: it copies a folder to --output_folder."""
    lines = (
        "#!/bin/sh",
        'while [ $# -gt 0 ]; do [ "$1" = --output_folder ] && out=$2; shift; done',
        'echo "*** 1. Extracting ZeRO fragments"',
        f'cp -r "{prepared}" "$out"',
        after,
    )
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def convert(folder: Path, out: Path, python: str) -> Converted | None:
    return convert_checkpoint(CheckpointOrder(folder=folder), UniversalOrder(out=out, python=python), Nobody(), print)[
        1
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_holds_the_same_values_gets_its_name(tmp_path: Path, stage: int) -> None:
    kind = Kind(stage=stage)
    adam(tmp_path / "saved", kind)
    # as the folder of a project on a cluster is
    (tmp_path / "saved").chmod(0o2777)
    program = converter(tmp_path / "python", universal(tmp_path / "prepared", kind))

    made = convert(tmp_path / "saved", tmp_path / "saved/global_step2_universal", program)

    assert made is not None
    assert (made.parameters, made.out) == (2, str(tmp_path / "saved/global_step2_universal"))
    assert (tmp_path / "saved/latest_universal").read_text() == "global_step2_universal"
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert names == {"global_step2", "global_step2_universal", "latest", "latest_universal"}


def test_the_file_of_the_optimizers_groups_is_missed_and_found_damaged(tmp_path: Path) -> None:
    groups = universal(tmp_path / "global_step2_universal", Kind(stage=2)) / "zero/optimizer_state.pt"
    whole = groups.read_bytes()
    found = {}
    for what, content in (("whole", whole), ("cut off", whole[:99]), ("gone", None)):
        groups.unlink()
        if content is not None:
            groups.write_bytes(content)
        findings = judge(look(tmp_path), "global_step2_universal", Plan()).findings
        found[what] = [each.rule for each in findings if each.severity is not Severity.NOTE]
        groups.touch()

    assert found == {"whole": [], "cut off": ["checkpoint-file-damaged"], "gone": ["checkpoint-shard-missing"]}


def test_cut_tensors_that_were_made_universal_are_merged_whole(tmp_path: Path) -> None:
    """The model states of each rank speak of its own part; the universal tag has the whole one."""
    tag = universal(tmp_path / "saved/global_step2_universal", Kind(stage=1))
    cut = {
        "mp_world_size": 2,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 2},
        "param_shapes": [{"0.first": (3, 1)}],
    }
    for rank in (0, 1):
        save(tag / f"mp_rank_0{rank}_model_states.pt", {**model_states(Kind(stage=1), 2, 2), **cut})

    found = merged(tmp_path / "saved", tmp_path / "out")

    assert found["0.first"][:2] == ("F32", (3, 2))
    assert struct.unpack("<6f", found["0.first"][2]) == (0, 1, 2, 3, 4, 5)


def other_value(states: dict[str, Weights]) -> None:
    states["exp_avg_sq"] = floats([0.25] * (len(states["exp_avg_sq"].content) // 4 - 1) + [0.5])


def fewer_values(states: dict[str, Weights]) -> None:
    states["fp32"] = Weights((), states["fp32"].content[:-4])


def no_moments(states: dict[str, Weights]) -> None:
    del states["exp_avg"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (other_value, "exp_avg_sq of 0.first: values that differ"),
        (fewer_values, "2 files in new: truncated or damaged"),
        (no_moments, "exp_avg of 0.first"),
    ],
)
def test_what_holds_other_values_is_thrown_away(tmp_path: Path, changed: Any, why: str) -> None:
    adam(tmp_path / "saved", Kind())
    before = {path.name for path in (tmp_path / "saved").iterdir()}
    program = converter(tmp_path / "python", universal(tmp_path / "prepared", Kind(), changed))

    with pytest.raises(BuildFailed, match=why):
        convert(tmp_path / "saved", tmp_path / "saved/new", program)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "error", "why"),
    [
        ("echo 'RuntimeError: shape [6] is invalid'; exit 1", BuildFailed, "shape .6. is invalid"),
        ("echo 'OSError: [Errno 28] No space left on device'; exit 1", ImpossiblePlan, "ran full"),
        ("echo \"No module named 'deepspeed'\"; exit 1", UsageError, "which is not installed here"),
        ('rm -r "$out"', BuildFailed, "wrote no checkpoint"),
    ],
)
def test_a_converter_that_fails_leaves_nothing(tmp_path: Path, after: str, error: type[DoctorError], why: str) -> None:
    adam(tmp_path / "saved", Kind())
    program = converter(tmp_path / "python", universal(tmp_path / "prepared", Kind()), after)

    with pytest.raises(error, match=why):
        convert(tmp_path / "saved", tmp_path / "elsewhere/new", program)
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (KINDS[0], "without ZeRO"),
        (KINDS[8], "joins the experts"),
        (Kind(stage=2), "needs Adam's states, but zero_pp_rank_0_mp_rank_00_optim_states.pt has no exp_avg_sq"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_the_converter_cannot_do_is_said_before(tmp_path: Path, kind: Kind, why: str) -> None:
    write(tmp_path, kind)

    assert why in next(refusals(examined(tmp_path)))


@pytest.mark.parametrize("hidden", [False, True])
def test_a_file_that_names_a_function_of_the_system_is_not_opened_by_the_converter(
    tmp_path: Path, hidden: bool
) -> None:
    """Also where the pickle throws the result away, so that nothing of it is left in what was read."""
    tag = adam(tmp_path, Kind(stage=1))
    bad = Called("posix", "system", ("true",), dropped=hidden)
    save(tag / "mp_rank_00_model_states.pt", {**model_states(Kind(stage=1), 2, 1), "args": bad})

    assert list(untrusted(examined(tmp_path))) == [("posix.system", "mp_rank_00_model_states.pt")]
    assert "posix.system" in next(refusals(examined(tmp_path)))


@pytest.mark.parametrize("name", ["zero_pp_rank_2_mp_rank_00_optim_states.pt", "more_optim_states.pt"])
def test_a_file_that_the_converter_would_take_and_nobody_judged_is_named(tmp_path: Path, name: str) -> None:
    """It takes every file by the end of its name: those of a larger run before, and whatever else was put there."""
    tag = adam(tmp_path, Kind(stage=1))
    save(tag / name, {"args": Called("posix", "system", ("true",))})

    assert f"would also read {name}," in next(refusals(examined(tmp_path)))


def looking(path: Path, prepared: Path, before: str = "true") -> str:
    """A converter that keeps what it is given: the files of --input_folder, as they are after it did something."""
    lines = (
        "#!/bin/sh",
        'while [ $# -gt 0 ]; do case "$1" in --output_folder) out=$2;; --input_folder) in=$2;; esac; shift; done',
        before,
        f'cp -rL "$in" "{path.parent}/given" && cp -r "{prepared}" "$out"',
    )
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


def test_the_converter_is_given_what_was_judged_written_anew(tmp_path: Path) -> None:
    """Entries that are neither the pickle nor a tensor are left behind, a file that nobody judged too."""
    kind = Kind(stage=1)
    tag = adam(tmp_path / "saved", kind)
    with zipfile.ZipFile(tag / "mp_rank_00_model_states.pt", "a") as archive:
        archive.writestr("mp_rank_00_model_states/evil.py", "raise SystemExit")
    (tag / "note.txt").write_text("not of the tag")

    made = convert(
        tmp_path / "saved", tmp_path / "saved/new", looking(tmp_path / "python", universal(tmp_path / "made", kind))
    )

    assert made is not None
    given = sorted((tmp_path / "given").iterdir())
    assert [path.name for path in given] == sorted(path.name for path in tag.glob("*.pt"))
    for path in given:
        with zipfile.ZipFile(path) as new, zipfile.ZipFile(tag / path.name) as old:
            entries = {info.filename: new.read(info) for info in new.infolist()}
            assert entries == {name: old.read(name) for name in old.namelist() if not name.endswith("evil.py")}
            starts = [info.header_offset + 30 + len(info.filename) + len(info.extra) for info in new.infolist()]
            assert [start % 64 for start in starts] == [0] * len(starts)
        assert read_archive(path, {}).problem == ""


def test_a_folder_that_is_put_in_the_place_of_the_judged_one_is_not_read(tmp_path: Path) -> None:
    """Who may write to the folder around may rename what lies in it, whosesoever it is."""
    kind = Kind(stage=1)
    adam(tmp_path / "saved", kind)
    prepared, out = universal(tmp_path / "made", kind), tmp_path / "saved/new"
    exchange = (
        f'cd "{out.parent}"; hidden=$(echo .dsdoctor-universal-*); mv "$hidden" away; mkdir -p "$hidden"; '
        'cp -r away/.dsdoctor-judged-* "$hidden"; echo evil > "$(echo "$hidden"/.dsdoctor-judged-*)/mp_rank_00_model_states.pt"; '
    )
    back = 'rm -r "$hidden"; mv away "$hidden"'
    program = looking(tmp_path / "python", prepared, exchange + f'cp -rL "$in" "{tmp_path}/seen"; ' + back)

    assert convert(tmp_path / "saved", out, program) is not None
    assert (tmp_path / "seen/mp_rank_00_model_states.pt").read_bytes()[:4] == b"PK\3\4"


def test_a_file_that_is_exchanged_after_it_was_judged_is_not_converted(tmp_path: Path) -> None:
    kind = Kind(stage=1)
    tag = adam(tmp_path / "saved", kind)
    program = looking(tmp_path / "python", universal(tmp_path / "made", kind))
    order = CheckpointOrder(folder=tmp_path / "saved")
    evil = {**model_states(kind, 2, 1), "args": Called("posix", "system", ("true",))}

    def exchange(_: str) -> None:
        save(tag / "mp_rank_00_model_states.pt", evil)

    with pytest.raises(ImpossiblePlan, match="changed during the inspection"):
        convert_checkpoint(order, UniversalOrder(out=tmp_path / "new", python=program), Nobody(), exchange)
    assert not (tmp_path / "given").exists()
    assert not (tmp_path / "new").exists()


def test_bytes_that_changed_on_the_disk_are_not_converted(tmp_path: Path) -> None:
    tag = adam(tmp_path / "saved", Kind(stage=1))
    file = tag / "mp_rank_00_model_states.pt"
    content = bytearray(file.read_bytes())
    entry = next(entry for name, entry in read_archive(file, {}).entries.items() if name == "data/0")
    content[entry.start] ^= 1
    file.write_bytes(content)

    with pytest.raises(ImpossiblePlan, match="'mp_rank_00_model_states/data/0' has a checksum or length that differs"):
        convert(tmp_path / "saved", tmp_path / "new", "/nowhere/python")


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", ".."])
def test_a_parameter_whose_folder_would_lie_elsewhere_is_not_converted(name: str, tmp_path: Path) -> None:
    """The converter joins its output folder and each parameter's name, and writes there."""
    tag = adam(tmp_path, Kind(stage=1))
    content = model_states(Kind(stage=1), 2, 1)
    content["module"][name] = content["module"].pop("scale")
    save(tag / "mp_rank_00_model_states.pt", content)

    assert "lead outside" in next(refusals(examined(tmp_path)))


def test_a_second_name_and_a_missing_folder_are_told(tmp_path: Path) -> None:
    adam(tmp_path / "saved", Kind())
    with pytest.raises(UsageError, match="already exists"):
        convert(tmp_path / "saved", tmp_path / "saved/global_step2", sys.executable)
    with pytest.raises(UsageError, match="there is no interpreter"):
        convert(tmp_path / "saved", tmp_path / "saved/new", "/nowhere/python")


def test_workers_are_as_many_as_memory_and_files_allow(tmp_path: Path) -> None:
    adam(tmp_path, Kind(world=4))
    found = examined(tmp_path)

    assert needs(found, cpus=64, available=None).workers == 4
    assert needs(found, cpus=64, available=1 << 30).workers == 1
    assert needs(found, cpus=2, available=64 << 30).workers == 2


@pytest.mark.slow
def test_a_kill_leaves_no_tag_and_ends_the_converter_and_the_next_one_sweeps(tmp_path: Path) -> None:
    adam(tmp_path / "saved", Kind())
    prepared = universal(tmp_path / "prepared", Kind())
    program = converter(tmp_path / "python", prepared, f'echo $$ > "{tmp_path}/pid"; sleep 60')
    out = tmp_path / "saved/new"
    command = [
        sys.executable,
        "-m",
        "dsdoctor",
        "checkpoint",
        str(tmp_path / "saved"),
        "--universal",
        str(out),
        "--python",
        program,
    ]

    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 20
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)

    assert not is_alive(child)
    assert not out.exists()
    assert {tag.name for tag in look(tmp_path / "saved").tags} == {"global_step2"}
    assert convert(tmp_path / "saved", out, converter(tmp_path / "other", prepared)) is not None
    assert list((tmp_path / "saved").glob(".dsdoctor*")) == []


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_a_universal_load_leaves_as_the_model_was_made_is_told(tmp_path: Path, stage: int) -> None:
    kind = Kind(stage=stage)
    tag = universal(tmp_path / "global_step2_universal", kind)
    saved, model = model_states(kind, kind.world, 1), next(tag.glob("*model_states.pt"))
    inside = {**saved["module"], "first.weight": floats([1.0])}
    noted = {"frozen_param_shapes": {"first.weight": (1,)}} if stage > 1 else {}
    found = {}
    for name, more in (
        ("buffers", {"frozen_param_shapes": {}}),
        ("frozen", {"module": inside, **noted}),
        ("excluded", {"frozen_param_shapes": None}),
        ("nothing", {"module": {}, "frozen_param_shapes": {}}),
    ):
        save(model, {**saved, **more})
        judged = judge(look(tmp_path), "global_step2_universal", Plan())
        told = [each for each in judged.findings if each.rule == "checkpoint-universal-leaves"]
        found[name] = [(each.severity, "first.weight" in each.title, "excluded" in each.title) for each in told]
        assert judged.outcome is not None
        assert judged.outcome.verdict is Verdict.LOADS

    note, warning = Severity.NOTE, Severity.WARNING
    assert found == {
        "buffers": [(note, False, False)],
        "frozen": [(warning, True, False)],
        "excluded": [(note, False, False)] if stage == 1 else [(warning, False, True)],
        "nothing": [],
    }
