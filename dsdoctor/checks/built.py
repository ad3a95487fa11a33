"""Machine -> findings about a built DeepSpeed, installed or in a wheel: ops for another torch, or not what was asked for."""

import re
from collections.abc import Iterator

from dsdoctor.checks.advice import BUILD_WHEEL, OR_BUILD_WHEEL
from dsdoctor.core import machine as needs
from dsdoctor.core.architectures import lacking_instructions, order, says_nothing
from dsdoctor.core.deepspeed_install import library_of
from dsdoctor.core.finding import Finding, Fix, Severity, Step, instead, step
from dsdoctor.core.machine import DeepSpeed, Machine, System
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
    """The ops were built with another torch than the one that is here."""
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
    """The ops were built with another CUDA release than torch's."""
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
    """An op that computes on the GPU holds no GPU code, although DeepSpeed says that it was built for CUDA."""
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
    """DeepSpeed says that an op is installed, and its shared object is not there."""
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
    """A shared object is there and DeepSpeed does not say that its op is installed."""
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


# Machine -> findings about the shared libraries that a built DeepSpeed's ops link and this machine does not have.


def shared_library_missing(machine: Machine) -> Iterator[Finding]:
    """An op links a shared library that this machine does not have."""
    built, here = machine.deepspeed, machine.loadable
    if built is None or here is None:
        return
    wanted = {name for names in built.needed.values() for name in names}
    for soname in sorted(wanted - here):
        ops = [op for op, names in built.needed.items() if soname in names]
        text, steps = _how_to_get(soname, machine, here)
        yield Finding.error(
            "shared-library-missing",
            f"{', '.join(ops)} {'links' if len(ops) == 1 else 'link'} {soname}, which this machine does not have",
            evidence=[built.location],
            affects=(needs.INSTALLED, *ops),
            fix=text,
            steps=steps,
        )


OTHER_NAME = {"libaio.so.1": "libaio.so.1t64", "libaio.so.1t64": "libaio.so.1"}
"""One library under two names. Debian and Ubuntu renamed it with the change to 64-bit time and kept no link under the old
name; on 64-bit processors the library itself did not change."""


def _how_to_get(soname: str, machine: Machine, here: frozenset[str]) -> tuple[str, tuple[Step, ...]]:
    """How to get a missing library: a sentence, and steps for its packages."""
    if soname in OTHER_NAME:
        return _how_to_get_libaio(soname, machine.system, here)
    if soname == "libcufile.so.0":
        release = str(machine.torch.cuda).replace(".", "-") if machine.torch and machine.torch.cuda else "13-0"
        package = f"libcufile-{release}"
        return "install it, from NVIDIA's repository", _install(package, package, "nvidia::libcufile")
    return "install it", _install("libgomp1", "libgomp", "libgomp")


def _how_to_get_libaio(soname: str, system: System, here: frozenset[str]) -> tuple[str, tuple[Step, ...]]:
    """How to get libaio under the name that the op links."""
    other, renamed = OTHER_NAME[soname], _renamed_libaio(system)
    folder = f"/usr/lib/{system.architecture}-linux-gnu" if re.match("Debian|Ubuntu", system.os) else "/usr/lib64"
    link = step("sudo ln -s {other} {link}", other=other, link=f"{folder}/{soname}")
    if other in here:
        return f"{other} is here, the same library under another name: give it this one too, or build the ops here", (
            link,
            OR_BUILD_WHEEL,
        )
    install = _install("libaio1t64" if renamed else "libaio1", "libaio", "libaio")
    if renamed == soname.endswith("t64"):
        return "install it", install
    return f"install it; here it is called {other}, so give it this name too", (*install, link)


def _install(apt: str, dnf: str, conda: str) -> tuple[Step, ...]:
    return (
        step("sudo apt-get install {package}", package=apt),
        instead("sudo dnf install {package}", package=dnf),
        instead("conda install {package}", package=conda),
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
            yield Finding.error(
                "no-kernel-image",
                f"a GPU here has capability {capability}, and {', '.join(lost)} hold code for sm_{', sm_'.join(inside)} only",
                evidence=[built.location],
                affects=(needs.INSTALLED, *lost),
                fix="build them for this GPU",
                steps=(
                    step(
                        "python -m dsdoctor build-wheel --ops {ops} --arch {capability}",
                        ops=",".join(lost),
                        capability=capability,
                    ),
                ),
            )


def cpu_isa_illegal_instruction(machine: Machine) -> Iterator[Finding]:
    """The ops' host code uses instructions that this processor does not have."""
    built = machine.deepspeed
    if not built or not machine.system.cpu_flags:
        return
    lost = lacking_instructions(built.cpu_flags, machine.system.cpu_flags)
    if lost:
        yield Finding.error(
            "cpu-isa-illegal-instruction",
            f"DeepSpeed {built.version}'s ops were compiled with {', '.join(lost[:6])}, which this processor does not have",
            evidence=[
                f"processor: {machine.system.cpu_model or 'unknown'}",
                *(f for f in built.cpu_flags if f.startswith(("-march=", "-mcpu="))),
            ],
            affects=(needs.INSTALLED, *built.installed_ops),
            fix="build them here, or elsewhere with build-wheel --node FILE, where FILE is from dsdoctor record FILE here",
            steps=(BUILD_WHEEL,),
        )


def cpu_flags_unknown(machine: Machine) -> Iterator[Finding]:
    """Which processor instructions the ops use is not known: there is no manifest, and no debug information to read."""
    built = machine.deepspeed
    if built and built.told_by != "record" and built.installed_ops and says_nothing(built.cpu_flags):
        yield Finding.note(
            "cpu-flags-unknown",
            f"{built.location} does not say for which processor its ops were compiled, so that was not judged",
        )


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
