"""The op table: which ops work in the current environment, and which build-wheel can build. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dsdoctor.builder.plan.plan import DEFAULT_OPS, needs_of, plan_build, refusal, wanted_ops
from dsdoctor.builder.source.ops import need_of
from dsdoctor.builder.toolkit.parts import NOT_ASKED, Offers
from dsdoctor.core import machine as needs
from dsdoctor.core.architectures import numeric, parse_architectures, plain
from dsdoctor.core.build_models import OpFact, Source
from dsdoctor.core.errors import DoctorError, UsageError
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildRequest
from dsdoctor.rules import book

INSTALLED, BUILDS, CANNOT = "installed", "builds", "cannot"
ASKED, USUAL = "asked for", "of the usual set"
IMPOSSIBLE = "the whole plan"
NOT_THE_COMPILERS = "accelerator-autodetect-cpu"
"""The rule that holds even where the compiler accepts the op: DeepSpeed would not try to build it."""

COMPILES_ITS_OWN = "ops-accelerator-mismatch"
"""The one problem of an installed op at which DeepSpeed compiles it at run time; at any other its loader stops."""


@dataclass(frozen=True, kw_only=True)
class OpVerdict:
    """The verdicts on one op, each with its reason where there is one.

    ``verdict`` is "installed", "builds" or "cannot": what pip or the run-time loader would get in this environment as it is.
    ``mended`` is "builds" or "cannot": what build-wheel would get.
    """

    op: str
    verdict: str
    because: str | None
    mended: str
    mended_because: str | None = None
    needed: str = ""
    """Why it must work: it was asked for, is installed, or is of the usual set; "" where nobody said that it must."""
    placeholder: bool = False
    """It has a name in DeepSpeed and no source."""


@dataclass(frozen=True, kw_only=True)
class OpTable:
    """The verdicts, and the findings: each with the ops that it affects, and a severity that depends on them."""

    ops: tuple[OpVerdict, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True)
class _OpFinding:
    """A check's finding whose ``affects`` names ops; ``needs`` is what the check itself put there (see ``core.needs``)."""

    finding: Finding
    needs: frozenset[str]

    @property
    def about_installed(self) -> bool:
        """Whether it is about ops that are built already."""
        return needs.INSTALLED in self.needs

    @property
    def at_run_time(self) -> bool:
        """Whether it affects ops that are built already."""
        return self.about_installed or needs.TORCH in self.needs


def judge_ops(
    machine: Machine,
    source: Source,
    request: BuildRequest,
    findings: Iterable[Finding],
    *,
    cache: str,
    compiled: Mapping[str, str | None] | None = None,
    offers: Offers = NOT_ASKED,
) -> OpTable:
    """Judge every op of a DeepSpeed. Raises UsageError for an unknown op in the request.

    ``findings`` are those of the checks, whose ``affects`` may hold needs. ``compiled`` is what the compiler answered (--deep):
    None for an op that passed, else its error; for an op that is not in it the compiler was not asked. ``offers`` are what can be
    fetched of a CUDA that PyPI has no compiler of.
    """
    asked = _asked(source, request)
    wants = {fact.op: requirements(fact, machine) | {fact.op} for fact in source.ops}
    op_findings = tuple(_in_ops(finding, wants) for finding in findings)
    build_obstacles = _build_obstacles(machine, source, request, cache, offers)
    needed = dict.fromkeys(asked, ASKED) or _needed_by_default(machine, source)
    judged = [
        _verdict(fact, machine, source, op_findings, build_obstacles[fact.op], compiled or {}) for fact in source.ops
    ]
    ops = tuple(replace(op, needed=needed.get(op.op, ""), placeholder=bool(need_of(op.op).empty)) for op, _ in judged)
    explained = {op.op for op, is_explained in judged if is_explained}
    missed = frozenset(op.op for op in ops if op.verdict == CANNOT and op.needed)
    cannot = frozenset(op.op for op in ops if op.verdict == CANNOT)
    weighed = tuple(found.finding if found.about_installed else _weighed(found, missed, asked) for found in op_findings)
    refused = tuple(_refused(op) for op in ops if op.op in (asked & cannot) - explained)
    return OpTable(ops=ops, findings=weighed + refused)


