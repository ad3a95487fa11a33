"""Stories of whole logs: what comes first, what is harmless, what only repeats, and what to do."""

import pytest

from dsdoctor.core.finding import Severity, has_error
from dsdoctor.diagnosis.models import Diagnosis, LogOutcome
from tests.diagnosis.reading import diagnose
from tests.each import each

MISSING_HEADER = (
    "/venv/torch/include/ATen/cuda/CUDAContextLight.h:6:10: fatal error: cusparse.h: No such file or directory"
)
FAILED_JIT = [
    "Using /root/.cache/torch_extensions/py310_cu118 as PyTorch extensions root...",
    "Building extension module fused_adam...",
    "[1/3] /usr/local/cuda-11.8/bin/nvcc  -DTORCH_EXTENSION_NAME=fused_adam -std=c++14 -O3 -std=c++17 "
    "-gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90,code=compute_90 -c multi_tensor_adam.cu",
    MISSING_HEADER,
    "ninja: build stopped: subcommand failed.",
    "Traceback (most recent call last):",
    "RuntimeError: Error building extension 'fused_adam'",
]
HARMLESS = [
    "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
    "[WARNING]  async_io: please install the libaio-dev package with apt",
    "[WARNING]  sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.1",
    "[WARNING]  using untested triton version (2.1.0), only 1.0.0 is known to be compatible",
    "[WARNING]  Please specify the CUTLASS repo directory as environment variable $CUTLASS_PATH",
    "Installed CUDA version 11.7 does not match the version torch was compiled with 11.8 but since the APIs are "
    "compatible, accepting this combination",
    "UserWarning: The detected CUDA version (12.2) has a minor version mismatch with the version that was used to "
    "compile PyTorch (12.1). Most likely this shouldn't be a problem.",
    "[WARNING] fp_quantizer compatibility check failed (CUDA_HOME does not exist, unable to compile CUDA op(s)), "
    "treating the op as not compatible",
    "/usr/bin/ld: cannot find -lcufile: No such file or directory",
    "collect2: error: ld returned 1 exit status",
    "LINK : fatal error LNK1181: cannot open input file 'aio.lib'",
    "No CUDA runtime is found, using CUDA_HOME='/usr/local/cuda'",
    "fatal: not a git repository (or any of the parent directories): .git",
    "DEPRECATION: --build-option and --global-option are deprecated. pip 25.3 will enforce this behaviour change.",
    "WARNING: Running pip as the 'root' user can result in broken permissions",
    "ERROR: pip's dependency resolver does not currently take into account all the packages that are installed.",
    "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being "
    "overloaded",
    "node1:9:9 [0] NCCL INFO Plugin load returned 2 : libnccl-net.so: cannot open shared object file",
    "[W socket.cpp:697] [c10d] The client socket has failed to connect to [node1]:29500 (errno: 22 - Invalid argument).",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "Unable to find hostfile, will proceed with training with local resources only.",
]


def rules(diagnosis: Diagnosis) -> list[str]:
    return [finding.rule for finding in diagnosis.findings if finding.severity is Severity.ERROR]


def test_a_failed_compile_names_its_cause_with_the_line_and_what_was_read() -> None:
    diagnosis = diagnose(FAILED_JIT, name="rank0.log")

    finding = diagnosis.findings[0]
    assert (diagnosis.name, diagnosis.outcome, diagnosis.lines) == ("rank0.log", LogOutcome.CAUSE, 7)
    assert rules(diagnosis) == ["cuda-header-missing"]
    assert finding.title == "the toolkit in /usr/local/cuda-11.8 has no cusparse.h"
    assert finding.evidence[0] == f"line 4: {MISSING_HEADER}"
    assert finding.affects == ("fused_adam",)
    assert diagnosis.facts.architectures == ("80", "90")
    assert (diagnosis.facts.cuda, diagnosis.facts.nvcc, diagnosis.facts.standard) == ("11.8", "11.8", "c++17")
    assert (diagnosis.facts.python, diagnosis.facts.op) == ("3.10", "fused_adam")
    assert finding.fix is not None
    assert finding.fix.steps[-1].line == "sudo apt install cuda-libraries-dev-11-8"


