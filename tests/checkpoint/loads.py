"""Real loads of many checkpoints, each by two fresh ranks: ``loads.py ORDERS.json ANSWERS.json SECONDS``.

Knows nothing of dsdoctor. After so many seconds no further load begins: there are fewer answers then.

torch, DeepSpeed and what they import only when an engine is made (two seconds and more) are imported once; the ranks of each load
are forked, so that a rank that fails or waits for ever takes no other load with it.
What a rank holds afterwards is told as digests of its own tensors: no rank asks another one for them.
"""

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import deepspeed
import deepspeed.ops.op_builder.all_ops
import deepspeed.pipe
import deepspeed.runtime.zero.muon.muon_optimizer
import torch
import torch._dynamo
import torch.utils.serialization

sys.path.insert(0, str(Path(__file__).parent))
import ranks

PATIENCE, MERCY = 60.0, 4.0
"""Seconds for a load, and for a rank after another one has failed: it waits for what will not come."""
TOGETHER = 3
"""Loads at one time: the ranks of one mostly wait for each other. Those that wait in vain are not counted."""
SPECIAL = {"frozen": {"frozen": True}, "experts": {"experts": True}}


def holds(engine):
    """What this rank holds, bit by bit: its weights and buffers, the fp32 weights, the moments, the schedule, the steps."""
    inner = engine.optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    states = [value for state in inner.state.values() for _, value in sorted(state.items())]
    return [
        digest([getattr(each, "ds_tensor", each) for each in engine.module.parameters()]),
        digest(engine.module.buffers()),
        digest(each for group in inner.param_groups for each in group["params"]),
        digest(states),
        str(engine.lr_scheduler and engine.lr_scheduler.state_dict()),
        [engine.global_steps, engine.global_samples, engine.skipped_steps],
    ]


def digest(values):
    made = hashlib.sha256()
    for value in values:
        made.update(bytes_of(value) if torch.is_tensor(value) else repr(value).encode())
    return made.hexdigest()[:16]


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


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
        # DeepSpeed names its shared memory after the port, and an earlier pair may still wait
        MASTER_PORT=str(number + 1),
    )
    # whatever happens, a forked rank never comes back
    try:
        load(order, rank, f"file://{place}/store{number}", place / f"answer{number}-{rank}.json")
    finally:
        os._exit(1)


class Pair:
    """The two ranks of a load."""

    def __init__(self, number, order, place):
        self.number, self.place, self.failed = number, place, False
        self.pids = {begin(number, rank, order, place) for rank in (0, 1)}
        self.end = time.monotonic() + PATIENCE

    def ended(self, pid, status):
        self.pids.discard(pid)
        if status and not self.failed:
            self.failed, self.end = True, time.monotonic() + MERCY

    def kill_late(self):
        for pid in self.pids if time.monotonic() > self.end else ():
            os.kill(pid, signal.SIGKILL)

    def became(self):
        """What became of both, and nothing is left of them."""
        (self.place / f"store{self.number}").unlink(missing_ok=True)
        answers = [self.place / f"answer{self.number}-{rank}.json" for rank in (0, 1)]
        return [json.loads(each.read_text()) if each.exists() else {"error": "it waits"} for each in answers]


def all_loads(orders, place, end):
    """Each order's answer. While a rank waits in vain for one that has failed, the next load goes on."""
    answers, running, waiting = {}, [], list(enumerate(orders))
    while waiting or running:
        if time.monotonic() > end:
            waiting.clear()
        elif waiting and sum(not pair.failed for pair in running) < TOGETHER:
            running.append(Pair(*waiting.pop(0), place))
        pid, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
        for pair in list(running):
            if pid in pair.pids:
                pair.ended(pid, status)
            pair.kill_late()
            if not pair.pids:
                answers[pair.number] = pair.became()
                running.remove(pair)
        if running and not pid:
            time.sleep(0.005)
    return [{**order, "ranks": answers[number]} for number, order in enumerate(orders) if number in answers]


def main():
    orders, answers = (Path(each) for each in sys.argv[1:3])
    end = time.monotonic() + float(sys.argv[3])
    # what is compiled for the ranks on one machine is loaded once, not by each of them
    deepspeed.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
    told = all_loads(json.loads(orders.read_text()), answers.parent, end)
    answers.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
