"""Machine -> findings about a built DeepSpeed, installed or in a wheel: ops for another torch, or not what was asked for."""

import re
from collections.abc import Iterator

from dsdoctor.core import machine as needs
from dsdoctor.core.architectures import lacking_instructions, order, says_nothing
from dsdoctor.core.deepspeed_install import library_of
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import DeepSpeed, Machine, System
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
    sure = impossible or bool(machine.visible_gpus) or uses == "cpu"
    evidence = [f"{built.location} (accelerator_name={built.accelerator!r})"]
    if without := _without_gpu_code(built, flavoured):
        evidence.append(f"no GPU code in {', '.join(without)}")
    severity = Severity.ERROR if impossible or flavoured or machine.visible_gpus else Severity.WARNING
    affects = (needs.INSTALLED, *built.installed_ops)
    here, ops = _uses(machine, uses, impossible=impossible), ",".join(flavoured or built.installed_ops)
    if flavoured and built.accelerator == "cpu":
        yield book.finding(
            "ops-accelerator-mismatch",
            severity,
            case="cpu-flavour" if sure else "cpu-flavour-no-gpu",
            evidence=evidence,
            affects=affects,
            flavoured=f"{', '.join(flavoured)} {'is' if len(flavoured) == 1 else 'are'}",
            version=built.version,
            here=here,
            accelerator=uses,
            ops=ops,
        )
    else:
        yield book.finding(
            "ops-accelerator-mismatch",
            severity,
            case="" if sure else "no-gpu",
            evidence=evidence,
            affects=affects,
            version=built.version,
            built=built.accelerator,
            here=here,
            accelerator=uses,
            ops=ops,
        )


def _accelerator_meant(machine: Machine) -> str | None:
    """The accelerator that ops are for here: what DS_ACCELERATOR names, else CUDA with a CUDA build of torch; None where open."""
    named = machine.variables.get("DS_ACCELERATOR")
    if named:
        return named if named in {"cuda", "cpu"} else None
    return "cuda" if machine.torch and machine.torch.cuda else None


def _uses(machine: Machine, accelerator: str, *, impossible: bool) -> str:
    """What says which accelerator is used here."""
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


CHECKS = (
    ops_torch_version_mismatch,
    ops_cuda_version_mismatch,
    ops_accelerator_mismatch,
    op_without_gpu_code,
    claimed_op_missing,
    op_not_claimed,
)


# Machine -> findings about the shared libraries that a built DeepSpeed's ops link and this machine does not have.


def shared_library_missing(machine: Machine) -> Iterator[Finding]:
    """An op links a shared library that this machine does not have."""
    built, here = machine.deepspeed, machine.loadable
    if built is None or here is None:
        return
    wanted = {name for names in built.needed.values() for name in names}
    for soname in sorted(wanted - here):
        ops = [op for op, names in built.needed.items() if soname in names]
        linked = f"{', '.join(ops)} {'links' if len(ops) == 1 else 'link'}"
        affects = (needs.INSTALLED, *ops)
        yield (_libaio_missing if soname in OTHER_NAME else _package_missing)(machine, soname, linked, affects)


OTHER_NAME = {"libaio.so.1": "libaio.so.1t64", "libaio.so.1t64": "libaio.so.1"}
"""One library under two names. Debian and Ubuntu renamed it with the change to 64-bit time and kept no link under the old
name; on 64-bit processors the library itself did not change."""


def _package_missing(machine: Machine, soname: str, linked: str, affects: tuple[str, ...]) -> Finding:
    """A library that one package has, libgomp or libcufile."""
    nvidia = soname == "libcufile.so.0"
    release = str(machine.torch.cuda).replace(".", "-") if machine.torch and machine.torch.cuda else "13-0"
    return book.finding(
        "shared-library-missing",
        Severity.ERROR,
        case="cufile" if nvidia else "",
        evidence=[machine.deepspeed.location] if machine.deepspeed else [],
        affects=affects,
        linked=linked,
        soname=soname,
        apt=f"libcufile-{release}" if nvidia else "libgomp1",
        dnf=f"libcufile-{release}" if nvidia else "libgomp",
        conda="nvidia::libcufile" if nvidia else "libgomp",
    )


def _libaio_missing(machine: Machine, soname: str, linked: str, affects: tuple[str, ...]) -> Finding:
    """libaio, under the name that the op links: systems have it under another."""
    system, other = machine.system, OTHER_NAME[soname]
    renamed = _renamed_libaio(system)
    folder = f"/usr/lib/{system.architecture}-linux-gnu" if re.match("Debian|Ubuntu", system.os) else "/usr/lib64"
    evidence = [machine.deepspeed.location] if machine.deepspeed else []
    if other in (machine.loadable or ()):
        return book.finding(
            "shared-library-missing",
            Severity.ERROR,
            case="other-name",
            evidence=evidence,
            affects=affects,
            linked=linked,
            soname=soname,
            other=other,
            link=f"{folder}/{soname}",
        )
    return book.finding(
        "shared-library-missing",
        Severity.ERROR,
        case="" if renamed == soname.endswith("t64") else "renamed",
        evidence=evidence,
        affects=affects,
        linked=linked,
        soname=soname,
        apt="libaio1t64" if renamed else "libaio1",
        dnf="libaio",
        conda="libaio",
        other=other,
        link=f"{folder}/{soname}",
    )


def _renamed_libaio(system: System) -> bool:
    """Whether this system's libaio has the new name: Debian from 13, Ubuntu from 24.04 on.

    >>> names = ("Debian GNU/Linux 13 (trixie)", "Ubuntu 24.04.2 LTS", "Ubuntu 22.04.5 LTS", "Debian GNU/Linux trixie/sid")
    >>> [_renamed_libaio(System(architecture="x86_64", os=name)) for name in names]
    [True, True, False, False]
    """
    match = re.match(r"(Debian|Ubuntu)\D*(\d+)", system.os)
    return match is not None and int(match[2]) >= {"Debian": 13, "Ubuntu": 24}[match[1]]


LINKED_CHECKS = (shared_library_missing,)


# Machine -> findings about a built DeepSpeed whose code is for another GPU or another processor than those that are here.


def no_kernel_image(machine: Machine) -> Iterator[Finding]:
    """An op holds no code that a GPU here can run."""
    built = machine.deepspeed
    for capability in sorted({gpu.capability for gpu in machine.visible_gpus}) if built else ():
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


TARGET_CHECKS = (
    no_kernel_image,
    cpu_isa_illegal_instruction,
    cpu_flags_unknown,
)
