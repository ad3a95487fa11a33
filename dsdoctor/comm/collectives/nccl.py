"""NCCL's log -> facts, and findings."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsdoctor.comm.models import Claim, by_rank, named
from dsdoctor.core.finding import Finding, Severity
from dsdoctor.rules import book

# NCCL's log with NCCL_DEBUG=INFO, of one or several ranks -> facts. Judges nothing; only ``relevant_lines`` reads a file.
#
# Reads the formats of NCCL 2.12 to 2.30. Other lines in between, and prefixes of launchers, do not matter.


MAX_LOG_BYTES = 8 << 20
"""Bytes of a rank's log that are read: NCCL writes what is needed during init."""

LINE = re.compile(
    r"(?<![\w.-])(?P<process>[\w.-]{1,255}:\d{1,9}):\d{1,9} \[-?\d+\] (?:[\w./]+:\d+ )?NCCL (?P<level>INFO|WARN) (?P<said>.*)"
)
INIT = re.compile(r"comm (0x[0-9a-f]+) rank (\d{1,9}) n[rR]anks (\d{1,9}) .*- Init (START|COMPLETE)")
EDGE = re.compile(r"Channel \d+(?:/\d+)? : (\d{1,9})\[\w+\] -> (\d{1,9})\[\w+\] (?:\[\w+\] )?via (\S+)")
HCA = re.compile(r"\[\d+\]([\w.-]+:\d+/\w+)")
SETTING = re.compile(r"(NCCL_\w+) set by environment to (\S.*?)\.?$")


@dataclass(frozen=True, kw_only=True)
class NcclFacts:
    """What NCCL logged. ``edges`` maps "0 -> 1" to its transport ("P2P/CUMEM", "SHM/direct/direct", "NET/IB/GDRDMA",
    "NET/Socket"); ``incomplete`` are the ranks that began init and did not end it; ``direct`` whether GPU Direct RDMA is on
    (None: not logged); ``no_fabric`` says why InfiniBand is not used, ``no_p2p`` which GPUs do not reach each other. Ranks
    are those of the largest communicator, of ``world`` ranks."""

    bootstrap: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    direct: bool | None = None
    variables: dict[str, str] = field(default_factory=dict)
    edges: dict[str, str] = field(default_factory=dict)
    world: int | None = None
    incomplete: tuple[int, ...] = ()
    no_fabric: tuple[str, ...] = ()
    no_p2p: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass
class _Communicator:
    process: str
    rank: int
    world: int
    complete: bool


RELEVANT = re.compile(
    r"Bootstrap|Using network|plugin|NET/IB|Channel 00|Init (?:START|COMPLETE)|set by environment|P2P|RDMA| WARN "
)


