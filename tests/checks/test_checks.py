"""Every check finds its problem, is silent on a healthy machine, takes an empty one, and has a manual page."""

from dataclasses import replace
from typing import Any

import pytest

from dsdoctor.checks import TOPICS, Topic, checks, examine
from dsdoctor.core import machine as needs
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Cuda, DeepSpeed, Driver, Machine, SearchPaths, System
from dsdoctor.core.processes import FileHolder, Leftover, SharedMemory
from dsdoctor.rules.book import room_rules
from tests.checks.sick import (
    BARE,
    BIG,
    BUILT,
    DRIVER,
    GUESSED,
    H100,
    HPC,
    LEFT,
    OTHER_MINOR,
    REAL,
    SICK,
    WHOLE,
    healthy,
    taking,
    without_gpu,
)
from tests.conftest import CPU_TORCH, GCC, TORCH
from tests.each import each

EMPTY = Machine(system=System(architecture="unknown", os="unknown"))


def findings(machine: Machine) -> list[Finding]:
    return [finding for topic in examine(machine) for finding in topic.findings]


def found(machine: Machine, rule: str) -> Finding:
    return next(finding for finding in findings(machine) if finding.rule == rule)


def rules(machine: Machine) -> set[str]:
    return {finding.rule for finding in findings(machine)}


@each("rule", sorted(SICK))
def test_a_check_finds_its_problem_and_says_how_to_fix_it(rule: str) -> None:
    finding = found(SICK[rule], rule)

    assert len(finding.title) > 20
    assert finding.fix is not None or finding.severity is Severity.NOTE
    assert "None" not in finding.title
    assert not any("None" in text for text in finding.evidence)


def test_every_check_has_a_sick_machine() -> None:
    assert set(SICK) == set(checks())


def test_a_healthy_machine_is_healthy() -> None:
    assert findings(healthy()) == []


@each("rule", sorted(checks()))
def test_a_check_takes_an_empty_machine_and_has_a_manual_page(rule: str) -> None:
    assert all(finding.rule == rule for finding in checks()[rule](EMPTY))
    assert rule in room_rules("checks")


def test_a_check_that_fails_is_a_note_and_the_others_still_run() -> None:
    def breaks(machine: Machine):  # type: ignore[no-untyped-def]
        yield from ()
        raise RuntimeError("ouch")

    topic = Topic(name="t", summary=lambda _: "t", checks=(breaks, checks()["torch-missing"]))
    [examined] = examine(healthy(torch=None), topics=(topic,))

    assert [finding.rule for finding in examined.findings] == ["check-broken", "torch-missing"]
    assert examined.findings[0].severity is Severity.NOTE


def test_only_the_named_checks_run() -> None:
    [topic] = examine(SICK["torch-missing"], rules=frozenset({"torch-missing"}))

    assert [finding.rule for finding in topic.findings] == ["torch-missing"]
    with pytest.raises(UsageError, match="no check 'nope'"):
        examine(EMPTY, rules=frozenset({"nope"}))


def test_another_minor_of_cuda_13_is_refused_and_of_12_let_pass() -> None:
    thirteen = found(taking("/x", OTHER_MINOR), "cuda-torch-mismatch")
    skipped = found(taking("/x", OTHER_MINOR, variables={"DS_SKIP_CUDA_CHECK": "1"}), "cuda-torch-mismatch")
    twelve = found(healthy(torch=replace(TORCH, cuda=Cuda(12, 6)), toolkits=(HPC,)), "cuda-torch-mismatch")

    assert (thirteen.severity, thirteen.affects) == (Severity.ERROR, (needs.CUDA,))
    assert (skipped.severity, skipped.affects) == (Severity.WARNING, ())
    assert twelve.severity is Severity.WARNING


def test_the_guess_of_a_wrapper_script_is_wrong_and_said_once() -> None:
    told = rules(taking("/usr/local", REAL, GUESSED))

    assert "cuda-home-wrong" in told
    assert not told & {"cuda-header-missing", "cuda-lib-link-missing", "toolkits-several", "cuda-torch-mismatch"}


