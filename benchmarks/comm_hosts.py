"""A thousand hosts and a thousand ranks without a thousand machines: what do they cost rank 0 and the head, and what is said?

    python -m benchmarks.comm_hosts [--hosts 200,1000] [--ranks 64,1000] [--real 64] [--json FILE]

From the repository's root, with torch, as root on Linux. The hosts are a script in place of ssh; three or a hundredth of them
refuse. The ranks are rank 0, which is real, and simulated agents: one process that writes the claims and answers of all others into
rank 0's store. The ranks of one host of eight either never come, or die in the collectives. A case is right when that host is
named, alone, on at most 60 lines.

--real: so many real ranks, eight on each node of a rig, all well or with one that is killed, for as long as the machine has memory.
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

from dsdoctor.comm.command import start_on_hosts
from dsdoctor.comm.launch.start import free_port, host_orders
from dsdoctor.comm.preflight.checks import bad_hosts, without
from dsdoctor.comm.preflight.facts import look_preflight
from dsdoctor.core.host import LocalHost
from dsdoctor.ranks.nodelist import fold
from tests.comm import faults
from tests.comm.jobs import by_hand
from tests.comm.rig import Rig

SSH = """#!/bin/sh
for last; do host=$word word=$last; done
case " $DEAD " in *" $host "*) echo "ssh: connect to host port 22: Connection refused" >&2; exit 255 ;; esac
case "$last" in *on_host*) ;; *)
    printf '@@dsdoctor\\nhost %s\\naddresses 10.0.0.1\\npython\\nfolder\\nmodules torch deepspeed dsdoctor\\n' "$host"; exit ;;
esac
rest=${last#*echo }
case "$(echo "${rest%% *}" | base64 -d)" in *'"first":0,'*)
    echo '{"document":"all is well"}'; echo '{"ended":{"rank":0,"host":"x","how":null}}' ;;
esac
exec cat > /dev/null
"""
MIB = 1 << 20
PER_HOST = 8
MOST_LINES = 60
REAL_SECONDS, LEAST_MEMORY = 125.0, 1536 * MIB


def hosts_case(count: int, folder: Path) -> dict[str, object]:
    """A look at so many hosts, of which some refuse, and a fan-out to those that are left."""
    refuse = max(count // 100, 3)
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    (folder / "hosts").write_text("".join(f"gpu{number:04d} slots=8\n" for number in range(1, count + 1)))
    dead = [f"gpu{(part + 1) * count // (refuse + 1):04d}" for part in range(refuse)]
    os.environ |= {"PATH": f"{folder}:{os.environ['PATH']}", "DEAD": " ".join(dead)}
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
        "case": f"{count} hosts x {PER_HOST} over ssh, {refuse} refuse",
        "bad": fold(bad),
        "look_s": round(looked, 1),
        "fan_out_s": round(time.monotonic() - began, 1),
        "head_peak_mib": round(_peak("self") / MIB),
        "wrong": "" if told.document == "all is well" and sorted(bad) == dead else "another verdict",
    }


def ranks_case(world: int, kind: str, folder: Path) -> dict[str, object]:
    """Rank 0 and the agents of all others; the ranks of one host are missing or die."""
    names = [f"gpu{rank // PER_HOST:04d}" for rank in range(world)]
    sick = [rank for rank in range(world) if names[rank] == names[world // 2]]
    around = _around(names, f"bench-{os.getpid()}-{world}-{kind}")
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


def _around(names: Sequence[str], run: str) -> dict[str, str]:
    """The environment of a rank, one of each name."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("DSDOCTOR")},
        "MASTER_ADDR": "10.200.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(len(names)),
        "DSDOCTOR_COMM_RUN": run,
        "DSDOCTOR_COMM_HOSTS": ",".join(names),
        "OMP_NUM_THREADS": "1",
    }


def real_case(world: int, killed: int | None, folder: Path) -> dict[str, object]:
    """So many real gloo ranks on nodes of a rig, forks of a torch that each node has imported; one is killed in the collectives, or
    none."""
    before = least = _available()
    ends: dict[int, dict[str, float]] = {}
    peaks: dict[int, int] = {}
    death = f"if os.environ.get('RANK') == '{killed}':\n            os.kill(os.getpid(), signal.SIGKILL)"
    own = {} if killed is None else faults.customized(folder / "site", faults.acts(2, death))
    with Rig(folder / "rig", nodes=world // PER_HOST) as rig:
        began = time.monotonic()
        nodes = [_forked(rig, number, world, own, folder) for number in range(world // PER_HOST)]
        while len(ends) < world and least > LEAST_MEMORY and time.monotonic() < began + REAL_SECONDS + 20:
            time.sleep(0.5)
            least = min(least, _available())
            for pid in _first_of(nodes[0].pid):
                peaks[pid] = max(peaks.get(pid, 0), _own(pid))
            for number in range(len(nodes)):
                lines = (folder / f"node-{number}").read_text().splitlines()
                ends |= {int(end["rank"]): end for end in map(json.loads, lines)}
    lines = (folder / "0.out").read_text().splitlines()
    said = f"{world} of {world} ranks" if killed is None else f"rank {killed} (node{chr(ord('a') + killed // PER_HOST)}"
    status = ends.get(0, {}).get("status")
    right = len(ends) == world and status == (0 if killed is None else 1) and any(said in line for line in lines)
    return {
        "case": f"{world} real ranks on {world // PER_HOST} nodes, {'all well' if killed is None else 'one is killed'}",
        "said": lines,
        "seconds": ends.get(0, {}).get("seconds"),
        "last_rank_s": max((end["seconds"] for end in ends.values()), default=None),
        "rank_0_peak_mib": round(sum(peaks.values()) / MIB),
        "machine_mib": round((before - least) / MIB),
        "wrong": "" if right else f"{len(ends)} ranks ended, rank 0 with {status}",
    }


def _forked(rig: Rig, number: int, world: int, own: dict[str, str], folder: Path) -> "subprocess.Popen[str]":
    """The ranks of one node."""
    node, around = by_hand(rig, number * PER_HOST, world)
    path = ":".join(filter(None, (own.get("PYTHONPATH"), str(Path.cwd()))))
    argv = [sys.executable, "-m", "benchmarks.forked_ranks", str(number * PER_HOST), str(PER_HOST), str(folder)]
    asked = ["--quick", "--backend", "gloo", "--deadline", f"{REAL_SECONDS:g}"]
    with (folder / f"node-{number}").open("w") as out, (folder / f"node-{number}.err").open("w") as err:
        return node.popen([*argv, *asked], env={**around, "PYTHONPATH": path}, stdout=out, stderr=err)


def _first_of(pid: int) -> list[int]:
    """The processes of a node's first rank."""
    below = [child for child in _tree(pid) if len(_tree(child)) > 1]
    several = next((each for each in below if len(_children(each)) > 1), pid)
    return [each for first in _children(several)[:1] for each in _tree(first)]


def _own(pid: int) -> int:
    """The memory of a process, what it shares with others in equal parts."""
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:")), 0)


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
    return [pid, *(each for child in _children(pid) for each in _tree(child))]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


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
    if given.json:
        given.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
