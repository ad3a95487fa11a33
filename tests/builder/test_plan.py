import pytest

from dsdoctor.builder.plan.plan import plan_build, plan_toolkit
from dsdoctor.core.build_models import BuildPlan, OpFact, Source
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.finding import Severity
from dsdoctor.core.machine import Cuda, Gap, Library, Machine, Python, System
from dsdoctor.core.requests import BuildRequest
from tests.conftest import CPU_TORCH, PYTHON, SYSTEM, TORCH, machine, toolkit

ALL = ("6.0", "7.5", "8.0", "9.0")


def fact(op: str, variable: str, *, cuda: tuple[str, ...] | None = None, device: bool = False) -> OpFact:
    suffix = "cu" if device else "cpp"
    return OpFact(
        op=op,
        variable=f"DS_BUILD_{variable}",
        module=f"deepspeed.ops.{op}_op",
        sources=(f"csrc/{op}.{suffix}",),
        architectures=cuda,
    )


SOURCE = Source(
    folder="/throw-away/source",
    asked="0.19.8",
    version="0.19.8",
    digest="d",
    accelerator="cuda",
    ops=(
        fact("async_io", "AIO", cuda=ALL),
        fact("pin_memory", "PIN_MEMORY"),
        fact("cpu_adam", "CPU_ADAM"),
        fact("utils", "UTILS"),
        fact("fused_adam", "FUSED_ADAM", cuda=ALL, device=True),
        fact("fp_quantizer", "FP_QUANTIZER", cuda=("8.0", "9.0"), device=True),
        fact("cutlass_ops", "CUTLASS_OPS", cuda=("8.0", "9.0"), device=True),
        fact("ragged_ops", "RAGGED_OPS", cuda=("8.0", "9.0"), device=True),
    ),
)
CPU_SOURCE = Source(
    folder="/throw-away/source",
    asked="newest",
    version="0.19.8",
    digest="d",
    accelerator="cpu",
    ops=(
        fact("cpu_adam", "CPU_ADAM"),
        OpFact(op="deepspeed_not_implemented", variable="DS_BUILD_NOT_IMPLEMENTED", module="x"),
    ),
)
HERE = machine(toolkits=(toolkit(Cuda(13, 0)),))
AIO = Library(name="libaio", header="/usr/include/libaio.h", library="/usr/lib/libaio.so")


def plan(request: BuildRequest | None = None, here: Machine = HERE, source: Source = SOURCE) -> BuildPlan:
    return plan_build(here, source, request or BuildRequest(), cache="/cache")


def ops(made: BuildPlan) -> list[str]:
    return [op.op for op in made.ops]


def errors(made: BuildPlan) -> list[str]:
    return [finding.rule for finding in made.findings if finding.severity is Severity.ERROR]


def test_the_default_set() -> None:
    made = plan()

    assert (ops(made), errors(made)) == (["cpu_adam", "utils", "fused_adam"], [])
    assert made.env == {
        "DS_ACCELERATOR": "cuda",
        "DS_BUILD_OPS": "0",
        "CC": "/usr/bin/gcc",
        "CXX": "/usr/bin/g++",
        "CUDA_HOME": "/usr/local/cuda-13.0",
        "CUDA_PATH": "/usr/local/cuda-13.0",
    }
    assert made.prepend["PATH"] == ("/venv/bin", "/usr/local/cuda-13.0/bin")
    assert made.local_version == "cu13.0.torch2.14"
    assert all(choice.because for choice in made.choices)


def test_on_a_cpu_torch_no_toolkit_is_needed_and_what_does_not_exist_is_said() -> None:
    made = plan(here=machine(torch=CPU_TORCH), source=CPU_SOURCE)

    assert (ops(made), errors(made), made.toolkit) == (["cpu_adam"], [], None)
    assert [left.op for left in made.left_out] == ["utils"]