def test_the_fix_of_a_wrong_guess_works() -> None:
    whole = found(taking("/usr/local", REAL, GUESSED), "cuda-home-wrong").fix
    bare = found(taking("/usr/local", replace(BARE, found_via=("usr_local",)), GUESSED), "cuda-home-wrong").fix

    assert whole is not None
    assert bare is not None
    assert (whole.commands[0], bare.commands[0]) == (
        'eval "$(python -m dsdoctor env)"',
        'export CUDA_HOME="$(python -m dsdoctor toolkit)"',
    )


@each(
    ("home", "tail"),
    [
        ("/a:/usr/local/cuda", "it is a list"),
        ("'/usr/local/cuda'", "a quote or a space"),
        ("/gone", "no CUDA toolkit is in it"),
    ],
)
def test_a_cuda_home_that_names_nothing(home: str, tail: str) -> None:
    finding = found(taking(home, REAL, variables={"CUDA_HOME": home}), "cuda-home-wrong")

    assert home in finding.title
    assert tail in " ".join(finding.evidence)
    assert finding.severity is Severity.ERROR


def test_headers_on_other_search_paths_count() -> None:
    paths = SearchPaths(headers=WHOLE.headers)

    assert "cuda-header-missing" not in rules(taking("/usr/local/cuda-13.0", BARE, paths=paths))
    assert found(taking("/usr/local/cuda-13.0", BARE), "cuda-header-missing").affects[:2] == (needs.CUDA, "cublas_v2.h")


def test_gpus_that_the_shell_hides_are_not_seen() -> None:
    hidden = healthy(variables={"CUDA_VISIBLE_DEVICES": ""})
    chosen = healthy(
        gpus=(H100, replace(H100, index=1, capability="8.0", uuid="GPU-2")), variables={"CUDA_VISIBLE_DEVICES": "0"}
    )

    assert "hides every GPU" in found(hidden, "arch-list-empty").evidence[0]
    assert "no-kernel-image" not in rules(chosen)


def test_an_older_minor_of_the_driver_is_only_a_note() -> None:
    older = healthy(torch=replace(TORCH, cuda=Cuda(13, 2)), driver=DRIVER)
    too_old = healthy(driver=Driver(version="535.1", cuda=Cuda(12, 2)))

    assert found(older, "driver-too-old").severity is Severity.NOTE
    assert found(too_old, "driver-too-old").severity is Severity.ERROR


def test_a_host_compiler_that_fits_is_named_beside_one_that_does_not() -> None:
    finding = found(SICK["host-compiler-too-new"], "host-compiler-too-new")

    assert all(fact in finding.title for fact in ("nvcc 13.0", "gcc up to 15", "gcc 16.1.0 (/usr/bin/g++-16)"))
    assert finding.fix is not None
    assert "gcc 12.2.0 (/usr/bin/g++)" in finding.fix.text


def test_nothing_is_said_of_toolkits_to_a_cpu_torch() -> None:
    told = rules(healthy(torch=replace(TORCH, cuda=None, version="2.13.0+cpu"), toolkits=(), gpus=(), deepspeed=None))

    assert not any("cuda" in rule for rule in told)


def test_a_new_torch_waits_for_no_lock_file() -> None:
    sick = SICK["stale-jit-cache"]

    assert "stale-jit-cache" not in rules(replace(sick, torch=TORCH))
    assert found(sick, "stale-jit-cache").affects == ("cpu_adam",)


@each(
    ("holder", "severity"),
    [
        (FileHolder(pid=None, doubt=""), Severity.ERROR),
        (FileHolder(pid=None, doubt="it lies on nfs"), Severity.WARNING),
        (FileHolder(pid=4711, doubt=""), None),
    ],
)
def test_a_lock_is_an_error_only_where_surely_nobody_holds_it(holder: FileHolder, severity: Severity | None) -> None:
    sick = SICK["stale-jit-cache"]
    assert sick.jit is not None
    held = replace(sick, jit=replace(sick.jit, holders={"cpu_adam": holder}))

    assert [each.severity for each in findings(held) if each.rule == "stale-jit-cache"] == [severity][
        : severity is not None
    ]


