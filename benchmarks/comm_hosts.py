"""A thousand hosts and a thousand ranks without a thousand machines: what do they cost rank 0 and the head, and what is said?

    python -m benchmarks.comm_hosts [--hosts 200,1000] [--ranks 64,1000] [--real 64] [--json FILE]

From the repository's root, with torch, as root on Linux. The hosts are a script in place of ssh; a hundredth of them refuse. The
ranks are rank 0, which is real, and simulated agents: one process that writes the claims and answers of all others into rank 0's
store. The ranks of one host of eight either never come, or die in the collectives. A case is right when that host is named, alone,
on at most 60 lines.

--real: so many real ranks on eight nodes of a rig, all well or with one that is killed, for as long as the machine has memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from dsdoctor.comm.launch.commands import host_orders
from dsdoctor.comm.launch.start import free_port
from dsdoctor.comm.launch.start_on_hosts import start_on_hosts
from dsdoctor.comm.preflight.facts import look_preflight
from dsdoctor.comm.preflight.left_out import bad_hosts, without
from dsdoctor.core.host import LocalHost
from dsdoctor.hosts.nodelist import fold
from tests.comm import faults
from tests.comm.jobs import job
from tests.comm.rig import Rig

SSH = """#!/bin/sh
for last; do host=$word word=$last; done
case "$host" in *00) echo "ssh: connect to host port 22: Connection refused" >&2; exit 255 ;; esac
case "$last" in *on_host*) ;; *)
    printf '@@dsdoctor\\nhost %s\\naddresses 10.0.0.1\\npython\\nfolder\\nmodules torch deepspeed dsdoctor\\n' "$host"; exit ;;
