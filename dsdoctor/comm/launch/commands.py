"""How many ranks, and where -> the orders of the hosts, and the variables of each rank. Starts nothing."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dsdoctor.comm.preflight.facts import SSH as ASKING
from dsdoctor.hosts.hostfile import Slots
from dsdoctor.hosts.ssh import for_any_shell
from dsdoctor.ranks.launchers import TORCHRUN

SSH = ("-T", *ASKING, "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


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

    @property
    def ranks(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.count)


def variables_of(order: HostOrder, rank: int) -> dict[str, str]:
    """What tells a rank of an order who it is: ``rank_of`` reads it."""
    return {
        TORCHRUN.rank: str(rank),
        TORCHRUN.world: str(order.world),
        TORCHRUN.local_rank: str(rank - order.first),
        TORCHRUN.local_world: str(order.count),
        "MASTER_ADDR": order.master,
        "MASTER_PORT": str(order.port),
        "DSDOCTOR_COMM_RUN": order.token,
        **({"DSDOCTOR_COMM_HOSTS": order.hosts} if order.hosts else {}),
    }


def host_orders(
    hosts: Sequence[Slots], *, master: str, port: int, token: str, seconds: float, arguments: Sequence[str] = ()
) -> dict[str, HostOrder]:
    """The order of each host of a hostfile, ranks in its order."""
    names = ",".join(f"{host.name}*{host.slots}" for host in hosts)
    order = HostOrder(
        first=0,
        count=0,
        world=sum(host.slots for host in hosts),
        master=master,
        port=port,
        token=token,
        hosts=names,
        seconds=seconds,
        arguments=tuple(arguments),
    )
    orders: dict[str, HostOrder] = {}
    for host in hosts:
        order = replace(order, first=order.first + order.count, count=host.slots)
        orders[host.name] = order
    return orders


def remote_command(argv: Sequence[str], folder: str, variables: Mapping[str, str]) -> str:
    """One command for any login shell: ``argv`` with ``variables`` in ``folder``, at home where that is not there."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    script = f"cd {shlex.quote(folder)} 2>/dev/null || cd || exit\n{exports}exec {shlex.join(argv)}\n"
    return for_any_shell(script, argv[2] if argv[1:2] == ("-m",) else argv[0])
