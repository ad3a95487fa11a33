"""Machine + Source + Wish -> BuildPlan, every choice with its reason. Pure: the same facts give the same plan."""

import re
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from dsdoctor.builder.architectures import check_known, numeric, only, parse_architectures
from dsdoctor.builder.compiler_choice import choose_compiler
from dsdoctor.builder.environment import caller_findings, environment, prepended, taken_away
from dsdoctor.builder.nouns import BuildPlan, Choice, LeftOut, OpFact, OpPlan, Source, ToolkitPlan, Wish
from dsdoctor.builder.op_choice import Refusal, Wanted, finding_of, needs_of, refusal, toolkit_refusal, wanted_ops
from dsdoctor.builder.toolkit_choice import MINOR_TOLERANT, PARTS, choose_toolkit
from dsdoctor.errors import ImpossiblePlan, UsageError
from dsdoctor.finding import Finding, Fix, Severity
from dsdoctor.machine import Compiler, Machine, Torch

GIB = 1 << 30
JOB_MEMORY = {True: 5 * GIB // 2, False: 2 * GIB}
"""Memory of one compile job with and without device code: compiles of torch's headers were measured at 1.5 to 2.1 GB."""

BASE_DISK = GIB // 4
OBJECT_DISK = 48 << 20
TOOLKIT_DISK = GIB
NINJA_WITH_JOBSERVER = (1, 13)


@dataclass(frozen=True, kw_only=True)
class _Ops:
    facts: tuple[OpFact, ...]
    left_out: tuple[LeftOut, ...]
    findings: tuple[Finding, ...]


def accelerator_of(machine: Machine, wish: Wish) -> str:
    """DeepSpeed's accelerator for this torch. Raises ImpossiblePlan without a working torch, or with a ROCm one."""
    torch = _working_torch(machine)
    if wish.accelerator == "cuda" and torch.cuda is None:
        raise ImpossiblePlan(
            f"--accelerator cuda was asked for, and torch {torch.version} is a CPU build",
            hint="install a CUDA build of torch: python -m pip install torch",
        )
    if wish.accelerator:
        return wish.accelerator
    return "cuda" if torch.cuda else "cpu"


def plan_build(machine: Machine, source: Source, wish: Wish, *, cache: str) -> BuildPlan:
    """Decide everything. A bad machine shows as ERROR findings of the plan; nonsense in the wish raises UsageError."""
    torch = _working_torch(machine)
    wanted = wanted_ops(source, wish)
    on_cuda = source.accelerator == "cuda"
    architectures, arch_choices = choose_architectures(machine, wish) if on_cuda else ((), ())
    possible = _sift(wanted, {fact.op: refusal(fact, machine, source, architectures) for fact in wanted.ops})
    headers, libraries = needs_of(possible.facts)
    toolkit, toolkit_choices, toolkit_findings = (
        choose_toolkit(machine, wish, cache, headers=headers, libraries=libraries) if headers else (None, (), ())
    )
    served = _sift(wanted, {fact.op: toolkit_refusal(fact, machine, toolkit) for fact in possible.facts}, possible)
    device_code = any(fact.has_device_code for fact in served.facts)
    compiler, compiler_choices, compiler_findings = choose_compiler(machine, toolkit, device_code=device_code)
    jobs, jobs_choice = choose_jobs(machine, wish, device_code=device_code)
    local, local_choice = choose_local_version(torch, source.accelerator, wish)
    skip = toolkit is not None and toolkit.release != torch.cuda and toolkit.release.major not in MINOR_TOLERANT
    ops = tuple(_op_plan(fact, architectures) for fact in served.facts)
    disk = _disk(ops, toolkit)
    return BuildPlan(
        python=machine.python.executable if machine.python else "",
        source=source.asked,
        source_version=source.version,
        accelerator=source.accelerator,
        ops=ops,
        left_out=(*wanted.missing, *possible.left_out, *served.left_out),
        architectures=architectures,
        toolkit=toolkit,
        jobs=jobs,
        use_ninja=_ninja_is_new_enough(machine),
        local_version=local,
        env=environment(accelerator=source.accelerator, toolkit=toolkit, compiler=compiler, skip_cuda_check=skip),
        prepend=prepended(machine, toolkit),
        unset=taken_away(machine),
        disk=disk,
        choices=(
            Choice(what="accelerator", value=source.accelerator, because=_why_accelerator(machine, torch, wish)),
            Choice(what="ops", value=", ".join(op.op for op in ops) or "none", because=wanted.because),
            *arch_choices,
            *toolkit_choices,
            *compiler_choices,
            jobs_choice,
            local_choice,
        ),
        findings=(
            *possible.findings,
            *toolkit_findings,
            *(() if toolkit_findings else served.findings),
            *compiler_findings,
            *_environment_findings(machine, disk),
            *caller_findings(machine, source),
            *_gap_findings(machine),
        ),
    )


def plan_toolkit(
    machine: Machine, wish: Wish, cache: str
) -> tuple[ToolkitPlan | None, Compiler | None, tuple[str, ...], tuple[Finding, ...]]:
    """Toolkit, host compiler and architectures for every CUDA op at once. Raises ImpossiblePlan for a CPU torch."""
    torch = _working_torch(machine)
    if torch.cuda is None:
        raise ImpossiblePlan(
            f"torch {torch.version} is a CPU build: no CUDA toolkit belongs to it",
            hint="name the Python of a CUDA build with --python PATH",
        )
    architectures, _ = choose_architectures(machine, wish)
    headers = frozenset({*PARTS, "nccl.h"})
    toolkit, _, findings = choose_toolkit(machine, wish, cache, headers=headers, libraries=frozenset({"curand"}))
    compiler, _, compiler_findings = choose_compiler(machine, toolkit, device_code=True)
    return toolkit, compiler, architectures, (*findings, *compiler_findings)


def choose_architectures(machine: Machine, wish: Wish) -> tuple[tuple[str, ...], tuple[Choice, ...]]:
    """The GPU architectures: asked for, else the visible GPUs', else every one this torch was built for."""
    torch = _working_torch(machine)
    shell = machine.variables.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if wish.arch is not None or shell:
        asked = parse_architectures(wish.arch if wish.arch is not None else shell)
        check_known(asked, torch.known_architectures)
        because = "--arch" if wish.arch is not None else "TORCH_CUDA_ARCH_LIST in your shell"
    elif torch.capabilities or machine.gpus:
        asked = numeric(torch.capabilities or tuple(gpu.capability for gpu in machine.gpus))
        because = "the GPUs visible here (get_device_capability)"
    else:
        asked = numeric(torch.arch_list)
        because = f"no GPU is visible here: every architecture torch {torch.version} was built for; --arch narrows it"
    return asked, (Choice(what="architectures", value=";".join(asked), because=because),)


def choose_jobs(machine: Machine, wish: Wish, *, device_code: bool) -> tuple[int, Choice]:
    """Compile jobs at once, from processors and memory as the control group limits them."""
    per_job = JOB_MEMORY[device_code]
    if wish.jobs is not None:
        return wish.jobs, Choice(what="jobs", value=str(wish.jobs), because="--jobs")
    memory = machine.system.memory
    by_memory = max(1, memory // per_job) if memory else machine.system.cpus
    jobs = max(1, min(machine.system.cpus, by_memory))
    shown = f"{memory / GIB:.0f} GiB" if memory else "unknown"
    because = f"{machine.system.cpus} processors, {shown} of memory at {per_job / GIB:.1f} GiB a job"
    return jobs, Choice(what="jobs", value=str(jobs), because=because)


def choose_local_version(torch: Torch, accelerator: str, wish: Wish) -> tuple[str, Choice]:
    """The local version segment without its "+", "" for none. Raises UsageError for one that PEP 440 refuses."""
    if wish.local_version is None:
        flavour = f"cu{torch.cuda}" if accelerator == "cuda" else "cpu"
        local, because = f"{flavour}.torch{torch.minor}", "DeepSpeed's loader demands this very torch and CUDA release"
    else:
        local, because = (
            wish.local_version.lstrip("+"),
            "--local-version" if wish.local_version else "--no-local-version",
        )
    try:
        normal = Version(f"0+{local}").local or "" if local else ""
    except InvalidVersion:
        raise UsageError(
            f"local version {local!r} is none: PEP 440 takes letters, digits and dots",
            hint="--local-version cu13.0.torch2.14",
        ) from None
    return normal, Choice(what="local version", value=f"+{normal}" if normal else "none", because=because)


def _working_torch(machine: Machine) -> Torch:
    python = machine.python
    if python is None:
        reason = next((gap.reason for gap in machine.gaps if gap.question.startswith("python")), "it does not answer")
        raise ImpossiblePlan(f"the Python to build for cannot be asked: {reason}", hint="name one with --python PATH")
    pip = f"{python.executable} -m pip install torch"
    if machine.torch is None:
        raise ImpossiblePlan(f"there is no torch in the environment of {python.executable}", hint=pip)
    if machine.torch.broken is not None:
        raise ImpossiblePlan(
            f"torch {machine.torch.version} is installed and cannot be imported: {machine.torch.broken}",
            hint=f"{pip} --force-reinstall",
        )
    if machine.torch.hip is not None:
        raise ImpossiblePlan(
            f"torch {machine.torch.version} is a ROCm build, dsdoctor builds for CUDA and CPU",
            hint="--accelerator cpu builds the host ops",
        )
    return machine.torch


def _sift(wanted: Wanted, refusals: dict[str, Refusal | None], among: _Ops | None = None) -> _Ops:
    facts = among.facts if among else wanted.ops
    refused = {fact.op: why for fact in facts if (why := refusals.get(fact.op)) is not None}
    return _Ops(
        facts=tuple(fact for fact in facts if fact.op not in refused),
        left_out=tuple(LeftOut(op=op, because=why.because, asked=op in wanted.named) for op, why in refused.items()),
        findings=tuple(finding_of(op, why) for op, why in refused.items() if op in wanted.named),
    )


def _op_plan(fact: OpFact, architectures: tuple[str, ...]) -> OpPlan:
    return OpPlan(
        op=fact.op,
        variable=fact.variable,
        module=fact.module,
        sources=fact.sources,
        architectures=only(architectures, fact.architectures) if fact.needs_toolkit else (),
        device_code=fact.has_device_code and fact.needs_toolkit,
    )


def _disk(ops: tuple[OpPlan, ...], toolkit: ToolkitPlan | None) -> int:
    objects = sum(len(op.sources) * OBJECT_DISK for op in ops)
    return BASE_DISK + objects + (TOOLKIT_DISK if toolkit and toolkit.fetch else 0)


def _ninja_is_new_enough(machine: Machine) -> bool:
    match = re.match(r"(\d+)\.(\d+)", machine.system.ninja or "")
    return match is not None and (int(match[1]), int(match[2])) >= NINJA_WITH_JOBSERVER


def _why_accelerator(machine: Machine, torch: Torch, wish: Wish) -> str:
    if wish.accelerator:
        return "--accelerator"
    if torch.cuda is None:
        return f"torch {torch.version} is a CPU build"
    seen = f"{len(machine.gpus)} GPU here" if machine.gpus else "no GPU here; DeepSpeed by itself would choose cpu"
    return f"torch {torch.version} is a CUDA build ({seen})"


def _environment_findings(machine: Machine, disk: int) -> list[Finding]:
    findings = []
    python = machine.python
    assert python is not None
    short = ".".join(python.version.split(".")[:2])
    if not python.headers:
        fix = Fix(text="install the headers of this very Python", commands=(f"sudo apt-get install python{short}-dev",))
        title = f"Python.h of Python {python.version} is not in {python.include}"
        findings.append(Finding(rule="python-headers-missing", severity=Severity.ERROR, title=title, fix=fix))
    for name in ("setuptools", "wheel"):
        if machine.package(name) is None:
            fix = Fix(text="install it", commands=(f"{python.executable} -m pip install {name}",))
            title = f"{name} is not in the environment of {python.executable}, and DeepSpeed's setup.py needs it"
            findings.append(Finding(rule="wheel-package-missing", severity=Severity.ERROR, title=title, fix=fix))
    if not _ninja_is_new_enough(machine):
        fix = Fix(text="install it", commands=(f"{python.executable} -m pip install 'ninja>=1.13'",))
        have = f"ninja {machine.system.ninja} is" if machine.system.ninja else "there is no ninja, and older ones are"
        title = f"{have} no client of a job server: each op compiles its files one by one"
        findings.append(Finding(rule="ninja-missing", severity=Severity.NOTE, title=title, fix=fix))
    free = machine.system.cache_free
    if free is not None and free < disk:
        title = f"the build needs about {disk / GIB:.1f} GiB, the cache folder's disk has {free / GIB:.1f} GiB free"
        fix = Fix(text="free some, or put the cache elsewhere", commands=("export DSDOCTOR_CACHE=/path/with/room",))
        findings.append(Finding(rule="disk-full", severity=Severity.ERROR, title=title, fix=fix))
    return findings


def _gap_findings(machine: Machine) -> list[Finding]:
    return [
        Finding(rule="not-asked", severity=Severity.NOTE, title=f"{gap.question} could not be asked: {gap.reason}")
        for gap in machine.gaps
    ]