def test_an_op_asked_for_by_name_that_lacks_its_library_is_an_error_with_the_package() -> None:
    made = plan(BuildRequest(ops=("async_io",)))

    (finding,) = (f for f in made.findings if f.severity is Severity.ERROR)
    assert finding.affects == ("async_io",)
    assert finding.fix is not None
    assert "libaio-dev" in finding.fix.commands[0]


def test_async_io_brings_pin_memory() -> None:
    made = plan(BuildRequest(ops=("async_io",)), machine(toolkits=(toolkit(Cuda(13, 0)),), libraries=(AIO,)))

    assert [(op.op, op.asked) for op in made.ops] == [("async_io", True), ("pin_memory", False)]
    assert errors(made) == []


def test_all_leaves_out_what_cannot_be_built_and_says_why() -> None:
    made = plan(BuildRequest(ops=("all",)))

    assert ops(made) == ["pin_memory", "cpu_adam", "utils", "fused_adam", "ragged_ops"]
    assert errors(made) == []
    why = {left.op: left.because for left in made.left_out}
    assert set(why) == {"async_io", "fp_quantizer", "cutlass_ops"}
    assert "libaio" in why["async_io"]
    assert "nvcc 13" in why["fp_quantizer"]
    assert "deepspeed-kernels" in why["cutlass_ops"]


def test_an_op_that_filters_architectures_has_a_list_of_its_own() -> None:
    made = plan(BuildRequest(ops=("fused_adam", "ragged_ops"), arch="7.5;9.0+PTX"))

    assert {op.op: op.architectures for op in made.ops} == {
        "fused_adam": ("7.5", "9.0+PTX"),
        "ragged_ops": ("9.0+PTX",),
    }


def test_an_op_whose_filter_keeps_nothing_is_refused() -> None:
    made = plan(BuildRequest(ops=("ragged_ops",), arch="7.5"))

    assert errors(made) == ["op-cannot-be-built"]
    assert "from 8.0 on" in made.findings[0].title


@pytest.mark.parametrize("name", ["fused_adam", "FUSED_ADAM", "DS_BUILD_FUSED_ADAM", "fused_Adam"])
def test_an_op_is_known_by_its_name_and_its_variable(name: str) -> None:
    assert ops(plan(BuildRequest(ops=(name,)))) == ["fused_adam"]


def test_an_unknown_op_is_a_usage_error_with_a_guess() -> None:
    with pytest.raises(UsageError, match="unknown op 'fusd_adam'") as caught:
        plan(BuildRequest(ops=("fusd_adam",)))

    assert caught.value.hint == "did you mean fused_adam?"


def test_host_ops_alone_need_no_toolkit_even_on_a_cuda_torch() -> None:
    made = plan(BuildRequest(ops=("cpu_adam",)), machine())

    assert (made.toolkit, errors(made)) == (None, [])


def test_a_toolkit_without_curand_still_serves_the_other_ops() -> None:
    quantizer = fact("quantizer", "QUANTIZER", cuda=ALL, device=True)
    source = Source(**{**SOURCE.__dict__, "ops": (*SOURCE.ops, quantizer)})
    whole = toolkit(Cuda(12, 8))
    sick = toolkit(Cuda(12, 8), headers=whole.headers - {"curand_kernel.h"})
    torch = CPU_TORCH.__class__(version="2.9.0+cu128", location="/t", cuda=Cuda(12, 8), arch_list=("9.0",))

    made = plan(BuildRequest(ops=("fused_adam",)), machine(torch=torch, toolkits=(sick,)), source)

    assert (ops(made), errors(made)) == (["fused_adam"], [])


