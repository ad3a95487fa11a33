"""Rules of runs where the same line has several causes: its own figures, the frames above it, or whose file it is decide."""

import json
from pathlib import Path

from dsdoctor.core.finding import Finding, Severity
from dsdoctor.diagnosis.catalogue import RULES
from tests.diagnosis.reading import diagnose
from tests.diagnosis.test_healthy import LOGS
from tests.each import each

HERE = Path(__file__).parent
ZERO = '  File "/v/lib/python3.11/site-packages/deepspeed/runtime/zero/{file}", line 700, in {function}'


def first(*log: str) -> Finding:
    return diagnose(log).findings[0]


def full(*, wanted: str, loose: str, own: str = "79.03 GiB", other: str = "") -> str:
    others = f" Process 4711 has {other} memory in use." if other else ""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {wanted}. GPU 0 has a total capacity of 79.15 GiB of which "
        f"111.25 MiB is free.{others} Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory "
        f"66.10 GiB is allocated by PyTorch, and {loose} is reserved by PyTorch but unallocated."
    )


def test_fragmentation_is_said_only_where_more_is_unused_than_was_wanted() -> None:
    assert "fragmented" in first(full(wanted="512.00 MiB", loose="11.40 GiB")).title
    assert "fragmented: 1.95 GiB were" in first(full(wanted="1.95 GiB", loose="26.66 GiB")).title
    assert "fragmented" not in first(full(wanted="512.00 MiB", loose="88.10 MiB")).title
    assert "fragmented" not in first(full(wanted="14.00 GiB", loose="1.40 GiB")).title


@each("error", ["no kernel image is available for execution on the device", "invalid device function"])
@each("arch", ["sm_120", "sm_35"])
def test_a_gpu_that_torch_was_not_built_for_asks_for_another_torch_and_not_for_ops(error: str, arch: str) -> None:
    warned = f"Thing with CUDA capability {arch} is not compatible with the current PyTorch installation."
    failed = f"RuntimeError: CUDA error: {error}"

    assert arch in first(warned, failed).title
    assert arch not in first(failed).title
    assert arch not in first(failed, warned).title


def test_another_process_is_named_only_where_it_holds_most() -> None:
    assert (
        "another process holds 70.10 GiB"
        in first(full(wanted="2.00 GiB", loose="88.10 MiB", own="7.60 GiB", other="70.10 GiB")).title
    )
    assert (
        "another process"
        not in first(full(wanted="2.00 GiB", loose="88.10 MiB", own="70.10 GiB", other="7.60 GiB")).title
    )


@each(
    ("frame", "words"),
    [
        (ZERO.format(file="partition_parameters.py", function="_allgather_params"), "stage3_max_live_parameters"),
        (ZERO.format(file="stage_1_and_2.py", function="initialize_optimizer_states"), "offload_optimizer"),
        ('  File "/v/transformers/trainer.py", line 3000, in _save_checkpoint', "zero_to_fp32"),
        ('  File "/v/deepspeed/runtime/engine.py", line 1100, in _configure_distributed_model', "zero.Init"),
        (
            '  File "/v/transformers/models/llama/modeling_llama.py", line 300, in forward',
            "train_micro_batch_size_per_gpu",
        ),
    ],
)
def test_what_to_change_first_depends_on_where_the_memory_ran_out(frame: str, words: str) -> None:
    finding = first(frame, full(wanted="2.00 GiB", loose="88.10 MiB"))

    assert finding.rule == "gpu-oom"
    assert finding.fix and words in finding.fix.text


@each(
    "file",
    ["flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so", "amp_C.cpython-310-x86_64-linux-gnu.so", "xformers/_C.so"],
)
def test_another_package_s_file_is_no_reason_to_build_deepspeed(file: str) -> None:
    finding = first(f"ImportError: /v/lib/python3.10/site-packages/{file}: undefined symbol: _ZN3c104cuda9SetDeviceEa")

    assert finding.rule == "foreign-extension-mismatch"
    assert finding.fix and not [line for line in finding.fix.commands if "dsdoctor install --build" in line]


def test_an_op_of_deepspeed_with_the_same_symbol_is_built_again() -> None:
    op = "/v/lib/python3.10/site-packages/deepspeed/ops/adam/cpu_adam_op.so"

    assert first(f"ImportError: {op}: undefined symbol: _ZN3c104cuda9SetDeviceEa").rule == "torch-abi-mismatch"


@each(("xid", "rule"), [(79, "gpu-hardware-error"), (48, "gpu-hardware-error"), (31, "gpu-illegal-access")])
def test_an_xid_tells_the_gpu_from_the_program(xid: int, rule: str) -> None:
    assert first(f"[1234.5] NVRM: Xid (PCI:0000:3b:00): {xid}, pid=4711, name=python").rule == rule


