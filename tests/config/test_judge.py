"""What is said of a configuration, given what DeepSpeed answered (recorded)."""

import time
from typing import Any

import pytest

from dsdoctor.config.answer import Accelerate, Construction, Correction, Effective, Filled, Mismatch, Refusal
from dsdoctor.config.judge import CHECKS
from dsdoctor.config.keys import FOREIGN, OTHER_NAMES, OWNERS
from dsdoctor.core.finding import Severity
from tests.config.mistakes import closed, typing_mistakes
from tests.config.recorded import recorded, rules, verdicts
from tests.each import each

BASE = {"train_micro_batch_size_per_gpu": 4}


def by_hand() -> list[Any]:
    """Every 25th typing mistake in the sections that DeepSpeed does not check itself."""
    unchecked = {section.path for section, _ in closed(recorded()) if not section.model}
    return [each for each in typing_mistakes(recorded()) if each.wrong[:-1] in unchecked][::25]


@pytest.mark.parametrize("mistake", by_hand(), ids=lambda mistake: ".".join(mistake.wrong))
def test_a_misspelt_key_is_named_with_the_right_one(mistake: Any) -> None:
    found = [verdict for verdict in verdicts(mistake.config) if verdict.path == mistake.wrong]

    assert rules(found) == ["config-key-misspelt"]
    assert ".".join(mistake.right) in found[0].finding.title


@pytest.mark.slow
def test_every_key_of_a_file_of_thousands_is_named_and_few_are_guessed() -> None:
    """A guess takes milliseconds: a hundred kilobytes of names must not take a minute."""
    began = time.process_time()
    found = verdicts({**BASE, "wall_clock_brakedown": True} | {f"gradient_clippin{n}": 1 for n in range(6000)})

    assert rules(found).count("config-key-misspelt") > 0
    assert len(found) == 6001
    assert time.process_time() - began < 10


def test_a_key_that_nobody_knows_is_a_warning_and_a_remark_is_nothing() -> None:
    found = verdicts({**BASE, "entirely_else": 1, "_comment": "ours", "//": "ours"})

    assert [(verdict.finding.rule, verdict.finding.severity) for verdict in found] == [
        ("config-key-ignored", Severity.WARNING)
    ]


@pytest.mark.slow
def test_a_key_of_another_program_is_said_to_be_its() -> None:
    """DeepSpeed has none of them, and none is taken for one of its own."""
    for name, owner in OWNERS.items():
        (found,) = verdicts({**BASE, name: 2})

        assert (found.finding.rule, found.finding.severity, found.correction) == (
            "config-key-ignored",
            Severity.WARNING,
            None,
        )
        assert f"{name} belongs to {owner}" in found.finding.title
    top = recorded().section(())
    assert top is not None
    assert not set(OWNERS) & (top.names | {path[0] for path in OTHER_NAMES})


@pytest.mark.launch
def test_the_keys_of_transformers_are_its_arguments() -> None:
    from transformers import TrainingArguments

    assert set(FOREIGN["transformers"]) <= set(TrainingArguments.__dataclass_fields__)


@each(
    ("config", "meant"),
    [
        ({"checkpointing": {"enabled": True, "save_n_recent_checkpoints": 3}}, None),
        ({"activation_checkpoint": {"partition_activations": True}}, ("activation_checkpointing",)),
        ({"optimizers": {"kind": "adam", "step_size": 3}}, None),
        ({"zero_optimisation": {"stge": 3}}, ("zero_optimization",)),
        ({"zero_optimisation": {}}, ("zero_optimization",)),
        ({"comm_logger": {"enabled": True}}, ("comms_logger",)),
        ({"seed": 1234}, None),
        ({"max_train_batch_size": None}, None),
        ({"tensorboards": {"job_name": "x", "output_paths": "y"}}, ("tensorboard",)),
    ],
)
def test_a_section_is_known_by_its_keys_too(config: dict[str, Any], meant: tuple[str, ...] | None) -> None:
    found = verdicts({**BASE, **config})[0]

    assert found.path == tuple(config)
    assert found.correction == (Correction(path=tuple(config), to=meant) if meant else None)
    assert found.finding.rule == ("config-key-misspelt" if meant else "config-key-ignored")


@each("section", ["optimizer", "scheduler"])
def test_a_value_beside_params_is_moved_into_them(section: str) -> None:
    config = {
        **BASE,
        section: {"type": "AdamW" if section == "optimizer" else "WarmupLR", "warmup": 1e-5, "params": {}},
    }
    (found,) = [verdict for verdict in verdicts(config) if verdict.path == (section, "warmup")]

    assert (found.finding.rule, found.finding.severity) == ("config-key-misplaced", Severity.ERROR)
    assert found.correction == Correction(path=(section, "warmup"), to=(section, "params", "warmup"))