def test_variables_of_the_caller_are_said_and_taken_away() -> None:
    here = machine(
        toolkits=(toolkit(Cuda(13, 0)),),
        variables={
            "DS_BUILD_FUSED_LAMB": "1",
            "DS_BUILD_CUTLES_OPS": "1",
            "DS_BUILD_OPS": "1",
            "CUDA_HOME": ":/usr/local/cuda",
        },
    )

    made = plan(here=here)

    titles = {finding.rule: finding.title for finding in made.findings}
    assert "did you mean DS_BUILD_CUTLASS_OPS?" in titles["variable-misspelt"]
    assert "variable-overridden" in titles
    assert "a list with ':'" in titles["cuda-home-wrong"]
    assert {"DS_BUILD_FUSED_LAMB", "DS_BUILD_CUTLES_OPS", "DS_BUILD_OPS", "CUDA_HOME"} <= set(made.unset)


def test_what_the_environment_lacks_is_an_error_with_the_package() -> None:
    bare = Python(**{**PYTHON.__dict__, "headers": False, "packages": {"setuptools": "65.5.0"}})
    small = System(**{**SYSTEM.__dict__, "cache_free": 1 << 20, "ninja": None})

    made = plan(here=machine(python=bare, system=small, toolkits=(toolkit(Cuda(13, 0)),)))

    assert errors(made) == ["python-headers-missing", "wheel-package-missing", "disk-full"]
    assert made.headers is None
    fixes = [finding.fix.steps[0].line for finding in made.findings if finding.fix]
    assert "sudo apt-get install python3.11-dev" in fixes
    assert "/venv/bin/python -m pip install wheel" in fixes


def test_missing_headers_of_debians_python_are_unpacked_without_root() -> None:
    bare = Python(**{**PYTHON.__dict__, "headers": False})
    debian = System(**{**SYSTEM.__dict__, "apt_get": "/usr/bin/apt-get"})
    here = machine(python=bare, system=debian, toolkits=(toolkit(Cuda(13, 0)),))

    made, offline = plan(here=here), plan(BuildRequest(offline=True), here)

    assert made.headers is not None
    assert made.headers.package == "libpython3.11-dev"
    assert made.prepend["CPATH"] == made.headers.include
    assert errors(made) == []
    assert errors(offline) == ["python-headers-missing"]


def test_what_could_not_be_asked_is_a_note() -> None:
    made = plan(here=machine(toolkits=(toolkit(Cuda(13, 0)),), gaps=(Gap(question="gpus", reason="no answer"),)))

    assert made.findings[-1].title == "gpus could not be queried: no answer"


def test_another_minor_of_cuda_13_tells_deepspeed_to_accept_it() -> None:
    made = plan(BuildRequest(toolkit="/x"), machine(toolkits=(toolkit(Cuda(13, 2), found_via=("named",)),)))

    assert made.env["DS_SKIP_CUDA_CHECK"] == "1"
    assert [finding.rule for finding in made.findings] == ["cuda-torch-mismatch", "many-architectures"]


def test_a_warning_about_the_toolkit_hides_no_op_that_it_does_not_serve() -> None:
    transformer = fact("transformer", "TRANSFORMER", cuda=ALL, device=True)
    source = Source(**{**SOURCE.__dict__, "ops": (*SOURCE.ops, transformer)})
    sick = toolkit(Cuda(13, 2), found_via=("named",), headers=toolkit(Cuda(13, 2)).headers - {"curand_kernel.h"})

    made = plan(BuildRequest(toolkit="/x", ops=("transformer",)), machine(toolkits=(sick,)), source)

    assert [finding.rule for finding in made.findings] == ["cuda-torch-mismatch", "op-cannot-be-built"]
    assert "curand_kernel.h" in made.findings[1].title


