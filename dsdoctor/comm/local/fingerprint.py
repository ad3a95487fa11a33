"""What should be the same on every rank: the fingerprint of this rank, and findings where ranks differ.

Only ``versions_here`` looks, at this process; it makes no CUDA context. The rest is pure and O(ranks).
"""

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dsdoctor.comm.local.differences import ABSENT, MOST_GROUPS, RankDifference, differences, said
from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.local.variables import is_secret
from dsdoctor.comm.models import Claim, Local
from dsdoctor.comm.rank_names import by_rank
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import Step, instead, step

OWN = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
)
"""Variables that each rank or host may have of its own."""

OF_THE_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_TOPO_FILE")
"""Devices have other names on other hosts, so a different value is fine; a missing one hardly ever is."""

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
    """What should be the same on every rank, by name; without what each rank must have to itself, and without secrets."""
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

    Why it matters: other releases exchange other messages at rendezvous and order collectives in another way. Init
    hangs, or fails far from the cause.

    How to fix it: install one torch everywhere. One environment for all hosts (an image, a shared folder, a lock file)
    fixes it for good.

        $ python -m pip show torch

    Since: 0.1
    """
    yield from _findings(
        claims, "torch", Finding.error, "install one torch everywhere", (step("python -m pip show torch"),)
    )


def cuda_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Some ranks have a torch that was built with another CUDA release than that of the others.

    Why it matters: such a torch brings other NCCL and cuBLAS libraries with it.

    How to fix it: install one build of torch everywhere.

        $ python -c 'import torch; print(torch.version.cuda)'

    Since: 0.1
    """
    yield from _findings(claims, "cuda", Finding.error, "install one build of torch everywhere", ())


def nccl_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank has loaded the same NCCL.

    A system library may come before that of torch's wheel by LD_LIBRARY_PATH or LD_PRELOAD.

    Why it matters: NCCL refuses ("Mismatched NCCL version detected") or hangs, because its ranks talk to each other in
    a format that changes with each release.

    How to fix it: load one NCCL everywhere. The finding names the files that were loaded.

        $ grep -m1 libnccl /proc/PID/maps
        $ unset LD_PRELOAD

    Since: 0.1
    """
    found = {claim.rank: claim.fingerprint.get("nccl library", "") for claim in claims}
    for difference in differences(claims, ("nccl",)):
        files = tuple(
            f"rank {ranks[0]} loaded {found[ranks[0]] or 'none'}" for _, ranks in difference.others[:MOST_GROUPS]
        )
        yield Finding.error(
            "nccl-differs",
            said(difference, by_rank(claims)),
            evidence=files,
            fix="load one NCCL everywhere",
            steps=(step("grep -m1 libnccl /proc/{pid}/maps"), step("unset LD_PRELOAD")),
        )


def backend_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Some ranks would use NCCL and others gloo.

    Why it matters: they cannot form a group. A host has no GPU, or its driver does not answer.

    How to fix it: see why no GPU is seen there, or ask for one backend.

        $ nvidia-smi
        $ python -m dsdoctor comm --backend gloo

    Since: 0.1
    """
    yield from _findings(
        claims, "backend", Finding.error, "see why no GPU is seen there, or ask for one backend", (step("nvidia-smi"),)
    )


def deepspeed_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank has the same DeepSpeed.

    Why it matters: its ranks then call other collectives at the same place, which looks like a hang.

    How to fix it: install one DeepSpeed everywhere.

        $ python -m pip show deepspeed

    Since: 0.1
    """
    fix = "install one DeepSpeed everywhere"
    yield from _findings(claims, "deepspeed", Finding.warning, fix, (step("python -m pip show deepspeed"),))


def python_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank runs the same Python.

    Why it matters: another minor release is another environment, with packages of its own; another patch release is
    only a note.

    How to fix it: use one environment on all hosts.

    Since: 0.1
    """
    for difference in differences(claims, ("python",)):
        values = [value for value, _ in difference.others] + ([difference.usual] if difference.usual else [])
        minors = {tuple(value.split(".")[:2]) for value in values}
        made = Finding.warning if len(minors) > 1 else Finding.note
        yield made("python-differs", said(difference, by_rank(claims)), fix="use one environment on all hosts")


