"""What a rank of a real training holds at each point, and how all ranks of many trainings are started."""

import contextlib
import gc
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from memory_cases import ARCHITECTURES, BATCH, SEQUENCE, Case

from dsdoctor.core.host import CHILD_SCRIPTS
from dsdoctor.memory.models import Point

PARTS = (
    (Point.FIRST_FORWARD, Point.FIRST_BACKWARD, Point.FIRST_STEP),
    (Point.FORWARD, Point.BACKWARD, Point.STEP),
)


def measure(case: Case, folder: Path) -> dict[str, int]:
    """Bytes of live storages at each point of two real steps."""
    import deepspeed
    import torch

    from dsdoctor.memory.engine import LiveStorages

    child = script("ask_model")
    torch.manual_seed(0)
    live = LiveStorages()
    live.start(existing=False)
    try:
        model, config, _ = child.build({"model": str(folder / f"{case.architecture}.json"), "dtype": "float32"})
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        engine, *_ = deepspeed.initialize(model=model, config=case.configuration())
        del model
        measured = {Point.AFTER_INITIALIZE: now(live)}
        for parts in PARTS:
            for _ in range(case.accumulation):
                found = micro_step(engine, child.inputs_of(engine.module, config, BATCH, SEQUENCE), live)
                for point, size in zip(parts, found, strict=True):
                    measured[point] = max(size, measured.get(point, 0))
            # of the calls of step() only the last one is a step
            measured[parts[-1]] = found[-1]
            measured.setdefault(Point.AFTER_STEP, now(live))
        engine.save_checkpoint(str(folder / "checkpoint"))
        measured[Point.SAVE] = most(live)
    finally:
        live.stop()
    engine.destroy()
    return {point.value: size for point, size in measured.items()}


def micro_step(engine: Any, inputs: dict[str, Any], live: Any) -> tuple[int, int, int]:
    """The most in forward, backward and step."""
    now(live)
    loss = engine(**inputs)["loss"]
    forward = most(live)
    engine.backward(loss)
    del loss
    backward = most(live)
    engine.step()
    return forward, backward, most(live)


LET_GO = 0.02
"""Seconds. A thread of gloo's holds a collective's tensors until Python lets it run, which may be well after wait() returned."""


def now(live: Any) -> int:
    gc.collect()
    time.sleep(LET_GO)
    live.mark()
    return sum(size for device, size in live.now.items() if device != "meta")


def most(live: Any) -> int:
    time.sleep(LET_GO)
    return sum(size for device, size in live.mark().items() if device != "meta")


def run_rank(plan: Path) -> None:
    """Measure every case of the plan; the answers go beside it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo")
    # DeepSpeed refuses fp16 on CPUs; torch computes it there, slowly
    get_accelerator().is_fp16_supported = lambda: True
    results = []
    for number, fields in enumerate(json.loads(plan.read_text())):
        case = Case(**fields)
        started = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            measured = measure(case, plan.parent)
        results.append({"measured": measured, "seconds": time.monotonic() - started})
        if os.environ["RANK"] == "0":
            print(f"{number} {case.name} {results[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        plan.with_name(f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def script(name: str) -> Any:
    """A child script as a module."""
    if str(CHILD_SCRIPTS) not in sys.path:
        sys.path.insert(0, str(CHILD_SCRIPTS))
    return importlib.import_module(name)


def launch(cases: list[Case], folder: Path) -> list[list[dict[str, Any]]]:
    """For each case what each of its ranks measured. All cases of one number of ranks go through the same processes."""
    for name, fields in ARCHITECTURES.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    found: dict[int, list[dict[str, Any]]] = {}
    for world in sorted({case.world for case in cases}):
        numbers = [number for number, case in enumerate(cases) if case.world == world]
        of_ranks = launched([cases[number] for number in numbers], world, folder)
        found |= dict(zip(numbers, map(list, zip(*of_ranks, strict=True)), strict=True))
    return [found[number] for number in range(len(cases))]


def launched(cases: list[Case], world: int, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank measured of each case."""
    plan = folder / "plan.json"
    plan.write_text(json.dumps([asdict(case) for case in cases]))
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29671")}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(plan)],
            env={
                **os.environ,
                **address,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_SIZE": str(world),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parents[1]),
            },
        )
        for rank in range(world)
    ]
    for rank in ranks:
        if rank.wait():
            raise SystemExit(f"a rank ended with status {rank.returncode}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
