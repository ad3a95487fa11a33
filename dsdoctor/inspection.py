"""The hall of verify and compare: built DeepSpeeds against machines, machines against each other. Runs nothing of them."""

from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.wheel import read_installed, read_wheel
from dsdoctor.checks import BUILT, examine
from dsdoctor.checks.compare import Difference, compare
from dsdoctor.errors import UsageError
from dsdoctor.finding import Finding
from dsdoctor.machine import DeepSpeed, Machine
from dsdoctor.sight import see


@dataclass(frozen=True, kw_only=True)
class Verified:
    """The outcome for a built DeepSpeed: its facts, and what was found against the machine."""

    machine: Machine
    built: DeepSpeed
    findings: tuple[Finding, ...]


def verify(python: str, machine: Path | None, wheel: Path | None) -> Verified:
    """Judge a wheel, or (None) the installed DeepSpeed, against a machine. Raises UsageError for what is no such wheel."""
    sight = see(python, machine, whole=False)
    if wheel is not None:
        built = read_wheel(wheel)
    elif sight.machine.deepspeed is None:
        raise UsageError(
            "no DeepSpeed is installed there", hint="name a wheel, or another environment with --python PATH"
        )
    elif sight.is_here:
        built = read_installed(sight.machine.deepspeed)
    else:
        built = sight.machine.deepspeed
    with_built = replace(sight.machine, deepspeed=built)
    found = examine(with_built, topics=BUILT)
    return Verified(machine=with_built, built=built, findings=tuple(f for topic in found for f in topic.findings))


def differences(files: tuple[Path, ...]) -> tuple[Difference, ...]:
    """What differs between snapshots, which are named after their files."""
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return compare({name: see("", file, whole=True).machine for name, file in zip(names, files, strict=True)})
