"""Real loads of many checkpoints, each by two fresh ranks: ``loads.py ORDERS.json ANSWERS.json SECONDS``.

Knows nothing of dsdoctor. After so many seconds no further load begins: there are fewer answers then.

torch and DeepSpeed are imported once; the ranks of each load are forked, so that a rank that fails or waits for ever takes no
other load with it. What a rank holds afterwards is told as sums over its own tensors: no rank asks another one for them.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import deepspeed
import torch

sys.path.insert(0, str(Path(__file__).parent))
import ranks

PATIENCE, MERCY = 60.0, 4.0
"""Seconds for a load, and for a rank after another one has failed: it waits for what will not come."""
SPECIAL = {"frozen": {"frozen": True}, "experts": {"experts": True}}


def holds(engine):
    """Sums over this rank's weights, fp32 weights and moments."""
    own = [getattr(each, "ds_tensor", each).detach().double().abs().sum() for each in engine.module.parameters()]
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    states = [
        value.detach().double().abs().sum()
        for state in inner.state.values()
        for name, value in sorted(state.items())
        if torch.is_tensor(value) and name != "step"
    ]
    weights = [
        each.detach().double().abs().sum() for group in inner.param_groups for each in group["params"] if each.numel()
    ]
    return [float(sum(found, torch.zeros((), dtype=torch.float64))) for found in (own, weights, states)]


def load(order, rank, store, answer):
    """One rank's part."""
    told = {}
    try:
        deepspeed.init_distributed(
            "gloo", init_method=store, rank=rank, world_size=2, verbose=False, auto_mpi_discovery=False
        )
        function = ranks.pipeline_of if order["kind"] == "pipeline" else ranks.engine_of
        special = SPECIAL.get(order["kind"], {})
        engine = function(order["stage"], order["dtype"], seed=99, universal=order.get("universal", False), **special)
        path, _ = engine.load_checkpoint(order["folder"], tag=order.get("tag"))
        told = {"path": path and str(path), "step": engine.global_steps}
        told["holds"] = holds(engine) if path else None
    except BaseException as error:
        told = {**told, "error": f"{type(error).__name__}: {error}"[:300], "at": traceback.format_exc()[-300:]}
    answer.write_text(json.dumps(told))
    os._exit(1 if "error" in told else 0)


def begin(number, rank, order, place):
    """A forked rank: its process."""
    pid = os.fork()
    if pid:
        return pid
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    # whatever happens, a forked rank never comes back
    try:
        load(order, rank, f"file://{place}/store{number}", place / f"answer{rank}.json")
    finally:
        os._exit(1)


def both(number, order, place):
    """What became of a load on both ranks."""
    for rank in (0, 1):
        (place / f"answer{rank}.json").unlink(missing_ok=True)
    pids = {begin(number, rank, order, place): rank for rank in (0, 1)}
    end = time.monotonic() + PATIENCE
    while pids and time.monotonic() < end:
        done, status = os.waitpid(-1, os.WNOHANG)
        if done:
            pids.pop(done, None)
            if status:
                end = min(end, time.monotonic() + MERCY)
        else:
            time.sleep(0.005)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    answers = [place / f"answer{rank}.json" for rank in (0, 1)]
    return [json.loads(each.read_text()) if each.exists() else {"error": "it waits"} for each in answers]


def main():
    orders, answers = (Path(each) for each in sys.argv[1:3])
    # what is compiled for the ranks on one machine is loaded once, not by each of them
    deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
    place = answers.parent
    told, end = [], time.monotonic() + float(sys.argv[3])
    for number, order in enumerate(json.loads(orders.read_text())):
        if time.monotonic() > end:
            break
        told.append({**order, "ranks": both(number, order, place)})
        (place / f"store{number}").unlink(missing_ok=True)
    answers.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
