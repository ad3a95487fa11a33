"""A job by hand on a rig: one process a rank, told by variables who it is. What each said, and when and how it ended."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.comm.left_over import left_in
from tests.comm.rig import Node, Rig, stop

PORT = 29500
PLAIN = Path(__file__).with_name("plain.py")


class Job:
    """Ranks that run. ``ends`` holds the exit status and the seconds since the start of those that ended."""

    def __init__(self, folder: Path, nodes: Sequence[Node] = ()) -> None:
        self.folder, self.nodes = folder, nodes
        self.began = time.monotonic()
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.ends: dict[str, tuple[int, float]] = {}

    def start(self, key: str, node: Node, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Starts a process of the job; its output goes to files."""
        with (self.folder / f"{key}.out").open("w") as out, (self.folder / f"{key}.err").open("w") as err:
            self.processes[key] = node.popen(argv, env=env, stdout=out, stderr=err)

    def wait(self, seconds: float, *keys: str) -> bool:
        """Waits so long at most for these ranks to end, or for all; whether they did."""
        wanted = {*(keys or self.processes)}
        return self.watch(seconds, lambda: wanted <= {*self.ends})

    def watch(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Waits so long at most for ``until``, and no longer than anything runs; whether it came to that."""
        limit = time.monotonic() + seconds
        while not until() and time.monotonic() < limit and len(self.ends) < len(self.processes):
            time.sleep(0.02)
            for key, process in self.processes.items():
                if key not in self.ends and process.poll() is not None:
                    self.ends[key] = (process.returncode, time.monotonic() - self.began)
        return until()

    def out(self, key: str = "0") -> str:
        """What a rank has written to stdout."""
        return (self.folder / f"{key}.out").read_text(errors="replace")

    def err(self, key: str = "0") -> str:
        """What a rank has written to stderr."""
        return (self.folder / f"{key}.err").read_text(errors="replace")

    def left(self) -> list[str]:
        """What runs on the nodes now beside their first processes."""
        spaces = {node.pid: str(Path(f"/proc/{node.pid}/ns/pid").readlink()) for node in self.nodes}
        return [each for space in spaces.values() for each in left_in(space, "pid", but=spaces.keys())]

    def told(self) -> str:
        """Everything, for a failed test."""
        parts = [f"--- {key}: {self.ends.get(key)}\n{self.out(key)}\n{self.err(key)}" for key in self.processes]
        return "\n".join(parts)


def by_hand(rig: Rig, rank: int, world: int, port: int = PORT) -> tuple[Node, dict[str, str]]:
    """The node of a rank and the variables that a launcher would set there: ranks in blocks, node by node."""
    share = -(-world // len(rig.nodes))
    node = rig.nodes[rank // share]
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank % share, "MASTER_PORT": port}
    return node, {"MASTER_ADDR": rig[0].address, **{name: str(value) for name, value in numbers.items()}}


@contextlib.contextmanager
def job(
    rig: Rig,
    argv: Sequence[str],
    world: int = 2,
    *,
    own: Mapping[int, Mapping[str, str]] | None = None,
    absent: Sequence[int] = (),
    twice: Sequence[int] = (),
) -> Iterator[Job]:
    """Starts ``python ARGV`` as every rank but the absent ones; ``own`` are variables of single ranks, ``twice`` ranks are
    started a second time (under the key "1again"). All are killed at the end."""
    folder = rig.folder / f"job-{time.monotonic_ns()}"
    folder.mkdir()
    running = Job(folder, rig.nodes)
    try:
        for rank in (*range(world), *twice):
            if rank not in absent:
                node, env = by_hand(rig, rank, world)
                key = f"{rank}again" if str(rank) in running.processes else str(rank)
                running.start(key, node, [sys.executable, *argv], {**env, **(own or {}).get(rank, {})})
        yield running
    finally:
        for process in running.processes.values():
            stop(process)
            process.wait()
