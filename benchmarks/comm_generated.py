"""Faults of one rank that nobody planned, kind x rank x collective x mode: is the first thing that `comm` says right, and in time?

    python -m benchmarks.comm_generated [--count 40] [--seed 1] [--modes quick,default,full]
                                        [--launchers hand,torchrun,dsdoctor,hostfile] [--json FILE]

From the repository's root, as root on Linux. A case is right when the first error that rank 0 reports has the right rule, rank
and words, the exit status is 1, and the deadline holds to two seconds. "hand" are three machines of a rig. Under the other
launchers the ranks are on this one: no process and no lock may be left, and the launcher itself may take 15 seconds.
"""

import argparse
import itertools
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.comm import launched_faults
from tests.comm.fault_table import Fault, played
from tests.comm.generated_faults import CALLS, MISDEEDS, RANKS, Misdeed, generated
from tests.comm.jobs import Job
from tests.comm.rig import missing

DEADLINES = {"--quick": 25.0, "--default": 50.0, "--full": 90.0}
MARGIN = 2.0


def play(fault: Fault) -> dict[str, object]:
    """One case: what was said first, and what is wrong with it ("" where nothing is)."""
    deadline = DEADLINES[fault.mode]
    mode = [fault.mode] if fault.mode != "--default" else []
    argv = ["-m", "dsdoctor.comm", *mode, "--backend", "gloo", "--deadline", f"{deadline:g}", "--json"]
    with (
        tempfile.TemporaryDirectory() as folder,
        played(fault, Path(folder), argv, "dsdoctor.comm", hold_at=0) as running,
    ):
        ended = running.wait(deadline + 15)
        said, complaint = judged(fault, running, ended, deadline)
    return {"case": fault.name, "said": said, "wrong": complaint, "seconds": running.ends.get("0", (0, 0.0))[1]}


def judged(fault: Fault, running: Job, ended: bool, deadline: float) -> tuple[str, str]:
    """What rank 0 said first, and why that is not right."""
    if not ended:
        return "", f"did not end: {sorted(set(running.processes) - set(running.ends))}"
    try:
        found = json.loads(running.out("0"))["findings"]
    except (ValueError, KeyError):
        return running.err("0")[-300:], "no document"
    errors = [finding for finding in found if finding["severity"] == "error"]
    if not errors:
        return "", "nothing was found"
    title, rule = errors[0]["title"], errors[0]["rule"]
    if rule not in fault.rules or not all(word in title for word in fault.says):
        return f"{title} [{rule}]", "another cause"
    if running.ends["0"][0] != 1:
        return title, f"exit status {running.ends['0'][0]}"
    if (latest := max(seconds for _, seconds in running.ends.values())) > deadline + MARGIN:
        return title, f"{latest:.1f} s"
    return title, ""


def play_launched(misdeed: Misdeed, rank: int, call: int, mode: str, launcher: str) -> dict[str, object]:
    """One case under a launcher of this machine."""
    deadline = DEADLINES[mode]
    with tempfile.TemporaryDirectory(prefix="comm-case-") as folder:
        found = launched_faults.play(misdeed, rank, call, launcher, mode, deadline, Path(folder))
    return {
        "case": f"rank {rank} {misdeed.name} before collective {call} of {mode}, by {launcher}",
        "said": found.title,
        "wrong": launched_faults.complaint(found, misdeed, rank, deadline),
        "seconds": round(found.seconds, 1),
    }


def cases(modes: Sequence[str], launchers: Sequence[str]) -> list[tuple[str, Callable[[], dict[str, object]]]]:
    """Every combination by its name."""
    found: list[tuple[str, Callable[[], dict[str, object]]]] = []
    if "hand" in launchers:
        found += [(fault.name, partial(play, fault)) for fault in generated(modes=modes)]
    others = [launcher for launcher in launchers if launcher != "hand"]
    for misdeed, rank, call, mode, launcher in itertools.product(MISDEEDS, RANKS, CALLS, modes, others):
        name = f"rank {rank} {misdeed.name} before collective {call} of {mode}, by {launcher}"
        found.append((name, partial(play_launched, misdeed, rank, call, mode, launcher)))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Play a sample of the table, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="so many, drawn by chance (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="quick,default,full")
    parser.add_argument("--launchers", default="hand")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--json", type=Path, help="write the results")
    given = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    chosen = cases([f"--{mode}" for mode in given.modes.split(",")], given.launchers.split(","))
    chosen = [(name, run) for name, run in chosen if given.only in name]
    if given.count:
        chosen = random.Random(given.seed).sample(chosen, min(given.count, len(chosen)))  # noqa: S311 - no secret
    results = []
    for _, run in chosen:
        results.append(run())
        print(f"{'ok   ' if not results[-1]['wrong'] else 'WRONG'} {json.dumps(results[-1])}", flush=True)
    counts = Counter("right" if not result["wrong"] else "wrong" for result in results)
    print(f"{len(results)} cases: {dict(counts)}")
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