def test_the_network_is_named_and_not_the_package_that_was_not_found_after_it() -> None:
    retry = "WARNING: Retrying (Retry(total={0}, connect=None)) after connection broken by 'NewConnectionError('x')': /simple/x/"
    log = [*(retry.format(left) for left in (4, 3, 2, 1, 0)), "ERROR: No matching distribution found for deepspeed"]

    assert first(*log).rule == "pip-network"


def test_a_pip_that_got_through_after_a_second_try_has_no_fault() -> None:
    retry = "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'ReadTimeoutError('x')': /simple/x/"

    findings = diagnose([retry, "Successfully installed deepspeed-0.19.8"]).findings

    assert [finding.severity for finding in findings if finding.severity is Severity.ERROR] == []


def test_a_resume_that_finds_nothing_is_a_warning_though_the_run_goes_on() -> None:
    warning = "[WARNING] [engine.py:4437:load_checkpoint] Unable to find latest file at /data/ckpt/latest, if trying to load latest"

    findings = diagnose([warning, "step 1 loss 2.0", "step 2 loss 1.9"]).findings

    assert [(finding.rule, finding.severity) for finding in findings] == [("checkpoint-not-found", Severity.WARNING)]
    assert "/data/ckpt/latest" in findings[0].title
    # its folder can be looked at, the file that is not there cannot
    assert findings[0].fix and findings[0].fix.steps[0].line == "python -m dsdoctor checkpoint /data/ckpt"


def test_an_argument_that_a_framework_refuses_is_told_in_its_own_words() -> None:
    frames = (
        "Traceback (most recent call last):",
        '  File "/v/site-packages/trl/trainer/some_trainer.py", line 40, in __init__',
        "    raise ValueError(",
    )
    words = "ValueError: num_widgets was made for another number of processes"
    divided = "ValueError: num_widgets must be a multiple of the number of processes, got 7."

    assert "TRL stopped on purpose" in first(*frames, words).title and words in first(*frames, words).title
    assert first(*frames, divided).title.startswith("num_widgets is not divisible by number of processes")


def test_a_name_that_torch_has_not_is_the_fault_of_who_asks_for_it() -> None:
    message = "AttributeError: module 'torch.optim' has no attribute 'adamx'"
    frame = '  File "/v/site-packages/deepspeed/runtime/engine.py", line 20, in {}'

    assert (
        first("Traceback (most recent call last):", frame.format("<module>"), message).rule
        == "deepspeed-too-old-for-torch"
    )
    assert (
        first("Traceback (most recent call last):", frame.format("_configure_basic_optimizer"), message).rule
        == "config-value-wrong"
    )


@each(
    "line",
    [
        "cp: cannot open 'x': Permission denied",
        "warning: dos2unix: skipping binary file a.sh",
        "wandb: pip install wandb --upgrade",
        "Successfully pulled image, node has 3 GB of ephemeral-storage",
        "KeyError handled: SLURM_PROCID is not set, using 0",
    ],
)
def test_a_line_that_only_resembles_a_failure_is_none(line: str) -> None:
    assert diagnose(["step 1 loss 2.0", line, "step 2 loss 1.9"]).findings == ()


def test_the_key_that_pydantic_refused_is_named() -> None:
    finding = first(
        "[rank0]: pydantic_core._pydantic_core.ValidationError: 1 validation error for DeepSpeedZeroConfig",
        "[rank0]: overlap_com",
        "[rank0]:   Extra inputs are not permitted [type=extra_forbidden, input_value=True, input_type=bool]",
    )

    assert finding.rule == "config-key-unknown" and "overlap_com" in finding.title


@each("model", ["ModelConfig", "VllmConfig", "TrainSettings"])
def test_a_validation_error_of_another_program_is_not_the_configuration_of_deepspeed(model: str) -> None:
    log = [
        f"pydantic_core._pydantic_core.ValidationError: 1 validation error for {model}",
        "max_len",
        "  Extra inputs are not permitted",
    ]

    assert not first(*log).rule.startswith("config-")


def healthy_logs() -> list[Path]:
    answers = [
        (corpus, json.loads((HERE / corpus / "answers.json").read_text(encoding="utf-8")))
        for corpus in ("real", "blind", "fresh")
    ]
    return [
        HERE / corpus / answer["file"]
        for corpus, all_of_them in answers
        for answer in all_of_them
        if answer["cause"] is None and answer.get("half", "open") == "open"
    ]


def test_no_rule_fires_on_a_healthy_log() -> None:
    logs = [raw.read_bytes().splitlines() for raw in healthy_logs()]
    found = [finding for log in [*logs, *LOGS.values()] for finding in diagnose(log).findings]

    assert len(logs) > 40
    assert [finding.rule for finding in found if finding.severity is Severity.ERROR and finding.rule in RULES] == []
