"""The smaller choices of a plan: accelerator, architectures, jobs, local version. Pure; each gives its reason."""

from packaging.version import InvalidVersion, Version

from dsdoctor.builder.architectures import check_known, numeric, parse_architectures
from dsdoctor.builder.nouns import Choice, Wish
from dsdoctor.builder.preconditions import working_torch
from dsdoctor.errors import ImpossiblePlan, UsageError
from dsdoctor.machine import Machine, Torch

GIB = 1 << 30
JOB_MEMORY = {True: 5 * GIB // 2, False: 2 * GIB}
"""Bytes of one compile job with and without device code: one compile of torch's headers takes 1.5 to 2.1 GB."""


def accelerator_of(machine: Machine, wish: Wish) -> str:
    """DeepSpeed's accelerator for this torch. Raises ImpossiblePlan without a working torch, or for a wish it cannot."""
    torch = working_torch(machine)
    if wish.accelerator == "cuda" and torch.cuda is None:
        raise ImpossiblePlan(
            f"--accelerator cuda was asked for, and torch {torch.version} is a CPU build",
            hint="install a CUDA build of torch: python -m pip install torch",
        )
    if wish.accelerator is None and torch.hip is not None:
        raise ImpossiblePlan(
            f"torch {torch.version} is a ROCm build, dsdoctor builds for CUDA and CPU",
            hint="--accelerator cpu builds the host ops",
        )
    if wish.accelerator:
        return wish.accelerator
    return "cuda" if torch.cuda else "cpu"


def explain_accelerator(machine: Machine, wish: Wish, accelerator: str) -> Choice:
    """Why that accelerator."""
    torch = working_torch(machine)
    if wish.accelerator:
        because = "--accelerator"
    elif torch.cuda is None:
        because = f"torch {torch.version} is a CPU build"
    else:
        seen = f"{len(machine.gpus)} GPU here" if machine.gpus else "no GPU here; DeepSpeed by itself would choose cpu"
        because = f"torch {torch.version} is a CUDA build ({seen})"
    return Choice(what="accelerator", value=accelerator, because=because)


def choose_architectures(machine: Machine, wish: Wish) -> tuple[tuple[str, ...], Choice]:
    """The GPU architectures: asked for, else the visible GPUs', else every one this torch was built for."""
    torch = working_torch(machine)
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
    return asked, Choice(what="architectures", value=";".join(asked), because=because)


def choose_jobs(machine: Machine, wish: Wish, *, device_code: bool) -> tuple[int, Choice]:
    """Compile jobs at once, from processors and memory as the control group limits them."""
    if wish.jobs is not None:
        return wish.jobs, Choice(what="jobs", value=str(wish.jobs), because="--jobs")
    per_job, memory = JOB_MEMORY[device_code], machine.system.memory
    by_memory = max(1, memory // per_job) if memory else machine.system.cpus
    jobs = max(1, min(machine.system.cpus, by_memory))
    shown = f"{memory / GIB:.0f} GiB" if memory else "unknown"
    because = f"{machine.system.cpus} processors, {shown} of memory at {per_job / GIB:.1f} GiB a job"
    return jobs, Choice(what="jobs", value=str(jobs), because=because)


def choose_local_version(torch: Torch, accelerator: str, wish: Wish) -> tuple[str, Choice]:
    """The local version segment without its "+", "" for none. Raises UsageError for one that PEP 440 refuses."""
    if wish.local_version is None:
        local = f"{f'cu{torch.cuda}' if accelerator == 'cuda' else 'cpu'}.torch{torch.minor}"
        because = "DeepSpeed's loader demands this very torch and CUDA release"
    else:
        local = wish.local_version.lstrip("+")
        because = "--local-version" if wish.local_version else "--no-local-version"
    try:
        normal = (Version(f"0+{local}").local or "") if local else ""
    except InvalidVersion:
        raise UsageError(
            f"local version {local!r} is none: PEP 440 takes letters, digits and dots",
            hint="--local-version cu13.0.torch2.14",
        ) from None
    return normal, Choice(what="local version", value=f"+{normal}" if normal else "none", because=because)
