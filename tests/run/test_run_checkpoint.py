"""--checkpoint-check of `python -m dsdoctor.run`: what is said before a load, when nothing was loaded, and after a save."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsdoctor.core.errors import UsageError
from dsdoctor.run.__main__ import environment_for, parse_command_line
from dsdoctor.run.checkpoint import CHOICES, CheckpointWatch, chosen
from dsdoctor.run.checkpoint_check import before_load, no_room
from dsdoctor.run.script import VARIABLE
from tests.checkpoint.written import Called, Kind, floats, model_states, save, write

ONE = Kind(stage=1, dtype="bf16", world=1)


class DummyOptim:
    """What DeepSpeed puts in the place of an optimizer, by the name of its class."""


class Around:
    """An optimizer of DeepSpeed's around another one."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


TRAINS = Around(object())


def engine_of(*, stage: int = 1, bf16: bool = True, around: object = TRAINS) -> Any:
    """An engine's class and one of it: what DeepSpeed's says of itself, and a save and a load that do what is asked."""

    class Engine:
        global_steps = 2
        optimizer = around

        def load_checkpoint(
            self,
            load_dir: str,
            tag: str | None = None,
            load_optimizer_states: bool = True,
            load_module_only: bool = False,
        ) -> Any:
            if load_dir == "raise":
                raise ValueError("not loaded")
            return (load_dir, {}) if (Path(load_dir) / "latest").exists() or tag else (None, None)

        def save_checkpoint(self, save_dir: str, tag: str | None = None) -> bool:
            write(Path(save_dir), ONE)
            if tag == "full":
                raise OSError(28, "No space left on device")
            if tag == "torn":
                (Path(save_dir) / "torn").mkdir()
                file = next((Path(save_dir) / "global_step2").glob("*optim*"))
                (Path(save_dir) / "torn" / file.name).write_bytes(file.read_bytes()[:-9])
            return True

        def load_universal_checkpoint(self) -> bool:
            return False

        def bfloat16_enabled(self) -> bool:
            return bf16

        def fp16_enabled(self) -> bool:
            return False

        def zero_optimization_stage(self) -> int:
            return stage

    return Engine()


def watched(engine: Any, *, choice: str = "warn", speaks: bool = True) -> list[str]:
    """What is said from now on of an engine."""
    said: list[str] = []
    CheckpointWatch(choice, speaks=speaks, say=lambda *lines: said.extend(lines)).engine(engine)
    return said


def test_nothing_is_said_of_a_checkpoint_that_loads_and_the_result_is_the_engines(tmp_path: Path) -> None:
    write(tmp_path, ONE)
    engine = engine_of()
    said = watched(engine)

    assert engine.load_checkpoint(str(tmp_path)) == (str(tmp_path), {})
    assert engine.save_checkpoint(str(tmp_path / "next")) is True
    assert said == []


@pytest.mark.parametrize(
    ("stage", "bf16", "rule"), [(3, True, "checkpoint-cannot-load"), (1, False, "checkpoint-needs-universal")]
)
def test_a_checkpoint_that_this_engine_cannot_load_is_told_before(
    tmp_path: Path, stage: int, bf16: bool, rule: str
) -> None:
    write(tmp_path, ONE)
    engine = engine_of(stage=stage, bf16=bf16)
    said = watched(engine)

    engine.load_checkpoint(load_dir=str(tmp_path))

    assert said[0] == "about the checkpoint:"
    assert f"[{rule}]" in said[1]
    before = len(said)
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    # the weights of stage 1 load whatever the type, and not at stage 3
    assert (len(said) == before) == (stage == 1)


def test_a_load_without_the_optimizer_that_takes_other_weights_or_none_is_told(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, Kind(stage=3, dtype="bf16", world=1, step=step))
    engine = engine_of(stage=3)
    said = watched(engine)

    engine.load_checkpoint(str(tmp_path), "global_step2", load_optimizer_states=False)
    assert said == []
    engine.load_checkpoint(str(tmp_path), "global_step1", load_optimizer_states=False)
    engine.load_checkpoint(str(tmp_path), load_module_only=True)

    told = [line.rpartition("[")[2] for line in said if line.endswith("]")]
    assert told == ["checkpoint-weights-of-latest]", "checkpoint-cannot-load]"]


MODULE_TOO = {"load_optimizer_states": False, "load_module_only": True}


