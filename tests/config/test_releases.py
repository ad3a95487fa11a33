"""What releases read, kept in the package: the answer without DeepSpeed, and the JSON schema made of it."""

import contextlib
import json
import sys
import venv
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dsdoctor.config.answer import ConfigContext
from dsdoctor.config.check import ConfigOrder, answered
from dsdoctor.config.judge import judge
from dsdoctor.config.releases import recorded, versions
from dsdoctor.config.schema import json_schema
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.machine import Gap
from tests.cli.runner import run
from tests.config.cases import bad, healthy
from tests.config.many import ask_many
from tests.config.posted import posted
from tests.config.public import PUBLIC
from tests.each import each

NEWEST = versions()[0]
MISTAKEN = {
    "train_batch_sise": 8,
    "zero_optimization": {"stage": 2, "overlap_com": True, "offload_optimizer": {"device": "gpu"}},
    "fp16": {"enabled": True, "loss_scale": "large"},
    "optimizer": {"type": "AdamZ"},
}
RULES = {
    "config-key-misspelt",
    "config-value-refused",
    "config-value-type",
    "config-batch-missing",
    "config-optimizer-unknown",
    "config-not-judged",
}


def rules(config: dict[str, Any], version: str = NEWEST) -> set[str]:
    asked = recorded(version, config)
    return {verdict.finding.rule for verdict in judge(ConfigContext(config=config, asked=asked))}


def test_mistakes_are_named_without_deepspeed() -> None:
    assert rules(MISTAKEN) == RULES


def test_a_release_is_judged_by_its_own_keys() -> None:
    config = {"train_batch_size": 8, "sparse_gradients": True}

    assert rules(config, "0.16.9") == {"config-not-judged"}
    assert "config-key-removed" in rules(config, "0.19.8")


@each(
    "config",
    (
        {"train_batch_size": [8], "zero_optimization": {"stage": {}, "reduce_bucket_size": float("inf")}},
        {"zero_optimization": {"stage": True, "offload_param": {"device": []}}, "optimizer": {"type": 3}},
        {"zero_optimization": 3, "fp16": [], "scheduler": None, "steps_per_print": float("nan")},
    ),
)
def test_values_of_any_type_are_judged(config: dict[str, Any]) -> None:
    assert "config-not-judged" in rules(config)


def test_a_deepspeed_that_is_broken_is_not_called_missing() -> None:
    order = ConfigOrder(file="", python=sys.executable)
    for module, is_there in (("deepspeed.ops", True), ("deepspeed", False)):
        answer = Gap(question="DeepSpeed", reason=f"ModuleNotFoundError: No module named '{module}'")
        with pytest.raises(ImpossiblePlan) if is_there else contextlib.nullcontext():
            assert answered(answer, order, {}).recorded


@each("name", PUBLIC)
def test_what_is_published_is_valid_by_the_schema(name: str) -> None:
    config, _ = PUBLIC[name]

    jsonschema.validate({"$schema": "x", "_remark": "y", **config}, json_schema(recorded(NEWEST)))


@pytest.mark.parametrize(
    "config",
    [
        {"train_batch_sise": 8},
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"overlap_com": True}},
        {"fp16": {"loss_scale": "large"}},
        {"steps_per_print": "often"},
    ],
)
def test_what_is_wrong_is_not_valid_by_the_schema(config: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, json_schema(recorded(NEWEST)))


@pytest.mark.slow
def test_the_schema_of_every_release_is_one() -> None:
    assert len(versions()) >= 40
    for version in versions():
        jsonschema.Draft7Validator.check_schema(json_schema(recorded(version)))


@pytest.mark.slow
def test_a_python_without_torch_gets_the_verdict_of_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(MISTAKEN))
    venv.create(tmp_path / "bare", with_pip=False)
    python = str(tmp_path / "bare" / "bin" / "python")

    done = run("config", str(file), "--python", python, "--json")
    schema = run("config", "--schema", "--python", python, "--source", "0.17.6")

    assert done.returncode == 1
    assert {finding["rule"] for finding in json.loads(done.stdout)["findings"]} == RULES
    assert json.loads(schema.stdout)["title"] == "ds_config.json of DeepSpeed 0.17.6"


@pytest.mark.launch
def test_without_deepspeed_nothing_is_found_that_deepspeed_does_not_say() -> None:
    """mics_shard_size is refused by a class that has words of its own for it."""
    configs = [
        *(case.config for case in (*posted(), *bad(), *healthy()) if not case.arguments),
        *(config for config, _ in PUBLIC.values()),
    ]
    asked = ask_many(configs)
    known = recorded(asked[0].version)

    assert (set(known.sections), set(known.removed)) == (set(asked[0].sections), set(asked[0].removed))
    same = 0
    for config, answer in zip(configs, asked, strict=True):
        by_deepspeed, by_keys = (
            {
                (verdict.finding.rule.replace("removed", "refused"), verdict.path)
                for verdict in judge(ConfigContext(config=config, asked=each_answer))
                if verdict.finding.rule != "config-not-judged"
            }
            for each_answer in (answer, recorded(answer.version, config))
        )
        assert by_keys - by_deepspeed == set(), config
        same += by_keys == by_deepspeed
    assert same >= 0.8 * len(configs)
