"""512 ranks on 64 nodes at rank 0's supervisor: one real supervisor with eight rings, and 63 simulated nodes that report to it as
real ones do, by TCP with the run's key. For benchmarks.hang_cost."""

import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from dsdoctor.core.text import encode
from dsdoctor.hang.channel import NodeReport, RunIdentity, identity, send_report
from dsdoctor.hang.models import RankView
from dsdoctor.hang.processes import wait_until_ended
from dsdoctor.hang.ring import JOINED, STALLED, RingWriter
from tests.hang.made import calling, elsewhere, operation, view

NODES, EACH, LATE = 64, 8, 77
AFTER, MOVES = 6.0, 8.0
"""Seconds of --hang-after, and for which the ranks move before."""
ENTRY = Path(__file__).parents[1] / "dsdoctor" / "run" / "hang_supervisor.py"


def rank_view(rank: int) -> RankView:
    """A rank with 48 recorded calls, as a real one has; one of them does not come."""
    world = NODES * EACH
    number = 55 if rank == LATE else 56
    calls = tuple(
        operation(each, "all_reduce", 4096, state="done" if each < 56 else "scheduled") for each in range(9, number + 1)
    )
    frames = elsewhere() if rank == LATE else calling("all_reduce")
    return replace(view(rank, frames, number, world=world, operations=calls), host=f"node{rank // EACH}")


def node(run: RunIdentity, number: int, still_since: float, end: threading.Event) -> None:
    """What another node's supervisor sends: a word now and then, and its views once nothing moves."""
    ranks = tuple(range(number * EACH, (number + 1) * EACH))
    views = tuple(map(rank_view, ranks))
    time.sleep(random.random())  # noqa: S311 - their seconds are not those of the others
    while not end.is_set():
        still = max(0.0, time.monotonic() - still_since)
        send_report(
            run, NodeReport(host=f"node{number}", still=still, ranks=ranks, views=views if still >= AFTER else ())
        )
        end.wait(AFTER / 4 if still < AFTER - 2 else 0.2 if still < AFTER else 5.0)


def supervised(folder: Path, out: Path, environment: dict[str, str], *, after: float) -> int:
    """Start a supervisor, which makes itself nobody's child; its process number."""
    order = {"folder": str(folder), "options": {"after": after, "on_hang": "report", "folder": str(out)}, "place": ""}
    command = [
        sys.executable,
        "-I",
        "-S",
        str(ENTRY),
        json.dumps(order),
        str(ENTRY.parents[2]),
        *filter(None, sys.path),
    ]
    subprocess.run(command, env=environment, check=True)
    return next(
        int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and str(folder) in words(path)
    )


def words(path: Path) -> str:
    try:
        text = (path / "cmdline").read_text()
    except OSError:
        return ""
    return text if "hang_supervisor" in text else ""


def ranks_of_this_node(folder: Path, pids: list[int], still_since: float, told: "queue.Queue[str]") -> None:
    """Eight ranks that move until a moment and then stand still; as real ones they look once a second, and print what they are
    given."""
    samples = [encode(rank_view(rank).sample) for rank in range(EACH)]
    stems = [folder / f"rank-{rank:05d}-{pid}" for rank, pid in enumerate(pids)]
    writers = [RingWriter(stem.with_suffix(".ring")) for stem in stems]
    while folder.exists():
        now = time.monotonic()
        progress, flags = int(min(now, still_since)), JOINED | (STALLED if now > still_since + AFTER / 3 else 0)
        for stem, writer, sample in zip(stems, writers, samples, strict=True):
            writer.write(sample, clock=now, progress=progress, stack=progress, flags=flags)
            if (given := stem.with_suffix(".words")).exists():
                text = given.read_text()
                given.unlink()
                told.put(text)
        time.sleep(0.2)


def figures() -> dict[str, float]:
    """Seconds from the moment when the time is over to the verdict, and what it took of a processor."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(10_000, 19_000))}  # noqa: S311
    run = identity(environment, user=os.geteuid())
    assert run is not None
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(120)"]
    ranks = [subprocess.Popen(sleep) for _ in range(EACH)]
    end, told, since = threading.Event(), queue.Queue[str](), time.monotonic() + MOVES
    with tempfile.TemporaryDirectory() as rings, tempfile.TemporaryDirectory() as out:
        (Path(rings) / "lock").touch()
        local = (Path(rings), [each.pid for each in ranks], since, told)
        threading.Thread(target=ranks_of_this_node, args=local, daemon=True).start()
        for number in range(1, NODES):
            threading.Thread(target=node, args=(run, number, since, end), daemon=True).start()
        try:
            pid = supervised(Path(rings), Path(out), environment, after=AFTER)
            time.sleep(max(0.0, since + AFTER - 1 - time.monotonic()))
            before = cpu(pid)
            text = told.get(timeout=60)
            seconds, used = time.monotonic() - since - AFTER, cpu(pid) - before
        finally:
            end.set()
            for each in ranks:
                each.kill()
                each.wait()
        wait_until_ended(pid, 5.0)
        files = len(list(Path(out).glob("rank-*.json")))
    assert f"✗ rank {LATE} (node{LATE // EACH}, " in text, text
    return {"seconds to the verdict": seconds, "processor seconds of the supervisor": used, "files of ranks": files}


def cpu(pid: int) -> float:
    """Seconds that a process has taken of a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