@pytest.mark.parametrize(
    ("around", "arguments", "rules"),
    [
        (TRAINS, {"load_optimizer_states": False}, ["checkpoint-weights-undone"]),
        (TRAINS, MODULE_TOO, []),
        *(
            (none, arguments, [])
            for none in (None, DummyOptim(), Around(DummyOptim()))
            for arguments in ({"load_optimizer_states": False}, MODULE_TOO)
        ),
    ],
)
def test_without_zero_in_bf16_only_a_training_whose_fp32_weights_stay_is_told(
    tmp_path: Path, around: object, arguments: dict[str, bool], rules: list[str]
) -> None:
    write(tmp_path, ONE)
    engine = engine_of(stage=0, around=around)
    said = watched(engine)

    engine.load_checkpoint(str(tmp_path), **arguments)

    assert [line.rpartition("[")[2][:-1] for line in said if line.endswith("]")] == rules


@pytest.mark.parametrize(("bf16", "rules"), [(True, ["checkpoint-cannot-load"]), (False, [])])
def test_an_evaluation_without_zero_cannot_load_in_bf16_and_is_told_which_argument_helps(
    tmp_path: Path, bf16: bool, rules: list[str]
) -> None:
    write(tmp_path, Kind(stage=0, dtype="bf16" if bf16 else "fp32", world=1))
    engine = engine_of(stage=0, bf16=bf16, around=Around(DummyOptim()) if bf16 else None)
    said = watched(engine)

    engine.load_checkpoint(str(tmp_path))

    assert [line.rpartition("[")[2][:-1] for line in said if line.endswith("]")] == rules
    assert any("load_module_only=True" in line for line in said) == bf16


def test_at_stage_3_both_arguments_take_the_weights_of_latest(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, Kind(stage=3, dtype="bf16", world=1, step=step))
    engine = engine_of(stage=3)
    said = watched(engine)

    engine.load_checkpoint(str(tmp_path), "global_step2", **MODULE_TOO)
    assert said == []
    engine.load_checkpoint(str(tmp_path), "global_step1", **MODULE_TOO)
    assert "[checkpoint-weights-of-latest]" in said[1]


def test_what_the_script_itself_may_have_is_left_to_the_load(tmp_path: Path) -> None:
    tag = write(tmp_path, ONE)
    save(next(tag.glob("*model_states.pt")), {**model_states(ONE, 1, 1), "args": [Called("__main__", "Arguments")]})
    engine = engine_of()
    said = watched(engine)

    engine.load_checkpoint(str(tmp_path))

    assert said == []


def test_a_missing_shard_is_told_before_and_a_load_of_nothing_after(tmp_path: Path) -> None:
    tag = write(tmp_path / "sick", ONE)
    next(tag.glob("*optim*")).unlink()
    engine = engine_of()
    said = watched(engine)

    engine.load_checkpoint(str(tmp_path / "sick"))
    assert "[checkpoint-shard-missing]" in said[1]
    said.clear()
    engine.load_checkpoint(str(tmp_path / "elsewhere"))
    assert "[checkpoint-nothing-loaded]" in said[1]
    assert said[1].startswith("· "), "a first start is no fault"
    assert len(said) == 2
    said.clear()
    (tmp_path / "sick" / "latest").unlink()
    engine.load_checkpoint(str(tmp_path / "sick"))
    assert any(line.startswith("! ") and "[checkpoint-nothing-loaded]" in line for line in said)


def test_a_folder_around_or_within_a_checkpoint_is_no_first_start(tmp_path: Path) -> None:
    """A tag in place of its folder, and the Trainer's output in place of its checkpoint-5."""
    tag = write(tmp_path / "out" / "checkpoint-5", ONE)
    engine, marks = engine_of(), {}
    said = watched(engine)
    (tmp_path / "fresh").mkdir()
    for place in (tag, tmp_path / "out", tmp_path / "fresh", tmp_path / "missing"):
        engine.load_checkpoint(str(place))
        marks[place.name] = [(line[0], "Fix: stop here" in " ".join(said)) for line in said if "nothing-loaded" in line]
        said.clear()

    warned, noted = [("!", True)], [("·", False)]
    assert list(marks.values()) == [warned, warned, noted, noted]


def test_a_save_that_was_cut_off_is_told(tmp_path: Path) -> None:
    engine = engine_of()
    said = watched(engine)

    engine.save_checkpoint(str(tmp_path), tag="torn")

    assert any("[checkpoint-file-damaged]" in line for line in said)


