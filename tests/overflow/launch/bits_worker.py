"""Ten steps with and without a watch: are weights and optimizer states the same bit for bit?"""

import copy
import tempfile
from pathlib import Path
from typing import Any

import engines
import numpy
import torch

from dsdoctor.overflow.watch.engine import watch

STEPS = 10


class Record:
    """A plain object with a number that each forward changes."""

    count = 0


class Noisy(engines.Net):
    """Draws from generators of its own, and keeps a record."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.generator = torch.Generator().manual_seed(3)
        self.drawn = numpy.random.default_rng(3)
        self.record = Record()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.record.count += 1
        noise = torch.rand(x.shape, generator=self.generator) + float(self.drawn.random()) + self.record.count
        return super().forward(x + 0.1 * noise.to(x), labels=labels)


def trained(case: dict[str, Any], rank: int, level: str | None) -> tuple[list[torch.Tensor], list[str]]:
    engines.seed(0)
    engine = engines.build(case, Noisy() if case.get("noisy") else None)
    folder = Path(tempfile.mkdtemp())
    chosen = {"trace_batch_nums": [1, 2, 5], "trace_dir": str(folder)} if level == "trace" else {}
    watching = None if level is None else watch(engine, level=level, report_file=str(folder / "report"), **chosen)
    for step in range(STEPS):
        for micro in range(case.get("gas", 1)):
            x, labels = engines.batch_of(step, micro, rank, engines.live_dtype(case))
            if step == case.get("bad"):
                x[0, 0] = float("inf")
            engine.backward(engines.loss_of(engine, x, labels))
            engine.step()
    states = engines.states(engine)
    if case["stage"] < 3:
        copy.deepcopy(engine.module)  # an average of the model, as scripts keep it
    rules: list[str] = []
    if watching is not None:
        rules = [finding.rule for finding in watching.findings()]
        watching.detach()
    engines.close(engine)
    return states, rules


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    plain, _ = trained(case, rank, None)
    results = {}
    for level in case["levels"]:
        states, rules = trained(case, rank, level)
        results[level] = {"same": engines.same(plain, states), "rules": rules}
    return results


if __name__ == "__main__":
    engines.main(run)
