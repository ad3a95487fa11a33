"""Toolkit, compiler, architectures, jobs and local version for machines written out."""

import pytest

from dsdoctor.builder.plan.choices import (
    Architectures,
    accelerator_of,
    choose_architectures,
    choose_jobs,
    choose_local_version,
    fit_architectures,
    unused_architectures,
)
from dsdoctor.builder.plan.compiler import choose_compiler
from dsdoctor.builder.toolkit.choose import Needs, choose_toolkit
from dsdoctor.core.build_models import ToolkitPlan
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.core.machine import Compiler, Cuda, Gpu, Machine, System, Toolkit, Torch
from dsdoctor.core.requests import BuildRequest
from dsdoctor.rules import book
from tests.conftest import CPU_TORCH, TORCH, WHOLE, machine, toolkit

BASE = frozenset({"cuda_runtime.h", "crt/host_config.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "cccl"})
NEEDS = Needs(headers=BASE, libraries=frozenset({"cudart", "curand"}))
WHEELS = Toolkit(
    root="/site/nvidia/cu13",
    release=Cuda(13, 0),
    version="13.0",
    headers=WHOLE - {"crt/host_config.h", "cccl", "cuda_profiler_api.h"},
    include_dirs=("/site/nvidia/cu13/include",),
    found_via=("pypi_wheels",),
)
TORCH_128 = Torch(version="2.9.0+cu128", location="/site/torch", cuda=Cuda(12, 8))


def chosen(here: Machine, asked: BuildRequest | None = None) -> tuple[ToolkitPlan | None, list[str]]:
    plan, _, findings = choose_toolkit(here, asked or BuildRequest(), "/cache", NEEDS)
    return plan, [finding.rule for finding in findings]


def test_the_whole_toolkit_of_torchs_release_is_taken() -> None:
    here = machine(toolkits=(toolkit(Cuda(12, 8)), toolkit(Cuda(13, 0)), toolkit(Cuda(13, 1))))

    assert chosen(here) == (ToolkitPlan(root="/usr/local/cuda-13.0", release=Cuda(13, 0)), [])


def test_headers_or_libraries_where_torch_does_not_look_make_it_a_layer() -> None:
    conda = toolkit(Cuda(13, 0), scattered=frozenset({"cusparse.h"}))

    plan, rules = chosen(machine(toolkits=(conda,)))

    assert plan is not None
    assert (plan.assemble, plan.fetch, rules) == (True, (), [])


def test_nvidias_own_cuda_12_has_no_nccl_and_takes_torchs() -> None:
    whole = toolkit(Cuda(12, 8), headers=WHOLE - {"nccl.h"})
    wheels = Toolkit(root="/s/nvidia", release=Cuda(12, 8), headers=frozenset({"nccl.h"}), found_via=("pypi_wheels",))
    needs = Needs(headers=BASE | {"nccl.h"}, libraries=frozenset({"cudart"}))

    with_wheels, _, _ = choose_toolkit(
        machine(torch=TORCH_128, toolkits=(whole, wheels)), BuildRequest(), "/cache", needs
    )
    without, _, findings = choose_toolkit(machine(torch=TORCH_128, toolkits=(whole,)), BuildRequest(), "/cache", needs)

    assert with_wheels is not None
    assert (with_wheels.assemble, with_wheels.fetch) == (True, ())
    assert without == ToolkitPlan(root="/usr/local/cuda-12.8", release=Cuda(12, 8))  # serves the ops without nccl.h
    assert findings == ()


def test_offline_is_kept_though_another_toolkit_was_assembled_before() -> None:
    before = toolkit(Cuda(13, 0), root="/cache/toolkits/13.0-other/home", found_via=("assembled",))

    plan, rules = chosen(machine(toolkits=(before, WHEELS)), BuildRequest(toolkit="pypi", offline=True))

    assert (plan, rules) == (None, ["cuda-toolkit-missing"])


def test_what_was_assembled_before_is_taken_offline() -> None:
    first, _ = chosen(machine(toolkits=(WHEELS,)), BuildRequest(toolkit="pypi"))
    assert first is not None
    before = toolkit(Cuda(13, 0), root=first.root, found_via=("assembled",))

    again, rules = chosen(machine(toolkits=(before, WHEELS)), BuildRequest(toolkit="pypi", offline=True))

    assert (again, rules) == (first, [])


def test_a_toolkit_without_headers_is_completed_from_torchs_wheels_and_nothing_is_fetched() -> None:
    sick = toolkit(
        Cuda(13, 0), headers=frozenset({"cuda_runtime.h", "crt/host_config.h", "cccl", "cuda_profiler_api.h"})
    )

    plan, rules = chosen(machine(toolkits=(sick, WHEELS)))

    assert plan is not None
    assert (plan.assemble, plan.fetch, rules) == (True, (), [])
    assert plan.layers[0].tools == "/usr/local/cuda-13.0/bin"


def test_without_a_toolkit_the_compiler_is_fetched_by_torchs_own_pin() -> None:
    plan, rules = chosen(machine(toolkits=(WHEELS,)))

    assert plan is not None
    assert plan.fetch == ("cuda-toolkit[cccl,crt,cudart,nvcc,nvvm,profiler]==13.0.3.0",)
    assert plan.root.startswith("/cache/toolkits/13.0-")
    assert rules == []


def test_headers_that_torchs_wheels_lack_are_fetched_too() -> None:
    bare = Toolkit(root="/site/nvidia/cu13", release=Cuda(13, 0), headers=frozenset(), found_via=("pypi_wheels",))

    plan, _ = chosen(machine(toolkits=(bare,)))

    assert plan is not None
    assert plan.fetch == (
        "cuda-toolkit[cccl,crt,cublas,cudart,cufile,curand,cusolver,cusparse,nvcc,nvvm,profiler]==13.0.3.0",
        "nvidia-nccl-cu13==2.30.7",
    )


def test_an_older_toolkit_of_the_same_major_is_not_torchs() -> None:
    plan, _ = chosen(machine(toolkits=(toolkit(Cuda(13, 2)), WHEELS)))

    assert plan is not None
    assert plan.assemble


def test_offline_says_what_would_be_fetched() -> None:
    plan, rules = chosen(machine(toolkits=(WHEELS,)), BuildRequest(offline=True))

    assert (plan, rules) == (None, ["cuda-toolkit-missing"])


def test_offline_takes_another_minor_with_a_warning() -> None:
    plan, rules = chosen(machine(toolkits=(toolkit(Cuda(13, 2)), WHEELS)), BuildRequest(offline=True))

    assert plan == ToolkitPlan(root="/usr/local/cuda-13.2", release=Cuda(13, 2))
    assert rules == ["cuda-torch-mismatch"]


def test_another_minor_of_cuda_12_is_accepted_as_deepspeed_does() -> None:
    here = machine(torch=TORCH_128, toolkits=(toolkit(Cuda(12, 1)), toolkit(Cuda(12, 6))))

    assert chosen(here) == (ToolkitPlan(root="/usr/local/cuda-12.6", release=Cuda(12, 6)), [])


def test_cuda_12_without_a_toolkit_names_the_commands_that_need_no_root() -> None:
    _, _, (finding,) = choose_toolkit(
        machine(torch=TORCH_128, toolkits=(toolkit(Cuda(13, 0)),)),
        BuildRequest(),
        "/cache",
        NEEDS,
    )

    assert finding.rule == "cuda-torch-mismatch"
    assert finding.evidence == ("/usr/local/cuda-13.0: CUDA 13.0.88",)
    assert finding.fix is not None
    assert [command.split()[0] for command in finding.fix.commands] == ["conda", "sh", "python", "export", "python"]
    assert "cuda-toolkit=12.8" in finding.fix.commands[0]


def test_a_named_toolkit_of_another_major_is_refused() -> None:
    here = machine(toolkits=(toolkit(Cuda(12, 8), found_via=("named",)),))

    assert chosen(here, BuildRequest(toolkit="/usr/local/cuda-12.8")) == (None, ["cuda-torch-mismatch"])


def test_a_named_folder_that_is_no_toolkit_is_refused() -> None:
    assert chosen(machine(), BuildRequest(toolkit="/nonexistent")) == (None, ["cuda-home-wrong"])


@pytest.mark.parametrize(
    ("versions", "path", "rules"),
    [
        ([(12, 2, 0)], "/usr/bin/g++-12", []),
        ([(17, 1, 0), (12, 2, 0), (14, 1, 0)], "/usr/bin/g++-14", []),
        ([(8, 5, 0), (11, 1, 0)], "/usr/bin/g++-11", []),
        ([(17, 1, 0)], None, ["host-compiler-too-new"]),
        ([(8, 5, 0)], None, ["host-compiler-too-old"]),
        ([], None, ["host-compiler-missing"]),
    ],
)
def test_a_compiler_that_nvcc_and_torch_take(
    versions: list[tuple[int, ...]], path: str | None, rules: list[str]
) -> None:
    compilers = tuple(
        Compiler(path=f"/usr/bin/g++-{v[0]}", c_path=f"/usr/bin/gcc-{v[0]}", kind="gcc", version=v, found_via="path")
        for v in versions
    )
    here = machine(compilers=compilers, toolkits=(toolkit(Cuda(13, 0)),))
    plan = ToolkitPlan(root="/usr/local/cuda-13.0", release=Cuda(13, 0))

    compiler, _, findings = choose_compiler(here, plan, device_code=True)

    assert (compiler.path if compiler else None, [finding.rule for finding in findings]) == (path, rules)


def test_without_device_code_nvccs_limit_does_not_count() -> None:
    new = Compiler(path="/usr/bin/g++", c_path="/usr/bin/gcc", kind="gcc", version=(17, 1), found_via="path")

    compiler, _, findings = choose_compiler(machine(compilers=(new,)), None, device_code=False)

    assert (compiler, findings) == (new, ())


def test_a_refused_compiler_names_the_package() -> None:
    new = Compiler(path="/usr/bin/g++", c_path="/usr/bin/gcc", kind="gcc", version=(17, 1), found_via="path")
    here = machine(compilers=(new,), toolkits=(toolkit(Cuda(13, 0)),))

    _, _, (finding,) = choose_compiler(
        here, ToolkitPlan(root="/usr/local/cuda-13.0", release=Cuda(13, 0)), device_code=True
    )

    assert finding.rule == "host-compiler-too-new"
    assert all(fact in finding.title for fact in ("nvcc 13.0", "gcc up to 15", "gcc 17.1"))
    assert finding.fix is not None
    assert "apt-get install g++-15" in finding.fix.commands[0]


GPU = Gpu(index=0, name="H200", uuid="GPU-1", capability="9.0", memory=1)


@pytest.mark.parametrize(
    ("here", "asked", "value"),
    [
        (machine(), BuildRequest(arch="9.0+PTX;8.0"), "8.0;9.0+PTX"),
        (machine(variables={"TORCH_CUDA_ARCH_LIST": "8.6"}), BuildRequest(), "8.6"),
        (machine(torch=Torch(**{**TORCH.__dict__, "capabilities": ("9.0", "8.0", "9.0")})), BuildRequest(), "8.0;9.0"),
        (machine(gpus=(GPU,)), BuildRequest(), "9.0"),
        (machine(), BuildRequest(), "7.5;8.0;9.0"),
    ],
)
def test_architectures(here: Machine, asked: BuildRequest, value: str) -> None:
    assert ";".join(choose_architectures(here, asked).entries) == value


def test_a_torch_that_names_no_architecture_wants_to_be_told() -> None:
    silent = Torch(**{**TORCH.__dict__, "arch_list": ()})

    with pytest.raises(UsageError, match="does not list its architectures") as caught:
        choose_architectures(machine(torch=silent), BuildRequest())
    assert "--arch" in caught.value.hint


def test_a_malformed_list_in_the_shell_names_the_variable() -> None:
    with pytest.raises(UsageError, match="TORCH_CUDA_ARCH_LIST in your shell"):
        choose_architectures(machine(variables={"TORCH_CUDA_ARCH_LIST": "9.0a"}), BuildRequest())


def test_architectures_for_a_build_without_gpu_code_have_no_use_and_a_malformed_list_is_refused_all_the_same() -> None:
    here = machine(torch=CPU_TORCH)

    (finding,) = unused_architectures(here, BuildRequest(arch="9.0"))
    why = "torch 2.13.0+cpu is a CPU build"
    assert finding == book.finding("arch-unused", Severity.WARNING, architectures="9.0", why=why)
    assert not unused_architectures(here, BuildRequest())
    for text in ("", "sm_90"):
        with pytest.raises(UsageError, match=r"architecture .*\(--arch\)"):
            unused_architectures(here, BuildRequest(arch=text))


OLD_NVCC = ToolkitPlan(root="/usr/local/cuda-12.1", release=Cuda(12, 1), architectures=("8.0", "9.0"))


def test_architectures_are_narrowed_to_what_this_nvcc_takes_when_nobody_asked() -> None:
    listed = Architectures(entries=("8.0", "12.0"), because="all of torch's", asked=False)

    fitting, (choice,), findings = fit_architectures(listed, OLD_NVCC)

    assert (fitting, findings) == (("8.0",), ())
    assert choice.because == "all of torch's; without 12.0, which nvcc 12.1 does not support"


@pytest.mark.parametrize(
    ("entry", "plan"),
    [("12.0", OLD_NVCC), ("7.0", ToolkitPlan(root="/r", release=Cuda(13, 0), assemble=True))],
)
def test_an_architecture_that_was_asked_for_and_nvcc_does_not_take_is_an_error(entry: str, plan: ToolkitPlan) -> None:
    _, _, (finding,) = fit_architectures(Architectures(entries=(entry,), because="--arch", asked=True), plan)

    assert (finding.rule, finding.severity) == ("gpu-arch-unsupported-by-nvcc", Severity.ERROR)
    assert entry in finding.title


@pytest.mark.parametrize(
    ("cpus", "memory", "jobs", "planned"),
    [
        (2, 24 << 30, 2, 7 << 30),
        (64, 10 << 30, 5, 10 << 30),
        (8, 1 << 30, 1, 7 << 29),
        (3, None, 3, 21 << 29),
        (8, 64 << 30, 8, 28 << 30),
    ],
)
def test_jobs_fit_processors_and_memory(cpus: int, memory: int | None, jobs: int, planned: int) -> None:
    here = machine(system=System(architecture="x86_64", os="", cpus=cpus, memory=memory))

    assert choose_jobs(here, BuildRequest(), device_code=True)[:2] == (jobs, planned)


def test_local_versions() -> None:
    assert choose_local_version(TORCH, "cuda", BuildRequest())[0] == "cu13.0.torch2.14"
    assert choose_local_version(CPU_TORCH, "cpu", BuildRequest())[0] == "cpu.torch2.13"
    assert choose_local_version(TORCH, "cpu", BuildRequest())[0] == "cpu.torch2.14"
    assert choose_local_version(TORCH, "cuda", BuildRequest(local_version=""))[0] == ""
    assert choose_local_version(TORCH, "cuda", BuildRequest(local_version="+Acme-7"))[0] == "acme.7"
    with pytest.raises(UsageError, match="PEP 440"):
        choose_local_version(TORCH, "cuda", BuildRequest(local_version="a b"))


def test_the_accelerator_follows_torch_and_not_the_missing_gpu() -> None:
    assert accelerator_of(machine(), BuildRequest()) == "cuda"
    assert accelerator_of(machine(torch=CPU_TORCH), BuildRequest()) == "cpu"
    assert accelerator_of(machine(), BuildRequest(accelerator="cpu")) == "cpu"
    with pytest.raises(ImpossiblePlan, match="CPU build"):
        accelerator_of(machine(torch=CPU_TORCH), BuildRequest(accelerator="cuda"))


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (machine(torch=None), "torch is not installed"),
        (machine(torch=Torch(version="2.1", location="", broken="libcudart.so.12: cannot open")), "libcudart"),
        (machine(python=None), "cannot examine the Python to build for"),
        (machine(torch=Torch(version="2.1+rocm", location="", hip="6.0")), "ROCm"),
    ],
)
def test_without_a_torch_that_serves_the_plan_is_impossible(here: Machine, reason: str) -> None:
    with pytest.raises(ImpossiblePlan, match=reason) as caught:
        accelerator_of(here, BuildRequest())

    assert caught.value.hint
