"""What should be the same on every rank: this one's fingerprint, and findings about the minority among all.

``versions_here`` alone looks, at this very process; it makes no CUDA context. The rest is pure and O(ranks).
"""

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dsdoctor.comm.local.differences import ABSENT, MOST_GROUPS, differences, said
from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.local.variables import is_secret
from dsdoctor.comm.models import Claim, Local
from dsdoctor.comm.words import by_rank
from dsdoctor.core.finding import Finding, Fix, Severity

OWN = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
)
"""Variables that each rank or host may have of its own."""

OF_THE_PLACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_TOPO_FILE")
"""Hosts have other names for their devices: another value is right there, a missing one hardly ever."""

HARMLESS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "OMP_NUM_THREADS", "NCCL_IGNORE_CPU_AFFINITY")


def versions_here() -> dict[str, str]:
    """Versions of this process, in which torch was imported already: torch, CUDA, NCCL as loaded, DeepSpeed, Python."""
    import torch

    facts = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None),
        "nccl": _nccl_version(),
        "nccl library": parse_mapped_nccl(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")),
        "deepspeed": _installed("deepspeed"),
        "python": platform.python_version(),
    }
    return {name: value for name, value in facts.items() if value}


def parse_mapped_nccl(maps: str) -> str | None:
    """The libnccl that a process has mapped.

    >>> parse_mapped_nccl("7f00-7f01 r-xp 00000000 08:01 42 /venv/nvidia/nccl/lib/libnccl.so.2\\n")
    '/venv/nvidia/nccl/lib/libnccl.so.2'
    """
    match = re.search(r"(/\S*libnccl\.so\S*)", maps)
    return match[1] if match else None


def fingerprint(local: Local, versions: Mapping[str, str]) -> dict[str, str]:
    """What should be the same on every rank, by name; without what each rank must have of its own, and without secrets."""
    taken = next(
        (interface for interface in local.interfaces if local.chosen and interface.name == local.chosen.name), None
    )
    wire = taken is not None and taken.kind != "loopback" and not is_loopback(taken.address)
    facts = {
        **versions,
        "driver": local.driver,
        "kernel": local.kernel,
        "gpu": " + ".join(sorted({gpu.name for gpu in local.gpus})) or None,
        "mtu": str(taken.mtu) if taken and wire else None,
        "interface": taken.name if taken else None,
    }
    steering = {name: value for name, value in local.variables.items() if name not in OWN}
    whole = {**{name: value for name, value in facts.items() if value}, **steering}
    return {name: value for name, value in whole.items() if not is_secret(name, value)}


def examine(claims: Sequence[Claim]) -> tuple[Finding, ...]:
    """Every finding about what is not the same everywhere."""
    return tuple(finding for check in CHECKS for finding in check(claims))


def torch_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank has the same torch.

    Other releases exchange other messages at rendezvous and order collectives otherwise: init hangs, or fails far from the
    cause. One environment for all hosts (an image, a shared folder, a lock file) mends it for good.
    """
    yield from _findings(claims, "torch", Severity.ERROR, "install one torch everywhere", ("python -m pip show torch",))


def cuda_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """torch was built with other CUDA releases on some ranks: they bring other NCCL and cuBLAS libraries with them."""
    yield from _findings(claims, "cuda", Severity.ERROR, "install one build of torch everywhere", ())


def nccl_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank has loaded the same NCCL.

    NCCL refuses ("Mismatched NCCL version detected") or hangs: its ranks speak to each other in a format that changes with
    each release. A system library may come before that of torch's wheel by LD_LIBRARY_PATH or LD_PRELOAD.
    """
    found = {claim.rank: claim.fingerprint.get("nccl library", "") for claim in claims}
    for difference in differences(claims, ("nccl",)):
        files = tuple(
            f"rank {ranks[0]} loaded {found[ranks[0]] or 'none'}" for _, ranks in difference.others[:MOST_GROUPS]
        )
        fix = Fix(text="load one NCCL everywhere", commands=("grep -m1 libnccl /proc/PID/maps", "unset LD_PRELOAD"))
        yield _finding("nccl-differs", Severity.ERROR, said(difference, by_rank(claims)), files, fix)


