"""What should be the same on every rank: the fingerprint of this rank, and findings where ranks differ.

Only ``versions_here`` looks, at this process; it makes no CUDA context. The rest is pure and O(ranks).
"""

import importlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.comm.local.interfaces import is_loopback
from dsdoctor.comm.models import Claim, Local, by_rank, named
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.core.redaction import setting
from dsdoctor.rules import book

# The claims of all ranks -> where they differ, and which ranks are the minority. Pure, and O(ranks).


ABSENT = "(none)"
MAX_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class RankDifference:
    """A name whose value is not the same everywhere. ``usual`` is the value of most ranks, ``count`` of them, and
    ``others`` the other values with their ranks; where two values are equally frequent ``usual`` is None and ``others``
    names all ranks."""

    name: str
    usual: str | None
    count: int
    others: tuple[tuple[str, tuple[int, ...]], ...]


def differences(claims: Sequence[Claim], names: Sequence[str] | None = None) -> tuple[RankDifference, ...]:
    """The names (all, or those given) whose values are not the same on all ranks. O(ranks x names)."""
    if names is None:
        names = sorted({name for claim in claims for name in claim.fingerprint} | {"backend"})
    return tuple(found for name in names if (found := _difference(claims, name)) is not None)


def _difference(claims: Sequence[Claim], name: str) -> RankDifference | None:
    ranks: dict[str, list[int]] = {}
    for claim in claims:
        value = claim.backend if name == "backend" else claim.fingerprint.get(name, ABSENT)
        ranks.setdefault(value, []).append(claim.rank)
    if len(ranks) < 2:
        return None
    groups = sorted(ranks.items(), key=lambda group: (-len(group[1]), min(group[1])))
    tie = len(groups[0][1]) == len(groups[1][1])
    others = groups if tie else groups[1:]
    return RankDifference(
        name=name,
        usual=None if tie else groups[0][0],
        count=0 if tie else len(groups[0][1]),
        others=tuple((value, tuple(sorted(numbers))) for value, numbers in others),
    )


def difference_text(difference: RankDifference, hosts: tuple[str, ...]) -> str:
    """A difference in words: the minority by rank and host, the others by their number.

    >>> odd = RankDifference(name="torch", usual="2.8.0", count=15, others=(("2.7.0", (1,)),))
    >>> difference_text(odd, ("node0", "node3"))
    'rank 1 (node3): torch 2.7.0, the 15 others 2.8.0'
    >>> difference_text(RankDifference(name="NCCL_ALGO", usual=None, count=0, others=(("Ring", (0,)), (ABSENT, (1,)))), ("a", "b"))
    'rank 0 (a): NCCL_ALGO=Ring, rank 1 (b): not set'
    """
    name, shown = difference.name, difference.others[:MAX_GROUPS]
    parts = [f"{named(ranks, hosts)}: {_value(name, value, whole=not at)}" for at, (value, ranks) in enumerate(shown)]
    left = difference.others[MAX_GROUPS:]
    if left:
        parts.append(f"{len(left)} more values on {sum(len(ranks) for _, ranks in left)} ranks")
    if difference.usual is not None:
        parts.append(f"the {difference.count} others {_value(name, difference.usual, whole=False)}")
    return ", ".join(parts)


def _value(name: str, value: str, *, whole: bool) -> str:
    absent = value == ABSENT
    text = ("not set" if name.isupper() else "not there") if absent else value
    return f"{name}{'=' if name.isupper() and not absent else ' '}{text}" if whole else text


OWN = (
    *("CUDA_VISIBLE_DEVICES", "NCCL_DEBUG_FILE", "NCCL_HOSTID", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
)
"""Variables that each rank or host may have of its own."""

OF_THE_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "NCCL_TOPO_FILE")
"""Devices have other names on other hosts, so a different value is fine; a missing one hardly ever is."""

DEVICE = {
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "INTERFACE"),
    **dict.fromkeys(("NCCL_IB_HCA", "UCX_NET_DEVICES"), "DEVICE"),
    "NCCL_TOPO_FILE": "FILE",
}
HARMLESS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "OMP_NUM_THREADS", "NCCL_IGNORE_CPU_AFFINITY")


def installed_versions() -> dict[str, str]:
    """Versions as they are installed: torch, DeepSpeed, Python. Imports none of them."""
    facts = {"torch": _installed("torch"), "deepspeed": _installed("deepspeed"), "python": platform.python_version()}
    return {name: value for name, value in facts.items() if value}


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
        "interface": taken.name if taken and wire else None,
    }
    steering = {name: setting(name, value) for name, value in local.variables.items() if name not in OWN}
    return {**{name: value for name, value in facts.items() if value}, **steering}