@each(
    "prefix", ["[rank1]: ", "#12 4.5 ", "2026-11-21T08:50:53.123Z ", "node1: ", "      ", "\x1b[31m", "[1,0]<stderr>:"]
)
def test_prefixes_change_nothing(prefix: str) -> None:
    diagnosis = diagnose([prefix + line for line in FAILED_JIT])

    assert rules(diagnosis) == ["cuda-header-missing"]
    assert diagnosis.findings[0].evidence[0] == f"line 4: {MISSING_HEADER}"


def test_colours_between_the_words_change_nothing() -> None:
    line = "\x1b[01m\x1b[Kx.h:13:10:\x1b[m\x1b[K \x1b[01;31m\x1b[Kfatal error: \x1b[m\x1b[KPython.h: No such file or directory"

    assert rules(diagnose([line])) == ["python-headers-missing"]


@each("line", HARMLESS)
def test_a_harmless_line_is_no_error(line: str) -> None:
    diagnosis = diagnose(["step 1 loss 2.0", line, "step 2 loss 1.9"])

    assert diagnosis.outcome is LogOutcome.HEALTHY
    assert not has_error(diagnosis.findings)


def test_all_harmless_lines_together_do_not_hide_the_cause() -> None:
    assert rules(diagnose([*HARMLESS, *FAILED_JIT])) == ["cuda-header-missing"]


def test_a_failure_that_was_overcome_is_no_error() -> None:
    log = ["ModuleNotFoundError: No module named 'dskernels'", "Successfully installed deepspeed-0.19.8"]

    diagnosis = diagnose(log)

    assert diagnosis.outcome is LogOutcome.HEALTHY
    assert [(finding.rule, finding.severity) for finding in diagnosis.findings] == [
        ("python-dep-missing", Severity.NOTE)
    ]


def test_the_compiler_knows_more_than_an_exception_before_it() -> None:
    log = ["RuntimeError: Error building extension 'cpu_adam'", "FileNotFoundError: [Errno 2] No such file: 'x'"]

    assert rules(diagnose([*log, MISSING_HEADER])) == ["cuda-header-missing"]


def test_a_watchdog_is_only_a_consequence_where_another_rank_says_why() -> None:
    watchdog = (
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE) ran for 9 ms"
    )
    cause = "RuntimeError: CUDA error: no kernel image is available for execution on the device"

    diagnosis = diagnose([watchdog, cause])

    assert [(finding.rule, finding.severity) for finding in diagnosis.findings] == [
        ("no-kernel-image", Severity.ERROR),
        ("nccl-collective-timeout", Severity.NOTE),
    ]


def test_a_wrapper_nvcc_explains_the_missing_header() -> None:
    log = ["[1/2] /usr/local/bin/nvcc -DTORCH_EXTENSION_NAME=fused_adam -c a.cu", MISSING_HEADER]

    diagnosis = diagnose(log)

    assert rules(diagnosis) == ["cuda-home-wrong"]
    assert diagnosis.findings[0].title == (
        "CUDA_HOME came out as /usr/local, guessed from the nvcc on PATH, which has no cusparse.h"
    )
    assert [finding.rule for finding in diagnosis.findings[1:]] == ["cuda-header-missing"]


def test_an_op_asked_for_and_left_out_is_an_error_although_all_went_well() -> None:
    log = [
        "+ DS_BUILD_AIO=1 DS_BUILD_CPU_ADAM=1 pip install --no-build-isolation deepspeed",
        "Install Ops={'async_io': False, 'cpu_adam': 1, 'gds': False}",
        "Successfully installed deepspeed-0.19.8",
    ]

    diagnosis = diagnose(log)

    assert rules(diagnosis) == ["op-silently-skipped"]
    assert diagnosis.findings[0].affects == ("async_io",)
    assert diagnosis.findings[0].evidence[0].startswith("line 2: ")
    assert (diagnosis.facts.asked, diagnosis.facts.built) == (("async_io", "cpu_adam"), ("cpu_adam",))


def test_a_rank_killed_while_an_op_compiles_is_the_compilers_memory() -> None:
    log = ["Building extension module cpu_adam...", "['python', 'train.py'] exits with return code = -9"]

    assert rules(diagnose(log)) == ["compiler-oom-killed"]


def test_a_rank_killed_after_its_ops_were_loaded_is_the_hosts_memory() -> None:
    log = [
        "Building extension module cpu_adam...",
        "Time to load cpu_adam op: 2.1 seconds",
        "['python', 'train.py'] exits with return code = -9",
    ]

    assert rules(diagnose(log)) == ["host-ram-oom"]


