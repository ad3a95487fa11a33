"""What libfabric, ROCm and Gaudi say of themselves; and an index that is out of range on the CPU, where the traceback is exact."""

from __future__ import annotations

from dsdoctor.core.finding import has_error
from tests.diagnosis.mixtures import FAILURES
from tests.diagnosis.reading import NO_RULE, diagnose
from tests.each import each

TRACEBACK = ["Traceback (most recent call last):", '  File "/w/train.py", line 7, in main', "    model(batch)"]
EFA = (
    "algo-2:78:278 [0] ofi_process_cq:1039 NCCL WARN NET/OFI Request 0x7fbb completed with error. RC: 20. Error: unknown error.",
    "libfabric:78:1673041632::efa:cq:rxr_cq_write_tx_error():243<warn> rxr_cq_write_tx_error: err: 20, prov_err: Not a directory",
    "libfabric:78:1673041632:core:efa:cq:efa_rdm_cq_handle_error()<warn> err: 113, message: Unreachable remote (9)",
)
NCCL = [
    *TRACEBACK,
    "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, unhandled system error, NCCL "
    "version 2.14.3",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
]


@each("said", EFA)
@each("label", ["", "[1,mpirank:8,algo-2]<stderr>:", "[rank8]: "])
def test_efa_is_named_where_its_sends_fail(said: str, label: str) -> None:
    first = diagnose([label + line for line in (said, *NCCL)]).findings[0]

    assert first.rule == "efa-send-failed"
    assert first.fix
    assert "security group" in first.fix.text
    assert diagnose([*FAILURES["unknown"], f"[rank7]: {said}"]).findings[0].rule in NO_RULE


@each(
    ("line", "rule", "word"),
    [
        ("RuntimeError: HIP error: invalid device function", "no-kernel-image", "HSA_OVERRIDE_GFX_VERSION"),
        (
            "RuntimeError: synStatus=20 [Device already acquired] Device acquire failed.",
            "hpu-already-acquired",
            "hl-smi",
        ),
    ],
)
def test_an_accelerator_of_another_kind_is_known(line: str, rule: str, word: str) -> None:
    first = diagnose([*TRACEBACK, line]).findings[0]

    assert first.rule == rule
    assert first.fix
    assert word in first.fix.text


STEPS = (
    [
        f"[2024-10-11 10:00:01,101] [INFO] [logging.py:128:log_dist] [Rank 0] step={number}, skipped=0"
        for number in range(59)
    ],
    [f"{{'loss': 1.{number}}}" for number in range(59)],
    ["working"] * 59,
)


@each("steps", STEPS)
@each(
    "line",
    [
        "hl: Device already acquired by this process, reuse",
        "import: HIP error: invalid device function; falling back",
        "hl-smi: [Device already acquired] by pid 7",
        "no kernel for this GPU (HIP error: invalid device function), taking the slow path",
    ],
)
def test_what_a_program_says_of_itself_is_no_failure(line: str, steps: list[str]) -> None:
    for log in ([line, *steps], [*steps[:5], line, *steps], [*steps, line, *steps[:2]]):
        assert not has_error(diagnose(log).findings)


@each(
    ("line", "blocking"),
    [
        ("IndexError: index out of range in self", False),
        ("../aten/Indexing.cu:1141: indexSelectLargeIndex: Assertion `srcIndex < srcSelectDimSize` failed.", True),
    ],
)
def test_kernels_are_only_waited_for_where_there_are_any(line: str, *, blocking: bool) -> None:
    first = diagnose([*TRACEBACK, line]).findings[0]

    assert first.rule == "gpu-index-out-of-range"
    assert first.fix
    assert any("CUDA_LAUNCH_BLOCKING" in step.line for step in first.fix.steps) is blocking
    assert ("exact" in first.fix.text) is not blocking


HCCL = [
    *TRACEBACK,
    "RuntimeError: InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function error: HcclAllreduce, error code is 6",
    "[ERROR] 2025-04-08-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call acl api failed.",
]
WAITED = (
    "EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send the data.",
    "EI0002: [PID: 13075] 2025-06-25-10:45:23.586.187 The wait execution of the Notify register times out. Reason: unknown",
)


@each("said", WAITED)
@each("label", ["", "[rank1]: ", "(Worker pid=12, ip=10.0.0.1) ", "node-2: "])
def test_a_rank_of_npus_that_waited_is_known_and_is_no_cause_beside_one(said: str, label: str) -> None:
    waited = [label + line for line in (*HCCL, said)]
    read = diagnose(waited)

    assert read.findings[0].rule == "hccl-timeout"
    assert read.follows
    assert diagnose([*FAILURES["unknown"], *waited]).findings[0].rule in NO_RULE


@each(
    ("error", "name"),
    [
        (
            "csrc/includes/reduction_utils_hip.h:352:46: error: no member named 'shfl_xor' in 'cooperative_groups::tile<64>'",
            "shfl_xor",
        ),
        ("csrc/gelu.hip:35:10: error: use of undeclared identifier '__nv_bfloat16'", "__nv_bfloat16"),
        ("csrc/includes/memory_access_hip.h:9:3: error: unknown type name '__nv_bfloat162'", "__nv_bfloat162"),
        ("csrc/adam/cpu_adam.cpp:10:2: error: use of undeclared identifier 'foo'", ""),
    ],
)
def test_what_a_rocm_lacks_is_named(error: str, name: str) -> None:
    first = diagnose(["[1/2] /opt/rocm/bin/hipcc -c x.hip -o x.o", "FAILED: x.o", f"/w/{error}"]).findings[0]

    assert (first.rule == "hip-member-missing") is bool(name)
    assert name in first.title
