"""The op table: two verdicts an op, and findings that weigh as much as the ops they hinder."""

from dataclasses import replace

import pytest

from dsdoctor.builder.plan.op_table import OpTable, OpVerdict, judge_ops
from dsdoctor.checks import examine
from dsdoctor.core.build_models import Source
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Cuda, DeepSpeed, Machine, Torch
from dsdoctor.core.requests import BuildRequest
from dsdoctor.rules import book
from tests.builder.test_plan import AIO, SOURCE, fact
from tests.checks.sick import BARE, BUILT, GUESSED, REAL, SICK, WHOLE, healthy, taking, without_gpu
from tests.conftest import TORCH, toolkit

ASKED = BuildRequest(ops=("fused_adam",))


def table(
    machine: Machine, asked: BuildRequest | None = None, source: Source = SOURCE, **compiled: str | None
) -> OpTable:
    findings = [finding for topic in examine(machine) for finding in topic.findings]
    return judge_ops(machine, source, asked or BuildRequest(), findings, cache="/cache", compiled=compiled)


def verdict(judged: OpTable, op: str) -> OpVerdict:
    return next(found for found in judged.ops if found.op == op)


def finding(judged: OpTable, rule: str) -> Finding:
    return next(found for found in judged.findings if found.rule == rule)


def bare(**changes: object) -> Machine:
    return healthy(deepspeed=None, **changes)


def test_a_healthy_machine_builds_all_but_what_lacks_its_library() -> None:
    judged = table(bare())

    assert {op.op: op.verdict for op in judged.ops} == {
        "async_io": "builds",
        "pin_memory": "builds",
        "cpu_adam": "builds",
        "utils": "builds",
        "fused_adam": "builds",
        "fp_quantizer": "cannot",
        "cutlass_ops": "cannot",
        "ragged_ops": "builds",
    }
    assert "q_exponent_bits" in (verdict(judged, "fp_quantizer").because or "")
    assert "deepspeed-kernels" in (verdict(judged, "cutlass_ops").because or "")


def test_a_wrong_guess_hinders_the_cuda_ops_and_build_wheel_mends_it() -> None:
    sick = taking("/usr/local", REAL, GUESSED, deepspeed=None)
    judged = table(sick)

    wrong = finding(judged, "cuda-home-wrong")
    assert wrong.affects == ("async_io", "fused_adam", "fp_quantizer", "cutlass_ops", "ragged_ops")
    assert verdict(judged, "fused_adam") == OpVerdict(
        op="fused_adam", verdict="cannot", because=wrong.title, mended="builds", needed="of the usual set"
    )
    assert verdict(judged, "cpu_adam").verdict == "builds"


def test_a_header_hinders_only_the_ops_that_include_it() -> None:
    lacking = replace(WHOLE, headers=WHOLE.headers - {"nccl.h"})
    source = replace(SOURCE, ops=(*SOURCE.ops, fact("dc", "DEEP_COMPILE", cuda=("9.0",))))

    judged = table(taking("/x", lacking, deepspeed=None), source=source)

    assert finding(judged, "cuda-header-missing").affects == ("dc",)
    assert (verdict(judged, "dc").verdict, verdict(judged, "fused_adam").verdict) == ("cannot", "builds")


def test_without_torch_nothing_builds() -> None:
    judged = table(bare(torch=None))

    assert {(op.verdict, op.mended) for op in judged.ops} == {("cannot", "cannot")}
    assert finding(judged, "torch-missing").severity is Severity.ERROR


def test_where_no_toolkit_can_be_had_the_host_ops_are_still_built() -> None:
    cuda12 = replace(TORCH, cuda=Cuda(12, 8), version="2.9.0+cu128", cuda_home=None)
    judged = table(bare(torch=cuda12, toolkits=()), BuildRequest(offline=True))

    assert verdict(judged, "fused_adam").mended == "cannot"
    assert verdict(judged, "cpu_adam").mended == "builds"


def test_an_installed_op_is_installed_and_its_surroundings_matter_less() -> None:
    judged = table(healthy(compilers=(), deepspeed=BUILT))

    assert (verdict(judged, "fused_adam").verdict, verdict(judged, "utils").verdict) == ("installed", "cannot")
    assert finding(judged, "host-compiler-missing").severity is Severity.NOTE


@pytest.mark.parametrize("torch", [None, replace(TORCH, broken="signal 11")])
def test_installed_ops_are_worth_nothing_without_torch(torch: Torch | None) -> None:
    judged = table(healthy(torch=torch))

    assert {op.verdict for op in judged.ops} == {"cannot"}
    assert any(found.severity is Severity.ERROR for found in judged.findings)


def test_what_no_op_needs_is_only_a_note() -> None:
    host_only = replace(SOURCE, accelerator="cpu", ops=tuple(fact for fact in SOURCE.ops if not fact.needs_toolkit))
    judged = table(
        taking("/usr/local", REAL, GUESSED, deepspeed=None, variables={"DS_ACCELERATOR": "cpu"}), source=host_only
    )

    assert finding(judged, "cuda-home-wrong").severity is Severity.NOTE
    assert {found.severity for found in judged.findings} == {Severity.NOTE}