def backend_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Some ranks would use NCCL and others gloo: a host without a GPU, or one whose driver does not answer."""
    yield from _findings(
        claims, "backend", Severity.ERROR, "see why no GPU is seen there, or ask for one backend", ("nvidia-smi",)
    )


def deepspeed_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank has the same DeepSpeed: its ranks then call other collectives at the same place, which looks like a hang."""
    fix = "install one DeepSpeed everywhere"
    yield from _findings(claims, "deepspeed", Severity.WARNING, fix, ("python -m pip show deepspeed",))


def python_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank runs the same Python. Another minor release is another environment; another patch only a note."""
    for difference in differences(claims, ("python",)):
        values = [value for value, _ in difference.others] + ([difference.usual] if difference.usual else [])
        minors = {tuple(value.split(".")[:2]) for value in values}
        severity = Severity.WARNING if len(minors) > 1 else Severity.NOTE
        fix = Fix(text="use one environment on all hosts")
        yield _finding("python-differs", severity, said(difference, by_rank(claims)), (), fix)


def gpu_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """The ranks have other GPUs. It works, and every step lasts as long as on the slowest; memory is that of the smallest."""
    yield from _findings(claims, "gpu", Severity.WARNING, "give the job one kind of node", ())


def mtu_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """The interfaces that the ranks would use have other packet sizes: small messages pass and the first large one may hang.

    A host that sends 9000 bytes to one that takes 1500 depends on routers that tell it so; many drop silently.
    """
    commands = ("sudo ip link set dev INTERFACE mtu 1500", "ping -M do -s 1472 OTHER_HOST")
    yield from _findings(claims, "mtu", Severity.WARNING, "set one MTU on all hosts and switches", commands)


def environment_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Driver, kernel, name of the interface or path of the NCCL library are not the same everywhere. Mostly harmless.

    Worth a look when one host behaves otherwise than the others: it is often the one that was set up at another time.
    """
    for difference in differences(claims, ("driver", "kernel", "interface", "nccl library")):
        yield _finding("environment-differs", Severity.NOTE, said(difference, by_rank(claims)), (), None)


def communication_variable_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """A variable that steers communication is not the same on every rank.

    NCCL_ALGO, NCCL_PROTO and their like must agree: ranks that choose another algorithm wait for each other for ever, or say
    "message truncated". DeepSpeed's launcher forwards NCCL_*, and neither GLOO_* nor TORCH_*: those go into ~/.deepspeed_env.
    """
    names = sorted({name for claim in claims for name in claim.fingerprint if name.isupper() and name not in OWN})
    for difference in differences(claims, names):
        values = {value for value, _ in difference.others} | {difference.usual}
        free = difference.name in HARMLESS or (difference.name in OF_THE_PLACE and ABSENT not in values)
        given = next((value for value in (difference.usual, *values) if value and value != ABSENT), "VALUE")
        fix = Fix(
            text="give it to every rank, or to none (DeepSpeed forwards what ~/.deepspeed_env holds)",
            commands=(f"echo '{difference.name}={given}' >> ~/.deepspeed_env", f"unset {difference.name}"),
        )
        severity = Severity.NOTE if free else Severity.WARNING
        title = said(difference, by_rank(claims))
        yield _finding("communication-variable-differs", severity, title, (), None if free else fix)


def _findings(
    claims: Sequence[Claim], name: str, severity: Severity, fix: str, commands: tuple[str, ...]
) -> Iterator[Finding]:
    for difference in differences(claims, (name,)):
        title = said(difference, by_rank(claims))
        yield _finding(f"{name}-differs", severity, title, (), Fix(text=fix, commands=commands))


def _finding(rule: str, severity: Severity, title: str, evidence: tuple[str, ...], fix: Fix | None) -> Finding:
    return Finding(rule=rule, severity=severity, title=title, evidence=evidence, fix=fix)


def _nccl_version() -> str | None:
    """What the loaded NCCL itself says; None in a torch without it. Makes no CUDA context."""
    try:
        version = importlib.import_module("torch.cuda.nccl").version()
    except (ImportError, AttributeError, RuntimeError):
        return None
    return ".".join(str(part) for part in version) if isinstance(version, tuple) else str(version)


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


CHECKS: tuple[Callable[[Sequence[Claim]], Iterator[Finding]], ...] = (
    backend_differs,
    torch_differs,
    cuda_differs,
    nccl_differs,
    deepspeed_differs,
    python_differs,
    gpu_differs,
    mtu_differs,
    communication_variable_differs,
    environment_differs,
)