def test_an_op_that_nothing_is_left_for_after_narrowing_to_this_nvcc_is_refused() -> None:
    newest_only = OpFact(**{**fact("ragged_ops", "RAGGED_OPS", device=True).__dict__, "architectures": ("12.0",)})
    source = Source(**{**SOURCE.__dict__, "ops": (*SOURCE.ops[:5], newest_only)})
    torch = TORCH.__class__(**{**TORCH.__dict__, "arch_list": ("9.0", "12.0")})
    here = machine(torch=torch, toolkits=(toolkit(Cuda(13, 0), architectures=("8.0", "9.0")),))

    named, everything = (
        plan(BuildRequest(ops=("ragged_ops",)), here, source),
        plan(BuildRequest(ops=("all",)), here, source),
    )

    assert errors(named) == ["op-cannot-be-built"]
    assert "ragged_ops" in [left.op for left in everything.left_out]
    assert {op.op: op.architectures for op in everything.ops}["fused_adam"] == ("9.0",)


def test_an_op_compiled_by_an_older_standard_than_torchs_headers_demand_is_refused() -> None:
    old = OpFact(**{**fact("utils", "UTILS").__dict__, "flags": ("-O3", "-std=c++17")})
    source = Source(**{**SOURCE.__dict__, "ops": (old,), "version": "0.16.0"})

    made = plan(BuildRequest(ops=("utils",)), source=source)

    assert errors(made) == ["op-cannot-be-built"]
    assert "0.16.0 compiles utils as C++17, but torch 2.14.1+cu130's headers require C++20" in made.findings[0].title


def test_libraries_that_an_op_links_are_needed_of_the_toolkit() -> None:
    aio = OpFact(**{**fact("async_io", "AIO", cuda=ALL).__dict__, "libraries": ("aio", "cuda", "cudart")})
    source = Source(**{**SOURCE.__dict__, "ops": (aio,)})
    stubless = toolkit(Cuda(12, 8), libraries=frozenset({"cudart"}))
    torch = CPU_TORCH.__class__(version="2.9.0+cu128", location="/t", cuda=Cuda(12, 8), arch_list=("9.0",))
    driver = Library(name="libcuda", library="/usr/lib/x86_64-linux-gnu/libcuda.so")

    without = plan(
        BuildRequest(ops=("async_io",)), machine(torch=torch, toolkits=(stubless,), libraries=(AIO,)), source
    )
    with_it = plan(
        BuildRequest(ops=("async_io",)), machine(torch=torch, toolkits=(stubless,), libraries=(AIO, driver)), source
    )

    assert without.toolkit is not None
    assert without.toolkit.assemble  # an assembled one has a stub of libcuda
    assert with_it.toolkit is not None
    assert not with_it.toolkit.assemble


def test_one_finding_about_the_toolkit_is_enough() -> None:
    torch = CPU_TORCH.__class__(version="2.9.0+cu128", location="/t", cuda=Cuda(12, 8), arch_list=("9.0",))

    made = plan(BuildRequest(ops=("fused_adam", "ragged_ops")), machine(torch=torch))

    assert errors(made) == ["cuda-toolkit-missing"]


def test_the_same_facts_give_the_same_plan() -> None:
    assert plan(BuildRequest(ops=("all",))) == plan(BuildRequest(ops=("all",)))


def test_a_toolkit_for_a_cpu_torch_is_impossible() -> None:
    with pytest.raises(ImpossiblePlan, match="CPU build"):
        plan_toolkit(machine(torch=CPU_TORCH), BuildRequest(), "/cache")


def test_a_toolkit_for_an_architecture_that_its_nvcc_does_not_take_is_an_error() -> None:
    torch = TORCH.__class__(**{**TORCH.__dict__, "known_architectures": ()})

    advice = plan_toolkit(machine(torch=torch, toolkits=(toolkit(Cuda(13, 0)),)), BuildRequest(arch="7.0"), "/cache")

    assert [finding.rule for finding in advice.findings] == ["gpu-arch-unsupported-by-nvcc"]


def test_the_plan_says_which_deepspeed_and_why() -> None:
    source = Source(**{**SOURCE.__dict__, "asked": "newest", "because": "the newest release"})

    choice = plan(source=source).choices[0]

    assert (choice.what, choice.value, choice.because) == ("DeepSpeed", "0.19.8 (newest)", "the newest release")