def test_a_log_that_goes_on_after_the_cache_does_not_hang() -> None:
    log = [
        "Using /root/.cache/torch_extensions/py310_cu118 as PyTorch extensions root...",
        "Loading extension module utils...",
        "Time to load utils op: 0.3 seconds",
    ]

    assert diagnose(log).outcome is LogOutcome.HEALTHY


def test_the_probe_of_the_op_that_failed_is_the_cause() -> None:
    log = [
        "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
        "AssertionError: Unable to pre-compile async_io",
    ]

    assert rules(diagnose(log)) == ["libaio-missing"]


def test_the_probe_of_another_op_is_not() -> None:
    log = [
        "[WARNING]  async_io requires the dev libaio .so object and headers but these were not found.",
        "AssertionError: Unable to pre-compile spatial_inference",
    ]

    diagnosis = diagnose(log)

    assert diagnosis.outcome is LogOutcome.ONLY_ECHOES
    assert diagnosis.findings[0].affects == ("spatial_inference",)


def test_echoes_alone_are_named_and_the_next_command_is_given() -> None:
    log = [
        "ImportError: /root/.cache/torch_extensions/py310_cu118/cpu_adam/cpu_adam.so: cannot open shared object file: No "
        "such file or directory",
        "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
    ]

    diagnosis = diagnose(log)

    finding = diagnosis.findings[0]
    assert (diagnosis.outcome, rules(diagnosis)) == (LogOutcome.ONLY_ECHOES, ["masked-jit-failure"])
    assert finding.fix is not None
    assert finding.fix.commands == (
        'TORCH_EXTENSIONS_DIR="$(mktemp -d)" MAX_JOBS=1 python -c "import sys; '
        "from deepspeed.ops.op_builder.all_ops import ALL_OPS; "
        'ALL_OPS[sys.argv[1]].load()" cpu_adam 2>&1 | tee build.log',
        "python -m dsdoctor diagnose build.log",
    )


def test_an_empty_log_is_said_to_be_empty() -> None:
    diagnosis = diagnose([b"\n", b"  \n"])

    assert (diagnosis.outcome, diagnosis.lines) == (LogOutcome.EMPTY, 2)
    assert [finding.severity for finding in diagnosis.findings] == [Severity.WARNING]


def test_a_failure_that_nothing_explains_shows_its_first_error_line() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "my.package.OwnError: 42",
        "['python', 'train.py'] exits with return code = 1",
    ]

    diagnosis = diagnose(log)

    assert diagnosis.outcome is LogOutcome.UNEXPLAINED
    assert diagnosis.findings[0].evidence[0] == "line 3: my.package.OwnError: 42"


@each(
    "folder, command",
    [
        ("/x y/.cache/torch_extensions", "ls -ld '/x y/.cache/torch_extensions'"),
        ("/x/.cache/torch_extensions/$(reboot);x", "ls -ld ~/.cache/torch_extensions"),
    ],
)
def test_what_a_log_says_is_quoted_in_commands(folder: str, command: str) -> None:
    finding = diagnose([f"PermissionError: [Errno 13] Permission denied: '{folder}'"]).findings[0]

    assert finding.fix is not None
    assert command in finding.fix.commands


@pytest.mark.slow
def test_repeats_are_counted_and_reported_once() -> None:
    line = "RuntimeError: CUDA error: no kernel image is available for execution on the device"

    diagnosis = diagnose([line] * 500)

    assert len(diagnosis.findings) == 1
    assert diagnosis.findings[0].evidence[1] == "and on 499 more lines"


def test_source_lines_of_a_traceback_are_not_the_message() -> None:
    log = [
        "Traceback (most recent call last):",
        '    raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")',
        "op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
    ]

    assert diagnose(log).findings[0].evidence[0].startswith("line 3: ")


@each(
    "routine",
    [
        "[{}/999] /usr/local/cuda/bin/nvcc -DTORCH_EXTENSION_NAME=fused_adam -c a{}.cu -o a{}.o",
        "/v/x.h:{}:1: warning: unused variable {} [-Wunused] {}",
    ],
)
def test_a_cause_among_very_many_lines_of_a_build_is_found(routine: str) -> None:
    many = [routine.format(number, number, number) for number in range(1000)]

    diagnosis = diagnose([*many, MISSING_HEADER, *many])

    assert rules(diagnosis) == ["cuda-header-missing"]
    assert diagnosis.findings[0].evidence[0].startswith("line 1001: ")


