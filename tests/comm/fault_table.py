"""The faults, one record each: what is done to a rig or to a rank, and what must come out by name. Played for plain torch too."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tests.comm import faults
from tests.comm.jobs import PORT, Job, job
from tests.comm.rig import Rig

Inject = Callable[[Rig, str], AbstractContextManager[None]]
"""Takes the rig and the text by which a rank's processes are known."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``before`` is done before the ranks start, ``during`` while all of them wait at a collective. ``changes`` and ``own``
    are alterations of Python and variables of single ranks. One of ``rules`` must be found by rank ``teller``, with all of
    ``says`` in its title, and with this exit status. ``whispers``: what a rank says for itself; ``mute`` ranks can neither
    say anything nor end."""

    name: str
    rules: tuple[str, ...]
    says: tuple[str, ...]
    before: Inject | None = None
    during: Inject | None = None
    changes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    own: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    absent: tuple[int, ...] = ()
    twice: tuple[int, ...] = ()
    world: int = 2
    nodes: int = 2
    links: int = 1
    mode: str = "--quick"
    status: int = 1
    teller: str = "0"
    whispers: Mapping[str, str] = field(default_factory=dict)
    mute: tuple[str, ...] = ()


@contextlib.contextmanager
def played(fault: Fault, folder: Path, argv: Sequence[str], command: str, *, hold_at: int) -> Iterator[Job]:
    """Runs ``python ARGV`` as the ranks of the fault, does to it what there is to do, and gives the job while that lasts. The
    ranks wait before their ``hold_at``-th collective where something is done meanwhile."""
    with Rig(folder / "rig", nodes=fault.nodes, links=fault.links) as rig, contextlib.ExitStack() as stack:
        if fault.before:
            stack.enter_context(fault.before(rig, command))
        own = _variables(fault, folder, hold_at)
        running = stack.enter_context(job(rig, argv, fault.world, own=own, absent=fault.absent, twice=fault.twice))
        if fault.during:
            ranks = range(fault.world)
            if not running.watch(60, lambda: all((folder / f"held-{rank}").exists() for rank in ranks)):
                raise RuntimeError(f"the ranks did not come to their collectives\n{running.told()}")
            stack.enter_context(fault.during(rig, command))
            (folder / "go").touch()
        yield running


def _variables(fault: Fault, folder: Path, hold_at: int) -> dict[int, dict[str, str]]:
    held = (faults.held(folder, hold_at),) if fault.during else ()
    own: dict[int, dict[str, str]] = {}
    for rank in range(fault.world):
        changes = (*held, *fault.changes.get(rank, ()))
        bent = faults.customized(folder / f"site-{rank}", *changes) if changes else {}
        own[rank] = {**bent, **fault.own.get(rank, {})}
    return own


@contextlib.contextmanager
def _killed(rig: Rig, command: str) -> Iterator[None]:
    faults.kill_rank(rig, 1, command)
    yield


@contextlib.contextmanager
def _flapped(rig: Rig, _: str) -> Iterator[None]:
    with faults.cable_pulled(rig, 1):
        time.sleep(0.4)
    yield


FAULTS = (
    Fault(name="a rank never comes", absent=(1,), rules=("rank-missing",), says=("rank 1",)),
    Fault(name="one of four never comes", world=4, absent=(2,), rules=("rank-missing",), says=("rank 2",)),
    Fault(
        name="wrong world size",
        own={1: {"WORLD_SIZE": "3"}},
        rules=("world-size-differs",),
        says=("world size 3", "rank 1 (nodeb)"),
    ),
    Fault(
        name="duplicate rank",
        world=3,
        absent=(2,),
        twice=(1,),
        rules=("rank-duplicated",),
        says=("rank 1", "nodea"),
    ),
    Fault(
        name="port in use, by a mute program",
        before=lambda rig, _: faults.squatter(rig[0], PORT),
        rules=("master-port-in-use",),
        says=("rank 0 (nodea)", f":{PORT}"),
        whispers={"1": "nodeb"},
    ),
    Fault(
        name="port in use, by sshd",
        before=lambda rig, _: faults.squatter(rig[0], PORT, "SSH-2.0-x\r\n"),
        rules=("master-port-in-use",),
        says=("rank 0 (nodea)", "SSH-2.0-x"),
        whispers={"1": "SSH-2.0-x"},
    ),
    Fault(
        name="no route to the master",
        own={1: {"MASTER_ADDR": "10.99.0.1"}},
        rules=("rank-missing",),
        says=("rank 1",),
        whispers={"1": "cannot be routed to"},
    ),
    Fault(
        name="host down",
        before=lambda rig, _: faults.cable_pulled(rig, 1),
        rules=("rank-missing",),
        says=("rank 1",),
        whispers={"1": "10.200.0.1:29500"},
    ),
    Fault(
        name="an address that another host has too",
        before=lambda rig, _: faults.same_address(rig, 1, 2),
        world=3,
        nodes=3,
        rules=("mesh-address-shared",),
        says=("nodeb and nodec have the same address 10.200.0.2",),
    ),
    Fault(
        name="another way back",
        before=lambda rig, _: faults.other_way_back(rig, 1, 2),
        world=3,
        nodes=3,
        links=2,
        rules=("mesh-one-way",),
        says=("nodec cannot connect to nodeb", "nodeb sends to 10.200.0.3 by eth1 10.200.1.2, not by eth0"),
    ),
    Fault(
        name="no room for temporary files",
        before=lambda rig, _: faults.full_tmp(rig[1]),
        rules=("tmp-full",),
        says=("rank 1 (nodeb): /run/tmp is full",),
        status=0,
    ),
    Fault(
        name="master's port dropped",
        before=lambda rig, _: faults.port_dropped(rig[0], PORT),
        rules=("rank-missing",),
        says=("rank 1",),
        whispers={"1": "does not answer"},
    ),
    Fault(
        name="master's port rejected",
        before=lambda rig, _: faults.port_rejected(rig[0], PORT),
        rules=("rank-missing",),
        says=("rank 1",),
        whispers={"1": "cannot be routed to"},
    ),
    Fault(name="rank killed (-9)", during=_killed, rules=("rank-died", "host-vanished"), says=("rank 1", "nodeb")),
    Fault(
        name="rank stopped (SIGSTOP)",
        during=lambda rig, command: faults.frozen_rank(rig, 1, command),
        rules=("rank-stopped",),
        mute=("1",),
        says=("rank 1 (nodeb",),
    ),
    Fault(
        name="link cut in mid-collective",
        during=lambda rig, _: faults.cable_pulled(rig, 1),
        rules=("host-vanished",),
        says=("nodeb", "rank 1"),
    ),
    Fault(
        name="link down for a moment in mid-collective",
        during=_flapped,
        rules=("link-errors-rose",),
        says=("nodeb",),
        status=6,
    ),
    Fault(
        name="packets dropped in mid-collective",
        during=lambda rig, _: faults.everything_dropped(rig[1]),
        rules=("host-vanished",),
        says=("nodeb", "rank 1"),
    ),
    Fault(
        name="all ports dropped but one",
        before=lambda rig, _: _on_all(rig, lambda node: faults.one_port_open(node, PORT)),
        rules=("mesh-only-master-port",),
        says=("nodea", "nodeb"),
    ),
    Fault(
        name="connections one way only",
        before=lambda rig, _: faults.one_way(rig[1], rig[0]),
        rules=("mesh-one-way",),
        says=("nodea cannot connect to nodeb",),
        # gloo opens its connections the other way
        status=6,
    ),
    Fault(
        name="connections not the way that gloo opens them",
        before=lambda rig, _: faults.firewall(
            rig[0], f"INPUT -s {rig[1].address} -p tcp --syn ! --dport {PORT} -j DROP"
        ),
        rules=("mesh-only-master-port",),
        says=("nodeb cannot connect to nodea",),
    ),
    Fault(
        name="a host whose firewall rejects all ports but one",
        before=lambda rig, _: faults.firewall(
            rig[1], f"INPUT -i eth+ -p tcp --syn ! --dport {PORT} -j REJECT --reject-with icmp-admin-prohibited"
        ),
        rules=("mesh-one-way",),
        says=("nodea and nodec cannot connect to nodeb", "a firewall that rejects"),
        world=3,
        nodes=3,
    ),
    Fault(
        name="MTU hole",
        before=lambda rig, _: faults.mtu_hole(rig),
        rules=("mesh-mtu-hole",),
        says=("nodea", "nodeb", "packets over 1500 bytes are lost"),
    ),
    Fault(
        name="3 % loss on one pair",
        before=lambda rig, _: faults.lossy(rig[2], rig[1]),
        world=3,
        nodes=3,
        mode="--default",
        status=6,
        rules=("mesh-lossy",),
        says=("nodeb -> nodec",),
    ),
    Fault(
        name="one node at 80 Mbit",
        before=lambda rig, _: faults.slow_node(rig, 2),
        world=3,
        nodes=3,
        mode="--default",
        status=6,
        rules=("node-is-slow",),
        says=("nodec",),
    ),
    Fault(
        name="a rank is 30 ms late at every call",
        world=3,
        nodes=3,
        mode="--default",
        status=6,
        changes={1: (faults.late_always(0.03),)},
        rules=("messages-late",),
        says=("rank 1 (nodeb)", "at any size"),
    ),
    Fault(
        name="a rank has a tenth of a processor",
        before=lambda _rig, _: faults.limited("cpu"),
        world=3,
        nodes=3,
        mode="--default",
        status=6,
        changes={1: (faults.entered("cpu"),)},
        rules=("cpu-quota-used-up",),
        says=("rank 1 (nodeb)", "0.1 CPUs were used up in"),
    ),
    Fault(
        name="a rank needs more memory than its cgroup has",
        before=lambda _rig, _: faults.limited("memory"),
        world=3,
        nodes=3,
        changes={1: (faults.entered("memory"), faults.acts(5, "bytearray(b'1') * (2 << 30)"))},
        rules=("rank-died",),
        says=("rank 1 (nodeb,", "SIGKILL: the out-of-memory killer of its memory cgroup, whose limit is 1,024 MiB"),
    ),
    Fault(
        name="a rank loses its connections with whoever it exchanges",
        world=3,
        nodes=3,
        changes={2: (faults.acts(1, "raise RuntimeError('Connection closed by peer [10.0.0.9]:1')"),)},
        rules=("narrowed-to",),
        says=("only groups with rank 2 (nodec) fail",),
    ),
    Fault(
        name="bit flip in one rank's data",
        world=3,
        nodes=3,
        changes={1: (faults.flipped_bit(),)},
        rules=("data-is-wrong",),
        says=("rank 1 (nodeb)",),
    ),
    Fault(
        name="another torch on one rank",
        world=3,
        nodes=3,
        changes={1: (faults.other_torch(),)},
        rules=("version-differs",),
        says=("rank 1 (nodeb)", "2.7.0+cpu"),
    ),
    Fault(
        name="torch of one rank cannot be imported",
        world=3,
        nodes=3,
        changes={2: (faults.broken_torch(),)},
        rules=("rank-unable",),
        says=("rank 2 (nodec)", "libcudart.so.13"),
        whispers={"2": "torch cannot be imported"},
    ),
    Fault(
        name="64 MB /dev/shm",
        before=lambda rig, _: faults.small_shm(rig[1]),
        rules=("comm-shm-too-small",),
        says=("rank 1 (nodeb)", "/dev/shm"),
        status=0,
    ),
    Fault(
        name="hostnames resolve to 127.0.1.1",
        before=lambda rig, _: _on_all(rig, lambda node: faults.name_on_loopback(rig, node)),
        rules=("mesh-loopback-address", "hostname-unusable"),
        says=("0 (nodea)", "1 (nodeb)", "127.0.1.1"),
    ),
)


@contextlib.contextmanager
def _on_all(rig: Rig, fault: Callable[..., AbstractContextManager[None]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for node in rig.nodes:
            stack.enter_context(fault(node))
        yield
