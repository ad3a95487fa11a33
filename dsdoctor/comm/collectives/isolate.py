"""Repeats a failed exchange: transports switched off one after the other, then smaller groups as ``nodes.plan`` chooses them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dsdoctor.comm.models import Claim
from dsdoctor.comm.nodes.plan import Outcome, Part, Run, Trial, play
from dsdoctor.comm.rank_names import by_rank, named
from dsdoctor.core.finding import Finding, step
from dsdoctor.core.text import and_more


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A variable that switches one transport or algorithm off; ``layer`` is at fault when the exchange works without it."""

    variable: str
    value: str
    layer: str
    fix: str


SWITCHES = {
    "nccl": (
        Switch(variable="NCCL_P2P_DISABLE", value="1", layer="peer-to-peer copies between GPUs (PCIe or NVLink)",
               fix="switch ACS off on the PCIe bridges and set iommu=pt; on NVLink see nvidia-fabricmanager"),
        Switch(variable="NCCL_SHM_DISABLE", value="1", layer="shared memory between ranks of a host",
               fix="give the container a larger /dev/shm (--shm-size=16g), and remove nccl-* files in it"),
        Switch(variable="NCCL_IB_DISABLE", value="1", layer="InfiniBand or RoCE",
               fix="see ibstat, NCCL_IB_GID_INDEX and NCCL_IB_HCA; the ports must be Active and of one fabric"),
        Switch(variable="NCCL_NVLS_ENABLE", value="0", layer="NVLink SHARP (multicast)",
               fix="see nvidia-fabricmanager and the driver"),
        Switch(variable="NCCL_ALGO", value="Ring", layer="the tree algorithms", fix="update NCCL"),
        Switch(variable="NCCL_PROTO", value="Simple", layer="the low-latency protocols (LL, LL128)", fix="update NCCL"),
    ),
}  # fmt: skip
"""In the order in which they are tried: the first that helps shows the layer."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What was tried: the switches, of which the last helped where ``cured``, and the rounds in smaller groups."""

    claims: tuple[Claim, ...]
    switches: tuple[Switch, ...] = ()
    cured: bool = False
    outcome: Outcome = field(default_factory=lambda: Outcome(trials=()))

    @property
    def said(self) -> str:
        """How much was tried."""
        return f"{len(self.switches) + len(self.outcome.trials)} trials with transports off and in smaller groups"


def parts_of(claims: Sequence[Claim], least: int = 3) -> tuple[Part, ...]:
    """The ranks of each host; where there are fewer hosts than ``least``, each rank by itself."""
    hosts = dict.fromkeys(claim.host for claim in claims)
    if len(hosts) < least:
        return tuple((claim.rank,) for claim in claims)
    return tuple(tuple(sorted(claim.rank for claim in claims if claim.host == host)) for host in hosts)


def isolate(
    claims: Sequence[Claim], backend: str, with_switch: Callable[[Switch], bool | None], in_groups: Run
) -> Search:
    """Try the switches until one helps, else go on in smaller groups. ``with_switch``: whether the exchange then works, None where
    no time is left."""
    tried: list[Switch] = []
    for switch in SWITCHES.get(backend, ()):
        works = with_switch(switch)
        if works is None:
            return Search(claims=tuple(claims), switches=tuple(tried))
        tried.append(switch)
        if works:
            return Search(claims=tuple(claims), switches=tuple(tried), cured=True)
    return Search(claims=tuple(claims), switches=tuple(tried), outcome=play(parts_of(claims), in_groups))


def transport_broken(search: Search) -> Iterator[Finding]:
    """An exchange that fails works once a single transport of NCCL is switched off.

    The transports are switched off one after the other, each in fresh processes; the first that helps names the layer.

    Why it matters: training hangs or computes with wrong data. The setting that helps is a workaround, and training
    with it is slow.

    How to fix it: repair the layer that the finding names. Until then, export the variable that helped.

        $ export NCCL_P2P_DISABLE=1

    Since: 0.1
    """
    if search.cured:
        *others, switch = search.switches
        hosts = and_more(list(dict.fromkeys(claim.host for claim in search.claims)), 4)
        yield Finding.error(
            "transport-broken",
            f"{switch.layer} is broken on {hosts}: with {switch.variable}={switch.value} the same exchanges are right",
            evidence=tuple(f"{other.variable}={other.value}: fails" for other in others),
            fix=switch.fix,
            steps=(step("export {variable}={value}", variable=switch.variable, value=switch.value),),
        )


def narrowed_to(search: Search) -> Iterator[Finding]:
    """A rank or host fails by itself, or with each of two others that are well; or two fail together that are well with others.

    The ranks exchanged again in small groups, in fresh processes: each host alone, pairs at once, the hosts of a pair
    that failed again with ones that were well, then groups of four, eight and so on.

    Why it matters: what fails with whoever is well is at fault: that GPU, that host, its adapter or its cable. Where
    both ends are well with others it is the path between them.

    How to fix it: take that host or GPU out of the job, and test it by itself.

        $ python -m dsdoctor comm --full

    Since: 0.1
    """
    hosts, outcome = by_rank(search.claims), search.outcome
    bad = tuple(sorted(rank for part in outcome.bad for rank in part))
    evidence = tuple(_told(trial) for trial in outcome.trials)
    steps = (step("python -m dsdoctor comm --full"),)
    if bad:
        yield Finding.error(
            "narrowed-to",
            f"only groups with {named(bad, hosts)} fail; the others are well among themselves",
            evidence=evidence,
            fix="take that host or GPU out of the job, and test it by itself",
            steps=steps,
        )
    for one, other in outcome.paths:
        yield Finding.error(
            "narrowed-to",
            f"{named(one, hosts)} and {named(other, hosts)} fail together, and each is well with others",
            evidence=evidence,
            fix="look at what lies between the two: switch, route, a firewall",
            steps=steps,
        )
    if not bad and not outcome.paths and outcome.least_failing:
        yield Finding.error(
            "narrowed-to",
            f"groups of {outcome.least_failing} fail, and every pair in them is well",
            evidence=evidence,
            fix="look at what only many use at once: the upper switches, a limit of connections or of memory",
            steps=steps,
        )


def _told(trial: Trial) -> str:
    def words(group: tuple[Part, ...]) -> str:
        return "+".join("-".join(map(str, sorted({part[0], part[-1]}))) for part in group)

    failed = [words(group) for group in trial.failed]
    return f"{trial.what}: {len(trial.well)} of {len(trial.groups)} well" + (
        f"; ranks {and_more(failed, 6)} not" if failed else ""
    )


CHECKS = (transport_broken, narrowed_to)
