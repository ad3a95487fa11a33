"""Machine + Source + BuildRequest -> BuildPlan, every choice with its reason. Pure: the same facts give the same plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from dsdoctor.builder.plan.choices import (
    Architectures,
    choose_architectures,
    choose_jobs,
    choose_local_version,
    explain_accelerator,
    explain_standard,
    fit_architectures,
    many_architectures,
    unused_architectures,
)
from dsdoctor.builder.plan.compiler import choose_compiler
from dsdoctor.builder.plan.environment import caller_findings, environment, prepended, taken_away
from dsdoctor.builder.plan.ops import Refusal, WantedOps, finding_of, needs_of, refusal, toolkit_refusal, wanted_ops
from dsdoctor.builder.plan.preconditions import disk_needed, environment_findings, gap_findings, working_torch
from dsdoctor.builder.plan.processor import choose_processor
from dsdoctor.builder.toolkit.choose import Needs, choose_toolkit
from dsdoctor.builder.toolkit.offers import NOT_ASKED, Offers
from dsdoctor.builder.toolkit.plan_assembly import EVERY_HEADER
from dsdoctor.builder.toolkit.python_headers import choose_headers
from dsdoctor.core.architectures import only
from dsdoctor.core.build_models import BuildPlan, Choice, HeadersPlan, LeftOut, OpFact, OpPlan, Source, ToolkitPlan
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.machine import Compiler, Machine
from dsdoctor.core.requests import BuildRequest

NO_ARCHITECTURES = Architectures(entries=(), because="", asked=False)


@dataclass(frozen=True, kw_only=True)
class _Sifted:
    """The ops that stay, those that are left out, and findings for the left out ones that the user named."""

    facts: tuple[OpFact, ...]
    left_out: tuple[LeftOut, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class ToolkitAdvice:
    """The toolkit that fits this torch, with the compiler and the architectures to try it with."""

    toolkit: ToolkitPlan | None
    compiler: Compiler | None
    architectures: tuple[str, ...]
    choices: tuple[Choice, ...]
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


class _OfSource(TypedDict):
    python: str
    source: str
    source_version: str
    accelerator: str


class _Surroundings(TypedDict):
    env: dict[str, str]
    prepend: dict[str, tuple[str, ...]]
    unset: tuple[str, ...]


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
    first = (_explain_source(source), explain_accelerator(machine, request, accelerator), _explain_ops(ops, wanted))
    last = (processor_choice, *means.choices, jobs_choice, local_choice)
    of_ops = (*possible.findings, *means.findings, *arch_findings, *fitting.findings, *cpu_findings)
    of_request = (*_unused(machine, request, accelerator), *many_architectures(listed, ops))
    disk = disk_needed(ops, means.toolkit)
    return BuildPlan(
        **_of_source(machine, source),
        ops=ops,
        left_out=(*wanted.missing, *possible.left_out, *means.served.left_out, *fitting.left_out),
        architectures=architectures,
        toolkit=means.toolkit,
        headers=means.headers,
        jobs=jobs,
        memory=memory,
        local_version=local,
        **_surroundings(machine, accelerator, means),
        disk=disk,
        processor=processor,
        debug_info=request.debug_info,
        tagged=request.tagged,
        choices=(*first, explain_standard(torch), *arch_choices, *last),
        findings=(*of_ops, *of_request, *_about_the_machine(machine, source, means, disk)),
    )


def _of_source(machine: Machine, source: Source) -> _OfSource:
    """What is built, and by which interpreter."""
    return {
        "python": machine.python.executable if machine.python else "",
        "source": source.asked,
        "source_version": source.version,
        "accelerator": source.accelerator,
    }


def _surroundings(machine: Machine, accelerator: str, means: _Means) -> _Surroundings:
    """The variables that the build sets, puts folders in front of, and takes away."""
    skip = _skip(machine, means.toolkit)
    return {
        "env": environment(accelerator=accelerator, toolkit=means.toolkit, compiler=means.compiler, skip_check=skip),
        "prepend": prepended(machine, means.toolkit, means.headers),
        "unset": taken_away(machine),
    }


def _unused(machine: Machine, request: BuildRequest, accelerator: str) -> tuple[Finding, ...]:
    return unused_architectures(machine, request) if accelerator == "cpu" else ()


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


def _explain_source(source: Source) -> Choice:
    return Choice(
        what="DeepSpeed",
        value=source.version if source.asked == source.version else f"{source.version} ({source.asked})",
        because=source.because or "--source",
    )


def _explain_ops(ops: tuple[OpPlan, ...], wanted: WantedOps) -> Choice:
    return Choice(what="ops", value=", ".join(op.op for op in ops) or "none", because=wanted.because)


def _about_the_machine(machine: Machine, source: Source, means: _Means, disk: int) -> tuple[Finding, ...]:
    callers = caller_findings(machine, source, means.toolkit)
    return (*environment_findings(machine, disk), *callers, *gap_findings(machine))


def plan_toolkit(machine: Machine, request: BuildRequest, cache: str, offers: Offers = NOT_ASKED) -> ToolkitAdvice:
    """A toolkit that serves every CUDA op. Raises ImpossiblePlan for a CPU build of torch."""
    torch = working_torch(machine)
    if torch.cuda is None:
        raise ImpossiblePlan(
            f"torch {torch.version} is a CPU build: no CUDA toolkit belongs to it",
            hint="name the Python of a CUDA build with --python PATH",
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


def _skip(machine: Machine, toolkit: ToolkitPlan | None) -> bool:
    """Whether DS_SKIP_CUDA_CHECK must be set, so that DeepSpeed accepts another minor release of torch's CUDA."""
    # DeepSpeed's own list of minors that it accepts differs from version to version, and lacks 13
    torch = machine.torch
    if toolkit is None or torch is None or torch.cuda is None or toolkit.release == torch.cuda:
        return False
    return toolkit.release.major == torch.cuda.major


def _sift(wanted: WantedOps, facts: tuple[OpFact, ...], refuse: Callable[[OpFact], Refusal | None]) -> _Sifted:
    refused = {fact.op: why for fact in facts if (why := refuse(fact)) is not None}
    return _Sifted(
        facts=tuple(fact for fact in facts if fact.op not in refused),
        left_out=tuple(LeftOut(op=op, because=why.because, asked=op in wanted.named) for op, why in refused.items()),
        findings=tuple(finding_of(op, why) for op, why in refused.items() if op in wanted.named),
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