def linking(soname: str, system: str, *here: str) -> tuple[str, ...]:
    """The commands for an op that links a library, on a machine that has others."""
    built = replace(BUILT, needed={"async_io": (soname,)})
    sick = healthy(deepspeed=built, loadable=frozenset(here), system=replace(BIG, os=system))
    fix = found(sick, "shared-library-missing").fix
    return tuple(step.line for step in fix.steps if step.platform in {"", "Debian, Ubuntu"}) if fix else ()


def test_the_fix_for_libaio_gives_it_the_name_that_the_op_asks_for() -> None:
    debian12, debian13 = "Debian GNU/Linux 12 (bookworm)", "Debian GNU/Linux 13 (trixie)"
    old, new = "libaio.so.1", "libaio.so.1t64"
    link = f"sudo ln -s {new} /usr/lib/x86_64-linux-gnu/{old}"

    assert linking(old, debian12) == ("sudo apt-get install libaio1",)
    assert linking(new, debian13) == ("sudo apt-get install libaio1t64",)
    assert linking(old, debian13) == ("sudo apt-get install libaio1t64", link)
    assert linking(old, debian13, new) == (link, "python -m dsdoctor build-wheel")
    assert linking(new, debian12) == (
        "sudo apt-get install libaio1",
        f"sudo ln -s {old} /usr/lib/x86_64-linux-gnu/{new}",
    )


def test_a_library_that_every_op_lacks_is_said_once_with_all_of_them() -> None:
    built = replace(BUILT, needed={"cpu_adam": ("libgomp.so.1",), "async_io": ("libaio.so.1", "libgomp.so.1")})
    finding = found(healthy(deepspeed=built, loadable=frozenset({"libaio.so.1"})), "shared-library-missing")

    assert all(fact in finding.title for fact in ("libgomp.so.1", "cpu_adam, async_io"))
    assert (finding.severity, finding.affects) == (Severity.ERROR, (needs.INSTALLED, "cpu_adam", "async_io"))
    assert "shared-library-missing" not in rules(healthy(deepspeed=built, loadable=None))


def test_ptx_serves_newer_gpus_and_machine_code_its_major_only() -> None:
    blackwell = replace(H100, capability="12.0")
    ptx = replace(BUILT, sm_arch={"fused_adam": ("90_real", "90_virtual")})

    assert "no-kernel-image" in rules(healthy(gpus=(blackwell,), torch=replace(TORCH, arch_list=("12.0",))))
    assert "no-kernel-image" not in rules(healthy(gpus=(blackwell,), deepspeed=ptx))


def test_every_topic_has_a_line_for_any_machine() -> None:
    for machine in (EMPTY, healthy(), without_gpu(), healthy(compilers=(GCC,) * 7)):
        assert all(topic.summary(machine) for topic in TOPICS)


def for_cpu(*ops: str) -> DeepSpeed:
    """As pip installs it where torch is built for CUDA and no GPU is visible."""
    built = replace(BUILT, version="0.19.8", accelerator="cpu", cuda="13.0", sm_arch={}, told_by="files")
    return replace(built, installed_ops=ops, present_ops=ops)


def test_an_op_of_the_cpu_flavour_is_no_op_for_the_gpu() -> None:
    wrong = found(without_gpu(deepspeed=for_cpu("cpu_adam", "fused_adam")), "ops-accelerator-mismatch")

    assert wrong.severity is Severity.ERROR
    assert wrong.evidence[-3:] == (
        "torch 2.14.1+cu130 is built for CUDA, and no GPU is visible here",
        "the CPU variant: fused_adam",
        "no GPU code in fused_adam",
    )
    assert wrong.fix is not None
    assert [step.line for step in wrong.fix.steps] == [
        "python -m dsdoctor build-wheel --accelerator cuda --ops fused_adam",
        "export DS_ACCELERATOR=cpu",
    ]


