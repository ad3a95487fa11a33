"""What goes wrong between machines, done to a rig for real: packets, links, processes, files. Context managers undo it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comm.rig import Node, Rig, port_of, stop, wait_until

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

# --- processes


def processes(rig: Rig, rank: int, command: str = "dsdoctor.comm", space: str = "pid") -> tuple[int, ...]:
    """The machine's pids of everything that a rank runs in the rig's nodes: by its environment and its command line. With
    ``space="net"`` the nsenter that started it is among them."""
    spaces = {Path(f"/proc/{node.pid}/ns/{space}").readlink() for node in rig.nodes}
    known = {f"{name}={rank}".encode() for name in RANK_VARIABLES}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if command.encode() not in (folder / "cmdline").read_bytes():
                continue
            if (folder / "ns" / space).readlink() in spaces and known & {
                *(folder / "environ").read_bytes().split(b"\0")
            }:
                found.append(int(folder.name))
    return tuple(sorted(found))


def signal_rank(rig: Rig, rank: int, number: int, command: str = "dsdoctor.comm", space: str = "pid") -> None:
    """Sends a signal to all processes of a rank, again until none of them is new."""
    done: set[int] = set()
    while fresh := {*processes(rig, rank, command, space)} - done:
        for pid in fresh:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        done |= fresh
    if not done:
        raise LookupError(f"rank {rank} runs no {command}")


def kill_rank(rig: Rig, rank: int, command: str = "dsdoctor.comm") -> None:
    """kill -9, as the kernel does when memory is out."""
    signal_rank(rig, rank, signal.SIGKILL, command)


@contextlib.contextmanager
def frozen_rank(rig: Rig, rank: int, command: str = "dsdoctor.comm") -> Iterator[None]:
    """All processes of a rank stopped; its kernel goes on acknowledging packets."""
    signal_rank(rig, rank, signal.SIGSTOP, command)
    try:
        yield
    finally:
        with contextlib.suppress(LookupError):
            # nsenter stops together with its child
            signal_rank(rig, rank, signal.SIGCONT, command, "net")


# --- links and packets


@contextlib.contextmanager
def cable_pulled(rig: Rig, number: int, link: int = 0) -> Iterator[None]:
    """The switch's end of a node's link goes down: the node sees its carrier go, packets vanish both ways."""
    assert rig.switch
    rig.switch.net("ip", "link", "set", port_of(number, link), "down")
    try:
        yield
    finally:
        rig.switch.net("ip", "link", "set", port_of(number, link), "up")


@contextlib.contextmanager
def link_down(node: Node, link: int = 0) -> Iterator[None]:
    """``ip link set eth0 down`` on the node: its own packets find no route."""
    node.net("ip", "link", "set", f"eth{link}", "down")
    try:
        yield
    finally:
        node.net("ip", "link", "set", f"eth{link}", "up")


@contextlib.contextmanager
def firewall(node: Node, *rules: str) -> Iterator[None]:
    """iptables rules such as ``INPUT -s 10.200.0.1 -j DROP``; lo is always let through."""
    added: list[list[str]] = []
    try:
        for rule in rules:
            chain, *rest = rule.split()
            node.net("iptables", "-w", "-A", chain, *rest)
            added.append([chain, *rest])
        yield
    finally:
        for rest in added:
            node.net("iptables", "-w", "-D", *rest)


def everything_dropped(node: Node) -> "contextlib.AbstractContextManager[None]":
    """No packet enters or leaves the node, and no error is reported."""
    return firewall(node, "INPUT -i eth+ -j DROP", "OUTPUT -o eth+ -j DROP")


def one_port_open(node: Node, port: int) -> "contextlib.AbstractContextManager[None]":
    """Others may open connections to this port of the node only; what is open stays open, and the node may call out."""
    return firewall(node, f"INPUT -i eth+ -p tcp --syn ! --dport {port} -j DROP")


def one_way(node: Node, source: Node) -> "contextlib.AbstractContextManager[None]":
    """``source`` cannot open a connection to the node; the node can to ``source``."""
    return firewall(node, f"INPUT -s {source.address} -p tcp --syn -j DROP")


def port_rejected(node: Node, port: int) -> "contextlib.AbstractContextManager[None]":
    """A firewall that says so: ICMP "administratively prohibited" (EHOSTUNREACH, errno 113)."""
    return firewall(node, f"INPUT -i eth+ -p tcp --dport {port} -j REJECT --reject-with icmp-admin-prohibited")


def port_dropped(node: Node, port: int) -> "contextlib.AbstractContextManager[None]":
    """A firewall that says nothing."""
    return firewall(node, f"INPUT -i eth+ -p tcp --dport {port} -j DROP")


def lossy(node: Node, source: Node, probability: float = 0.03) -> "contextlib.AbstractContextManager[None]":
    """Of what comes from ``source`` a part is lost, by chance."""
    chance = f"-m statistic --mode random --probability {probability}"
    return firewall(node, f"INPUT -s {source.address} {chance} -j DROP")


@contextlib.contextmanager
def slow_node(rig: Rig, number: int, rate: str = "80mbit", link: int = 0) -> Iterator[None]:
    """The node's link is slow in both directions (token bucket; this kernel has no netem)."""
    assert rig.switch
    ends = ((rig[number], f"eth{link}"), (rig.switch, port_of(number, link)))
    bucket = ("root", "tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
    try:
        for space, interface in ends:
            space.net("tc", "qdisc", "replace", "dev", interface, *bucket)
        yield
    finally:
        for space, interface in ends:
            space.net("tc", "qdisc", "del", "dev", interface, "root")


@contextlib.contextmanager
def mtu_hole(rig: Rig, link: int = 0) -> Iterator[None]:
    """Nodes that send frames of 9000 bytes over a switch that drops what is above 1500, and reports it to no one."""
    for node in rig.nodes:
        node.net("ip", "link", "set", f"eth{link}", "mtu", "9000")
    try:
        yield
    finally:
        for node in rig.nodes:
            node.net("ip", "link", "set", f"eth{link}", "mtu", "1500")


# --- ports and files

LISTEN = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print("listening", flush=True)
kept = []
while True:
    kept.append(listener.accept()[0])
    kept[-1].sendall(sys.argv[2].encode())
"""


@contextlib.contextmanager
def squatter(node: Node, port: int, says: str = "") -> Iterator[None]:
    """Another program's server on the port: says nothing, or a greeting such as ``SSH-2.0-x`` and a line end."""
    log = node.folder / "squatter.log"
    with log.open("w") as file:
        process = node.popen([sys.executable, "-c", LISTEN, str(port), says], stdout=file, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: "listening" in log.read_text(), 10, "the squatter does not listen", log)
        yield
    finally:
        stop(process)
        process.wait()


@contextlib.contextmanager
def full_tmp(node: Node, folder: str = "/run/tmp") -> Iterator[None]:
    """A folder for temporary files that takes nothing more."""
    fill = f"mount -t tmpfs -o size=64k tmp {folder} && dd if=/dev/zero of={folder}/fill bs=4k 2>/dev/null; true"
    node.run(["sh", "-c", fill], check=True)
    try:
        yield
    finally:
        node.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def same_address(rig: Rig, number: int, other: int) -> Iterator[None]:
    """A node has the address of another beside its own; rank 0's node still finds the right one."""
    node, first = rig[other], rig[0]
    card = _card(rig[number])
    first.net("ip", "neigh", "replace", rig[number].address, "lladdr", card, "dev", "eth0")
    node.net("ip", "address", "add", f"{rig[number].address}/24", "dev", "eth0")
    try:
        yield
    finally:
        node.net("ip", "address", "del", f"{rig[number].address}/24", "dev", "eth0")


def _card(node: Node) -> str:
    return node.net("ip", "-brief", "link", "show", "eth0").split()[2]


@contextlib.contextmanager
def other_way_back(rig: Rig, number: int, target: int) -> Iterator[None]:
    """A node sends to another by its second link, and drops what comes from there by the first, as many systems are set up to."""
    node = rig[number]
    node.net("ip", "route", "add", f"{rig[target].address}/32", "dev", "eth1", "src", node.addresses[1])
    for name in ("all", "eth0", "eth1"):
        node.net("sysctl", "-qw", f"net.ipv4.conf.{name}.rp_filter=1")
    try:
        yield
    finally:
        node.net("ip", "route", "del", f"{rig[target].address}/32", "dev", "eth1")


@contextlib.contextmanager
def small_shm(node: Node, size: str = "64m") -> Iterator[None]:
    """/dev/shm as Docker makes it."""
    node.run(["mount", "-o", f"remount,size={size}", "/dev/shm"], check=True)
    try:
        yield
    finally:
        node.run(["mount", "-o", "remount,size=50%", "/dev/shm"], check=True)


@contextlib.contextmanager
def name_on_loopback(rig: Rig, node: Node, address: str = "127.0.1.1") -> Iterator[None]:
    """The node's own name leads to itself only, as Debian's installer writes it."""
    node.hosts(rig.hosts().replace(f"{node.address} {node.name}", f"{address} {node.name}"))
    try:
        yield
    finally:
        node.hosts(rig.hosts())


# --- one rank's Python

AFTER_IMPORT = """
import importlib.abc, importlib.machinery, os, signal, sys, time
from pathlib import Path

CHANGES = {}

class After(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module
        def changed(module):
            run(module)
            for change in CHANGES[name]:
                change(module)
        spec.loader.exec_module = changed
        return spec

FIRST = ("all_reduce", "reduce", "broadcast", "send", "isend", "gather")
SECOND = ("all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
          "all_to_all_single")

def wrap(module, before):
    # before(the tensor that this rank contributes) goes before every collective
    for position, names in enumerate((FIRST, SECOND)):
        for name in names:
            if hasattr(module, name):
                setattr(module, name, with_before(getattr(module, name), before, position))

def with_before(function, before, position):
    def call(*given, **named):
        before(given[position] if len(given) > position else named.get(("tensor", "input")[position]))
        return function(*given, **named)
    return call

sys.meta_path.insert(0, After())
"""
OTHER_VERSION = """
def other_version(module):
    module.__version__ = {version!r}

CHANGES.setdefault("torch.version", []).append(other_version)
"""
FLIPPED = """
def flip(tensor):
    import torch
    if isinstance(tensor, torch.Tensor) and tensor.numel() >= {elements} and tensor.is_contiguous():
        raw = tensor.view(-1).view(torch.uint8)
        raw[tensor.element_size() * (tensor.numel() // 2) + {byte}] ^= {bit}

CHANGES.setdefault("torch.distributed.distributed_c10d", []).append(lambda module: wrap(module, flip))
"""
HELD = """
calls = [0]

def hold(tensor):
    calls[0] += 1
    folder = Path({folder!r})
    if calls[0] == {call}:
        (folder / ("held-" + os.environ["RANK"])).write_text(str(os.getpid()))
        until = time.monotonic() + 60
        while not (folder / "go").exists() and time.monotonic() < until:
            time.sleep(0.01)

CHANGES.setdefault("torch.distributed.distributed_c10d", []).append(lambda module: wrap(module, hold))
"""


BROKEN_TORCH = """
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ImportError({said!r})

sys.meta_path.insert(0, NoTorch())
"""
LATE = """
CHANGES.setdefault("torch.distributed.distributed_c10d", []).append(
    lambda module: wrap(module, lambda tensor: time.sleep({seconds}))
)
"""
ACTS = """
acted = [0]

def act(tensor):
    acted[0] += 1
    if acted[0] == {call}:
        {statement}

CHANGES.setdefault("torch.distributed.distributed_c10d", []).append(lambda module: wrap(module, act))
"""


ENTERED = """
Path({folder!r}, "cgroup.procs").write_text("0")
"""
CGROUPS = Path("/sys/fs/cgroup")
LIMITS = {
    "cpu": {"cpu.cfs_quota_us": "10000", "cpu.max": "10000 100000"},
    "memory": {"memory.limit_in_bytes": str(1 << 30), "memory.max": str(1 << 30)},
}
"""A tenth of a processor, and 1 GiB; each by version 1 and version 2."""


def cgroup_of(controller: str) -> Path:
    """The control group that a rank is put into, of version 1 where that has the controller."""
    top = CGROUPS / controller if (CGROUPS / controller / "cgroup.procs").exists() else CGROUPS
    return top / f"dsdoctor-tests-{os.getpid()}"


@contextlib.contextmanager
def limited(controller: str) -> Iterator[None]:
    """A control group with little of one thing; what is in it at the end is moved out of it."""
    group = cgroup_of(controller)
    try:
        group.mkdir()
        for name, text in LIMITS[controller].items():
            if (group / name).exists():
                (group / name).write_text(text)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()


def entered(controller: str) -> str:
    """The rank is in that control group from its start."""
    return ENTERED.format(folder=os.fspath(cgroup_of(controller)))


def customized(folder: Path, *changes: str) -> dict[str, str]:
    """Variables that make a Python bear the changes."""
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(AFTER_IMPORT + "".join(changes))
    return {"PYTHONPATH": str(folder)}


def other_torch(version: str = "2.7.0+cpu") -> str:
    """torch says that it is another version."""
    return OTHER_VERSION.format(version=version)


def flipped_bit(elements: int = 16, byte: int = 1, bit: int = 1) -> str:
    """One bit of the middle element of what this rank contributes is wrong, in tensors of at least so many elements."""
    return FLIPPED.format(elements=elements, byte=byte, bit=bit)


def held(folder: Path, call: int) -> str:
    """The rank stops before its so many-th collective until ``folder/go`` is there; ``folder/held-RANK`` says that it did."""
    return HELD.format(folder=str(folder), call=call)


def broken_torch(said: str = "libcudart.so.13: cannot open shared object file: No such file or directory") -> str:
    """torch cannot be imported."""
    return BROKEN_TORCH.format(said=said)


def late_always(seconds: float) -> str:
    """The rank is late at every collective and with every message that it sends."""
    return LATE.format(seconds=seconds)


def acts(call: int, statement: str) -> str:
    """The rank does a Python statement before its so many-th collective."""
    return ACTS.format(call=call, statement=statement)
