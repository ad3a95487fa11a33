"""A toolkit of CUDA 12 or 11.8 out of what NVIDIA or a distribution offers, for machines written out."""

from dataclasses import replace

import pytest

from dsdoctor.builder.plan.choices import choose_architectures, fit_architectures
from dsdoctor.builder.plan.compiler import choose_compiler
from dsdoctor.builder.plan.plan import plan_toolkit
from dsdoctor.builder.toolkit.assemble import COMPONENTS
from dsdoctor.builder.toolkit.choose import Needs, choose_toolkit, needs_offers
from dsdoctor.builder.toolkit.parts import EVERY_HEADER, NOT_ASKED, NvidiaRelease, Offers
from dsdoctor.core.build_models import Archive, Choice, DebianPackage, ToolkitPlan
from dsdoctor.core.finding import Finding
from dsdoctor.core.machine import Compiler, Cuda, Machine, Toolkit, Torch
from dsdoctor.core.requests import BuildRequest
from tests.conftest import GCC, machine, toolkit

NEEDS = Needs(headers=EVERY_HEADER, libraries=frozenset({"cudart", "curand"}))
TORCH = Torch(
    version="2.8.0+cu128", location="/s/torch", cuda=Cuda(12, 8), arch_list=("8.0", "9.0", "10.0"), nccl="2.27.3"
)
WHEELS = Toolkit(
    root="/s/nvidia",
    release=Cuda(12, 8),
    headers=frozenset(
        {"cuda_runtime.h", "cublas_v2.h", "cusparse.h", "cusolverDn.h", "curand_kernel.h", "cufile.h", "nccl.h"}
    ),
    include_dirs=("/s/nvidia/cublas/include", "/s/nvidia/cuda_runtime/include", "/s/nvidia/nccl/include"),
    library_dirs=("/s/nvidia/cublas/lib", "/s/nvidia/cuda_runtime/lib"),
    found_via=("pypi_wheels",),
)


def release(label: str, *without: str) -> NvidiaRelease:
    return NvidiaRelease(
        label=label,
        archives=tuple(
            Archive(
                name=name, version=f"{label}", path=f"{name}/x.tar.xz", sha256="a" * 64, size=1 << 20, license="CUDA"
            )
            for name in COMPONENTS
            if name not in {"cuda_crt", "libnvvm", *without}
        ),
    )


def package(version: str, suite: str = "trixie") -> DebianPackage:
    facts = {"distribution": "Debian", "component": "non-free", "sha256": "d" * 64, "size": 87_240_108}
    return DebianPackage(name="nvidia-cuda-toolkit", version=version, suite=suite, **facts)  # type: ignore[arg-type]


TRIXIE, BOOKWORM = package("12.4.131~12.4.1-2"), package("11.8.89~11.8.0-5~deb12u1", "bookworm")
DEBIAN = Offers(packages=(TRIXIE, BOOKWORM), misses=("NVIDIA's archives cannot be reached: no route",), asked=True)
NVIDIA = Offers(nvidia=release("12.8.1"), asked=True)


def chosen(
    here: Machine, offers: Offers, request: BuildRequest | None = None
) -> tuple[ToolkitPlan | None, tuple[Choice, ...], tuple[Finding, ...]]:
    return choose_toolkit(here, request or BuildRequest(), "/cache", NEEDS, offers)


def a_machine(*toolkits: Toolkit, **torch: object) -> Machine:
    return machine(torch=replace(TORCH, **torch), toolkits=toolkits)  # type: ignore[arg-type]


def test_nvidias_archives_of_the_very_release_come_first() -> None:
    plan, (choice,), findings = chosen(a_machine(WHEELS), replace(DEBIAN, nvidia=release("12.8.1")))

    assert plan is not None
    assert [archive.name for archive in plan.archives] == ["cuda_nvcc", "cuda_cudart", "cuda_cccl", "cuda_profiler_api"]
    assert (plan.release, plan.packages, plan.fetch, findings) == (Cuda(12, 8), (), (), ())
    assert "NVIDIA's archives have CUDA 12.8.1, that exact release" in choice.because
    assert "10.0" in plan.architectures


def test_headers_that_torchs_wheels_lack_are_fetched_as_archives_too() -> None:
    plan, _, _ = chosen(a_machine(), NVIDIA)

    assert plan is not None
    assert {"libcublas", "libcusparse", "libcusolver", "libcurand", "libcufile"} <= {a.name for a in plan.archives}
    assert plan.fetch == ("nvidia-nccl-cu12==2.27.3",)
    assert set(plan.headers) == EVERY_HEADER


def test_a_manifest_without_a_compiler_is_no_offer() -> None:
    offers = Offers(nvidia=release("12.8.1", "cuda_cudart"), packages=(TRIXIE,), asked=True)

    plan, _, _ = chosen(a_machine(WHEELS), offers)

    assert plan is not None
    assert (plan.archives, plan.packages) == ((), (TRIXIE,))


def test_the_distributions_package_is_second_and_its_other_minor_a_warning() -> None:
    plan, (choice,), (finding,) = chosen(a_machine(WHEELS), DEBIAN)

    assert plan is not None
    assert (plan.release, plan.packages) == (Cuda(12, 4), (TRIXIE,))
    assert plan.fetch == ("cuda-toolkit[cccl,cudart,nvcc,profiler]==12.4.1",)
    assert "no route" in choice.because
    assert (finding.rule, finding.severity.value) == ("cuda-torch-mismatch", "warning")
    assert "it cannot compile for 10.0, which torch has code for" in finding.evidence


