"""Claims and attempts of ranks that never ran, for what judges them."""

from typing import Any

from dsdoctor.comm.local.checks import CHECKS
from dsdoctor.comm.local.facts import RankView, merged
from dsdoctor.comm.models import ChosenInterface, Claim, Interface, Local, Rank
from dsdoctor.comm.results import ConnectOutcome, Reach
from dsdoctor.core.finding import Finding

LETTERS = "abcdefgh"


def rank(number: int = 0, world: int = 4, **more: Any) -> Rank:
    said = {"local_rank": 0, "local_world": 1, "launcher": "torchrun", "master": "10.0.0.1", "port": 29500, **more}
    return Rank(rank=number, world=world, **said)


def claim(number: int, *, per_host: int = 2, world: int = 4, **more: Any) -> Claim:
    host = f"node{LETTERS[number // per_host]}"
    address = f"10.0.0.{number // per_host + 1}"
    interface = Interface(name="eth0", address=address, prefix=24, mtu=9000)
    chosen = ChosenInterface(name="eth0", address=address, because="its name resolves to it")
    said: dict[str, Any] = {
        "local_rank": number % per_host,
        "host": host,
        "pid": 100 + number,
        "address": address,
        "port": 40000 + number,
        "interface": "eth0",
        "arrived": 10.0,
        "seen": 10.0,
        "local": Local(hostname=host, interfaces=(interface,), chosen=chosen, routed=chosen),
    }
    return Claim(rank=number, world=world, **{**said, **more})


def claims(world: int = 4, per_host: int = 2) -> tuple[Claim, ...]:
    return tuple(claim(number, per_host=per_host, world=world) for number in range(world))


def reaches(made: tuple[Claim, ...], **outcomes: ConnectOutcome) -> tuple[Reach, ...]:
    """Every pair reached, but for those between hosts that are named: ``a_b=Outcome...`` is from nodea to nodeb."""

    def outcome(source: Claim, target: Claim) -> ConnectOutcome:
        return outcomes.get(f"{source.host[-1]}_{target.host[-1]}", ConnectOutcome.REACHED)

    return tuple(
        Reach(source=source.rank, target=target.rank, outcome=outcome(source, target), address=target.address)
        for source in made
        for target in made
        if source is not target
    )


def findings_of(me: Rank, local: Local, *, backend: str, several_hosts: bool) -> tuple[Finding, ...]:
    """What is found on the host of one rank."""
    gpu = local.gpus[me.local_rank % len(local.gpus)] if local.gpus else None
    place = RankView(local=local, world=me.world, backend=backend, several_hosts=several_hosts, gpu=gpu)
    return merged(CHECKS, [(me.rank, place)], (*("",) * me.rank, local.hostname))