def test_two_names_equally_near_are_both_told_and_none_is_taken() -> None:
    (found,) = verdicts({**BASE, "f16": {"enabled": True}})

    assert "bf16 or fp16" in found.finding.title
    assert found.correction is None


def test_names_that_others_give_are_told_with_deepspeeds() -> None:
    aio, logging, clipping = (
        verdicts({**BASE, **each}) for each in ({"aio": {"thread_count": 2}}, {"log_interval": 5}, {"max_grad_norm": 1})
    )

    assert [found[0].correction for found in (aio, logging, clipping)] == [
        Correction(path=("aio", "thread_count"), to=("aio", "intra_op_parallelism")),
        Correction(path=("log_interval",), to=("steps_per_print",)),
        Correction(path=("max_grad_norm",), to=("gradient_clipping",)),
    ]


def test_a_tensor_parallel_size_is_the_one_of_training() -> None:
    """``tp.tp_size`` is of inference: a training takes no notice of it."""
    path = ("tensor_parallel", "tp_size")
    refusal = Refusal(paths=(path,), kind="extra_forbidden", message="Extra", model="TPTrainingConfig")
    (found,) = verdicts({**BASE, "tensor_parallel": {"tp_size": 4}}, answer={"refusals": (refusal,)})

    assert found.correction == Correction(path=path, to=("tensor_parallel", "autotp_size"))


def test_params_are_known_whatever_is_in_them() -> None:
    (found,) = [
        each
        for each in verdicts({**BASE, "optimizer": {"type": "SGD", "parms": {"lr": 0.5}}})
        if each.path[-1:] == ("parms",)
    ]

    assert found.correction == Correction(path=("optimizer", "parms"), to=("optimizer", "params"))


def test_a_learning_rate_at_the_top_makes_no_optimizer_out_of_itself() -> None:
    (found,) = verdicts({**BASE, "lr": 0.1})

    assert "optimizer.params.lr" in found.finding.title
    assert found.correction is None


def test_a_count_of_tokens_is_no_secret() -> None:
    path = ("hybrid_engine", "max_out_token")
    refusal = Refusal(paths=(path,), kind="extra_forbidden", message="Extra", model="HybridEngineConfig")
    (found,) = verdicts({**BASE, "hybrid_engine": {"max_out_token": 512}}, answer={"refusals": (refusal,)})

    assert "512" in str(found.finding.evidence)


def test_infinity_of_a_file_is_text_for_hjson() -> None:
    (found,) = verdicts({**BASE, "steps_per_print": "Infinity,"})

    assert found.finding.title.startswith("steps_per_print is Infinity, which hjson")
    assert '"Infinity' not in found.finding.title


@each(
    ("path", "value", "fix"),
    [
        (("zero_optimization", "offload_optimizer"), True, 'write {"device": "cpu"}'),
        (("zero_optimization", "offload_param"), "nvme", 'write {"device": "nvme"}'),
        (("bf16",), True, 'write {"enabled": true}'),
        (("zero_optimization",), 2, 'write {"stage": 2}'),
    ],
)
def test_how_a_section_is_written_that_was_given_as_a_flag(path: tuple[str, ...], value: Any, fix: str) -> None:
    config = {path[0]: value} if len(path) == 1 else {path[0]: {path[1]: value}}
    refusal = Refusal(paths=(path,), kind="model_type", message="Input should be a valid dictionary")
    found = [each for each in verdicts({**BASE, **config}, answer={"refusals": (refusal,)}) if each.path == path]

    assert [each.finding.fix.text for each in found if each.finding.fix] == [fix]


