"""What the guard does in a healthy step, in calls and not in seconds: those are the machine's."""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from dsdoctor.overflow.replay.replay import BatchRecorder
from tests.overflow.engine import Engine

MAX_CALLS = 33
"""Python calls for one micro-batch: 26 with Python 3.11."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        made = self.layers(x)
        return {"loss": (made - labels).square().mean(), "logits": made}


def calls_in_dsdoctor(engine: Engine, **batch: Tensor) -> int:
    called = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal called
        called += event == "call" and "/dsdoctor/overflow/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            engine.module(**batch)["loss"].backward()
    finally:
        sys.setprofile(None)
    return called


def test_a_micro_batch_costs_few_calls_however_many_modules_there_are() -> None:
    engine, batch = Engine(Model()), {"x": torch.ones(2, 4), "labels": torch.zeros(2, 4)}
    recorder = BatchRecorder(engine)
    calls_in_dsdoctor(engine, **batch)  # where the generators lie is looked up once
    recorder.forget()

    called = calls_in_dsdoctor(engine, **batch)

    assert len(recorder.batches) == 1
    assert sorted(recorder.batches[0].gradients) == [0, 1]
    assert 0 < called <= MAX_CALLS