def gpu_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """The ranks have different GPU models.

    Why it matters: it works, but every step takes as long as on the slowest, and the usable memory is that of the
    smallest.

    How to fix it: give the job one kind of node.

    Since: 0.1
    """
    yield from _findings(claims, "gpu", Finding.warning, "give the job one kind of node", ())


def mtu_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """The interfaces that the ranks would use have different packet sizes (MTU).

    Why it matters: small messages pass and the first large one may hang. A host that sends 9000 bytes to one that takes
    1500 depends on routers that report it; many drop silently.

    How to fix it: set one MTU on all hosts and switches.

        $ sudo ip link set dev INTERFACE mtu 1500
        $ ping -M do -s 1472 OTHER_HOST

    Since: 0.1
    """
    steps = (step("sudo ip link set dev {interface} mtu 1500"), step("ping -M do -s 1472 {other_host}"))
    yield from _findings(claims, "mtu", Finding.warning, "set one MTU on all hosts and switches", steps)


def environment_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Driver, kernel, name of the interface or path of the NCCL library are not the same everywhere.

    Why it matters: this is mostly harmless. It is worth a look when one host behaves differently: often that is the
    host that was set up at another time.

    How to fix it: nothing has to be done while the rest of the test is well; else set that host up like the others.

    Since: 0.1
    """
    for difference in differences(claims, ("driver", "kernel", "interface", "nccl library")):
        yield Finding.note("environment-differs", said(difference, by_rank(claims)))


def communication_variable_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """A variable that steers communication is not the same on every rank.

    Why it matters: NCCL_ALGO, NCCL_PROTO and the like must agree: ranks that choose another algorithm wait for each
    other for ever, or say "message truncated". DeepSpeed's launcher forwards NCCL_*, but neither GLOO_* nor TORCH_*.

    How to fix it: give it to every rank, or to none. DeepSpeed forwards what ~/.deepspeed_env holds.

        $ echo 'NAME=VALUE' >> ~/.deepspeed_env
        $ unset NAME

    Since: 0.1
    """
    names = sorted({name for claim in claims for name in claim.fingerprint if name.isupper() and name not in OWN})
    for difference in differences(claims, names):
        values = {value for value, _ in difference.others} | {difference.usual}
        free = difference.name in HARMLESS or (difference.name in OF_THE_HOST and ABSENT not in values)
        given, whose = _proposed(difference)
        title = said(difference, by_rank(claims))
        if free:
            yield Finding.note("communication-variable-differs", title)
            continue
        yield Finding.warning(
            "communication-variable-differs",
            title,
            fix=f"give it to every rank{whose}, or to none (DeepSpeed forwards what ~/.deepspeed_env holds)",
            steps=(
                step("printf '%s\\n' {line} >> ~/.deepspeed_env", line=f"{difference.name}={given}"),
                instead("unset {variable}", variable=difference.name),
            ),
        )


def _proposed(difference: RankDifference) -> tuple[str, str]:
    """The value that all ranks could have, and whose it is: that of most ranks; where two are as frequent, that of the
    lowest rank."""
    if difference.usual not in {None, "", ABSENT}:
        return str(difference.usual), ", with the value of most ranks"
    given = [(value, ranks) for value, ranks in difference.others if value not in {"", ABSENT}]
    if not given:
        return "VALUE", ""
    value, ranks = min(given, key=lambda group: (-len(group[1]), group[1]))
    tie = sum(len(others) == len(ranks) for _, others in given) > 1
    if tie or len(ranks) == 1:
        return value, f", with the value of rank {ranks[0]}"
    return value, f", with the value of most of those that have one (rank {ranks[0]})"


def _findings(
    claims: Sequence[Claim], name: str, made: Callable[..., Finding], fix: str, steps: tuple[Step, ...]
) -> Iterator[Finding]:
    for difference in differences(claims, (name,)):
        yield made(f"{name}-differs", said(difference, by_rank(claims)), fix=fix, steps=steps)


def _nccl_version() -> str | None:
    """The version that the loaded NCCL reports; None in a torch without it. Makes no CUDA context."""
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
