"""Choices of a plan that need no toolkit: accelerator, architectures, jobs, disk, local version, each with its reason. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.version import Version

from dsdoctor.core.architectures import OLDEST, check_known, compiled_by, numeric, parse_architectures
from dsdoctor.core.build_models import Choice, OpPlan, ToolkitPlan
from dsdoctor.core.errors import ImpossiblePlan, UsageError
from dsdoctor.core.finding import Finding, Severity, step
from dsdoctor.core.machine import Machine, Node, Torch
from dsdoctor.core.requests import BuildRequest
from dsdoctor.core.text import and_more, counted
from dsdoctor.rules import book

GIB = 1 << 30
BASE_DISK_BYTES = GIB // 4
OBJECT_DISK_BYTES = 48 << 20
"""Bytes of one object with its share of the shared object: with -g they are 17 to 40 MB."""
TOOLKIT_DISK_BYTES = GIB
UNPACK_RATIO = 6
"""What NVIDIA's archives take with what is in them, as a multiple of their size, estimated high."""
JOB_MEMORY_BYTES = {True: 7 * GIB // 2, False: 2 * GIB}
"""Bytes of one compile job with and without device code: the largest process of a build of all ops was measured at
2.9 GiB (3.4 GiB with evoformer_attn), one of host code at 1.5 to 2.1 GB."""
SETUPTOOLS_WITH_BDIST_WHEEL = Version("70.1")


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """A list of wanted architectures. ``asked`` is False when the user did not choose it, so that it may be narrowed."""

    entries: tuple[str, ...]
    because: str
    asked: bool


def working_torch(machine: Machine) -> Torch:
    """The torch of the environment. Raises ImpossiblePlan with the reason when there is none that works."""
    python = machine.python
    if python is None:
        reason = next((gap.reason for gap in machine.gaps if gap.question.startswith("python")), "it does not answer")
        raise ImpossiblePlan(f"cannot examine the Python to build for: {reason}", hint="name one with --python PATH")
    if machine.torch is None:
        raise ImpossiblePlan(
            f"torch is not installed in the environment of {python.executable}",
            hint=step("{python} -m pip install torch", python=python.executable).line,
        )
    if machine.torch.broken is not None:
        raise ImpossiblePlan(
            f"torch {machine.torch.version} is installed but cannot be imported: {machine.torch.broken}",
            hint=step("{python} -m pip install --force-reinstall torch", python=python.executable).line,
        )
    return machine.torch


def accelerator_of(machine: Machine, request: BuildRequest) -> str:
    """DeepSpeed's accelerator for this torch. Raises ImpossiblePlan without a working torch, or where torch has no such build."""
    torch = working_torch(machine)
    if request.accelerator == "cuda" and torch.cuda is None:
        raise ImpossiblePlan(
            f"--accelerator cuda needs a CUDA build of torch; torch {torch.version} is {torch.build}",
            hint="install a CUDA build of torch: python -m pip install torch",
        )
    if request.accelerator is None and machine.unjudged_accelerator:
        raise ImpossiblePlan(
            f"{machine.unjudged_accelerator}; dsdoctor builds for CUDA and CPU only",
            hint="--accelerator cpu builds the host ops",
        )
    if request.accelerator:
        return request.accelerator
    return "cuda" if torch.cuda else "cpu"


def explain_accelerator(machine: Machine, request: BuildRequest, accelerator: str) -> Choice:
    """The reason for the accelerator."""
    torch = working_torch(machine)
    if request.accelerator:
        because = "--accelerator"
    elif torch.cuda is None:
        because = book.phrase("builder", "torch-cpu-build", torch=torch.version)
    elif machine.gpus:
        because = book.phrase(
            "builder", "torch-cuda-build", torch=torch.version, gpus=counted(len(machine.gpus), "GPU")
        )
    else:
        because = book.phrase("builder", "torch-cuda-build-without-gpu", torch=torch.version)
    return Choice(what="accelerator", value=accelerator, because=because)


def explain_standard(torch: Torch) -> Choice:
    """The C++ standard that torch's headers need."""
    # DeepSpeed's builders pass the flag themselves; ops that pass a lower one are left out of the plan
    because = book.phrase("builder", "required-by-torch", torch=torch.version)
    return Choice(what="C++ standard", value=f"C++{torch.cxx_standard}", because=because)


def choose_architectures(machine: Machine, request: BuildRequest) -> Architectures:
    """The GPU architectures: --arch, else the nodes' GPUs, else TORCH_CUDA_ARCH_LIST, else the visible GPUs', else all of torch's.

    Raises UsageError for a list that torch or DeepSpeed cannot read, and when none of these names any.
    """
    torch = working_torch(machine)
    shell = machine.variables.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if request.arch is not None:
        return _named_architectures(request.arch, "--arch", torch)
    if any(node.capabilities for node in request.nodes):
        return _node_architectures(request.nodes, shell)
    if shell:
        return _named_architectures(shell, "TORCH_CUDA_ARCH_LIST in your shell", torch)
    if (torch.capabilities or machine.gpus) and not request.nodes:
        found = numeric(torch.capabilities or tuple(gpu.capability for gpu in machine.gpus))
        return Architectures(entries=found, because=book.phrase("builder", "visible-gpus"), asked=True)
    unseen = book.phrase("builder", "no-gpu-in-snapshots" if request.nodes else "no-gpu-visible")
    if not torch.arch_list:
        raise UsageError(
            f"{unseen}, and torch {torch.version} does not list its architectures",
            hint='name the GPUs\' architectures: --arch "8.0;9.0"',
        )
    because = book.phrase("builder", "every-architecture", unseen=unseen, torch=torch.version)
    return Architectures(entries=numeric(torch.arch_list), because=because, asked=False)


def fit_architectures(
    wanted: Architectures, toolkit: ToolkitPlan | None
) -> tuple[tuple[str, ...], tuple[Choice, ...], tuple[Finding, ...]]:
    """The wanted architectures that this nvcc compiles for; one that the user asked for and nvcc does not take is a finding."""
    if toolkit is None:
        return wanted.entries, (), ()
    major = toolkit.release.major
    fitting = tuple(entry for entry in wanted.entries if compiled_by(entry, toolkit.architectures, major))
    lost = [entry for entry in wanted.entries if entry not in fitting]
    if lost and (wanted.asked or not fitting):
        able = ", ".join(numeric(toolkit.architectures)) or f"{OLDEST.get(major, 'any')} and newer"
        finding = book.finding(
            "gpu-arch-unsupported-by-nvcc",
            Severity.ERROR,
            case="build",
            evidence=[f"architectures: {wanted.because}", f"toolkit: {toolkit.root}"],
            nvcc=str(toolkit.release),
            lost=lost,
            takes=able,
        )
        return wanted.entries, (), (finding,)
    because = wanted.because
    if lost:
        because = book.phrase("builder", "some-architectures", because=because, lost=lost, nvcc=str(toolkit.release))
    return fitting, (Choice(what="architectures", value=";".join(fitting), because=because),), ()


def unused_architectures(machine: Machine, request: BuildRequest) -> tuple[Finding, ...]:
    """A warning that --arch does nothing in a build without GPU code. Raises UsageError for a malformed list all the same."""
    if request.arch is None:
        return ()
    listed = _named_architectures(request.arch, "--arch", working_torch(machine))
    cpu_build = book.phrase("builder", "torch-cpu-build", torch=working_torch(machine).version)
    why = "--accelerator cpu" if request.accelerator else cpu_build
    return (book.finding("arch-unused", Severity.WARNING, architectures=";".join(listed.entries), why=why),)


def many_architectures(listed: Architectures, ops: Sequence[OpPlan]) -> tuple[Finding, ...]:
    """A note that GPU code is compiled for each of many architectures because nobody named one."""
    compiled = [op.op for op in ops if op.device_code and len(op.architectures) > 1]
    if listed.asked or not compiled:
        return ()
    count = max(len(op.architectures) for op in ops)
    return (book.finding("many-architectures", Severity.NOTE, affects=compiled, ops=and_more(compiled), count=count),)


def choose_jobs(machine: Machine, request: BuildRequest, *, device_code: bool) -> tuple[int, int, Choice]:
    """How many compilers run at once, and the bytes that they may take together, within the limits of the control group."""
    # the pool counts each compiler by JOB_MEMORY_BYTES, so that more g++ than nvcc run side by side where memory is short
    memory, cpus = machine.system.memory, machine.system.cpus
    by_memory = max(1, memory // JOB_MEMORY_BYTES[False]) if memory else cpus
    jobs = request.jobs if request.jobs is not None else max(1, min(cpus, by_memory))
    most = jobs * JOB_MEMORY_BYTES[device_code]
    planned = max(JOB_MEMORY_BYTES[device_code], min(most, memory)) if memory else most
    shown = f"{memory / GIB:.0f} GiB" if memory else "unknown"
    by = "--jobs" if request.jobs is not None else book.phrase("builder", "processors", cpus=cpus, memory=shown)
    because = book.phrase("builder", "jobs", by=by, planned=f"{planned / GIB:.1f} GiB")
    return jobs, planned, Choice(what="jobs", value=str(jobs), because=because)


def choose_local_version(torch: Torch, accelerator: str, request: BuildRequest) -> tuple[str, Choice]:
    """The local version without its "+", "" for none. Raises UsageError for one that PEP 440 refuses."""
    if request.no_local_version or request.local_version == "":
        local, because = "", "--no-local-version"
    elif request.local_version is None:
        local = f"{f'cu{torch.cuda}' if accelerator == 'cuda' else 'cpu'}.torch{torch.minor}"
        because = book.phrase("builder", "local-version")
    else:
        local = request.local_version.lstrip("+")
        because = "--local-version"
    try:
        normal = (Version(f"0+{local}").local or "") if local else ""
    except ValueError:
        raise UsageError(
            f"{local!r} is not a local version: PEP 440 allows letters, digits and dots",
            hint="--local-version cu13.0.torch2.14",
        ) from None
    return normal, Choice(what="local version", value=f"+{normal}" if normal else "none", because=because)


def disk_needed(ops: tuple[OpPlan, ...], toolkit: ToolkitPlan | None) -> int:
    """The bytes that a build may take in the cache folder, estimated high."""
    objects = sum(len(op.sources) * OBJECT_DISK_BYTES for op in ops)
    archives = sum(archive.size for archive in toolkit.archives) if toolkit else 0
    return (
        BASE_DISK_BYTES + objects + (TOOLKIT_DISK_BYTES if toolkit and toolkit.fetches else 0) + UNPACK_RATIO * archives
    )


def environment_findings(machine: Machine, disk: int) -> Iterator[Finding]:
    """Errors for missing packages and for a disk with less than ``disk`` bytes free."""
    python = machine.python
    assert python is not None
    for name in _missing_packages(machine):
        yield book.finding(
            "wheel-package-missing", Severity.ERROR, case="build", name=name, executable=python.executable
        )
    free = machine.system.cache_free
    if free is not None and free < disk:
        needed, left = f"{disk / GIB:.1f} GiB", f"{free / GIB:.1f} GiB"
        yield book.finding("disk-full", Severity.ERROR, case="build", needed=needed, free=left)


def gap_findings(machine: Machine) -> Iterator[Finding]:
    """A note for each question about the machine that could not be answered."""
    for gap in machine.gaps:
        yield book.finding("not-asked", Severity.NOTE, case="build", question=gap.question, reason=gap.reason)


def _missing_packages(machine: Machine) -> list[str]:
    setuptools = machine.package("setuptools")
    if setuptools is None:
        return ["setuptools"]
    try:
        complete = Version(setuptools) >= SETUPTOOLS_WITH_BDIST_WHEEL
    except ValueError:
        complete = False
    return [] if complete or machine.package("wheel") else ["wheel"]


def _node_architectures(nodes: tuple[Node, ...], shell: str) -> Architectures:
    """The architectures of all nodes' GPUs together."""
    found = numeric(tuple({name for node in nodes for name in node.capabilities}))
    shown = ", ".join(f"{node.name} {' '.join(numeric(node.capabilities)) or 'none'}" for node in nodes)
    because = book.phrase("builder", "gpus-of-nodes-and-shell" if shell else "gpus-of-nodes", nodes=shown)
    return Architectures(entries=found, because=because, asked=True)


def _named_architectures(text: str, where: str, torch: Torch) -> Architectures:
    try:
        entries = parse_architectures(text)
        check_known(entries, torch.known_architectures)
    except UsageError as error:
        raise UsageError(f"{error.message} ({where})", hint=error.hint) from None
    return Architectures(entries=entries, because=where, asked=True)