def examine(claims: Sequence[Claim]) -> tuple[Finding, ...]:
    """Every finding about what is not the same everywhere."""
    return tuple(finding for check in CHECKS for finding in check(claims))


OF_HOSTS = {
    "backend": Severity.ERROR,
    **dict.fromkeys(("gpu", "mtu"), Severity.WARNING),
    **dict.fromkeys(("driver", "kernel", "interface", "nccl library"), Severity.NOTE),
}
OF_THE_WIRE = ("mtu", "interface")
"""Compared where they are known: a rank that would use no interface, or the loopback, has a finding of its own."""
VERSIONS = {
    **dict.fromkeys(("torch", "cuda", "nccl"), Severity.ERROR),
    **dict.fromkeys(("deepspeed", "python"), Severity.WARNING),
}


def host_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """The hosts of the ranks are not alike: the backend that they would use, their GPUs, the packet size (MTU) of their interfaces,
    driver, kernel, name of the interface or path of the NCCL library."""
    for name, severity in OF_HOSTS.items():
        known = [claim for claim in claims if name in claim.fingerprint] if name in OF_THE_WIRE else claims
        for difference in differences(known, (name,)):
            yield book.finding(
                "host-differs",
                severity,
                case="backend"
                if name == "backend"
                else "mtu"
                if name == "mtu"
                else ""
                if name == "gpu"
                else "harmless",
                difference=difference_text(difference, by_rank(claims)),
            )


def version_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Not every rank has the same torch, CUDA release of torch, NCCL, DeepSpeed or Python."""
    loaded = {claim.rank: claim.fingerprint.get("nccl library") or "none" for claim in claims}
    for difference in differences(claims, tuple(VERSIONS)):
        name, severity = difference.name, VERSIONS[difference.name]
        groups = difference.others[:MAX_GROUPS] if name == "nccl" else ()
        values = {value for value, _ in difference.others} | {difference.usual or difference.others[0][0]}
        if name == "python" and len({tuple(value.split(".")[:2]) for value in values}) == 1:
            severity = Severity.NOTE
        yield book.finding(
            "version-differs",
            severity,
            case="cuda"
            if name == "cuda"
            else "nccl"
            if name == "nccl"
            else "deepspeed"
            if name == "deepspeed"
            else "python"
            if name == "python"
            else "",
            evidence=tuple(f"rank {ranks[0]} loaded {loaded[ranks[0]]}" for _, ranks in groups),
            difference=difference_text(difference, by_rank(claims)),
        )


def communication_variable_differs(claims: Sequence[Claim]) -> Iterator[Finding]:
    """A variable that steers communication is not the same on every rank."""
    names = sorted({name for claim in claims for name in claim.fingerprint if name.isupper() and name not in OWN})
    for difference in differences(claims, names):
        name, in_words = difference.name, difference_text(difference, by_rank(claims))
        values = {value for value, _ in difference.others} | {difference.usual}
        if name in HARMLESS or (name in OF_THE_HOST and ABSENT not in values):
            yield book.finding("communication-variable-differs", Severity.NOTE, case="harmless", difference=in_words)
        elif name in OF_THE_HOST:
            yield book.finding(
                "communication-variable-differs",
                Severity.WARNING,
                case="of-the-host",
                difference=in_words,
                variable=name,
                setting=f"{name}={DEVICE[name]}",
            )
        else:
            value, rank, is_most = _proposed(difference)
            yield book.finding(
                "communication-variable-differs",
                Severity.WARNING,
                case="as-most"
                if is_most and rank is None
                else "as-most-that-have-one"
                if is_most
                else ""
                if rank is None
                else "as-one",
                difference=in_words,
                variable=name,
                setting=f"{name}={value}",
                rank=rank,
            )


def _proposed(difference: RankDifference) -> tuple[str, int | None, bool]:
    """The value that all ranks could have: that of most ranks; where two are as frequent, that of the lowest rank. The rank
    that has it, None where that need not be said; and whether most have it, or most of those that have any."""
    if difference.usual not in {None, "", ABSENT}:
        return str(difference.usual), None, True
    given = [(value, ranks) for value, ranks in difference.others if value not in {"", ABSENT}]
    if not given:
        return "VALUE", None, False
    value, ranks = min(given, key=lambda group: (-len(group[1]), group[1]))
    tie = sum(len(others) == len(ranks) for _, others in given) > 1
    return value, ranks[0], not tie and len(ranks) > 1


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
    host_differs,
    version_differs,
    communication_variable_differs,
)
