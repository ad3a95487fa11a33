"""How many ranks, and where -> the command and the variables of each. Starts nothing."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dsdoctor.comm.preflight.facts import SSH as ASKING
from dsdoctor.core.rank_variables import TORCHRUN
from dsdoctor.hosts.hostfile import Slots

MODULE = "dsdoctor.comm"
SSH = ("-T", *ASKING, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


@dataclass(frozen=True, kw_only=True)
class Started:
    """One rank that is to be started here: ``argv``, and the variables to be added to this process's."""

    rank: int
    argv: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HostOrder:
    """The ranks of a host: ``first`` and how many of the whole world, who is the master, and the arguments of each.

    ``token`` is the run's, ``seconds`` the most that they may take, ``hosts`` what ``rank_of`` reads in DSDOCTOR_COMM_HOSTS.
    """

    first: int
    count: int
    world: int
    master: str
    port: int
    token: str
    seconds: float
    hosts: str = ""
    arguments: tuple[str, ...] = ()


def local_ranks(order: HostOrder, *, python: str) -> tuple[Started, ...]:
    """The ranks of an order, on this machine."""
    return tuple(
        Started(rank=order.first + local, argv=(python, "-m", MODULE, *order.arguments), environment=_who(order, local))
        for local in range(order.count)
    )


def host_orders(
    hosts: Sequence[Slots], *, master: str, port: int, token: str, seconds: float, arguments: Sequence[str] = ()
) -> dict[str, HostOrder]:
    """The order of each host of a hostfile, ranks in its order."""
    world, first, orders = sum(host.slots for host in hosts), 0, dict[str, HostOrder]()
    names = ",".join(f"{host.name}*{host.slots}" for host in hosts)
    for host in hosts:
        orders[host.name] = HostOrder(
            first=first,
            count=host.slots,
            world=world,
            master=master,
            port=port,
            token=token,
            hosts=names,
            seconds=seconds,
            arguments=tuple(arguments),
        )
        first += host.slots
    return orders


def remote_command(argv: Sequence[str], folder: str, variables: Mapping[str, str]) -> str:
    """One command for any login shell: ``argv`` in ``folder`` with ``variables``."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    return "exec sh -c " + shlex.quote(f"cd {shlex.quote(folder)} || exit\n{exports}exec {shlex.join(argv)}\n")


def _who(order: HostOrder, local: int) -> dict[str, str]:
    """What ``rank_of`` reads."""
    return {
        TORCHRUN.rank: str(order.first + local),
        TORCHRUN.world: str(order.world),
        TORCHRUN.local_rank: str(local),
        TORCHRUN.local_world: str(order.count),
        "MASTER_ADDR": order.master,
        "MASTER_PORT": str(order.port),
        "DSDOCTOR_COMM_RUN": order.token,
        **({"DSDOCTOR_COMM_HOSTS": order.hosts} if order.hosts else {}),
    }