def relevant_lines(folder: str, pid: int) -> str:
    """The lines of one data process's log that ``parse_nccl_log`` reads, each once and of the first channel only, because
    they are sent to rank 0."""
    kept: dict[str, None] = {}
    for path in Path(folder).glob(f"nccl.*.{pid}.log"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            lines = file.read(MAX_LOG_BYTES).decode("utf-8", errors="replace").splitlines()
            kept |= dict.fromkeys(line for line in lines if RELEVANT.search(line))
    return "\n".join(kept)


def parse_nccl_log(text: str) -> NcclFacts:
    """The facts in a log.

    >>> facts = parse_nccl_log(
    ...     "n1:7:7 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>\\n"
    ...     "n1:7:9 [0] NCCL INFO Using network Socket\\n"
    ...     "n1:7:9 [0] NCCL INFO ncclCommInitRank comm 0x1f rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 1000 - Init START\\n"
    ...     "n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\\n"
    ... )
    >>> facts.bootstrap, facts.networks, facts.edges, facts.incomplete
    (('eth0:10.0.0.1',), ('Socket',), {'0 -> 1': 'P2P/CUMEM'}, (0,))
    """
    lines = [(match["process"], match["level"], match["said"].strip()) for match in LINE.finditer(text)]
    said = list(dict.fromkeys(words for _, _, words in lines))
    communicators = _communicators(lines)
    world = max((communicator.world for communicator in communicators), default=None)
    whole = {communicator.process for communicator in communicators if communicator.world == world}
    rdma = [words for words in said if "GPU Direct RDMA " in words]
    return NcclFacts(
        bootstrap=_first(said, r"Bootstrap ?: Using (\S+?)<\d*>"),
        networks=_first(said, r"(?:Using network|Assigned NET plugin) (\S+)"),
        hcas=tuple(dict.fromkeys(hca for words in said if "NET/IB : Using" in words for hca in HCA.findall(words))),
        direct=not any("Disabled" in words for words in rdma) if rdma else None,
        variables={match[1]: match[2] for words in said if (match := SETTING.match(words))},
        edges=_edges(lines, whole),
        world=world,
        incomplete=_incomplete(communicators, whole),
        no_fabric=_first(
            said, r"(NET/IB : No device found|Failed to open libibverbs\.so\S*|NCCL_IB_DISABLE set by .*)"
        ),
        no_p2p=_first(said, r"(Could not enable P2P between .*|P2P is disabled between .*)"),
        warnings=tuple(dict.fromkeys(f"{process}: {words}" for process, level, words in lines if level == "WARN")),
    )


def parse_transport(via: str) -> str:
    """A transport without the number of its network card; "PXN" where another GPU's card is used.

    >>> [parse_transport(via) for via in ("NET/IB/3/GDRDMA", "NET/IB/2(0)/GDRDMA", "SHM/direct/direct", "NET/Socket/0")]
    ['NET/IB/GDRDMA', 'NET/IB/PXN/GDRDMA', 'SHM/direct/direct', 'NET/Socket']
    """
    return re.sub(r"/\d+(?=/|$)", "", re.sub(r"/\d+\(\d+\)", "/PXN", via))


def _first(said: list[str], pattern: str) -> tuple[str, ...]:
    found = (re.match(pattern, words) for words in said)
    return tuple(dict.fromkeys(match[1] for match in found if match))


def _communicators(lines: list[tuple[str, str, str]]) -> list[_Communicator]:
    known: dict[tuple[str, str], _Communicator] = {}
    ended: list[_Communicator] = []
    for process, _, words in lines:
        match = INIT.search(words)
        if not match:
            continue
        key = process, match[1]
        if match[4] == "START" and key in known:
            ended.append(known.pop(key))
        communicator = known.setdefault(key, _Communicator(process, int(match[2]), int(match[3]), complete=False))
        communicator.complete = match[4] == "COMPLETE"
    return [*ended, *known.values()]


def _incomplete(communicators: list[_Communicator], whole: set[str]) -> tuple[int, ...]:
    """The ranks, in the largest communicator, of the processes in which any communicator's init did not end."""
    world = max((communicator.world for communicator in communicators), default=0)
    ranks = {communicator.process: communicator.rank for communicator in communicators if communicator.world == world}
    stuck = {
        communicator.rank if communicator.world == world else ranks[communicator.process]
        for communicator in communicators
        if communicator.process in whole and not communicator.complete
    }
    return tuple(sorted(stuck))


def _edges(lines: list[tuple[str, str, str]], whole: set[str]) -> dict[str, str]:
    """Of the processes in the largest communicator (all where init was not logged): others number their ranks differently."""
    found: dict[tuple[int, int], dict[str, None]] = {}
    for process, _, words in lines:
        match = EDGE.match(words) if not whole or process in whole else None
        if match:
            transports = found.setdefault((int(match[1]), int(match[2])), {})
            transports[parse_transport(match[3])] = None
    return {f"{source} -> {target}": " + ".join(found[source, target]) for source, target in sorted(found)}


# What NCCL wrote during a test -> findings. Looks at nothing.


MAX_LINES = 8


def examine(facts: NcclFacts, claims: tuple[Claim, ...]) -> tuple[Finding, ...]:
    """Every finding about NCCL's log."""
    return tuple(finding for check in CHECKS for finding in check(facts, claims))


def nccl_init_incomplete(facts: NcclFacts, claims: tuple[Claim, ...]) -> Iterator[Finding]:
    """A rank began NCCL's init and did not end it."""
    if facts.incomplete:
        yield book.finding(
            "nccl-init-incomplete",
            Severity.ERROR,
            evidence=(*(f"bootstrap over {name}" for name in facts.bootstrap[:2]), *facts.warnings[:MAX_LINES]),
            ranks=named(facts.incomplete, by_rank(claims)),
            world=facts.world,
        )


def nccl_network_is_socket(facts: NcclFacts, claims: tuple[Claim, ...]) -> Iterator[Finding]:
    """The hosts have InfiniBand or RoCE with an active port, and NCCL uses TCP sockets."""
    active = {
        f"{port.device} of {claim.host}"
        for claim in claims
        for port in (claim.local.fabric if claim.local else ())
        if port.state == "ACTIVE"
    }
    if "Socket" in facts.networks and active and len(set(by_rank(claims))) > 1:
        evidence = facts.no_fabric or ("NCCL does not say why",)
        yield book.finding("nccl-network-is-socket", Severity.WARNING, evidence=evidence, port=min(active))


def nccl_p2p_off(facts: NcclFacts, claims: tuple[Claim, ...]) -> Iterator[Finding]:
    """GPUs of one host do not reach each other directly: NCCL goes through the processor's memory, or through a socket."""
    hosts, slow = by_rank(claims), []
    for edge, transport in facts.edges.items():
        source, target = (int(rank) for rank in edge.split(" -> "))
        together = max(source, target) < len(hosts) and hosts[source] == hosts[target]
        if together and not transport.startswith(("P2P", "NVLS")):
            slow.append(f"{edge} via {transport}")
    if slow:
        off = [f"{name}={value}" for name, value in facts.variables.items() if name.startswith("NCCL_P2P_")]
        yield book.finding(
            "nccl-p2p-off",
            Severity.WARNING if off else Severity.NOTE,
            evidence=(*off, *facts.no_p2p[:2], *slow[:MAX_LINES]),
            count=len(slow),
            total=len(facts.edges),
            edge=slow[0],
        )


def nccl_direct_rdma_off(facts: NcclFacts, _: tuple[Claim, ...]) -> Iterator[Finding]:
    """InfiniBand is used, and the network cards cannot read the GPUs' memory."""
    if facts.direct is False and facts.hcas:
        yield book.finding("nccl-direct-rdma-off", Severity.WARNING, adapters=facts.hcas[:MAX_LINES])


def nccl_warned(facts: NcclFacts, _: tuple[Claim, ...]) -> Iterator[Finding]:
    """NCCL wrote warnings during the test."""
    lines = facts.warnings
    if lines:
        evidence = tuple(line[:300] for line in lines[:MAX_LINES])
        yield book.finding(
            "nccl-warned", Severity.NOTE, case="lines", evidence=evidence, count=len(lines), line=lines[0][:160]
        )


CHECKS: tuple[Callable[[NcclFacts, tuple[Claim, ...]], Iterator[Finding]], ...] = (
    nccl_init_incomplete,
    nccl_network_is_socket,
    nccl_p2p_off,
    nccl_direct_rdma_off,
    nccl_warned,
)