def test_torchs_own_runtime_headers_are_not_mixed_with_another_nvcc() -> None:
    plan, _, _ = chosen(a_machine(WHEELS), DEBIAN)

    assert plan is not None
    (layer,) = plan.layers
    assert layer.include == ("/s/nvidia/cublas/include", "/s/nvidia/nccl/include")
    assert layer.libraries == ("/s/nvidia/cublas/lib",)


@pytest.mark.parametrize(
    ("cuda", "label"),
    [(Cuda(11, 8), "11.8.0"), (Cuda(11, 7), "11.8.0"), (Cuda(12, 1), "12.0.1"), (Cuda(12, 2), "12.4.1")],
)
def test_the_package_of_the_nearest_minor_is_taken(cuda: Cuda, label: str) -> None:
    offers = Offers(packages=(TRIXIE, BOOKWORM, package("12.0.140~12.0.1-4build4", "noble")), asked=True)

    plan, _, findings = chosen(a_machine(cuda=cuda), offers)

    assert plan is not None
    assert plan.fetch[0].endswith(f"=={label}")
    assert ("nvidia-cuda-cccl-cu12==12.3.101.post1" in plan.fetch) is (label == "12.0.1")
    assert len(findings) == (cuda != plan.release)


def test_a_package_that_pypi_has_no_headers_for_is_none() -> None:
    plan, _, (finding,) = chosen(
        a_machine(cuda=Cuda(11, 6)), Offers(packages=(package("11.5.1-1ubuntu1"),), asked=True)
    )

    assert (plan, finding.rule) == (None, "cuda-toolkit-missing")


def test_nothing_to_be_had_tells_who_was_asked_and_every_way_out() -> None:
    offers = Offers(misses=("NVIDIA's archives cannot be reached: x", "there is no apt-get"), asked=True)

    plan, _, (finding,) = chosen(a_machine(WHEELS), offers)

    assert plan is None
    assert finding.evidence == offers.misses
    assert finding.fix is not None
    ways = " ".join(finding.fix.commands)
    assert all(
        way in ways for way in ("conda create", "linux.run", "DSDOCTOR_CUDA_REDIST", "pip install --upgrade torch")
    )


def test_what_the_older_nvcc_cannot_compile_is_left_out_or_refused() -> None:
    here = a_machine(WHEELS)
    plan, _, _ = chosen(here, DEBIAN)

    narrowed, (choice,), none = fit_architectures(choose_architectures(here, BuildRequest()), plan)
    _, _, (asked,) = fit_architectures(choose_architectures(here, BuildRequest(arch="10.0")), plan)

    assert (narrowed, none) == (("8.0", "9.0"), ())
    assert "without 10.0, which nvcc 12.4 does not support" in choice.because
    assert asked.rule == "gpu-arch-unsupported-by-nvcc"


def test_the_compiler_fits_an_nvcc_that_is_still_to_be_fetched() -> None:
    new = Compiler(path="/usr/bin/g++-14", c_path="/usr/bin/gcc-14", kind="gcc", version=(14, 2, 0), found_via="path")
    here = replace(a_machine(WHEELS), compilers=(new, GCC))
    plan, _, _ = chosen(here, DEBIAN)

    compiler, (choice,), _ = choose_compiler(here, plan, device_code=True)

    none, _, (finding,) = choose_compiler(replace(here, compilers=(new,)), plan, device_code=True)

    assert compiler == GCC
    assert "nvcc 12.4 supports up to 13" in choice.because
    assert (none, finding.rule) == (None, "host-compiler-too-new")
    assert all(fact in finding.title for fact in ("nvcc 12.4", "gcc up to 13", "gcc 14.2.0"))


ASSEMBLED = toolkit(
    Cuda(12, 4), root="/cache/toolkits/12.4-x/home", found_via=("assembled",), architectures=("8.0", "9.0")
)


def test_one_of_another_minor_that_was_assembled_is_taken_again_with_the_warning() -> None:
    here = a_machine(WHEELS, ASSEMBLED)

    plan, _, (finding,) = chosen(here, NOT_ASKED)

    assert plan is not None
    assert (plan.root, plan.assemble, finding.rule) == (ASSEMBLED.root, False, "cuda-torch-mismatch")
    assert not needs_offers(here, BuildRequest())


def test_the_very_release_replaces_one_that_stood_in_for_it() -> None:
    here = a_machine(WHEELS, ASSEMBLED)

    plan, _, findings = chosen(here, NVIDIA)

    assert plan is not None
    assert (plan.release, plan.assemble, findings) == (Cuda(12, 8), True, ())
    assert needs_offers(here, BuildRequest(arch="10.0"))
    assert needs_offers(here, BuildRequest(), mirror=True)
    assert needs_offers(here, BuildRequest(toolkit="pypi"))


@pytest.mark.parametrize(
    ("here", "request_", "asked"),
    [
        (a_machine(WHEELS), BuildRequest(), True),
        (a_machine(WHEELS), BuildRequest(offline=True), False),
        (a_machine(WHEELS), BuildRequest(toolkit="/usr/local/cuda-12.6"), False),
        (a_machine(WHEELS, toolkit(Cuda(12, 6))), BuildRequest(), False),
        (a_machine(WHEELS, toolkit(Cuda(13, 0))), BuildRequest(), True),
        (machine(), BuildRequest(), False),
    ],
)
def test_others_than_pypi_are_asked_only_where_it_matters(here: Machine, request_: BuildRequest, asked: bool) -> None:
    assert needs_offers(here, request_) is asked


def test_the_toolkit_command_says_why_it_is_this_one() -> None:
    advice = plan_toolkit(a_machine(WHEELS), BuildRequest(arch="8.0"), "/cache", DEBIAN)

    assert advice.toolkit is not None
    assert advice.toolkit.packages == (TRIXIE,)
    assert [choice.what for choice in advice.choices] == ["toolkit", "architectures", "compiler"]
