"""The table of regressions: every row has a source and a cure, and a version in the log that has no such fault rules it out."""

from dsdoctor.core.finding import has_error
from dsdoctor.diagnosis.catalogue import REGRESSIONS
from tests.diagnosis.reading import diagnose
from tests.each import each

HOOKS = "AttributeError: 'Linear' object has no attribute 'ds_grads_remaining'"
NO_LOSS = "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 1.99e-05, 'epoch': 0.01}"
STAGE_OFFLOAD = [
    '  File "/venv/deepspeed/runtime/zero/stage3.py", line 2030, in unscale_and_clip_grads',
    "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
]


def version(number: str) -> str:
    return f"[INFO] [logging.py:96:log_dist] [Rank 0] DeepSpeed info: version={number}, git-hash=unknown, git-branch=unknown"


def first(*log: str) -> str:
    return diagnose(log).findings[0].rule


def test_there_are_enough_rows_and_each_has_its_thread_and_its_cure() -> None:
    assert len(REGRESSIONS) >= 25
    for row in REGRESSIONS:
        assert row.sources, row.what
        assert all(len(source.split("/")) == 4 and source.split("/")[3].isdigit() for source in row.sources), (
            row.sources
        )
        assert row.cure and row.steps, row.what


def test_the_title_names_the_release_and_says_if_where_the_log_names_none() -> None:
    finding = diagnose([HOOKS]).findings[0]

    assert finding.rule == "known-regression"
    assert "0.16.5" in finding.title and "check yours first" in finding.title
    assert finding.fix and "0.16.4" in finding.fix.text and "issues/7203" in finding.fix.text


def test_the_log_s_own_version_is_named() -> None:
    assert "the log shows 0.16.5" in diagnose([version("0.16.5"), HOOKS]).findings[0].title


@each("older", ["0.16.4", "0.15.0", "0.9.2+cu118"])
def test_a_release_before_the_fault_rules_the_row_out(older: str) -> None:
    assert first(version(older), HOOKS) != "known-regression"


def test_a_release_after_the_last_with_the_fault_rules_the_row_out() -> None:
    assert first(version("0.14.2"), *STAGE_OFFLOAD) == "known-regression"
    assert first(version("0.16.0"), *STAGE_OFFLOAD) != "known-regression"


@each(("stage", "known"), [("1", True), ("2", True), ("3", False), ("0", False)])
def test_a_fault_of_some_stages_is_not_blamed_for_another_stage(stage: str, known: bool) -> None:
    stage_line = f"[INFO] [config.py:988:print]   zero_optimization_stage ...... {stage}"

    assert (first(version("0.13.5"), stage_line, *[NO_LOSS] * 4) == "known-regression") is known


def test_a_symptom_with_many_reasons_counts_only_with_the_version() -> None:
    assert first(version("0.12.2"), NO_LOSS) == "known-regression"
    assert not has_error(diagnose([version("0.16.0"), NO_LOSS]).findings)
    assert not has_error(diagnose([NO_LOSS]).findings)
