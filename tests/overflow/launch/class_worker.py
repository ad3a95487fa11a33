"""The guide's class on an engine's module: a defect in step 2, perhaps on one rank only, and an evaluation on one rank alone."""

from typing import Any

import engines
import torch
from verdict_worker import STEP, Net, batch, plant

from dsdoctor import DebugUnderflowOverflow


def run(case: dict[str, Any], rank: int) -> dict[str, Any]:
    engine = engines.build(case, Net(case.get("checkpointing", "none")))
    watching = DebugUnderflowOverflow(engine.module)
    raised = ""
    try:
        for step in range(STEP + 1):
            if step == STEP:
                plant(engine, case, rank)
            if case.get("evaluate") and rank == 0:
                engine.eval()
                with torch.no_grad():
                    engine(*batch(case, step, 0, rank))
                engine.train()
            x, labels = batch(case, step, 0, rank)
            engine.backward(engine(x, labels)["loss"])
            engine.step()
    except ValueError as error:
        raised = f"{type(error).__name__}: {error}"
    watching.detach()
    engines.close(engine)
    return {"raised": raised, "batches": watching.batch_number}


if __name__ == "__main__":
    engines.main(run)
