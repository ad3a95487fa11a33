"""Four steps at level trace, of which two batches are traced; the third case runs onto a full disk."""

import os
from pathlib import Path
from typing import Any

import engines
import verdict_worker

from dsdoctor.overflow.watch.engine import watch


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    engine = engines.build(case, verdict_worker.Net(case.get("checkpointing", "none")))
    folder = Path(case["folder"])
    watching = watch(
        engine, level="trace", trace_batch_nums=[1, 2], trace_dir=folder, abort_after_batch_num=case.get("last")
    )
    raised = ""
    try:
        for step in range(4):
            if case.get("full") and step == 1:
                fill(folder / f"filler-{rank}")
            x, labels = engines.batch_of(step, 0, rank, engines.live_dtype(case))
            engine.backward(engine(x, labels)["loss"])
            engine.step()
    except ValueError as error:
        raised = str(error)
    steps = int(engine.global_steps)
    watching.detach()
    engines.close(engine)
    return {"raised": raised, "steps": steps}


def fill(path: Path) -> None:
    """Leave no room on the file system of the path."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            os.fsync(file.fileno())


if __name__ == "__main__":
    engines.main(run)
