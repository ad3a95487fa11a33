"""Faults between ranks, done for real on a rig of namespaces: what plain torch says and after how long, and what dsdoctor says.

    python -m benchmarks.comm_faults [--only WORD] [--timeout 10] [--deadline 20] [--json FILE]

From the repository's root, as root on Linux. Prints a table in Markdown. Both run with gloo on the CPU; plain torch is
tests/comm/plain.py (a process group, a small and a large all_reduce) with the timeout given to torch.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.comm.fault_table import FAULTS, Fault, played
from tests.comm.jobs import PLAIN, Job
from tests.comm.rig import missing

PATIENCE = 90.0
"""Seconds after which a script that does not end is given up."""
FRAMES = re.compile(r"^(Traceback|\s+File|\s+at |frame #|\[W|\s*$|\s{4})|Exception raised from|GLHF")


def last_words(running: Job, key: str) -> str:
    """What a rank of plain torch said last, without frames."""
    lines = [line for line in running.err(key).splitlines() if line.strip() and not FRAMES.match(line)]
    errors = [line for line in lines if "Error" in line] or lines
    words = re.sub(r"^\[rank\d+\]:\s*", "", errors[-1].strip()) if errors else running.out(key).strip()
    return words.replace("|", "\\|")[:160]


def ending(running: Job, key: str) -> str:
    """When and how a rank ended."""
    if key not in running.ends:
        return f"still there after {time.monotonic() - running.began:.0f} s"
    status, seconds = running.ends[key]
    return f"{seconds:.1f} s" + ("" if status else ", status 0")


def plain(fault: Fault, timeout: float) -> dict[str, str]:
    """What plain torch says on each rank."""
    argv = [str(PLAIN), f"{timeout:g}"]
    with tempfile.TemporaryDirectory() as folder, played(fault, Path(folder), argv, PLAIN.name, hold_at=2) as running:
        running.wait(PATIENCE, *(key for key in running.processes if key not in fault.mute))
        return {key: f"{last_words(running, key)} ({ending(running, key)})" for key in running.processes}


def ours(fault: Fault, deadline: float) -> dict[str, str]:
    """What dsdoctor says: the verdict of the rank that tells, and when."""
    mode = [fault.mode] if fault.mode in {"--quick", "--full"} else []
    argv = ["-m", "dsdoctor.comm", *mode, "--backend", "gloo", "--deadline", f"{deadline:g}", "--json"]
    with (
        tempfile.TemporaryDirectory() as folder,
        played(fault, Path(folder), argv, "dsdoctor.comm", hold_at=5) as running,
    ):
        running.wait(deadline + 10, fault.teller)
        return {fault.teller: f"{_said(fault, running)} ({ending(running, fault.teller)})"}


def _said(fault: Fault, running: Job) -> str:
    try:
        found = json.loads(running.out(fault.teller))["findings"]
    except (ValueError, KeyError):
        return "no document: " + last_words(running, fault.teller)
    meant = [one for one in found if one["rule"] in fault.rules] or found
    return f"{meant[0]['title']} [{meant[0]['rule']}]" if meant else "all is well"


def row(fault: Fault, theirs: dict[str, str], mine: dict[str, str]) -> str:
    """One line of the table."""
    said = "<br>".join(f"{key}: {words}" for key, words in theirs.items())
    return f"| {fault.name} | {said} | {'<br>'.join(mine.values())} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Plays the faults one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose name has this word")
    parser.add_argument("--timeout", type=float, default=10.0, help="given to torch")
    parser.add_argument("--deadline", type=float, default=20.0, help="given to dsdoctor")
    parser.add_argument("--skip", choices=("plain", "ours"), help="leave one side out")
    parser.add_argument("--json", type=Path, help="write what was measured")
    given = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    print(
        f"| fault | plain torch, timeout {given.timeout:g} s | dsdoctor, deadline {given.deadline:g} s |\n|---|---|---|"
    )
    measured = {}
    for fault in (fault for fault in FAULTS if given.only in fault.name):
        theirs = {} if given.skip == "plain" else plain(fault, given.timeout)
        mine = {} if given.skip == "ours" else ours(fault, given.deadline if fault.mode == "--quick" else 45)
        measured[fault.name] = {"plain": theirs, "dsdoctor": mine}
        print(row(fault, theirs, mine), flush=True)
    if given.json:
        given.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