def test_a_save_that_raised_is_told_with_what_a_training_goes_on_from(tmp_path: Path) -> None:
    engine = engine_of()
    said = watched(engine)

    with pytest.raises(OSError, match="No space left"):
        engine.save_checkpoint(str(tmp_path), tag="full")

    assert "full was not saved" in said[1]
    assert "[checkpoint-save-failed]" in said[1]
    assert any("No space left on device" in line for line in said)
    assert any("latest names 'global_step2'" in line for line in said)


def test_an_engines_error_and_wrong_arguments_are_its_own(tmp_path: Path) -> None:
    engine = engine_of()
    said = watched(engine)

    with pytest.raises(ValueError, match="not loaded") as raised:
        engine.load_checkpoint("raise")
    with pytest.raises(TypeError, match="unexpected keyword"):
        engine.load_checkpoint(folder="x")
    assert said == []
    assert "dsdoctor" not in str(raised.traceback[-1].path).replace(str(Path(__file__).parents[2]), "")


def test_other_ranks_and_off_change_nothing(tmp_path: Path) -> None:
    for how in ({"choice": "off"}, {"speaks": False}):
        engine = engine_of()
        before = type(engine).load_checkpoint
        said = watched(engine, **how)  # type: ignore[arg-type]
        assert type(engine).load_checkpoint is before
        assert said == []


def test_a_class_is_wrapped_once(tmp_path: Path) -> None:
    engine = engine_of()
    said = watched(engine)
    watched(engine)

    engine.load_checkpoint(str(tmp_path))

    assert sum("checkpoint-nothing-loaded" in line for line in said) == 1


def test_a_disk_without_room_for_one_more_is_a_warning() -> None:
    finding = no_room("/data", 3 << 30, 4 << 30)

    assert finding.rule == "checkpoint-disk-full"
    assert "/data has 3.00 GiB left, but the checkpoint that was just saved took 4.00 GiB" in finding.title


@pytest.mark.parametrize("choice", CHOICES)
def test_each_choice_reaches_the_script(choice: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    call = parse_command_line(["--checkpoint-check", choice, str(script)], {})

    assert f'"checkpoint_check": "{choice}"' in environment_for(call, {}, "m:f")[VARIABLE]
    with pytest.raises(UsageError, match="warn, off"):
        chosen("yes")


@pytest.mark.slow
def test_nothing_is_imported_before_it_is_needed() -> None:
    code = (
        "import sys, dsdoctor.run.checkpoint; print(sorted({'torch', 'dsdoctor.checkpoint.judge'} & set(sys.modules)))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


class Parameter:
    """A parameter, as far as it is looked at."""

    def __init__(self, count: int, *, trains: bool) -> None:
        self.count, self.requires_grad = count, trains

    def numel(self) -> int:
        return self.count


def test_frozen_parameters_that_a_load_leaves_as_they_are_are_told_of_the_very_model(tmp_path: Path) -> None:
    tag = write(tmp_path, ONE)
    states = model_states(ONE, 1, 1)
    parameters = {
        "0.first": Parameter(6, trains=True),
        "base.a": Parameter(40, trains=False),
        "base.b": Parameter(2, trains=False),
    }
    inside = {**states["module"], "base.a": floats([1.0]), "base.b": floats([1.0])}
    said = {}
    for name, module, strict, universal in (
        ("excluded, not strict", states["module"], False, False),
        ("excluded, strict", states["module"], True, False),
        ("inside", inside, False, False),
        ("universal", inside, True, True),
    ):
        save(next(tag.glob("*model_states.pt")), {**states, "module": module})
        kept = before_load(
            engine_with(parameters, universal=universal), {"load_dir": str(tmp_path), "load_module_strict": strict}
        )
        said[name] = [line.strip() for line in kept if "frozen parameters" in line]

    assert said == {
        "excluded, not strict": [
            "· global_step2 does not contain 2 frozen parameters of the model (42 elements)  [checkpoint-frozen-excluded]"
        ],
        "excluded, strict": [],
        "inside": [],
        "universal": [
            "· a universal load of global_step2 does not restore 2 frozen parameters of the model (42 elements)  "
            "[checkpoint-universal-leaves]"
        ],
    }


def engine_with(parameters: dict[str, Parameter], *, universal: bool) -> Any:
    """An engine with a model."""
    engine = engine_of()

    class Module:
        def named_parameters(self) -> Any:
            return parameters.items()

    engine.module = Module()
    type(engine).load_universal_checkpoint = lambda _: universal
    return engine
