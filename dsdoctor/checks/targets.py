"""Machine -> findings about a built DeepSpeed whose code is for another GPU or another processor than those that are here."""

import re
from collections.abc import Iterator

from dsdoctor.checks.advice import BUILD_WHEEL
from dsdoctor.core import machine as needs
from dsdoctor.core.architectures import lacking_instructions, order, says_nothing
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.machine import Machine


def no_kernel_image(machine: Machine) -> Iterator[Finding]:
    """An op holds no code that a GPU here can run.

    Machine code runs on the same major architecture with the same or a higher minor; PTX on any newer GPU.

    Why it matters: The op fails with "no kernel image is available for execution on the device".

    How to fix it: Build the op for this GPU.

        $ python -m dsdoctor build-wheel --ops NAME --arch "9.0"

    Since: 0.1
    """
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
    """The ops' host code uses instructions that this processor does not have.

    DeepSpeed compiles with -march=native, so a wheel fits processors like the one it was built on. The flags come from
    the manifest, or from what the compiler wrote into each shared object. Names with a plus are gcc's extensions of
    Arm's -march.

    Why it matters: The process ends with SIGILL.

    How to fix it: Build the ops here. Or record this machine, and build elsewhere for what it has.

        $ python -m dsdoctor build-wheel
        $ python -m dsdoctor record FILE
        $ python -m dsdoctor build-wheel --node FILE

    Since: 0.1
    """
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
    """Which processor instructions the ops use is not known: there is no manifest, and no debug information to read.

    Why it matters: Whether the ops run on this processor was not judged; they may end with SIGILL.

    How to fix it: Load every op here, or build them with dsdoctor, which writes a manifest.

        $ python -m dsdoctor verify --installed --load
        $ python -m dsdoctor build-wheel

    Since: 0.1
    """
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


CHECKS = (
    no_kernel_image,
    cpu_isa_illegal_instruction,
    cpu_flags_unknown,
)