def test_a_deprecated_key_is_replaced_by_the_documented_one() -> None:
    (found,) = verdicts(
        {**BASE, "zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}},
        answer={"facts": Effective(stage=3)},
    )

    assert found.finding.title.endswith("zero_optimization.stage3_gather_16bit_weights_on_model_save replaces it")


@each(
    ("beside", "fix"),
    [
        ({}, 'add "params", an empty object for the defaults'),
        ({"warmup_num_steps": 5}, 'put warmup_num_steps into "params"'),
    ],
)
def test_a_scheduler_without_params(beside: dict[str, Any], fix: str) -> None:
    made = Construction(name="WarmupLR", refused="no params")
    config = {**BASE, "scheduler": {"type": "WarmupLR", **beside}}
    (found,) = [each for each in verdicts(config, answer={"scheduler": made}) if each.path == ("scheduler", "params")]

    assert found.finding.fix is not None
    assert found.finding.fix.text == fix


def test_a_secret_in_a_refused_key_is_not_shown() -> None:
    refusal = Refusal(paths=(("wandb", "api_key"),), kind="extra_forbidden", message="Extra", model="WandbConfig")
    (found,) = verdicts({**BASE, "wandb": {"api_key": "sk-123"}}, answer={"refusals": (refusal,)})

    assert "sk-123" not in str(found)


@each(
    ("path", "value", "correction"),
    [
        (("steps_per_print",), "10", "10"),
        (("wall_clock_breakdown",), "false", "false"),
        (("gradient_clipping",), "1.0", "1.0"),
        (("flops_profiler", "enabled"), "True", "true"),
        (("gradient_clipping",), "much", None),
        (("gradient_clipping",), None, None),
        (("aio", "block_size"), [1], None),
    ],
)
def test_text_for_a_number_is_an_error_where_deepspeed_does_not_look(
    path: tuple[str, ...], value: Any, correction: str | None
) -> None:
    config: dict[str, Any] = {path[0]: value} if len(path) == 1 else {path[0]: {path[1]: value}}
    (found,) = verdicts({**BASE, **config})

    assert (found.finding.rule, found.finding.severity) == ("config-value-type", Severity.ERROR)
    assert found.correction == (Correction(path=path, value=correction) if correction else None)


@each("value", [1, 1.5, 0])
def test_a_number_for_a_number_is_well(value: float) -> None:
    assert verdicts({**BASE, "gradient_clipping": value, "prescale_gradients": 0}) == ()


def test_auto_is_told_once_where_somebody_could_fill_it_in() -> None:
    config = {**BASE, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto"}}

    assert rules(verdicts(config)) == ["config-auto-for-trainer"]


@each(
    ("config", "rule", "severity"),
    [
        ({"steps_per_print": "auto"}, "config-auto-stays", Severity.ERROR),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "config-auto-dropped", Severity.WARNING),
        ({"optimizer": {"params": {"momentum": "auto"}}}, "config-auto-stays", Severity.ERROR),
    ],
)
def test_auto_that_nobody_fills_in(config: dict[str, Any], rule: str, severity: Severity) -> None:
    (found,) = verdicts({**BASE, **config})

    assert (found.finding.rule, found.finding.severity) == (rule, severity)


@each(("refused", "rules_told"), [((), ["config-auto-stays"]), (("no",), ["config-trainer-refuses"])])
def test_what_accelerate_refused_as_a_whole_is_told_and_not_each_auto(
    refused: tuple[str, ...], rules_told: list[str]
) -> None:
    config = {"steps_per_print": "auto"}
    found = verdicts(config, answer={"filled": Filled(config=config, refused=refused)}, filled_by="accelerate")

    assert rules(found) == rules_told


def test_in_a_training_every_auto_that_is_left_is_told() -> None:
    config = {**BASE, "gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}}

    assert rules(verdicts(config, in_training=True)) == ["config-auto-stays", "config-auto-dropped"]


@each(
    ("facts", "zero", "expected"),
    [
        (Effective(stage=0, offload_optimizer="cpu"), {}, ["config-offload-ignored", "config-own-optimizer-offload"]),
        (Effective(stage=2, offload_param="cpu"), {}, ["config-offload-ignored"]),
        (Effective(stage=2, offload_optimizer="nvme"), {}, ["config-offload-ignored", "config-own-optimizer-offload"]),
        (
            Effective(stage=3, offload_optimizer="nvme"),
            {},
            ["config-nvme-without-path", "config-own-optimizer-offload"],
        ),
        (Effective(stage=2), {"stage3_max_live_parameters": 7}, ["config-stage-ignores"]),
        (Effective(stage=2), {"stage3_max_live_parameters": 1000000000}, []),
        (Effective(stage=3), {"round_robin_gradients": True}, ["config-stage-ignores"]),
        (Effective(stage=3), {"stage3_max_live_parameters": 7, "overlap_comm": False}, []),
    ],
)
def test_what_a_stage_does_not_do_is_told(facts: Effective, zero: dict[str, Any], expected: list[str]) -> None:
    config = {**BASE, "zero_optimization": {"stage": facts.stage, **zero}}

    assert rules(verdicts(config, answer={"facts": facts})) == expected


@each(
    ("stage", "section", "told"),
    [
        (3, {"device": "cpu", "pipeline_read": True, "nvme_path": "/nvme"}, [Severity.NOTE]),
        (3, {"device": "cpu", "super_offload": True, "fast_init": True}, []),
        (2, {"device": "cpu", "super_offload": True}, [Severity.WARNING]),
        # defaults say nothing
        (1, {"device": "cpu", "buffer_count": 4, "fast_init": False, "pin_memory": True}, []),
    ],
)
def test_keys_of_an_offload_that_its_device_or_stage_does_not_read(
    stage: int, section: dict[str, Any], told: list[Severity]
) -> None:
    config = {"zero_optimization": {"stage": stage, "offload_optimizer": section}}
    found = verdicts(config, answer={"facts": Effective(stage=stage, offload_optimizer="cpu")})

    assert [v.finding.severity for v in found if v.finding.rule == "config-offload-ignored"] == told


def test_a_bucket_larger_than_the_model_is_told() -> None:
    facts = Effective(stage=3, reduce_bucket_size=500_000_000, bf16=True)
    (found,) = verdicts(BASE, answer={"facts": facts, "parameters": 6_850_000})

    assert "1.0 GB" in found.finding.title and "6,850,000" in found.finding.title


@each(
    ("capability", "facts", "severity"),
    [
        ("6.1", Effective(stage=0, fp16=True), Severity.ERROR),
        ("7.5", Effective(stage=0, bf16=True), Severity.WARNING),
        ("10.0", Effective(stage=0, bf16=True), None),
        ("7.0", Effective(stage=0, fp16=True), None),
    ],
)
def test_a_precision_against_the_gpus(capability: str, facts: Effective, severity: Severity | None) -> None:
    found = verdicts(BASE, answer={"facts": facts}, capabilities=("12.0", capability))

    assert [verdict.finding.severity for verdict in found] == ([severity] if severity else [])


def test_an_optimizer_that_is_none_is_corrected_where_one_is_near() -> None:
    made = Construction(name="AdamWW", refused="not supported")
    (found,) = verdicts({**BASE, "optimizer": {"type": "AdamWW"}}, answer={"optimizer": made})

    assert found.correction == Correction(path=("optimizer", "type"), value='"AdamW"')


def test_parameters_of_an_optimizer() -> None:
    made = Construction(
        name="adamw", made="FusedAdam", known={"lr": "float", "betas": "list"}, unknown=("learning_rate", "momentum")
    )
    params = {"learning_rate": 1, "momentum": 1, "lr": "1e-3"}
    found = verdicts({**BASE, "optimizer": {"type": "AdamW", "params": params}}, answer={"optimizer": made})

    assert rules(found) == ["config-optimizer-parameter", "config-optimizer-parameter", "config-value-type"]
    assert found[0].correction is None  # lr is there already
    assert found[2].correction == Correction(path=("optimizer", "params", "lr"), value="1e-3")


def test_all_batch_sizes_fit_one_world() -> None:
    sizes = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    (found,) = verdicts(sizes)

    assert "fit 8 data-parallel ranks" in found.finding.title
    assert verdicts(sizes, answer={"world": 8}) == ()


def test_a_mismatch_with_training_arguments_is_corrected_to_auto() -> None:
    filled = Filled(
        config=BASE, mismatches=(Mismatch(path="fp16.enabled", value="true", argument="fp16", wanted="false"),)
    )
    (found,) = verdicts(BASE, answer={"filled": filled}, filled_by="transformers")

    assert found.correction == Correction(path=("fp16", "enabled"), value='"auto"')


def test_hjson_is_told_only_to_those_who_cannot_read_it() -> None:
    assert rules(verdicts(BASE, plain_json=False)) == []
    assert rules(verdicts(BASE, plain_json=False, filled_by="accelerate")) == ["config-not-plain-json"]


def test_accelerate_that_does_not_use_the_file() -> None:
    def told(said: Accelerate) -> list[str]:
        return rules(verdicts(BASE, answer={"accelerate": said}, filled_by="accelerate"))

    assert told(Accelerate(uses_deepspeed=False)) == ["config-accelerate-without-file"]
    assert told(Accelerate(uses_deepspeed=True)) == ["config-accelerate-without-file"]
    assert told(Accelerate(uses_deepspeed=True, file="other.json")) == ["config-accelerate-other-file"]
    assert told(Accelerate(uses_deepspeed=True, file="/a/ds_config.json")) == []


def test_what_could_not_be_judged_is_told() -> None:
    assert rules(verdicts(BASE, answer={"facts": None})) == ["config-not-judged"]


def test_no_check_is_listed_twice() -> None:
    assert len(CHECKS) == len(set(CHECKS))