def requirements(fact: OpFact, machine: Machine) -> frozenset[str]:
    """What an op needs, as names of ``dsdoctor.core.machine``."""
    wants = {needs.TORCH, needs.COMPILER, needs.PYTHON_HEADERS, *(need.name for need in need_of(fact.op).needs)}
    if fact.needs_toolkit:
        of_toolkit = needs_of((fact,), machine)
        wants |= {needs.CUDA, *of_toolkit.headers, *(needs.library(name) for name in of_toolkit.libraries)}
    if fact.needs_toolkit and fact.has_device_code:
        wants.add(needs.DEVICE_CODE)
    return frozenset(wants)


def without_needs(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings where no ops are known, so that what they affect is not known either."""
    return tuple(replace(finding, affects=()) for finding in findings)


def _asked(source: Source, request: BuildRequest) -> frozenset[str]:
    """The ops that must work: those that were named; "all" names every one that has source files."""
    if request.ops == ("all",):
        return frozenset(fact.op for fact in source.ops if fact.sources)
    return frozenset(wanted_ops(source, request).named) if request.ops else frozenset()


def _needed_by_default(machine: Machine, source: Source) -> dict[str, str]:
    """The ops that decide the severity of findings when the user asked for none, and why: those installed, else the usual set."""
    installed = machine.deepspeed.installed_ops if machine.deepspeed else ()
    if installed:
        return dict.fromkeys(installed, INSTALLED)
    return dict.fromkeys(DEFAULT_OPS.get(source.accelerator, ()), USUAL)


def _in_ops(finding: Finding, wants: Mapping[str, frozenset[str]]) -> _OpFinding:
    """Replace the needs in a finding's ``affects`` by the ops that have those needs."""
    hindered = tuple(op for op, wanted in wants.items() if wanted.intersection(finding.affects))
    return _OpFinding(finding=replace(finding, affects=hindered), needs=frozenset(finding.affects))


def _verdict(
    fact: OpFact,
    machine: Machine,
    source: Source,
    op_findings: tuple[_OpFinding, ...],
    build_obstacle: str | None,
    compiled: Mapping[str, str | None],
) -> tuple[OpVerdict, bool]:
    """The verdict, and whether a finding is its reason."""
    hindering = [found for found in op_findings if fact.op in found.finding.affects]
    installed = machine.deepspeed is not None and fact.op in machine.deepspeed.installed_ops
    at_run_time = (found.finding for found in hindering if installed and found.at_run_time)
    spoils = next((finding for finding in at_run_time if _is_error(finding)), None)
    reason: Finding | str | None = spoils
    if installed and spoils is None:
        verdict = INSTALLED
    elif spoils is not None and spoils.rule != COMPILES_ITS_OWN:
        verdict = CANNOT
    else:
        obstacle = compiled.get(fact.op) or _obstacle(fact, machine, source, hindering, tried=fact.op in compiled)
        verdict, reason = CANNOT if obstacle else BUILDS, obstacle or spoils
    op = OpVerdict(
        op=fact.op,
        verdict=verdict,
        because=reason.title if isinstance(reason, Finding) else reason,
        mended=CANNOT if build_obstacle else BUILDS,
        mended_because=build_obstacle,
    )
    return op, isinstance(reason, Finding)


def _obstacle(
    fact: OpFact, machine: Machine, source: Source, hindering: list[_OpFinding], *, tried: bool
) -> Finding | str | None:
    """What pip or the run-time loader would meet first. ``tried``: the compiler was asked, so its answer replaces the findings'."""
    torch = machine.torch
    if fact.needs_toolkit and torch is not None and torch.cuda is None:
        return book.phrase("builder", "torch-without-cuda", torch=torch.version, build=torch.build)
    building = [found.finding for found in hindering if not found.about_installed]
    building = [finding for finding in building if not tried or finding.rule == NOT_THE_COMPILERS]
    if building:
        return min(building, key=lambda finding: not _is_error(finding))
    why = refusal(fact, machine, source, _architectures(machine) or fact.architectures or ())
    return why.because if why else None


def _architectures(machine: Machine) -> tuple[str, ...]:
    """The architectures that ops would be compiled for in this environment as it is."""
    text = machine.variables.get("TORCH_CUDA_ARCH_LIST", "").strip()
    try:
        listed = parse_architectures(text) if text else ()
    except UsageError:
        listed = ()
    return tuple(map(plain, listed)) or numeric([gpu.capability for gpu in machine.visible_gpus])


def _build_obstacles(
    machine: Machine, source: Source, request: BuildRequest, cache: str, offers: Offers
) -> dict[str, str | None]:
    """For every op why build-wheel would not get it, None where it would."""
    everything = replace(
        request, ops=("all",), ops_because="", arch=request.arch or _substitute_architecture(machine, request)
    )
    whole = _left_out(machine, source, everything, cache, offers)
    rest = whole
    if IMPOSSIBLE in whole:
        # where no toolkit can be had, the ops that need none can still be built
        host_only = replace(source, ops=tuple(fact for fact in source.ops if not fact.needs_toolkit))
        rest = _left_out(machine, host_only, everything, cache, offers)

    def why(fact: OpFact) -> str | None:
        left_out = whole if fact.needs_toolkit else rest
        return left_out.get(fact.op) or left_out.get(IMPOSSIBLE)

    return {fact.op: why(fact) for fact in source.ops}


def _substitute_architecture(machine: Machine, request: BuildRequest) -> str | None:
    """An architecture that every nvcc since 11.0 takes, where none is known because torch was not loaded: build-wheel loads it."""
    torch = machine.torch
    known = torch is None or torch.arch_list or torch.capabilities or machine.gpus or request.nodes
    return None if known or machine.variables.get("TORCH_CUDA_ARCH_LIST", "").strip() else "8.0"


def _left_out(
    machine: Machine, source: Source, request: BuildRequest, cache: str, offers: Offers
) -> dict[str, str | None]:
    """The ops that a plan leaves out and why; under IMPOSSIBLE what makes the whole plan impossible."""
    torch = machine.torch
    if torch is not None and torch.cuda is None and any(fact.needs_toolkit for fact in source.ops):
        return {IMPOSSIBLE: f"torch {torch.version} is {torch.build}"}
    try:
        plan = plan_build(machine, source, request, cache=cache, offers=offers)
    except DoctorError as error:
        return {IMPOSSIBLE: error.message}
    left_out: dict[str, str | None] = {left.op: left.because for left in plan.left_out}
    errors = [finding.title for finding in plan.findings if finding.severity is Severity.ERROR]
    if errors:
        left_out[IMPOSSIBLE] = errors[0]
    return left_out


def _weighed(found: _OpFinding, missed: frozenset[str], asked: frozenset[str]) -> Finding:
    """A finding about building, with the severity that follows from the ops that it hinders.

    ``missed`` are the ops that matter and cannot be had. A finding that hinders one the user asked for is an ERROR; one that
    hinders another of them keeps its severity. One that hinders none of them becomes a NOTE; a WARNING, if it was an ERROR that
    affects other ops and some op is missed. A finding that by its kind affects no ops keeps its severity.
    """
    finding = found.finding
    if not found.needs:
        return finding
    hindered = missed.intersection(finding.affects)
    if hindered & asked:
        return replace(finding, severity=Severity.ERROR)
    if hindered:
        return finding
    lowered = missed and finding.affects and _is_error(finding)
    return replace(finding, severity=Severity.WARNING if lowered else Severity.NOTE)


def _refused(op: OpVerdict) -> Finding:
    if op.mended == BUILDS:
        return book.finding(
            "op-cannot-be-built", Severity.ERROR, case="here", affects=[op.op], op=op.op, because=op.because
        )
    return book.finding(
        "op-cannot-be-built",
        Severity.ERROR,
        case="nor-by-build-wheel",
        affects=[op.op],
        op=op.op,
        because=op.because,
        mended_because=op.mended_because,
    )


def _is_error(finding: Finding) -> bool:
    return finding.severity is Severity.ERROR