def test_ops_of_the_host_alone_that_were_built_for_the_cpu_are_a_warning_until_a_gpu_is_there() -> None:
    here = for_cpu("cpu_adam")

    assert found(without_gpu(deepspeed=here), "ops-accelerator-mismatch").severity is Severity.WARNING
    assert found(healthy(deepspeed=here), "ops-accelerator-mismatch").severity is Severity.ERROR


@each("change", [{"variables": {"DS_ACCELERATOR": "cpu"}}, {"torch": CPU_TORCH}])
def test_a_cpu_that_is_meant_is_no_mismatch(change: dict[str, Any]) -> None:
    assert "ops-accelerator-mismatch" not in rules(without_gpu(deepspeed=for_cpu("fused_adam"), **change))


def test_gpu_code_is_missed_only_where_the_files_were_read() -> None:
    unread = replace(BUILT, sm_arch={}, present_ops=None, told_by="record")
    damaged = replace(
        BUILT, sm_arch={}, unreadable=("deepspeed/ops/adam/fused_adam_op.cpython-311-x86_64-linux-gnu.so",)
    )

    assert "op-without-gpu-code" not in rules(healthy(deepspeed=unread))
    assert "op-without-gpu-code" not in rules(healthy(deepspeed=damaged))


@each(
    "python",
    [
        "/home/a/.cache/uv/archive-v0/yX9tZY/bin/python",
        "/home/a/.local/share/uv/tools/dsdoctor/bin/python",
        "/home/a/.local/pipx/venvs/dsdoctor/bin/python",
        "/home/a/.local/share/pipx/.cache/b5ac/bin/python",
    ],
)
def test_no_torch_is_to_be_put_into_an_environment_of_a_tool(python: str) -> None:
    sick = SICK["torch-missing"]
    assert sick.python is not None
    here = replace(sick, python=replace(sick.python, executable=python))

    [topic] = examine(here, rules=frozenset({"torch-missing"}))
    [own] = examine(sick, rules=frozenset({"torch-missing"}))

    assert [finding.fix.steps[0].template for finding in topic.findings if finding.fix] == [
        'dsdoctor check --python "$(command -v python)"'
    ]
    assert [
        step.argv for finding in own.findings if finding.fix for step in finding.fix.steps if "install" in step.line
    ]


def test_leftovers_in_shared_memory_are_told_where_they_matter_and_deleted_where_nobody_may_use_them() -> None:
    doubted = replace(LEFT, path="/dev/shm/nccl-x", doubt="it is another user's")
    foreign = replace(LEFT, path="/dev/shm/../../etc/passwd")

    def told(*left: Leftover, total: int = 8 * LEFT.size) -> Finding | None:
        sick = healthy(shared_memory=SharedMemory(total=total, leftovers=left))
        return next((each for each in findings(sick) if each.rule == "shared-memory-left-over"), None)

    both, unsure = told(LEFT, doubted, foreign), told(doubted)
    assert both is not None
    assert unsure is not None
    assert both.fix is not None
    assert unsure.fix is not None
    assert [each.line for each in both.fix.steps] == [f"rm -- {LEFT.path}"]
    assert "cannot tell whether a process uses 1 of them: it is another user's" in both.evidence
    assert [each.line for each in unsure.fix.steps] == ["sudo fuser -v /dev/shm/nccl-x"]
    assert told(foreign) is None
    assert told(LEFT, total=11 * LEFT.size) is None
    assert told(LEFT, total=10 * LEFT.size) is not None


def test_a_dev_shm_that_leftovers_fill_is_not_too_small() -> None:
    full = healthy(system=replace(BIG, shared_memory=1 << 20))
    left = SharedMemory(total=2 << 30, leftovers=tuple(replace(LEFT, path=f"{LEFT.path}{n}") for n in range(20)))

    assert "nccl-shm-too-small" in rules(full)
    assert rules(replace(full, shared_memory=left)) == {"shared-memory-left-over"}


def test_the_architectures_to_set_are_those_of_the_gpus_here() -> None:
    finding = found(SICK["gpu-arch-unknown-to-torch"], "gpu-arch-unknown-to-torch")

    assert finding.fix and finding.fix.steps[-1].line == "export TORCH_CUDA_ARCH_LIST=9.0"
