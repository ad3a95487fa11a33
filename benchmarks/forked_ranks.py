"""The real ranks of one node for benchmarks.comm_hosts, on little memory: torch is imported once, and each rank is a fork of that.

python -m benchmarks.forked_ranks FIRST COUNT FOLDER ARGUMENT...

From the second import on a rank's own is none: what this leaves out is its time and its memory. The environment is that of the
first rank. Each rank's output is FOLDER/RANK.out, and how it ended and after how many seconds is a line of JSON on stdout.
"""

import gc
import json
import os
import runpy
import sys
import time
from pathlib import Path


def play(rank: int, local_rank: int, folder: Path, arguments: list[str]) -> None:
    """Be one rank, in a process of its own."""
    for number, end in ((1, "out"), (2, "err")):
        with (folder / f"{rank}.{end}").open("wb") as file:
            os.dup2(file.fileno(), number)
    os.setsid()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
    sys.argv = ["dsdoctor.comm", *arguments]
    runpy.run_module("dsdoctor.comm", run_name="__main__", alter_sys=True)


def main() -> None:
    """Start the ranks, and wait until all have ended."""
    import torch.distributed  # noqa: F401 - what the forks share

    first, count, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    gc.collect()
    gc.freeze()
    began, ranks = time.monotonic(), dict[int, int]()
    for local_rank in range(count):
        if pid := os.fork():
            ranks[pid] = first + local_rank
            continue
        play(first + local_rank, local_rank, folder, sys.argv[4:])
        return
    (folder / f"pids-{first}.json").write_text(json.dumps({rank: pid for pid, rank in ranks.items()}))
    while ranks:
        pid, status = os.waitpid(-1, 0)
        if pid in ranks:
            ended = {"rank": ranks.pop(pid), "status": os.waitstatus_to_exitcode(status)}
            print(json.dumps({**ended, "seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
