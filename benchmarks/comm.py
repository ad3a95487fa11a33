"""How comm grows with the number of ranks, and what it costs beside the script that people run today.

    python -m benchmarks.comm [--ranks 2 4 8 16 32] [--claims 1000 10000] [--rounds 5] [--json FILE]

From the repository's root. Three tables: whole processes of `dsdoctor comm --quick` with real gloo ranks on this machine; rank 0's
work for many ranks (claims of simulated ranks in a real TCPStore, read and judged); and `torchrun --nproc_per_node 2`
with tests/comm/plain.py (a group, two all_reduce, a barrier) beside the same with `-m dsdoctor.comm --quick`, alternating.
"""

import argparse
import json
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date, timedelta
from pathlib import Path

import msgspec
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dsdoctor import __version__
from dsdoctor.comm.local import checks as local_checks
from dsdoctor.comm.local import fingerprint
from dsdoctor.comm.models import ChosenInterface, Claim, Interface, Local, Rank
from dsdoctor.comm.rendezvous import checks as arrival_checks
from dsdoctor.comm.rendezvous.checks import Arrivals
from dsdoctor.comm.rendezvous.store import MessageBoard

PLAIN = Path(__file__).parents[1] / "tests/comm/plain.py"
PER_HOST = 8
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def timed(argv: list[str]) -> tuple[float, float]:
    """Wall seconds and processor seconds of a command and all its children; it must succeed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(argv, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, used


def growth(worlds: list[int]) -> list[dict[str, float]]:
    """Whole runs on this machine."""
    rows = []
    for world in worlds:
        argv = [sys.executable, "-m", "dsdoctor", "comm", "--quick", "--nproc", str(world), "--deadline", "300"]
        wall, used = timed(argv)
        rows.append({"ranks": world, "seconds": round(wall, 2), "cpu_seconds": round(used, 2)})
        print(f"| {world} | {wall:.1f} | {used:.1f} | {used / world:.2f} |", flush=True)
    return rows


def claim(rank: int, world: int) -> Claim:
    """A rank as it would come; one of them has another torch."""
    host, address = f"node{rank // PER_HOST:04d}", f"10.{rank // 65536}.{rank // 256 % 256}.{rank % 256}"
    chosen = ChosenInterface(name="eth0", address=address, because="the host's name resolves to it")
    local = Local(
        hostname=host,
        resolves_to=(address,),
        interfaces=(Interface(name="eth0", address=address, prefix=16, mtu=9000, speed=100_000),),
        chosen=chosen,
        routed=chosen,
        shm_total=1 << 36,
        shm_free=1 << 36,
        nofile=1 << 20,
        variables={"NCCL_SOCKET_IFNAME": "eth0"},
    )
    versions = {"torch": "2.12.0" if rank == world // 2 else "2.13.0", "cuda": "13.0", "python": "3.11.7"}
    return Claim(
        rank=rank,
        world=world,
        local_rank=rank % PER_HOST,
        host=host,
        pid=rank + 1,
        address=address,
        port=40_000,
        arrived=1.0,
        fingerprint=fingerprint.fingerprint(local, versions),
        local=local,
    )


def rank_zero(worlds: list[int]) -> list[dict[str, float]]:
    """In a process for each size, so that the memory is that of one."""
    rows = []
    for world in worlds:
        argv = [sys.executable, "-m", "benchmarks.comm", "--rank-zero", str(world)]
        row = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        print(
            f"| {world} | {row['bytes'] / 1e6:.1f} | {row['read']:.2f} | {row['judge']:.2f} | {row['memory'] / 1e6:.0f} |",
            flush=True,
        )
    return rows


def one_rank_zero(world: int) -> dict[str, float]:
    """Claims of all ranks but the last two come in; read them, and say who is missing and who is different."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    board = MessageBoard(store, "simulated")
    log, size = board.log("claims"), 0
    for rank in range(world - 2):
        one = claim(rank, world)
        size += len(msgspec.json.encode(one))
        log.write(one)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    claims = tuple(board.log("claims").news(Claim))
    read = time.monotonic() - began
    me = Rank(rank=0, world=world, local_rank=0, local_world=PER_HOST, launcher="srun", master="node0000", port=29500)
    began = time.monotonic()
    arrivals = Arrivals(me=me, claims=claims, waited=60.0)
    found = [finding for check in arrival_checks.CHECKS for finding in check(arrivals)]
    found += [*local_checks.examine_all(claims), *fingerprint.examine(claims)]
    judge = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert {"rank-missing", "version-differs"} <= {finding.rule for finding in found}, found
    return {"ranks": world, "bytes": size, "read": read, "judge": judge, "memory": (after - memory) * 1024}


def overhead(rounds: int) -> dict[str, float]:
    """Both under torchrun, turn by turn."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--nnodes", "1"]
    plain, ours = [], []
    for _ in range(rounds):
        plain.append(timed([*torchrun, str(PLAIN)])[0])
        ours.append(timed([*torchrun, "-m", "dsdoctor.comm", "--quick"])[0])
    one, other = statistics.median(plain), statistics.median(ours)
    print(f"| {one:.2f} | {other:.2f} | {other / one:.2f} |", flush=True)
    return {"plain": one, "quick": other, "ratio": other / one, "rounds": rounds}


def main() -> None:
    """Print the tables; write them as JSON where that is wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8, 16, 32])
    parser.add_argument("--claims", type=int, nargs="*", default=[1000, 10_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-zero", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_zero:
        print(json.dumps(one_rank_zero(asked.rank_zero)))
        return
    print("| plain script, s | comm --quick, s | ratio |\n|---|---|---|")
    against = overhead(asked.rounds)
    print("\n| ranks | wall s | CPU s | CPU s a rank |\n|---|---|---|---|")
    grown = growth(asked.ranks)
    print(
        "\n| simulated ranks | claims, MB | read, s | judge, s | memory of reading and judging, MB |\n|---|---|---|---|---|"
    )
    simulated = rank_zero(asked.claims)
    if asked.json:
        machine = {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
        versions = {"dsdoctor": __version__, "torch": torch.__version__, "python": platform.python_version()}
        whole = {
            "date": date.today().isoformat(),
            "machine": machine,
            "versions": versions,
            "overhead": against,
            "growth": grown,
            "rank_zero": simulated,
        }
        with tempfile.NamedTemporaryFile("w", dir=asked.json.parent, delete=False) as file:
            json.dump(whole, file, indent=1)
        Path(file.name).replace(asked.json)


if __name__ == "__main__":
    main()