def test_all_asks_for_every_op_that_is_one() -> None:
    judged = table(bare(), BuildRequest(ops=("all",)))

    assert {found.affects for found in judged.findings if found.rule == "op-cannot-be-built"} == {
        ("fp_quantizer",),
        ("cutlass_ops",),
    }


def test_an_installed_op_that_does_not_fit_is_not_installed() -> None:
    old = table(healthy(deepspeed=replace(BUILT, torch="2.13")))
    for_cpu = table(healthy(deepspeed=replace(BUILT, accelerator="cpu")))

    assert (verdict(old, "fused_adam").verdict, verdict(old, "utils").verdict) == ("cannot", "builds")
    assert "built with torch 2.13" in (verdict(old, "fused_adam").because or "")
    assert finding(old, "ops-torch-version-mismatch").severity is Severity.ERROR
    assert verdict(for_cpu, "fused_adam").verdict == "builds"
    assert "built for cpu" in (verdict(for_cpu, "fused_adam").because or "")


@pytest.mark.parametrize(
    ("asked", "severity"), [(BuildRequest(), Severity.NOTE), (BuildRequest(ops=("async_io",)), Severity.ERROR)]
)
def test_libaio_matters_to_who_asked_for_it(asked: BuildRequest, severity: Severity) -> None:
    judged = table(bare(libraries=()), asked)

    assert finding(judged, "libaio-missing").severity is severity
    assert finding(judged, "libaio-missing").affects == ("async_io",)


def test_an_asked_op_that_cannot_be_had_is_an_error_even_where_no_check_speaks() -> None:
    judged = table(bare(), BuildRequest(ops=("fp_quantizer",)))

    refused = finding(judged, "op-cannot-be-built")
    assert refused.affects == ("fp_quantizer",)
    (op,) = (op for op in judged.ops if op.op == "fp_quantizer")
    assert refused == book.finding(
        "op-cannot-be-built",
        Severity.ERROR,
        case="nor-by-build-wheel",
        affects=["fp_quantizer"],
        op="fp_quantizer",
        because=op.because,
        mended_because=op.mended_because,
    )
    with pytest.raises(UsageError, match="unknown op"):
        table(bare(), BuildRequest(ops=("no_such_op",)))


def test_without_a_gpu_deepspeed_would_choose_the_cpu() -> None:
    judged = table(without_gpu(deepspeed=None), ASKED)

    assert verdict(judged, "fused_adam").verdict == "cannot"
    assert verdict(judged, "fused_adam").mended == "builds"
    assert finding(judged, "accelerator-autodetect-cpu").severity is Severity.ERROR
    named = table(
        without_gpu(deepspeed=None, variables={"DS_ACCELERATOR": "cuda", "TORCH_CUDA_ARCH_LIST": "9.0"}), ASKED
    )
    assert verdict(named, "fused_adam").verdict == "builds"


def test_the_compiler_knows_better() -> None:
    passes = table(taking("/x", BARE, deepspeed=None), ASKED, fused_adam=None)
    fails = table(bare(), ASKED, fused_adam="x.cu:1: fatal error: foo.h: No such file or directory")
    no_gpu = table(without_gpu(deepspeed=None), ASKED, fused_adam=None)

    assert verdict(passes, "fused_adam").verdict == "builds"
    assert finding(passes, "cuda-header-missing").severity is Severity.NOTE
    assert (verdict(fails, "fused_adam").verdict, "foo.h" in (verdict(fails, "fused_adam").because or "")) == (
        "cannot",
        True,
    )
    assert verdict(no_gpu, "fused_adam").verdict == "cannot"


@pytest.mark.slow
def test_any_sick_machine_gets_a_table() -> None:
    names = {fact.op for fact in SOURCE.ops}
    for rule, sick in SICK.items():
        judged = table(sick)

        assert {op.op for op in judged.ops} == names, rule
        assert all(set(found.affects) <= names for found in judged.findings), rule
        assert all(op.because for op in judged.ops if op.verdict == "cannot"), rule


def test_an_older_toolkit_that_lacks_nothing_is_judged_by_its_release() -> None:
    other = toolkit(Cuda(12, 8), found_via=("usr_local", "taken_by_torch"))
    judged = table(taking("/usr/local/cuda-12.8", other, deepspeed=None, libraries=(AIO,)))

    assert "CUDA 12.8" in (verdict(judged, "fused_adam").because or "")
    assert verdict(judged, "fused_adam").mended == "builds"


def test_deepspeed_without_ops_leaves_the_usual_set_to_matter() -> None:
    empty = DeepSpeed(version="0.19.8", location="/site/deepspeed")
    judged = table(taking("/usr/local", REAL, GUESSED, deepspeed=empty))

    assert finding(judged, "cuda-home-wrong").severity is Severity.ERROR


def test_a_check_that_did_not_load_torch_still_says_what_build_wheel_gets_without_a_gpu() -> None:
    loaded = without_gpu(deepspeed=None, torch=replace(TORCH, capabilities=()))
    unloaded = replace(loaded, torch=replace(TORCH, capabilities=(), arch_list=()))

    gets = [{op.op for op in table(machine).ops if op.mended == "builds"} for machine in (loaded, unloaded)]

    assert gets[0] == gets[1]
    assert "fused_adam" in gets[1]
