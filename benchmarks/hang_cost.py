"""What the hang watch costs while nothing hangs: ``python -m benchmarks.hang_cost [--json FILE]``.

Processor time of a training step with and without the watch, block by block in turns on two gloo ranks; of one look of a rank's
thread, which looks once a second, at a process with three groups and forty frames; memory that the watch takes in a rank;
processor time a second and memory of the supervisor with eight ranks (a supervisor is one a node); and the seconds of a verdict
on 512 ranks at rank 0's supervisor. Needs torch."""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import hang_ranks
from benchmarks.hang_ranks import cpu, supervised
from dsdoctor.hang.ring import RingWriter
from dsdoctor.hang.sampler import Sampler

LOOKS = 400
RANKS, SECONDS = 8, 20
BLOCK, PAIRS = 1.5, 30
"""Seconds of a block, and pairs of blocks."""
WIDTH, BATCH = 512, 64
ROOT = Path(__file__).parents[1]


def sampler(folder: Path, name: str, *, patience: float = 1e9) -> Sampler:
    """The watch's thread, with a ring of its own."""
    ring = RingWriter(folder / name)
    return Sampler(ring, str(folder / f"{name}.words"), rank=0, world=2, patience=patience, tend=lambda: None)


def step_rank(folder: Path, rank: int) -> None:
    """One of two ranks that train, the watch on in every other block; rank 0 prints the processor time of a step in each block."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.ones(BATCH, WIDTH)

    def steps(count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
        return (time.process_time() - began) / count

    steps(20)
    began = time.monotonic()
    steps(20)
    told = torch.tensor([max(20, BLOCK / ((time.monotonic() - began) / 20))])
    dist.broadcast(told, 0)
    blocks = []
    for number in range(2 * PAIRS):
        # on, off, off, on: what drifts is the same for both
        watch = sampler(folder, f"{rank}-{number}") if number % 4 in {0, 3} else None
        if watch is not None:
            watch.start(os.getpid())
        dist.barrier()
        blocks.append([watch is not None, steps(int(told))])
        if watch is not None:
            watch.close()
    (folder / f"blocks-{rank}.json").write_text(json.dumps(blocks))
    dist.destroy_process_group()


def step_cost() -> dict[str, object]:
    """By how much a step's processor time grows, with 95 % of what resampling the pairs gives."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.hang_cost", "--rank-of", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, str(rank)], env=env, cwd=ROOT) for rank in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0]
        both = [json.loads((Path(folder) / f"blocks-{rank}.json").read_text()) for rank in range(2)]
    means = [(on, statistics.mean((first, second))) for (on, first), (_, second) in zip(*both, strict=True)]
    pairs = [means[place : place + 2] for place in range(0, len(means), 2)]
    ratios = [dict(pair)[True] / dict(pair)[False] - 1 for pair in pairs]
    made = random.Random(0)  # noqa: S311
    spread = sorted(statistics.median(made.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {
        "pairs of blocks": len(ratios),
        "milliseconds of processor a step": statistics.median(seconds for on, seconds in means if not on) * 1000,
        "more with the watch, %": statistics.median(ratios) * 100,
        "95 % of that": [spread[100] * 100, spread[-101] * 100],
    }


def look_milliseconds(folder: Path) -> dict[str, float]:
    """Of one look while the ranks move, of one that also reads a full flight recorder; all of a minute as a share of it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for _ in range(2):
        dist.new_group([0])
    for _ in range(2000):
        dist.all_reduce(torch.ones(4))
    looking, stalled = sampler(folder, "a"), sampler(folder, "b", patience=0.0)
    each, first = deep(40, lambda: timed(looking.look, LOOKS)), deep(40, lambda: timed(stalled.look, 1))
    arrivals = timed(read_arrivals, 10)
    minute = (60 * each + arrivals) / 60_000
    return {
        "moving": each,
        "first look when still": first,
        "calls of a minute": arrivals,
        "share of a processor, %": minute * 100,
    }


def read_arrivals() -> None:
    """What a rank does once a minute more."""
    from dsdoctor.hang.sampler import Arrivals
    from dsdoctor.ranks.flight_recorder import recorder_texts

    Arrivals(None).read("\n".join(recorder_texts()))


def deep(frames: int, function: Callable[[], float]) -> float:
    return function() if frames <= 0 else deep(frames - 1, function)


def timed(function: Callable[[], None], times: int) -> float:
    began = time.thread_time()
    for _ in range(times):
        function()
    return (time.thread_time() - began) / times * 1000


MEMORY = """
import sys, time, torch, torch.distributed as dist, json, os
from pathlib import Path
folder = sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
for _ in range(2000): dist.all_reduce(torch.ones(4))
def private():
    return sum(int(l.split()[1]) for l in open("/proc/self/smaps_rollup") if l.startswith("Private")) / 1024
before = private()
from dsdoctor.hang.start import Beginning
from dsdoctor.hang.models import HangOptions
begun = Beginning(HangOptions(), Path(sys.argv[2]), rank=0, world=2)
for _ in range(20): begun.sampler.look()
after = private()
torch._C._distributed_c10d._dump_fr_trace_json()
dumped = private()
from dsdoctor.ranks.flight_recorder import recorder_texts
begun.sampler._arrivals.read("\\n".join(recorder_texts()))
time.sleep(2)
told = {"begun": after - before, "torch's own dump of 2000 calls, once": dumped - after, "reading it": private() - dumped}
print(json.dumps(told))
"""


def memory_in_a_rank() -> dict[str, float]:
    """MiB that a rank's process has more of its own once the watch is in it."""
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(random.randint(10_000, 19_000)),  # noqa: S311
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", MEMORY, folder, str(hang_ranks.ENTRY)]
        told = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def supervisor_figures(folder: Path) -> dict[str, float]:
    """A supervisor beside eight sleeping processes whose rings are there."""
    sleepers = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(RANKS)]
    sample = json.dumps({"rank": 0, "world": RANKS, "pid": 1, "time": 0.0}).encode()
    writers = [RingWriter(folder / f"rank-{rank:05d}-{each.pid}.ring") for rank, each in enumerate(sleepers)]
    (folder / "lock").touch()
    pid = supervised(folder, folder, {**os.environ, "MASTER_ADDR": "127.0.0.1"}, after=1e5)
    try:
        time.sleep(2)
        before = cpu(pid)
        for number in range(SECONDS):
            for writer in writers:
                writer.write(sample, clock=time.monotonic(), progress=number, stack=number, flags=4)
            time.sleep(1)
        used = (cpu(pid) - before) / SECONDS
        memory = Path(f"/proc/{pid}/smaps_rollup").read_text()
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in memory.splitlines()[1:]}
    own = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return {
        "processor %": used * 100,
        "Rss MiB": sizes["Rss"],
        "Pss MiB": sizes["Pss"],
        "private MiB": own,
        "private MiB a rank": own / RANKS,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    parser.add_argument("--rank-of", nargs=2, default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        step_rank(Path(given.rank_of[0]), int(given.rank_of[1]))
        return
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        figures: dict[str, object] = {"python": platform.python_version(), "processors": os.cpu_count()}
        figures |= {"load": os.getloadavg()[0], "512 ranks at rank 0's supervisor": hang_ranks.figures()}
        figures |= {
            "MiB of its own in a rank": memory_in_a_rank(),
            "supervisor with 8 ranks": supervisor_figures(Path(second)),
        }
        figures |= {"a training step": step_cost(), "milliseconds of one look": look_milliseconds(Path(first))}
    print(json.dumps(figures, indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
