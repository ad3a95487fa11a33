"""Faults of one rank that are generated: what it does, which rank does it, before which collective, in which mode."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tests.comm import faults
from tests.comm.fault_table import Fault


@dataclass(frozen=True, kw_only=True)
class Misdeed:
    """Something that a rank does in Python before a collective, and what must be said of it."""

    name: str
    statement: str
    rules: tuple[str, ...]
    says: tuple[str, ...]


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
    Misdeed(name="sleeps in Python", statement="time.sleep(3600)", rules=("rank-behind",), says=("stands in act",)),
    Misdeed(
        name="waits in C, holding the interpreter",
        # a mutex that is locked twice: no signal ends the wait
        statement="import ctypes; lock = ctypes.create_string_buffer(64); "
        "take = ctypes.PyDLL(None).pthread_mutex_lock; take(lock); take(lock)",
        rules=("rank-behind",),
        says=("stands in act",),
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
            name=f"rank {rank} {misdeed.name} before collective {call} of {mode}",
            world=3,
            nodes=3,
            mode=mode,
            changes={rank: (faults.acts(call, misdeed.statement),)},
            rules=misdeed.rules,
            says=(f"rank {rank} (node{'abc'[rank]}", *misdeed.says),
        )
        for misdeed, rank, call, mode in itertools.product(misdeeds, ranks, calls, modes)
    ]


SAMPLE = tuple(
    generated((misdeed,), (RANKS[place % 3],), (CALLS[(place + 1) % 3],), (MODES[0],))[0]
    for place, misdeed in enumerate(MISDEEDS)
)
"""One of each kind, over the ranks and places."""
