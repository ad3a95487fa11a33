"""Faults of one rank or its node that are generated: what is done, which rank, before which collective, in which mode."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from tests.comm import faults
from tests.comm.fault_table import Fault
from tests.comm.rig import Rig


@dataclass(frozen=True, kw_only=True)
class Misdeed:
    """Something that a rank does in Python, and what must be said of it, with which exit status. It is a ``statement`` before a
    collective, or a ``change`` that lasts."""

    name: str
    statement: str = ""
    change: str = ""
    rules: tuple[str, ...]
    says: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("--quick", "--default", "--full")
    status: int = 1

    def change_at(self, call: int) -> str:
        """What the rank's Python is changed by."""
        return self.change or faults.acts(call, self.statement)

    def said(self, rank: int, call: int, mode: str) -> str:
        """The case by its name."""
        return f"rank {rank} {self.name}{'' if self.change else f' before collective {call}'} of {mode}"


MISDEEDS = (
    Misdeed(
        name="raises",
        statement="raise ValueError('batch 7 is empty')",
        rules=("rank-raised",),
        says=("ValueError: batch 7 is empty",),
    ),
    Misdeed(
        name="raises that it is not supported",
        statement="raise RuntimeError('this operator is not supported here')",
        rules=("rank-raised",),
        says=("this operator is not supported here",),
    ),
    Misdeed(
        name="raises NotImplementedError",
        statement="raise NotImplementedError('no kernel for it')",
        rules=("rank-raised",),
        says=("no kernel for it",),
    ),
    Misdeed(name="exits with 0", statement="os._exit(0)", rules=("rank-died",), says=()),
    Misdeed(name="exits with 3", statement="sys.exit(3)", rules=("rank-died",), says=("exit status 3",)),
    Misdeed(
        name="is killed", statement="os.kill(os.getpid(), signal.SIGKILL)", rules=("rank-died",), says=("SIGKILL",)
    ),
    Misdeed(
        name="is stopped",
        statement="os.kill(os.getpid(), signal.SIGSTOP)",
        rules=("rank-stopped",),
        says=("stopped by a signal",),
    ),
    Misdeed(name="sleeps in Python", statement="time.sleep(3600)", rules=("rank-behind",), says=(" in act",)),
    Misdeed(
        name="waits in C, holding the interpreter",
        # a mutex that is locked twice: no signal ends the wait
        statement="import ctypes; lock = ctypes.create_string_buffer(64); "
        "take = ctypes.PyDLL(None).pthread_mutex_lock; take(lock); take(lock)",
        rules=("rank-behind",),
        says=(" in act",),
    ),
)
SLOWER = ("--default", "--full")
LASTING = (
    Misdeed(
        name="is 30 ms late with every message",
        change=faults.late_always(0.03),
        rules=("messages-late",),
        says=("at any size",),
        modes=SLOWER,
        status=6,
    ),
    Misdeed(name="sends a wrong bit", change=faults.flipped_bit(), rules=("data-is-wrong",)),
    Misdeed(name="has another torch", change=faults.other_torch(), rules=("version-differs",), says=("2.7.0+cpu",)),
    Misdeed(
        name="cannot import torch",
        change=faults.broken_torch(),
        rules=("rank-unable", "torch-unusable"),
        says=("libcudart.so.13",),
    ),
)


@dataclass(frozen=True, kw_only=True)
class OfNode:
    """Something that is done to a rank's node, for as long as the test runs or (``during``) while all wait before a collective."""

    name: str
    inject: Callable[[Rig, int], AbstractContextManager[None]]
    rules: tuple[str, ...]
    during: bool = False
    modes: tuple[str, ...] = ("--quick", "--default", "--full")
    status: int = 1


OF_NODES = (
    OfNode(name="is cut off", inject=faults.cable_pulled, rules=("host-vanished",), during=True),
    OfNode(
        name="loses all packets",
        inject=lambda rig, rank: faults.everything_dropped(rig[rank]),
        rules=("host-vanished",),
        during=True,
    ),
    OfNode(name="has a slow link", inject=faults.slow_node, rules=("node-is-slow",), modes=SLOWER, status=6),
    OfNode(
        name="has 64 MB of shared memory",
        inject=lambda rig, rank: faults.small_shm(rig[rank]),
        rules=("comm-shm-too-small",),
        status=0,
    ),
)
RANKS = (0, 1, 2)
CALLS = (1, 2, 9)
MODES = ("--quick", "--default", "--full")


def generated(
    misdeeds: Sequence[Misdeed] = MISDEEDS,
    ranks: Sequence[int] = RANKS,
    calls: Sequence[int] = CALLS,
    modes: Sequence[str] = MODES,
) -> list[Fault]:
    """A fault for each combination, on three ranks of three nodes."""
    return [
        Fault(
            name=misdeed.said(rank, call, mode),
            world=3,
            nodes=3,
            mode=mode,
            changes={rank: (misdeed.change_at(call),)},
            rules=misdeed.rules,
            says=(f"rank {rank} (node{'abc'[rank]}", *misdeed.says),
            status=misdeed.status,
        )
        for misdeed, rank, call, mode in itertools.product(misdeeds, ranks, calls, modes)
        if mode in misdeed.modes and (not misdeed.change or call == calls[0])
    ]


def of_nodes(modes: Sequence[str] = MODES) -> list[tuple[Fault, int]]:
    """A fault for each node, and the collective before which the ranks are held for it (0: they are not)."""
    return [
        (
            Fault(
                name=f"the node of rank {rank} {kind.name}{f' before collective {call}' if call else ''} of {mode}",
                world=3,
                nodes=3,
                mode=mode,
                before=None if kind.during else partial(_injected, kind, rank),
                during=partial(_injected, kind, rank) if kind.during else None,
                rules=kind.rules,
                says=(f"node{'abc'[rank]}",),
                status=kind.status,
            ),
            call,
        )
        for kind, rank, mode in itertools.product(OF_NODES, RANKS, modes)
        for call in (CALLS if kind.during else (0,))
        if mode in kind.modes
    ]


def _injected(kind: OfNode, rank: int, rig: Rig, _: str) -> AbstractContextManager[None]:
    return kind.inject(rig, rank)


SAMPLE = tuple(
    generated((misdeed,), (RANKS[place % 3],), (CALLS[(place + 1) % 3],), (MODES[0],))[0]
    for place, misdeed in enumerate(MISDEEDS)
)
"""One of each kind, over the ranks and places."""
