"""Repeats a failed exchange in smaller groups: each host alone, hosts in pairs, ranks in pairs, transports switched off.

``together`` and ``narrowed`` are pure. A trial runs in new data processes and new groups, disjoint groups at the same time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dsdoctor.comm.models import Claim
from dsdoctor.comm.rank_names import named
from dsdoctor.comm.torch_ops import rounds
from dsdoctor.core.finding import Finding
from dsdoctor.core.fix import step
from dsdoctor.core.sentences import and_more

Groups = tuple[tuple[int, ...], ...]


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
    "gloo": (),
}  # fmt: skip
"""In the order in which they are tried: the first that helps shows the layer."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What was tried and which groups failed."""

    what: str
    groups: Groups
    failed: Groups
    switch: Switch | None = None


def hosts_apart(claims: Sequence[Claim]) -> Groups:
    """The ranks of each host that has several, as groups.

    >>> hosts_apart(())
    ()
    """
    hosts = dict.fromkeys(claim.host for claim in claims)
    groups = tuple(tuple(claim.rank for claim in claims if claim.host == host) for host in hosts)
    return tuple(group for group in groups if len(group) > 1) if len(groups) > 1 else ()


def together(parts: Sequence[tuple[int, ...]]) -> Iterator[Groups]:
    """Every two parts together once, disjoint ones at the same time.

    >>> list(together([(0, 1), (2,), (3,)]))[0]
    ((2, 3),)
    """
    for pairs in rounds(len(parts)):
        yield tuple(tuple(sorted(parts[first] + parts[second])) for first, second in pairs)


def narrowed(trials: Sequence[Trial]) -> tuple[int, ...]:
    """The ranks that are in every group that failed and in none that worked.

    >>> narrowed([Trial(what="", groups=((0, 1), (2, 3)), failed=((0, 1),)), Trial(what="", groups=((0, 2),), failed=())])
    (1,)
    """
    failed = [set(group) for trial in trials for group in trial.failed]
    well = {rank for trial in trials for group in trial.groups if group not in trial.failed for rank in group}
    return tuple(sorted(set.intersection(*failed) - well)) if failed else ()


def isolate(
    claims: Sequence[Claim], backend: str, run: Callable[[str, Groups, Switch | None], Trial | None]
) -> list[Trial]:
    """Try until a single rank or host is left. ``run`` returns None when there is no more time."""
    trials: list[Trial] = []

    def tried(what: str, groups: Groups, switch: Switch | None = None) -> Trial | None:
        trial = run(what, groups, switch)
        if trial is not None:
            trials.append(trial)
        return trial

    for switch in SWITCHES.get(backend, ()):
        trial = tried(f"{switch.variable}={switch.value}", (), switch)
        if trial is None or not trial.failed:
            return trials
    apart = hosts_apart(claims)
    if apart and tried("each host by itself", apart) is None:
        return trials
    hosts = dict.fromkeys(claim.host for claim in claims)
    parts = [tuple(claim.rank for claim in claims if claim.host == host) for host in hosts]
    if len(parts) < 3:
        parts = [(claim.rank,) for claim in claims]
    for pairs in together(parts) if len(parts) > 2 else ():
        if tried("in pairs", pairs) is None or len(narrowed(trials)) == 1:
            return trials
    return trials


def transport_broken(trials: Sequence[Trial], claims: Sequence[Claim]) -> Iterator[Finding]:
    """An exchange that fails works once a single transport of NCCL is switched off.

    The transports are switched off one after the other, each in fresh processes; the first that helps names the layer.

    Why it matters: training hangs or computes with wrong data. The setting that helps is a workaround, and training
    with it is slow.

    How to fix it: repair the layer that the finding names. Until then, export the variable that helped.

        $ export NCCL_P2P_DISABLE=1

    Since: 0.1
    """
    for trial in trials:
        if trial.switch and not trial.failed:
            yield Finding.error(
                "transport-broken",
                f"{trial.switch.layer} is broken on {_hosts(claims)}: with {trial.what} the same exchanges are right",
                evidence=tuple(f"{other.what}: fails" for other in trials if other.switch and other.failed),
                fix=trial.switch.fix,
                steps=(step("export {variable}={value}", variable=trial.switch.variable, value=trial.switch.value),),
            )


def narrowed_to(trials: Sequence[Trial], claims: Sequence[Claim]) -> Iterator[Finding]:
    """Every group with a certain rank or host fails, and those without it are well.

    The ranks exchanged again in small groups, in fresh processes.

    Why it matters: what is in every group that failed, and in none that was well, is at fault: that GPU, that host, its
    adapter or its cable.

    How to fix it: take that host or GPU out of the job, and test it by itself.

        $ python -m dsdoctor comm --full

    Since: 0.1
    """
    suspects = narrowed([trial for trial in trials if trial.switch is None])
    hosts = {claim.rank: claim.host for claim in claims}
    if not suspects or len(suspects) == len(hosts):
        return
    by_rank = tuple(hosts.get(rank, "") for rank in range(max(hosts) + 1))
    yield Finding.error(
        "narrowed-to",
        f"only groups with {named(suspects, by_rank)} fail; the others are well among themselves",
        evidence=tuple(_told(trial) for trial in trials if trial.switch is None),
        fix="take that host or GPU out of the job, and test it by itself",
        steps=(step("python -m dsdoctor comm --full"),),
    )


def _told(trial: Trial) -> str:
    groups = ", ".join(
        f"{'+'.join(map(str, group))} {'fails' if group in trial.failed else 'well'}" for group in trial.groups[:6]
    )
    return f"{trial.what}: {groups}"


def _hosts(claims: Sequence[Claim]) -> str:
    return and_more(list(dict.fromkeys(claim.host for claim in claims)), 4)


CHECKS = (transport_broken, narrowed_to)
