"""The lines above an error that set what it names, or what its fix names, are evidence."""

from tests.diagnosis.reading import diagnose
from tests.each import each

RAISED = [
    "Traceback (most recent call last):",
    '  File "/v/site-packages/vllm/config.py", line 7, in verify',
    "    raise ValueError(",
]
ERROR = "ValueError: Number of alpha heads (28) must be divisible by beta group size (8)."


def evidence(*lines: str) -> str:
    return "\n".join(diagnose([*lines]).findings[0].evidence)


@each(
    ("above", "told"),
    [
        ("$ serve alpha --beta-group-size 8 --port 8000", "line 1: beta-group-size=8"),
        ("run: ['serve', '--beta_group_size', '8']", "line 1: beta_group_size=8"),
        ("config: engine.beta_group_size=8", "line 1: engine.beta_group_size=8"),
        ("{'alpha_heads': 28, 'beta_group_size': 8}", "line 1: beta_group_size=8"),
        ("export BETA_GROUP_SIZE=8", "line 1: BETA_GROUP_SIZE=8"),
    ],
)
def test_what_sets_a_value_is_found_however_it_is_written(above: str, told: str) -> None:
    assert f"set above, in {told}" in evidence(above, *RAISED, ERROR)


@each(
    "above",
    [
        "$ serve alpha --gamma-group-size 8",
        "the beta group size was chosen",
        "step 7: beta_group_size=8, loss: 2.5",
        '  File "/w/serve.py", line 3, in main',
    ],
)
def test_other_lines_are_no_evidence(above: str) -> None:
    assert "above" not in evidence(above, *RAISED, ERROR)


def test_a_line_of_source_sets_nothing() -> None:
    frame = ['  File "/v/site-packages/a.py", line 7, in f', "    g(x, beta_group_size=8)"]

    assert "above" not in evidence(RAISED[0], *frame, "KeyError: 'x'", *RAISED, ERROR)


def test_a_secret_is_not_repeated() -> None:
    said = evidence("export ALPHA_API_TOKEN=hunter2", *RAISED, "ValueError: ALPHA_API_TOKEN is not set correctly")

    assert "hunter2" not in said


def test_a_warning_that_named_it_before_is_told() -> None:
    said = evidence(
        "WARNING alpha: beta_group_size will be ignored", "more", *RAISED, "ValueError: beta_group_size lies too low"
    )

    assert "warned of above, in line 1: " in said


def test_a_variable_that_the_fix_names_is_told_where_it_is_set() -> None:
    log = [
        "HSA_OVERRIDE_GFX_VERSION=10.3.0",
        "step 1 loss 2.5",
        "Memory access fault by GPU node-2 on address (nil). Reason: Unknown.",
    ]

    assert "set above, in line 1: HSA_OVERRIDE_GFX_VERSION=10.3.0" in evidence(*log)


def test_the_command_at_the_head_of_a_long_log_is_still_known() -> None:
    said = evidence("$ serve --beta-group-size 8", *(f"part {number} is done" for number in range(900)), *RAISED, ERROR)

    assert "set above, in line 1: beta-group-size=8" in said
