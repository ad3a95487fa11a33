"""Snapshots of machines -> what differs between them, the minority first."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.core.machine import Machine
from dsdoctor.core.text import and_more
from dsdoctor.probe.observe import observe

GIB = 1 << 30
MAX_NAMED_MACHINES = 4


@dataclass(frozen=True, kw_only=True)
class MachineGroup:
    """Machines on which a fact has the same value; ``value`` is None where it is not there."""

    value: str | None
    machines: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FactDifference:
    """A fact that is not the same on all machines; the smallest group comes first."""

    fact: str
    groups: tuple[MachineGroup, ...]


def differences(files: tuple[Path, ...]) -> tuple[FactDifference, ...]:
    """What differs between snapshots, which are named after their files."""
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return compare({name: observe("", file, whole=True).machine for name, file in zip(names, files, strict=True)})


def difference_lines(differences: Iterable[FactDifference], machines: int) -> Iterator[str]:
    """One line for each fact: the machines that differ, then the others."""
    differences = tuple(differences)
    for difference in differences:
        *minorities, majority = difference.groups
        shown = "; ".join(
            f"{and_more(group.machines, MAX_NAMED_MACHINES)}: {group.value or 'not there'}" for group in minorities
        )
        others = f"the other {len(majority.machines)}" if len(majority.machines) > 1 else majority.machines[0]
        yield f"! {difference.fact}: {shown}; {others}: {majority.value or 'not there'}"
    if not differences:
        yield f"✓ no differences between {machines} machines"


def compare(machines: Mapping[str, Machine]) -> tuple[FactDifference, ...]:
    """What differs between named machines."""
    facts_by_machine = {name: dict(facts_of(machine)) for name, machine in machines.items()}
    facts = dict.fromkeys(fact for values in facts_by_machine.values() for fact in values)
    found = []
    for fact in facts:
        names_by_value: dict[str | None, list[str]] = defaultdict(list)
        for name, values in facts_by_machine.items():
            names_by_value[values.get(fact)].append(name)
        if len(names_by_value) > 1:
            groups = (MachineGroup(value=value, machines=tuple(names)) for value, names in names_by_value.items())
            found.append(FactDifference(fact=fact, groups=tuple(sorted(groups, key=lambda group: len(group.machines)))))
    return tuple(found)


def facts_of(machine: Machine) -> Iterator[tuple[str, str]]:
    """The facts worth comparing, each as text. Those that always differ (free disk) are left out."""
    yield from _software(machine)
    yield from _hardware(machine)
    for toolkit in machine.toolkits:
        if toolkit.nvcc:
            yield f"CUDA toolkit {toolkit.root}", toolkit.version or "unknown"
    for compiler in machine.compilers:
        yield f"compiler {compiler.path}", f"{compiler.kind} {'.'.join(map(str, compiler.version))}"
    for library in machine.libraries:
        yield library.name, "usable" if library.usable else "without its header"
    for name, value in machine.variables.items():
        yield name, value
    for name, version in (machine.python.packages if machine.python else {}).items():
        if name not in {"torch", "deepspeed"}:
            yield f"package {name}", version
    for gap in machine.gaps:
        yield f"unanswered: {gap.question}", gap.reason


def _software(machine: Machine) -> Iterator[tuple[str, str]]:
    python, torch, deepspeed, driver = machine.python, machine.torch, machine.deepspeed, machine.driver
    if python:
        yield "Python", python.version
    if torch:
        yield "torch", torch.version
        yield "CUDA that torch was built with", str(torch.cuda or "none")
        yield "NCCL", torch.nccl or "none"
        yield "CUDA_HOME that torch takes", torch.cuda_home or "none"
    if deepspeed:
        yield "DeepSpeed", deepspeed.version
        yield "installed ops", ", ".join(deepspeed.installed_ops) or "none"
    yield "NVIDIA driver", driver.version if driver else "none"


def _hardware(machine: Machine) -> Iterator[tuple[str, str]]:
    system = machine.system
    yield "GPUs", ", ".join(f"{gpu.name} ({gpu.capability})" for gpu in machine.gpus) or "none"
    yield "system", f"{system.os}, {system.architecture}"
    yield "glibc", system.glibc or "unknown"
    yield "processor", system.cpu_model or "unknown"
    yield "processors", str(system.cpus)
    if system.memory:
        yield "memory", f"{round(system.memory / GIB)} GiB"
    if system.cpu_flags:
        vector = sorted(flag for flag in system.cpu_flags if flag.startswith(("avx", "amx", "asimd", "sve")))
        yield "vector instructions", " ".join(vector) or "none"
