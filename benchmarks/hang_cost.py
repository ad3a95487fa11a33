"""What the hang watch costs while nothing hangs: ``python -m benchmarks.hang_cost [--json FILE]``.

Processor time of one look of a rank's thread, which looks once a second, at a process with three groups and forty frames;
processor time a second and memory of the supervisor with eight ranks (a supervisor is one a node); and the seconds of a
verdict on 512 ranks. Needs torch."""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dsdoctor.hang.ring import RingWriter
from dsdoctor.hang.sampler import Sampler
from dsdoctor.hang.verdict import judge
from tests.hang.made import calling, elsewhere, incident, operation, view

LOOKS = 400
RANKS, SECONDS = 8, 20


def look_milliseconds(folder: Path) -> dict[str, float]:
    """Of one look while the ranks move, and of one that also reads a full flight recorder."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for _ in range(2):
        dist.new_group([0])
    for _ in range(2000):
        dist.all_reduce(torch.ones(4))
    moving = Sampler(RingWriter(folder / "a"), str(folder / "w"), rank=0, world=1, patience=1e9, tend=lambda: None)
    still = Sampler(RingWriter(folder / "b"), str(folder / "w"), rank=0, world=1, patience=0.0, tend=lambda: None)
    return {
        "moving": deep(40, lambda: timed(moving, LOOKS)),
        "first look when still": deep(40, lambda: timed(still, 1)),
    }


def deep(frames: int, function):  # type: ignore[no-untyped-def]
    return function() if frames <= 0 else deep(frames - 1, function)


def timed(sampler: Sampler, looks: int) -> float:
    began = time.thread_time()
    for _ in range(looks):
        sampler.look()
    return (time.thread_time() - began) / looks * 1000


def supervisor_figures(folder: Path) -> dict[str, float]:
    """A supervisor beside eight sleeping processes whose rings are there."""
    sleepers = [subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) for _ in range(RANKS)]
    sample = json.dumps({"rank": 0, "world": RANKS, "pid": 1, "time": 0.0}).encode()
    writers = [RingWriter(folder / f"rank-{rank:05d}-{each.pid}.ring") for rank, each in enumerate(sleepers)]
    (folder / "lock").touch()
    order = {"folder": str(folder), "options": {"after": 1e5, "on_hang": "report", "folder": "x"}, "place": ""}
    entry = Path(__file__).parents[1] / "dsdoctor" / "run" / "hang_supervisor.py"
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-I", "-S", str(entry), json.dumps(order), str(entry.parents[2]), *sys.path]
    subprocess.run(command, env=env, check=True)
    pid = next(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and str(folder) in words(path))
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
    return {"processor %": used * 100, "Rss MiB": sizes["Rss"], "Pss MiB": sizes["Pss"], "private MiB": own}


def words(path: Path) -> str:
    try:
        text = (path / "cmdline").read_text()
    except OSError:
        return ""
    return text if "hang_supervisor" in text else ""


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(fields[0]) / 1e9


def verdict_seconds(ranks: int = 512) -> float:
    operations = tuple(operation(number, "all_reduce", 4096, state="done") for number in range(1, 48))
    views = [
        view(
            rank,
            elsewhere() if rank == 77 else calling("all_reduce"),
            55 if rank == 77 else 56,
            world=ranks,
            operations=operations,
        )
        for rank in range(ranks)
    ]
    made = incident(*views, world=ranks)
    began = time.perf_counter()
    verdict = judge(made)
    assert verdict.findings[0].title.startswith("rank 77 ")
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        figures = {
            "python": platform.python_version(),
            "processors": os.cpu_count(),
            "load": os.getloadavg()[0],
            "milliseconds of one look": look_milliseconds(Path(first)),
            "supervisor with 8 ranks": supervisor_figures(Path(second)),
            "seconds of a verdict on 512 ranks": verdict_seconds(),
        }
    print(json.dumps(figures, indent=1))
    if given.json:
        Path(given.json).write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
