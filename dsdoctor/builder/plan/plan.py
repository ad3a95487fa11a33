"""The plan of a build: which ops, with which toolkit and compiler, and why. Pure: the same facts give the same plan."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsdoctor.builder.plan.choices import (
    Architectures,
    choose_architectures,
    choose_jobs,
    choose_local_version,
    disk_needed,
    environment_findings,
    explain_accelerator,
    explain_standard,
    fit_architectures,
    gap_findings,
    many_architectures,
    unused_architectures,
    working_torch,
)
from dsdoctor.builder.plan.compiler import choose_compiler, choose_processor
from dsdoctor.builder.plan.environment import caller_findings, environment, prepended, unset_variables
from dsdoctor.builder.source.ops import BASE_HEADERS, CUDA_LIBRARIES, known_breakage, need_of
from dsdoctor.builder.toolkit.choose import BASE_LIBRARIES, Needs, choose_toolkit, lacking
from dsdoctor.builder.toolkit.debian import choose_headers
from dsdoctor.builder.toolkit.parts import EVERY_HEADER, NOT_ASKED, Offers
from dsdoctor.core.architectures import only
from dsdoctor.core.build_models import BuildPlan, Choice, HeadersPlan, LeftOut, OpFact, OpPlan, Source, ToolkitPlan
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.finding import Finding, Severity, has_error
from dsdoctor.core.machine import Compiler, Machine
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.text import nearest
from dsdoctor.rules import book

DEFAULT_OPS = {"cuda": ("cpu_adam", "utils", "fused_adam"), "cpu": ("cpu_adam", "utils")}
NEWER_DEEPSPEED = "deepspeed"
NO_ARCHITECTURES = Architectures(entries=(), because="", asked=False)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why an op cannot be built here, and what would change that."""

    because: str
    remedy: str = ""
    """What would change it: a library, by its name in ``Machine.libraries``, or NEWER_DEEPSPEED."""


