"""Source + request -> the ops to build, and the reason for each one that is left out. Pure."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from dsdoctor.builder.source.op_catalogue import BASE_HEADERS, CUDA_LIBRARIES, known_breakage, need_of
from dsdoctor.builder.toolkit.choose import BASE_LIBRARIES, Needs, lacking
from dsdoctor.core.architectures import only
from dsdoctor.core.build_models import LeftOut, OpFact, Source, ToolkitPlan
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Finding, Fix, Severity, step
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildRequest

DEFAULT = {"cuda": ("cpu_adam", "utils", "fused_adam"), "cpu": ("cpu_adam", "utils")}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an op cannot be built here, and what would change that."""

    because: str
    fix: Fix | None = None


@dataclass(frozen=True, kw_only=True)
class WantedOps:
    """The ops of a request, with those that they require. ``named`` are those the user named: for them a refusal is an error."""

    ops: tuple[OpFact, ...]
    named: frozenset[str]
    because: str
    missing: tuple[LeftOut, ...] = ()


def wanted_ops(source: Source, request: BuildRequest) -> WantedOps:
    """Resolve names ("cpu_adam", "CPU_ADAM", "DS_BUILD_CPU_ADAM", "all"). Raises UsageError for an unknown one."""
    if request.ops == ("all",):
        return WantedOps(ops=source.ops, named=frozenset(), because="--ops all")
    if request.ops is not None and not request.ops_because:
        names = list(dict.fromkeys(_resolve(name, source) for name in request.ops))
        return WantedOps(ops=_with_required(names, source), named=frozenset(names), because="--ops")
    names = list(request.ops or DEFAULT.get(source.accelerator, ("cpu_adam",)))
    absent = tuple(
        LeftOut(op=name, because=f"DeepSpeed {source.version} has no such op for {source.accelerator}", asked=False)
        for name in names
        if source.op(name) is None
    )
    here = [name for name in names if source.op(name) is not None]
    because = request.ops_because or f"the usual set for {source.accelerator}"
    return WantedOps(ops=_with_required(here, source), named=frozenset(here), because=because, missing=absent)


def refusal(fact: OpFact, machine: Machine, source: Source, architectures: tuple[str, ...]) -> Refusal | None:
    """Why this op cannot be built with any toolkit, or None."""
    op = need_of(fact.op)
    cuda = machine.torch.cuda if machine.torch and fact.needs_toolkit else None
    if op.empty:
        return Refusal(because=op.empty)
    broken = known_breakage(op, source.version, cuda)
    if broken:
        release = f" with CUDA {cuda}" if cuda else ""
        return Refusal(because=f"DeepSpeed {source.version}'s {fact.op} cannot be compiled{release}: {broken}")
    for need in op.needs:
        library = machine.library(need.name)
        if library is None or not library.usable:
            return Refusal(because=f"{fact.op} needs {need.what}, which is not here", fix=need.fix)
    standard = _standard(fact.flags)
    if machine.torch and standard is not None and standard < machine.torch.cxx_standard:
        return Refusal(
            because=f"DeepSpeed {source.version} compiles {fact.op} as C++{standard}, torch {machine.torch.version}'s "
            f"headers demand C++{machine.torch.cxx_standard}",
            fix=Fix(
                text="build a DeepSpeed that follows this torch",
                steps=(step("python -m dsdoctor build-wheel --source newest"),),
            ),
        )
    if fact.broken:
        return Refusal(because=f"its builder fails: {fact.broken}")
    if fact.has_device_code and not only(architectures, fact.architectures):
        floor = fact.architectures[0] if fact.architectures else "none"
        return Refusal(
            because=f"{fact.op} takes GPUs from {floor} on, the architectures are {'; '.join(architectures)}"
        )
    return None


def toolkit_refusal(fact: OpFact, machine: Machine, toolkit: ToolkitPlan | None) -> Refusal | None:
    """Why this op cannot be built with the chosen toolkit, or None."""
    if not fact.needs_toolkit:
        return None
    needs = needs_of((fact,), machine)
    if toolkit is None:
        return Refusal(because=f"{fact.op} is a CUDA extension, and there is no toolkit for it")
    missing = lacking(toolkit, machine, sorted(needs.headers), sorted(needs.libraries))
    if missing:
        return Refusal(because=f"{fact.op} needs {', '.join(missing)}, which {toolkit.root} does not have")
    return None


def needs_of(facts: Iterable[OpFact], machine: Machine) -> Needs:
    """CUDA headers and libraries that these ops need together; none when no op is a CUDA extension."""
    headers: set[str] = set()
    libraries: set[str] = set()
    for fact in facts:
        if fact.needs_toolkit:
            headers |= {*BASE_HEADERS, *need_of(fact.op).cuda_headers}
            libraries |= {*BASE_LIBRARIES, *set(fact.libraries).intersection(CUDA_LIBRARIES)}
    driver = machine.library("libcuda")
    if driver is not None and driver.library:
        libraries.discard("cuda")
    return Needs(headers=frozenset(headers), libraries=frozenset(libraries))


def finding_of(op: str, why: Refusal) -> Finding:
    """The finding for an op that was named and cannot be built."""
    return Finding(
        rule="op-cannot-be-built",
        severity=Severity.ERROR,
        title=f"{op} was asked for and cannot be built: {why.because}",
        affects=(op,),
        fix=why.fix,
    )


def _standard(flags: tuple[str, ...]) -> int | None:
    """The C++ standard of an op's flags; the last one counts.

    >>> _standard(("-O3", "-std=c++17"))
    17
    """
    found = [flag[-2:] for flag in flags if re.fullmatch(r"-std=(?:c|gnu)\+\+\d\d", flag)]
    return int(found[-1]) if found else None


def _with_required(names: list[str], source: Source) -> tuple[OpFact, ...]:
    required = [other for name in names for other in need_of(name).requires if source.op(other) is not None]
    facts = (source.op(name) for name in dict.fromkeys([*names, *required]))
    return tuple(fact for fact in facts if fact is not None)


def _resolve(name: str, source: Source) -> str:
    for fact in source.ops:
        short = fact.variable.removeprefix("DS_BUILD_")
        if name in {fact.op, fact.variable, short} or name.upper() == short.upper():
            return fact.op
    names = [fact.op for fact in source.ops]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(names))}"
    raise UsageError(
        f"unknown op {name!r}: DeepSpeed {source.version} has none of that name for {source.accelerator}", hint=meant
    )