def test_a_compiler_killed_after_very_many_commands_is_still_the_compilers_memory() -> None:
    commands = [f"[{number}/999] c++ -DTORCH_EXTENSION_NAME=cpu_adam -c a{number}.cpp" for number in range(500)]

    assert rules(diagnose([*commands, "exits with return code = -9"])) == ["compiler-oom-killed"]


def test_an_exception_that_a_terminal_wrapped_is_read_as_one_line() -> None:
    log = [
        "ImportError: cannot import name 'log' from ",
        "'torch.distributed.elastic.agent.server.api' (/v/torch/api.py)",
    ]

    assert rules(diagnose(log)) == ["deepspeed-too-old-for-torch"]


def test_the_memory_of_a_gpu_is_no_ill_of_the_network() -> None:
    waiting = (
        "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=BROADCAST) ran for 600 ms"
    )
    log = [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB",
        waiting,
        "exits with return code = 1",
    ]

    diagnosis = diagnose(log)

    assert (diagnosis.outcome, rules(diagnosis)) == (LogOutcome.CAUSE, ["gpu-oom"])
    assert diagnosis.findings[0].title.startswith("the GPU's memory is full")
    assert [finding.rule for finding in diagnosis.findings[1:]] == ["nccl-collective-timeout"]


def test_an_error_of_the_compiler_that_no_rule_knows_is_shown_instead_of_its_echoes() -> None:
    log = ['x.cu(467): error: identifier "THCudaCheck" is undefined', *FAILED_JIT[-3:]]

    diagnosis = diagnose(log)

    assert diagnosis.outcome is LogOutcome.UNEXPLAINED
    assert diagnosis.findings[0].evidence[0] == f"line 1: {log[0]}"


CHOSE = "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it."
FLAVOUR = [
    "+ DS_BUILD_FUSED_ADAM=1 pip install -v --no-build-isolation deepspeed",
    CHOSE,
    "Install Ops={'cpu_adam': False, 'fused_adam': 1, 'pin_memory': False}",
    "Requirement already satisfied: nvidia-cuda-runtime-cu12==12.8.90 in /v/lib (from torch>=2.0.0->deepspeed==0.19.8) (12.8.90)",
    "Successfully installed deepspeed-0.19.8",
]


def test_an_op_built_for_the_cpu_where_torch_is_built_for_cuda_is_an_error_although_all_went_well() -> None:
    diagnosis = diagnose(FLAVOUR)

    assert rules(diagnosis) == ["accelerator-autodetect-cpu"]
    assert diagnosis.findings[0].title.startswith("fused_adam is the CPU flavour: no GPU was visible")
    assert diagnosis.findings[0].title.endswith("torch is built for CUDA 12.8")
    assert diagnosis.findings[0].affects == ("fused_adam",)


def test_where_the_log_does_not_say_which_torch_it_is_the_cpu_flavour_is_a_warning() -> None:
    unsaid = diagnose([line for line in FLAVOUR if "nvidia" not in line])
    of_the_cpu = diagnose([*FLAVOUR[:3], "Requirement already satisfied: torch==2.13.0+cpu", FLAVOUR[4]])
    named = diagnose([line.replace(CHOSE, "Setting ds_accelerator to cpu (environment)") for line in FLAVOUR])

    assert [finding.severity for finding in unsaid.findings] == [Severity.WARNING]
    assert {finding.severity for finding in of_the_cpu.findings} == {Severity.NOTE}
    assert not named.findings


def test_a_build_that_failed_has_another_cause_than_the_flavour() -> None:
    failed = [
        *FLAVOUR[:4],
        "x.h:6:10: fatal error: omp.h: No such file or directory",
        "ERROR: Failed building wheel for deepspeed",
    ]

    assert "CPU flavour" not in diagnose(failed).findings[0].title


def test_an_op_that_the_chosen_accelerator_does_not_have_is_an_error() -> None:
    log = [
        line.replace("FUSED_ADAM", "FUSED_LAMB").replace("'fused_adam': 1", "'fused_adam': False") for line in FLAVOUR
    ]

    diagnosis = diagnose(log)

    assert diagnosis.findings[0].rule == "op-silently-skipped"
    assert diagnosis.findings[0].title == (
        "fused_lamb was asked for, and DeepSpeed has no such op for the accelerator that it chose (CPU)"
    )
