"""What a step keeps for a replay is little of what is free: a script that drops its batches means their memory to be free."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from dsdoctor.core.cgroups import free_memory
from dsdoctor.core.host import LocalHost
from dsdoctor.overflow.replay.replay import (
    MAX_INPUT_BYTES,
    MIN_FREE_FACTOR,
    SMALL_INPUT_BYTES,
    BatchRecorder,
    HostMemory,
)
from tests.overflow.engine import Engine


class Scale(nn.Module):
    """Reads nothing of its input, so that a large one costs no memory here."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight * len(batch)


def kept(size: int, *, count: int = 1) -> list[bool]:
    """Which of some forwards' inputs a step keeps, each of so many bytes."""
    engine = Engine(Scale())
    recorder = BatchRecorder(engine)
    for _ in range(count):
        engine(torch.empty(size, dtype=torch.uint8))
    found = [batch.args is not None for batch in recorder.batches]
    recorder.detach()
    return found


@pytest.mark.parametrize(("share", "is_kept"), [(0.5, True), (1.5, False)])
def test_inputs_are_kept_up_to_a_share_of_the_free_memory(share: float, is_kept: bool) -> None:
    free = free_memory(LocalHost())
    assert free is not None and free > SMALL_INPUT_BYTES * MIN_FREE_FACTOR * 3, (
        "this machine has too little memory for the test"
    )

    size = int(free / MIN_FREE_FACTOR * share)
    assert kept(min(size, MAX_INPUT_BYTES) if is_kept else size) == [is_kept]


def test_small_inputs_are_kept_whatever_is_free() -> None:
    assert kept(SMALL_INPUT_BYTES // 4, count=4) == [True] * 4


def test_the_hosts_memory_is_not_read_anew_in_every_forward() -> None:
    """It takes milliseconds, with all files of the cgroups."""
    host, seen, kept = HostMemory(again=600.0), [], []
    for _ in range(4):
        seen.append(host.free())
        kept.append(torch.ones(4 << 20))

    assert len(set(seen)) == 1
    assert seen[0] > 0


def test_a_graph_that_outlives_its_engine_keeps_no_engine() -> None:
    engine = Engine(nn.Linear(1, 1))
    recorder = BatchRecorder(engine)
    graph = engine(torch.ones(1, 1)).grad_fn
    gone = weakref.ref(engine)
    del engine, recorder
    gc.collect()

    assert graph is not None
    assert gone() is None