esac
case "$last" in *'"first":0,'*) echo '{"document":"all is well"}'; echo '{"ended":{"rank":0,"host":"x","how":null}}' ;; esac
exec cat > /dev/null
"""
MIB = 1 << 20
PER_HOST = 8
MOST_LINES = 60
REAL_SECONDS, LEAST_MEMORY = 240.0, 1536 * MIB


def hosts_case(count: int, folder: Path) -> dict[str, object]:
    """A look at so many hosts, and a fan-out to those that are left."""
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    (folder / "hosts").write_text("".join(f"gpu{number:04d} slots=8\n" for number in range(1, count + 1)))
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    began = time.monotonic()
    facts = look_preflight(LocalHost(), hostfile="hosts", python=sys.executable, folder=str(folder))
    looked = time.monotonic() - began
    bad = bad_hosts(facts)
    left = without(facts, bad).hosts
    assert left is not None
    run = f"bench-{os.getpid()}"
    orders = host_orders(left.hosts, master="127.0.0.1", port=free_port(), token=run, seconds=120.0)
    began = time.monotonic()
    told = start_on_hosts(
        orders, python="python3", folder="/", variables={}, seconds=120.0, ssh=(str(folder / "ssh"), "-T")
    )
    return {
        "case": f"{count} hosts over ssh, {count // 100} refuse",
        "look_s": round(looked, 1),
        "fan_out_s": round(time.monotonic() - began, 1),
        "head_peak_mib": round(_peak("self") / MIB),
        "wrong": "" if told.document == "all is well" and len(bad) == count // 100 else f"bad: {fold(bad)}",
    }


def ranks_case(world: int, kind: str, folder: Path) -> dict[str, object]:
    """Rank 0 and the agents of all others; the ranks of one host are missing or die."""
    names = [f"gpu{rank // PER_HOST:04d}" for rank in range(world)]
    sick = [rank for rank in range(world) if names[rank] == names[world // 2]]
    port, run = free_port(), f"bench-{os.getpid()}-{world}-{kind}"
    around = {
        **{name: value for name, value in os.environ.items() if not name.startswith("DSDOCTOR")},
        "MASTER_ADDR": "10.200.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "DSDOCTOR_COMM_RUN": run,
        "DSDOCTOR_COMM_HOSTS": ",".join(names),
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-m", "dsdoctor.comm", "--quick", "--backend", "gloo", "--deadline", "60"]
    with Rig(folder / "rig", nodes=1) as rig:
        # every address of the simulated hosts is this node's own
        rig[0].net("ip", "route", "add", "local", "10.201.0.0/16", "dev", "lo")
        began = time.monotonic()
        simulated = [sys.executable, "-m", "benchmarks.simulated_ranks", str(world), kind, ",".join(map(str, sick))]
        rig[0].popen(simulated, env=around, cwd=Path.cwd(), stderr=None)
        own = {**around, "RANK": "0", "LOCAL_RANK": "0"}
        rank_0 = rig[0].popen([*argv, "--out", str(folder / "out")], env=own, cwd=Path.cwd(), stderr=subprocess.DEVNULL)
        peaks: dict[int, int] = {}
        watcher = threading.Thread(target=_watch, args=(rank_0, peaks))
        watcher.start()
        out, _ = rank_0.communicate(timeout=120)
        took = time.monotonic() - began
        watcher.join()
    lines = out.splitlines()
    rule = {"missing": "rank-missing", "dies": "rank-died"}[kind]
    right = rule in lines[0] and names[world // 2] in lines[0] and f"{sick[0]}-{sick[-1]}" in lines[0]
    return {
        "case": f"{world} ranks on {world // PER_HOST} hosts, the ranks of one {kind}",
        "said": lines[0][:200],
        "lines": len(lines),
        "seconds": round(took, 1),
        "rank_0_peak_mib": round(sum(peaks.values()) / MIB),
        "wrong": ""
        if right and (world <= 64 or len(lines) <= MOST_LINES) and rank_0.returncode == 1
        else "another verdict",
    }


def real_case(world: int, killed: int | None, folder: Path) -> dict[str, object]:
    """So many real gloo ranks on eight nodes of a rig; one is killed in the collectives, or none."""
    argv = ["-m", "dsdoctor.comm", "--quick", "--backend", "gloo", "--deadline", f"{REAL_SECONDS:g}"]
    death = faults.acts(2, "os.kill(os.getpid(), signal.SIGKILL)")
    own = {} if killed is None else {killed: faults.customized(folder / "site", death)}
    peaks: dict[int, int] = {}
    before = least = _available()
    with Rig(folder / "rig", nodes=world // PER_HOST) as rig, job(rig, argv, world, own=own) as running:

        def looked() -> bool:
            nonlocal least
            for pid in _tree(running.processes["0"].pid):
                peaks[pid] = max(peaks.get(pid, 0), _peak(str(pid)))
            least = min(least, _available())
            return len(running.ends) == world or least < LEAST_MEMORY

        running.watch(REAL_SECONDS + 30, looked)
        lines = running.out("0").splitlines()
        status, seconds = running.ends.get("0", (None, 0.0))
        latest = max((seconds for _, seconds in running.ends.values()), default=0.0)
        ended = len(running.ends)
    said = f"{world} of {world} ranks" if killed is None else f"rank {killed} (node{chr(ord('a') + killed // PER_HOST)}"
    right = ended == world and status == (0 if killed is None else 1) and any(said in line for line in lines)
    return {
        "case": f"{world} real ranks on {world // PER_HOST} nodes, {'all well' if killed is None else 'one is killed'}",
        "said": lines,
        "seconds": round(seconds, 1),
        "last_rank_s": round(latest, 1),
        "rank_0_peak_mib": round(sum(peaks.values()) / MIB),
        "machine_mib": round((before - least) / MIB),
        "wrong": "" if right else f"{ended} ranks ended, rank 0 with {status}",
    }


def _available() -> int:
    """The memory that this machine has left."""
    meminfo = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable"))


def _watch(process: "subprocess.Popen[str]", peaks: dict[int, int]) -> None:
    """The highest resident size of rank 0's processes, those that it forked included."""
    while process.poll() is None:
        for pid in _tree(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), _peak(str(pid)))
        time.sleep(0.1)


def _tree(pid: int) -> list[int]:
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(each for child in below for each in _tree(int(child)))]


def _peak(pid: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM")), 0)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="200,1000")
    parser.add_argument("--ranks", default="64,1000")
    parser.add_argument("--real", default="", help="so many real ranks")
    parser.add_argument("--json", type=Path, help="write the results")
    given = parser.parse_args(argv)
    results = []
    for count in map(int, filter(None, given.hosts.split(","))):
        with tempfile.TemporaryDirectory(prefix="comm-hosts-") as folder:
            results.append(hosts_case(count, Path(folder)))
            print(json.dumps(results[-1]), flush=True)
    for world in map(int, filter(None, given.ranks.split(","))):
        for kind in ("missing", "dies"):
            with tempfile.TemporaryDirectory(prefix="comm-hosts-") as folder:
                results.append(ranks_case(world, kind, Path(folder)))
                print(json.dumps(results[-1]), flush=True)
    for world in map(int, filter(None, given.real.split(","))):
        for killed in (None, world * 3 // 5):
            with tempfile.TemporaryDirectory(prefix="comm-hosts-") as folder:
                results.append(real_case(world, killed, Path(folder)))
                print(json.dumps(results[-1], indent=1), flush=True)
    if given.json:
        given.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
