"""What we know by name of DeepSpeed, transformers and accelerate stands in their installed sources."""

import importlib.util
import re
from pathlib import Path

import pytest

from dsdoctor.config.judge import FOR_NVME, FOR_STAGE_3
from dsdoctor.config.keys import CHOSEN_BY_NAME, NAMED_IN, OTHER_NAMES, OTHERS_READ
from dsdoctor.config.values import BATCH, FILLED_BY_ACCELERATE, FILLED_BY_TRAINER, NUMBERS
from tests.config.recorded import recorded
from tests.each import each


def source(package: str, file: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return Path(spec.origin).parent.joinpath(file).read_text(encoding="utf-8")


@each("key", OTHERS_READ)
def test_keys_that_others_read_are_read_there(key: str) -> None:
    package, file, words = OTHERS_READ[key]

    assert words in source(package, file)


@each("name", NAMED_IN)
def test_what_others_call_a_key_stands_there(name: str) -> None:
    package, file, words = NAMED_IN[name]

    assert words in source(package, file)


@each("path", OTHER_NAMES, ids=".".join)
def test_another_name_is_none_of_deepspeeds_and_what_it_means_is(path: Path) -> None:
    asked = recorded()

    assert asked.key(path) is None
    assert all(right[:-1] in CHOSEN_BY_NAME or asked.key(right) for right in OTHER_NAMES[path])


def test_the_keys_that_the_trainer_fills_are_those_of_transformers() -> None:
    text = source("transformers", "integrations/deepspeed.py")
    filled = set(re.findall(r"fill_(?:match|only)\(\s*\"([\w.]+)\"", text))

    assert filled == set(FILLED_BY_TRAINER)


def test_the_keys_that_accelerate_fills_are_those_of_its_plugin() -> None:
    text = source("accelerate", "utils/dataclasses.py")
    mapping = text.partition("plugin_to_config_mapping = {")[2].partition("}")[0]
    filled = set(re.findall(r": \"([\w.]+)\"", mapping))

    assert filled - set(FILLED_BY_TRAINER) == set(FILLED_BY_ACCELERATE)


def test_what_accelerate_fills_when_it_prepares_stands_there() -> None:
    child = (Path(importlib.util.find_spec("dsdoctor").origin).parent / "child_scripts" / "config_fill.py").read_text()  # type: ignore[union-attr, arg-type]
    listed = child.partition("WHEN_PREPARED = (")[2].partition("\n)")[0]
    text = source("accelerate", "accelerator.py")

    assert len(re.findall(r'"([\w.]+)"', listed)) == 8
    assert all(f'"{key}"' in text for key in re.findall(r'"([\w.]+)"', listed))


def test_numbers_without_a_default_are_keys_of_deepspeed() -> None:
    top = recorded().section(())

    assert top is not None
    assert {path[0] for path in NUMBERS} <= top.names
    assert set(BATCH) <= top.names
    assert all(key.kind == "" for key in top.keys if (key.name,) in NUMBERS), (
        "DeepSpeed gives a default now: the list can go"
    )


@each("name", [name for names in (*FOR_NVME.values(), FOR_STAGE_3) for name in names])
def test_stages_1_and_2_do_not_read_what_is_for_nvme_or_stage_3(name: str) -> None:
    low = source("deepspeed", "runtime/zero/stage_1_and_2.py")
    engine = source("deepspeed", "runtime/engine.py")
    for_low = engine.partition("if zero_stage <= ZeroStageEnum.gradients:")[2].partition("elif zero_stage ==")[0]

    assert f".{name}" not in low
    assert "Stage1And2ZeroOptimizer(" in for_low
    assert name not in for_low


def test_what_is_for_nvme_is_read_there() -> None:
    stage3 = source("deepspeed", "runtime/zero/stage3.py")
    swapping = stage3.partition("def _configure_tensor_swapping")[2].partition("def ")[0]

    assert "if self.swap_optimizer:\n            self._configure_tensor_swapping(" in stage3
    assert all(name in swapping for name in ("offload_optimizer_config.nvme_path", "offload_optimizer_config.pipeline"))
    # the most that lies in the host's memory is looked at for parameters on NVMe only
    assert stage3.count("self.max_params_in_cpu") == 5
    assert (
        "if self.params_in_nvme_and_cpu and \\\n                aggregate_params_count + params_in_group > self.max_params_in_cpu"
        in stage3
    )
