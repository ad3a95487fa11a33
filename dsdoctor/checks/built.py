"""Machine -> findings about a built DeepSpeed, installed or in a wheel: ops for another torch, or not what was asked for."""

from collections.abc import Iterator

from dsdoctor.checks.advice import BUILD_WHEEL
from dsdoctor.core import machine as needs
from dsdoctor.core.deepspeed_install import library_of
from dsdoctor.core.finding import Finding, Fix, Severity, instead, step
from dsdoctor.core.machine import DeepSpeed, Machine
from dsdoctor.core.text import and_more

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
    """The ops were built with another torch than the one that is here.

    torch's C++ interface changes with each minor, so a wheel serves exactly one.

    Why it matters: DeepSpeed's loader compares major and minor and refuses the ops ("PyTorch version mismatch!").

    How to fix it: Build them for this torch, or install the torch they were built with.

        $ python -m dsdoctor build-wheel

    Since: 0.1
    """
    built, torch = machine.deepspeed, machine.torch
    if built and torch and built.torch and built.installed_ops and built.torch != torch.minor:
        yield Finding.error(
            "ops-torch-version-mismatch",
            f"DeepSpeed {built.version}'s ops were built with torch {built.torch}, torch {torch.version} is installed",
            evidence=[built.location, torch.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            fix=f"build them for torch {torch.minor}, or install torch {built.torch}",
            steps=(BUILD_WHEEL,),
        )


def ops_cuda_version_mismatch(machine: Machine) -> Iterator[Finding]:
    """The ops were built with another CUDA release than torch's.

    Why it matters: DeepSpeed's loader compares major and minor of both and refuses the ops ("PyTorch CUDA version
    mismatch!").

    How to fix it: Build them with the CUDA release of this torch.

        $ python -m dsdoctor build-wheel

    Since: 0.1
    """
    built, torch = machine.deepspeed, machine.torch
    if not built or not torch or not built.cuda or not torch.cuda or not built.installed_ops:
        return
    if built.accelerator != "cpu" and built.cuda != str(torch.cuda):
        yield Finding.error(
            "ops-cuda-version-mismatch",
            f"DeepSpeed {built.version}'s ops were built with CUDA {built.cuda}, torch {torch.version} with CUDA {torch.cuda}",
            evidence=[built.location, torch.location],
            affects=(needs.INSTALLED, *built.installed_ops),
            fix=f"build them with CUDA {torch.cuda}",
            steps=(BUILD_WHEEL,),
        )


def ops_accelerator_mismatch(machine: Machine) -> Iterator[Finding]:
    """The ops were built for another accelerator than the one they are for.

    They are for the one that DS_ACCELERATOR names, else for CUDA with a CUDA build of torch. A build on a machine without
    a GPU chooses cpu and does not say so: DS_BUILD_FUSED_ADAM=1 then compiles the CPU flavour of fused_adam, which has the
    same name and no GPU code.

    Why it matters: On a GPU machine DeepSpeed ignores ops that were built for the CPU accelerator and compiles its own
    at run time. With a CPU torch it cannot load those built for CUDA.

    How to fix it: Build them for the accelerator that is used. Where a CPU is meant although torch is built for CUDA, say so.

        $ python -m dsdoctor build-wheel --accelerator cuda
        $ export DS_ACCELERATOR=cpu

    Since: 0.1
    """
    built, torch = machine.deepspeed, machine.torch
    if not built or not torch or not built.accelerator or not built.installed_ops:
        return
    impossible = built.accelerator == "cuda" and torch.cuda is None and torch.hip is None
    uses = "cpu" if impossible else _accelerator_meant(machine)
    if uses is None or uses == built.accelerator:
        return
    flavoured = tuple(op for op in GPU_OPS if op in built.installed_ops) if uses == "cuda" else ()
    yield Finding(
        rule="ops-accelerator-mismatch",
        severity=Severity.ERROR if impossible or flavoured or machine.visible_gpus else Severity.WARNING,
        title=_flavour(machine, built, flavoured, uses, impossible=impossible),
        evidence=(f"{built.location} (accelerator_name={built.accelerator!r})", *_without_gpu_code(built, flavoured)),
        affects=(needs.INSTALLED, *built.installed_ops),
        fix=_built_for(uses, flavoured or built.installed_ops, sure=impossible or bool(machine.visible_gpus)),
    )


def _built_for(accelerator: str, ops: tuple[str, ...], *, sure: bool) -> Fix:
    """Build for the accelerator; where no GPU tells that it is meant (``sure``), it may be the other that is."""
    build = step(
        "python -m dsdoctor build-wheel --accelerator {accelerator} --ops {ops}",
        accelerator=accelerator,
        ops=",".join(ops),
    )
    if sure or accelerator == "cpu":
        return Fix(text="build them for the accelerator that is used", steps=(build,))
    text = "build them for the GPU; where a CPU is meant although torch is built for CUDA, say so"
    return Fix(text=text, steps=(build, instead("export DS_ACCELERATOR=cpu")))


def _accelerator_meant(machine: Machine) -> str | None:
    """The accelerator that ops are for here: what DS_ACCELERATOR names, else CUDA with a CUDA build of torch; None where open."""
    named = machine.variables.get("DS_ACCELERATOR")
    if named:
        return named if named in {"cuda", "cpu"} else None
    return "cuda" if machine.torch and machine.torch.cuda else None


def _flavour(machine: Machine, built: DeepSpeed, flavoured: tuple[str, ...], uses: str, *, impossible: bool) -> str:
    """What clashes: the accelerator of the build, and what it is for."""
    version = machine.torch.version if machine.torch else ""
    if impossible:
        here = f"torch {version} is a CPU build"
    elif machine.variables.get("DS_ACCELERATOR"):
        here = f"DS_ACCELERATOR={uses}"
    else:
        here = f"torch {version} is built for CUDA{'' if machine.visible_gpus else ', and no GPU is visible here'}"
    if flavoured and built.accelerator == "cpu":
        flavour = "is the CPU flavour" if len(flavoured) == 1 else "are the CPU flavour"
        return f"{', '.join(flavoured)} {flavour}: DeepSpeed {built.version}'s ops were built for cpu; {here}"
    return f"DeepSpeed {built.version}'s ops were built for {built.accelerator}; {here}"


def _without_gpu_code(built: DeepSpeed, ops: tuple[str, ...]) -> tuple[str, ...]:
    """What the shared objects themselves show, where they were read."""
    if built.present_ops is None or built.told_by == "record":
        return ()
    # of a damaged object nothing is known; op-unreadable tells it
    read = [op for op in ops if op in built.present_ops and library_of(op, built.unreadable) is None]
    without = [op for op in read if op not in built.sm_arch]
    return (f"no GPU code in {', '.join(without)}",) if without else ()


def op_without_gpu_code(machine: Machine) -> Iterator[Finding]:
    """An op that computes on the GPU holds no GPU code, although DeepSpeed says that it was built for CUDA.

    The shared object is the CPU flavour of the op, of another build, or was stripped of its GPU code.

    Why it matters: DeepSpeed takes the record's word and loads it; the first step fails on tensors of the GPU.

    How to fix it: Build the op again.

        $ python -m dsdoctor build-wheel --accelerator cuda --ops NAME

    Since: 0.1
    """
    built = machine.deepspeed
    if built is None or built.accelerator != "cuda" or not built.cuda:
        return
    for line in _without_gpu_code(built, tuple(op for op in GPU_OPS if op in built.installed_ops)):
        named = tuple(line.removeprefix("no GPU code in ").split(", "))
        yield Finding.error(
            "op-without-gpu-code",
            f"DeepSpeed {built.version} says that it was built for cuda, and there is {line}",
            evidence=[built.location],
            affects=(needs.INSTALLED, *named),
            fix="build them again",
            steps=(step("python -m dsdoctor build-wheel --accelerator cuda --ops {ops}", ops=",".join(named)),),
        )


def claimed_op_missing(machine: Machine) -> Iterator[Finding]:
    """DeepSpeed says that an op is installed, and its shared object is not there.

    The cause is a build that was interrupted, or a wheel that was repacked.

    Why it matters: The loader fails with ModuleNotFoundError.

    How to fix it: Build it again.

        $ python -m dsdoctor build-wheel --ops NAME

    Since: 0.1
    """
    built = machine.deepspeed
    if built and built.present_ops is not None:
        lost = [op for op in built.installed_ops if op not in built.present_ops]
        if lost:
            yield Finding.error(
                "claimed-op-missing",
                f"DeepSpeed {built.version} lists {', '.join(lost)} as installed, and has no shared object of that name",
                evidence=[built.location],
                affects=(needs.INSTALLED, *lost),
                fix="build it again",
                steps=(
                    step(
                        "python -m dsdoctor build-wheel --ops {ops}",
                        ops=",".join(built.installed_ops),
                    ),
                ),
            )


def op_not_claimed(machine: Machine) -> Iterator[Finding]:
    """A shared object is there and DeepSpeed does not say that its op is installed.

    git_version_info_installed.py names the installed ops.

    Why it matters: An op that is not named there is not used, and is compiled at run time all the same.

    How to fix it: Build again, by a build that names what the wheel holds.

        $ python -m dsdoctor build-wheel

    Since: 0.1
    """
    built = machine.deepspeed
    if built and built.unclaimed:
        yield Finding.warning(
            "op-not-claimed",
            f"{and_more(built.unclaimed)} are in {built.location}, and DeepSpeed does not list them as installed: it ignores them",
            fix="build it again, with a build that lists what it holds",
            steps=(BUILD_WHEEL,),
        )


CHECKS = (
    ops_torch_version_mismatch,
    ops_cuda_version_mismatch,
    ops_accelerator_mismatch,
    op_without_gpu_code,
    claimed_op_missing,
    op_not_claimed,
)
