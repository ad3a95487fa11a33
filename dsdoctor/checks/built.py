"""Machine -> findings about a built DeepSpeed, installed or in a wheel: ops for another torch, GPU or processor, or not all of
them."""

import re
from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.architectures import lacking_instructions, numeric, order, says_nothing
from dsdoctor.core.deepspeed_install import library_of
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import DeepSpeed, Machine
from dsdoctor.core.text import and_more
from dsdoctor.rules import book

GPU_OPS = ("fused_adam", "fused_lamb", "fused_lion")
"""Ops that hold GPU code in every build for CUDA. On a CPU, fused_adam has a flavour of its own under the same name."""


def summary(machine: Machine) -> str:
    """One line for the topic."""
    built = machine.deepspeed
    if built is None:
        return "DeepSpeed: not installed"
    made = [f"torch {built.torch}" if built.torch else "", f"CUDA {built.cuda}" if built.cuda else ""]
    ops = (
        f"{len(built.installed_ops)} op{'s' * (len(built.installed_ops) > 1)} built with {', '.join(filter(None, made))}"
        if built.installed_ops
        else "no ops in it"
    )
    return f"DeepSpeed {built.version}: {ops}"


def ops_torch_version_mismatch(machine: Machine) -> Iterator[Finding]:
    """The ops were built with another torch than the one that is here."""
    built, torch = machine.deepspeed, machine.torch
    if built and torch and built.torch and built.installed_ops and built.torch != torch.minor:
        yield book.finding(
            "ops-torch-version-mismatch",
            Severity.ERROR,
            evidence=[built.location, torch.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            version=built.version,
            built=built.torch,
            torch=torch.version,
            minor=torch.minor,
        )


def ops_cuda_version_mismatch(machine: Machine) -> Iterator[Finding]:
    """The ops were built with another CUDA release than torch's."""
    built, torch = machine.deepspeed, machine.torch
    if not built or not torch or not built.cuda or not torch.cuda or not built.installed_ops:
        return
    if built.accelerator != "cpu" and built.cuda != str(torch.cuda):
        yield book.finding(
            "ops-cuda-version-mismatch",
            Severity.ERROR,
            evidence=[built.location, torch.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            version=built.version,
            built=built.cuda,
            torch=torch.version,
            cuda=str(torch.cuda),
        )


def ops_accelerator_mismatch(machine: Machine) -> Iterator[Finding]:
    """The ops were built for another accelerator than the one they are for."""
    built, torch = machine.deepspeed, machine.torch
    if not built or not torch or not built.accelerator or not built.installed_ops:
        return
    if machine.unjudged_accelerator:
        return
    impossible = built.accelerator == "cuda" and torch.cuda is None
    uses = "cpu" if impossible else _accelerator_meant(machine)
    if uses is None or uses == built.accelerator:
        return
    flavoured = tuple(op for op in GPU_OPS if op in built.installed_ops) if uses == "cuda" else ()
    evidence = [
        f"{built.location} (accelerator_name={built.accelerator!r})",
        _reason(machine, uses, impossible=impossible),
    ]
    if flavoured and built.accelerator == "cpu":
        evidence.append(f"the CPU variant: {', '.join(flavoured)}")
    if without := _without_gpu_code(built, flavoured):
        evidence.append(f"no GPU code in {', '.join(without)}")
    yield book.finding(
        "ops-accelerator-mismatch",
        Severity.ERROR if impossible or flavoured or machine.visible_gpus else Severity.WARNING,
        case="" if impossible or machine.visible_gpus or uses == "cpu" else "no-gpu",
        evidence=evidence,
        affects=(needs.INSTALLED, *built.installed_ops),
        version=built.version,
        built=built.accelerator,
        accelerator=uses,
        ops=",".join(flavoured or built.installed_ops),
    )


def op_without_gpu_code(machine: Machine) -> Iterator[Finding]:
    """An op that computes on the GPU holds no GPU code, although DeepSpeed says that it was built for CUDA."""
    built = machine.deepspeed
    if built is None or built.accelerator != "cuda" or not built.cuda:
        return
    if without := _without_gpu_code(built, tuple(op for op in GPU_OPS if op in built.installed_ops)):
        yield book.finding(
            "op-without-gpu-code",
            Severity.ERROR,
            evidence=[built.location],
            affects=(needs.INSTALLED, *without),
            version=built.version,
            without=without,
            ops=",".join(without),
        )


def claimed_op_missing(machine: Machine) -> Iterator[Finding]:
    """DeepSpeed says that an op is installed, and its shared object is not there."""
    built = machine.deepspeed
    if built and built.present_ops is not None:
        lost = [op for op in built.installed_ops if op not in built.present_ops]
        if lost:
            yield book.finding(
                "claimed-op-missing",
                Severity.ERROR,
                evidence=[built.location],
                affects=(needs.INSTALLED, *lost),
                version=built.version,
                lost=lost,
                ops=",".join(built.installed_ops),
            )


def op_not_claimed(machine: Machine) -> Iterator[Finding]:
    """A shared object is there and DeepSpeed does not say that its op is installed."""
    built = machine.deepspeed
    if built and built.unclaimed:
        yield book.finding(
            "op-not-claimed", Severity.WARNING, unclaimed=and_more(built.unclaimed), location=built.location
        )


def no_kernel_image(machine: Machine) -> Iterator[Finding]:
    """An op holds no code that a GPU here can run."""
    built = machine.deepspeed
    for capability in numeric([gpu.capability for gpu in machine.visible_gpus]) if built else ():
        lost = [op for op, inside in built.sm_arch.items() if not _serves(inside, capability)] if built else []
        if built and lost:
            inside = sorted({name.split("_")[0] for op in lost for name in built.sm_arch[op]})
            yield book.finding(
                "no-kernel-image",
                Severity.ERROR,
                evidence=[built.location],
                affects=(needs.INSTALLED, *lost),
                capability=capability,
                lost=lost,
                inside=[f"sm_{name}" for name in inside],
                ops=",".join(lost),
            )


def cpu_isa_illegal_instruction(machine: Machine) -> Iterator[Finding]:
    """The ops' host code uses instructions that this processor does not have."""
    built = machine.deepspeed
    if not built or not machine.system.cpu_flags:
        return
    lost = lacking_instructions(built.cpu_flags, machine.system.cpu_flags)
    if lost:
        yield book.finding(
            "cpu-isa-illegal-instruction",
            Severity.ERROR,
            evidence=[
                f"processor: {machine.system.cpu_model or 'unknown'}",
                *(f for f in built.cpu_flags if f.startswith(("-march=", "-mcpu="))),
            ],
            affects=(needs.INSTALLED, *built.installed_ops),
            version=built.version,
            instructions=lost[:6],
        )


def cpu_flags_unknown(machine: Machine) -> Iterator[Finding]:
    """Which processor instructions the ops use is not known: there is no manifest, and no debug information to read."""
    built = machine.deepspeed
    if built and built.told_by != "record" and built.installed_ops and says_nothing(built.cpu_flags):
        yield book.finding("cpu-flags-unknown", Severity.NOTE, case="unjudged", location=built.location)


def _accelerator_meant(machine: Machine) -> str | None:
    """The accelerator that ops are for here: what DS_ACCELERATOR names, else CUDA with a CUDA build of torch; None where open."""
    named = machine.variables.get("DS_ACCELERATOR")
    if named:
        return named if named in {"cuda", "cpu"} else None
    return "cuda" if machine.torch and machine.torch.cuda else None


def _reason(machine: Machine, accelerator: str, *, impossible: bool) -> str:
    """Why this accelerator is used here."""
    version = machine.torch.version if machine.torch else ""
    if impossible:
        return f"torch {version} is a CPU build"
    if machine.variables.get("DS_ACCELERATOR"):
        return f"DS_ACCELERATOR={accelerator}"
    return f"torch {version} is built for CUDA{'' if machine.visible_gpus else ', and no GPU is visible here'}"


def _without_gpu_code(built: DeepSpeed, ops: tuple[str, ...]) -> tuple[str, ...]:
    """The ops whose shared objects, where they were read, hold no GPU code."""
    if built.present_ops is None or built.told_by == "record":
        return ()
    # of a damaged object nothing is known; op-unreadable tells it
    read = [op for op in ops if op in built.present_ops and library_of(op, built.unreadable) is None]
    return tuple(op for op in read if op not in built.sm_arch)


def _serves(inside: tuple[str, ...], capability: str) -> bool:
    """Whether "90_real" or "80_virtual" code runs on a GPU of a capability.

    >>> _serves(("80_real",), "8.6"), _serves(("86_real",), "8.0"), _serves(("80_virtual",), "9.0")
    (True, False, True)
    """
    wanted = order(capability)
    for name in inside:
        match = re.fullmatch(r"(\d+)(\d)([a-z]?)_(real|virtual)", name)
        if match is None:
            continue
        has, exact = (int(match[1]), int(match[2])), bool(match[3])
        fits = has <= wanted and (match[4] == "virtual" or has[0] == wanted[0])
        if has == wanted or (fits and not exact):
            return True
    return False


CHECKS = (
    ops_torch_version_mismatch,
    ops_cuda_version_mismatch,
    ops_accelerator_mismatch,
    op_without_gpu_code,
    claimed_op_missing,
    op_not_claimed,
    no_kernel_image,
    cpu_isa_illegal_instruction,
    cpu_flags_unknown,
)