@dataclass(frozen=True, kw_only=True)
class WantedOps:
    """The ops of a request, with those that they require. ``named`` are those the user named: for them a refusal is an error."""

    ops: tuple[OpFact, ...]
    named: frozenset[str]
    because: str
    missing: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ToolkitAdvice:
    """The toolkit that fits this torch, with the compiler and the architectures to try it with."""

    toolkit: ToolkitPlan | None
    compiler: Compiler | None
    architectures: tuple[str, ...]
    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class _Sifted:
    """The ops that stay, those that are left out, and findings for the left out ones that the user named."""

    facts: tuple[OpFact, ...]
    left_out: tuple[LeftOut, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class _Means:
    """What the ops are built with, and (``served``) which of them can be built with it."""

    served: _Sifted
    toolkit: ToolkitPlan | None
    compiler: Compiler | None
    headers: HeadersPlan | None
    choices: tuple[Choice, ...]
    findings: tuple[Finding, ...]


def plan_build(
    machine: Machine, source: Source, request: BuildRequest, *, cache: str, offers: Offers = NOT_ASKED
) -> BuildPlan:
    """Decide everything. What is wrong with the machine becomes ERROR findings of the plan; a bad request raises UsageError.
    ``offers`` are what can be fetched of a CUDA that PyPI has no compiler of."""
    torch, accelerator = working_torch(machine), source.accelerator
    wanted = wanted_ops(source, request)
    listed = choose_architectures(machine, request) if accelerator == "cuda" else NO_ARCHITECTURES
    possible = _sift(wanted, wanted.ops, lambda fact: refusal(fact, machine, source, listed.entries))
    means = _means(machine, request, cache, offers, wanted, possible.facts)
    architectures, arch_choices, arch_findings = fit_architectures(listed, means.toolkit)
    fitting = _sift(wanted, means.served.facts, lambda fact: refusal(fact, machine, source, architectures))
    ops = tuple(_op_plan(fact, architectures, wanted) for fact in fitting.facts)
    jobs, memory, jobs_choice = choose_jobs(machine, request, device_code=any(op.device_code for op in ops))
    local, local_choice = choose_local_version(torch, accelerator, request)
    processor, processor_choice, cpu_findings = choose_processor(machine, request, means.compiler)
    choices = (
        Choice(
            what="DeepSpeed",
            value=source.version if source.asked == source.version else f"{source.version} ({source.asked})",
            because=source.because or "--source",
        ),
        explain_accelerator(machine, request, accelerator),
        Choice(what="ops", value=", ".join(op.op for op in ops) or "none", because=wanted.because),
        explain_standard(torch),
        *arch_choices,
        processor_choice,
        *means.choices,
        jobs_choice,
        local_choice,
    )
    disk = disk_needed(ops, means.toolkit)
    findings = (
        *possible.findings,
        *means.findings,
        *arch_findings,
        *fitting.findings,
        *cpu_findings,
        *(unused_architectures(machine, request) if accelerator == "cpu" else ()),
        *many_architectures(listed, ops),
        *environment_findings(machine, disk),
        *caller_findings(machine, source, means.toolkit),
        *gap_findings(machine),
    )
    return BuildPlan(
        python=machine.python.executable if machine.python else "",
        source=source.asked,
        source_version=source.version,
        accelerator=accelerator,
        ops=ops,
        left_out=(*wanted.missing, *possible.left_out, *means.served.left_out, *fitting.left_out),
        architectures=architectures,
        toolkit=means.toolkit,
        headers=means.headers,
        jobs=jobs,
        memory=memory,
        local_version=local,
        env=environment(
            accelerator=accelerator,
            toolkit=means.toolkit,
            compiler=means.compiler,
            skip_check=_skips_cuda_check(machine, means.toolkit),
        ),
        prepend=prepended(machine, means.toolkit, means.headers),
        unset=unset_variables(machine),
        disk=disk,
        processor=processor,
        debug_info=request.debug_info,
        tagged=request.tagged,
        choices=choices,
        findings=findings,
    )


def plan_toolkit(machine: Machine, request: BuildRequest, cache: str, offers: Offers = NOT_ASKED) -> ToolkitAdvice:
    """A toolkit that serves every CUDA op. Raises ImpossiblePlan for a torch that was not built for CUDA."""
    torch = working_torch(machine)
    if torch.cuda is None:
        raise ImpossiblePlan(
            f"torch {torch.version} is {torch.build}: it needs no CUDA toolkit",
            hint="use --python PATH to name the Python of a CUDA build",
        )
    needs = Needs(headers=EVERY_HEADER, libraries=frozenset({"cudart", "curand"}))
    toolkit, choices, findings = choose_toolkit(machine, request, cache, needs, offers)
    architectures, arch_choices, arch_findings = fit_architectures(choose_architectures(machine, request), toolkit)
    compiler, compiler_choices, compiler_findings = choose_compiler(machine, toolkit, device_code=True)
    return ToolkitAdvice(
        toolkit=toolkit,
        compiler=compiler,
        architectures=architectures,
        choices=(*choices, *arch_choices, *compiler_choices),
        findings=(*findings, *arch_findings, *compiler_findings),
    )


def wanted_ops(source: Source, request: BuildRequest) -> WantedOps:
    """Resolve names ("cpu_adam", "CPU_ADAM", "DS_BUILD_CPU_ADAM", "all"). Raises UsageError for an unknown one."""
    if request.ops == ("all",):
        return WantedOps(ops=source.ops, named=frozenset(), because="--ops all")
    if request.ops is not None and not request.ops_because:
        names = list(dict.fromkeys(_resolve(name, source) for name in request.ops))
        return WantedOps(ops=_with_required(names, source), named=frozenset(names), because="--ops")
    names = list(request.ops or DEFAULT_OPS.get(source.accelerator, ("cpu_adam",)))
    unknown = book.phrase("builder", "no-such-op", version=source.version, accelerator=source.accelerator)
    absent = tuple(LeftOut(op=name, because=unknown, asked=False) for name in names if source.op(name) is None)
    here = [name for name in names if source.op(name) is not None]
    because = request.ops_because or book.phrase("builder", "usual-set", accelerator=source.accelerator)
    return WantedOps(ops=_with_required(here, source), named=frozenset(here), because=because, missing=absent)


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


def refusal(fact: OpFact, machine: Machine, source: Source, architectures: tuple[str, ...]) -> Refusal | None:
    """Why this op cannot be built with any toolkit, or None."""
    op = need_of(fact.op)
    cuda = machine.torch.cuda if machine.torch and fact.needs_toolkit else None
    if op.empty:
        return Refusal(because=book.phrase("builder", op.empty))
    broken = known_breakage(op, source.version, cuda)
    if broken:
        name = "op-broken-with-cuda" if cuda else "op-broken"
        return Refusal(
            because=book.phrase("builder", name, version=source.version, op=fact.op, cuda=str(cuda), why=broken)
        )
    for need in op.needs:
        library = machine.library(need.name)
        if library is None or not library.usable:
            because = book.phrase("builder", "library-missing", op=fact.op, what=need.what)
            return Refusal(because=because, remedy=need.name)
    standard = _standard(fact.flags)
    if machine.torch and standard is not None and standard < machine.torch.cxx_standard:
        return Refusal(
            because=book.phrase(
                "builder",
                "standard-too-old",
                version=source.version,
                op=fact.op,
                standard=standard,
                torch=machine.torch.version,
                required=machine.torch.cxx_standard,
            ),
            remedy=NEWER_DEEPSPEED,
        )
    if fact.broken:
        return Refusal(because=book.phrase("builder", "builder-fails", error=fact.broken))
    if fact.has_device_code and not only(architectures, fact.architectures):
        floor = fact.architectures[0] if fact.architectures else "none"
        listed = "; ".join(architectures)
        return Refusal(because=book.phrase("builder", "gpus-too-old", op=fact.op, floor=floor, architectures=listed))
    return None


def toolkit_refusal(fact: OpFact, machine: Machine, toolkit: ToolkitPlan | None) -> Refusal | None:
    """Why this op cannot be built with the chosen toolkit, or None."""
    if not fact.needs_toolkit:
        return None
    needs = needs_of((fact,), machine)
    if toolkit is None:
        return Refusal(because=book.phrase("builder", "toolkit-missing", op=fact.op))
    missing = lacking(toolkit, machine, sorted(needs.headers), sorted(needs.libraries))
    if missing:
        return Refusal(because=book.phrase("builder", "toolkit-lacks", op=fact.op, missing=missing, root=toolkit.root))
    return None


def _means(
    machine: Machine,
    request: BuildRequest,
    cache: str,
    offers: Offers,
    wanted: WantedOps,
    facts: tuple[OpFact, ...],
) -> _Means:
    """Choose toolkit, host compiler and Python's headers, and the ops that can be built with them."""
    needs = needs_of(facts, machine)
    toolkit, toolkit_choices, toolkit_findings = (
        choose_toolkit(machine, request, cache, needs, offers) if needs.headers else (None, (), ())
    )
    served = _sift(wanted, facts, lambda fact: toolkit_refusal(fact, machine, toolkit))
    device_code = any(fact.has_device_code for fact in served.facts)
    compiler, compiler_choices, compiler_findings = choose_compiler(machine, toolkit, device_code=device_code)
    headers, header_choices, header_findings = choose_headers(machine, request, cache)
    # without any toolkit the finding about that says why; repeating it for each op would bury it
    op_findings = () if has_error(toolkit_findings) else served.findings
    return _Means(
        served=served,
        toolkit=toolkit,
        compiler=compiler,
        headers=headers,
        choices=(*toolkit_choices, *compiler_choices, *header_choices),
        findings=(*toolkit_findings, *op_findings, *compiler_findings, *header_findings),
    )


def _sift(wanted: WantedOps, facts: tuple[OpFact, ...], refuse: Callable[[OpFact], Refusal | None]) -> _Sifted:
    refused = {fact.op: why for fact in facts if (why := refuse(fact)) is not None}
    return _Sifted(
        facts=tuple(fact for fact in facts if fact.op not in refused),
        left_out=tuple(LeftOut(op=op, because=why.because, asked=op in wanted.named) for op, why in refused.items()),
        findings=tuple(_refused(op, why) for op, why in refused.items() if op in wanted.named),
    )


def _refused(op: str, why: Refusal) -> Finding:
    """The finding for an op that was named and cannot be built."""
    return book.finding(
        "op-cannot-be-built",
        Severity.ERROR,
        case="libaio"
        if why.remedy == "libaio"
        else "cutlass"
        if why.remedy == "cutlass"
        else "deepspeed-kernels"
        if why.remedy == "dskernels"
        else "oneccl"
        if why.remedy == "oneccl"
        else "newer-deepspeed"
        if why.remedy == NEWER_DEEPSPEED
        else "refused",
        affects=(op,),
        op=op,
        because=why.because,
    )


def _op_plan(fact: OpFact, architectures: tuple[str, ...], wanted: WantedOps) -> OpPlan:
    return OpPlan(
        op=fact.op,
        variable=fact.variable,
        module=fact.module,
        sources=fact.sources,
        architectures=only(architectures, fact.architectures) if fact.needs_toolkit else (),
        device_code=fact.has_device_code and fact.needs_toolkit,
        asked=not wanted.named or fact.op in wanted.named,
    )


def _skips_cuda_check(machine: Machine, toolkit: ToolkitPlan | None) -> bool:
    """Whether DS_SKIP_CUDA_CHECK must be set, so that DeepSpeed accepts another minor release of torch's CUDA."""
    # DeepSpeed's own list of minors that it accepts differs from version to version, and lacks 13
    torch = machine.torch
    if toolkit is None or torch is None or torch.cuda is None or toolkit.release == torch.cuda:
        return False
    return toolkit.release.major == torch.cuda.major


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
    near = nearest(name, names, min_likeness=0.5)
    meant = f"did you mean {near}?" if near else f"it has {', '.join(sorted(names))}"
    unknown = book.phrase("builder", "no-such-op", version=source.version, accelerator=source.accelerator)
    raise UsageError(f"unknown op {name!r}: {unknown}", hint=meant)
