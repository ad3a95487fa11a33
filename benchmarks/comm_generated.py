"""Faults of one rank or node, kind x rank x collective x mode x launcher: is what `comm` says first right, and in time?

    python -m benchmarks.comm_generated [--count 40] [--seed 1] [--modes quick,default,full]
                                        [--launchers hand,torchrun,dsdoctor,hostfile] [--seconds 500] [--json FILE]
                                        [--at-once 8] [--real]

From the repository's root, as root on Linux. The order of the cases is drawn by the seed so that any beginning of it is a fair
sample: kinds, launchers, modes, ranks and collectives come in turn. With --json a run goes on where the last one ended. A case is
right when the first finding that rank 0 reports has the right rule, rank and words, the exit status is right, and the deadline
holds to two seconds, or as many times that as processes wait for each processor. "hand" are three machines of a rig. Under the
other launchers the ranks are on this one, and the launcher itself may take 15 seconds. No process and no lock may be left.

Ranks and launchers are forks of one process that has imported torch (forked_python.py), but for the kinds in REAL, which are of
torch's import, and with --real. Most of a case is waiting for a deadline: with --at-once so many cases run beside each other, and
a new one begins when no more than PROCESSORS of their processes want to run. What was wrong is played again by the next run, and
kept under "wrong_first" also when it is right then.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import select
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.forked_python import forking, prepare
from dsdoctor.core.processes import fork
from tests.comm import launched_faults
from tests.comm.fault_table import Fault, played
from tests.comm.generated_faults import CALLS, LASTING, MISDEEDS, RANKS, Misdeed, generated, of_nodes
from tests.comm.jobs import Job
from tests.comm.rig import missing

DEADLINES = {"--quick": 25.0, "--default": 50.0, "--full": 90.0}
REAL = ("has another torch", "cannot import torch")
"""Kinds whose interpreters are started anew: they are of what happens when torch is imported."""
PROCESSORS, PAUSE = os.cpu_count() or 1, 0.5
"""Processes of ours that may want to run when a case begins, and seconds between two beginnings."""
ENDING, SOON = ("raises", "exits", "is killed", "cannot import"), 20.0
Result = dict[str, object]
MARGIN, LAUNCHER = 2.0, 15.0
"""Seconds beside the deadline, and for a launcher: the deadline counts from a rank's own start, after torchrun imported torch."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One combination. ``parts`` are its kind, launcher, mode, and its rank and collective where it has any."""

    name: str
    run: Callable[[], Result]
    parts: tuple[str, ...]

    @classmethod
    def named(cls, name: str, run: Callable[[], Result]) -> "Case":
        """A case by what its name says: "rank 1 is killed before collective 2 of --full, by hand"."""
        words, _, launcher = name.partition(", by ")
        words, _, mode = words.partition(" of --")
        words, _, call = words.partition(" before collective ")
        words = words.removeprefix("the node of rank ").removeprefix("rank ")
        rank, _, kind = words.partition(" ")
        return cls(name=name, run=run, parts=(kind, launcher, mode, rank, call))


def play(fault: Fault, hold_at: int = 0) -> Result:
    """One case by hand: what was said first, and what is wrong with it ("" where nothing is)."""
    deadline = DEADLINES[fault.mode]
    mode = [fault.mode] if fault.mode != "--default" else []
    argv = ["-m", "dsdoctor.comm", *mode, "--backend", "gloo", "--deadline", f"{deadline:g}", "--json"]
    with (
        tempfile.TemporaryDirectory(prefix="comm-case-") as folder,
        played(fault, Path(folder), argv, "dsdoctor.comm", hold_at=hold_at) as running,
    ):
        ended = running.wait(deadline + 15)
        said, complaint = judged(fault, running, ended, deadline)
        complaint = complaint or left_behind(running)
    seconds = round(running.ends.get("0", (0, 0.0))[1], 1)
    return {
        "case": f"{fault.name}, by hand",
        "said": said.replace(folder, "CASE"),
        "wrong": complaint,
        "seconds": seconds,
    }


def judged(fault: Fault, running: Job, ended: bool, deadline: float) -> tuple[str, str]:
    """What rank 0 said first, and why that is not right."""
    if not ended:
        return "", f"did not end: {sorted(set(running.processes) - set(running.ends))}"
    try:
        found = [one for one in json.loads(running.out("0"))["findings"] if one["severity"] != "note"]
    except (ValueError, KeyError):
        return running.err("0")[-300:], "no document"
    if not found:
        return "", "nothing was found"
    title, rule = found[0]["title"], found[0]["rule"]
    if rule not in fault.rules or not all(word in title for word in fault.says):
        return f"{title} [{rule}]", "another cause"
    if running.ends["0"][0] != fault.status:
        return title, f"exit status {running.ends['0'][0]}"
    if (latest := max(seconds for _, seconds in running.ends.values())) > deadline + MARGIN * crowded():
        return title, f"{latest:.1f} s"
    return title, ""


def left_behind(running: Job) -> str:
    """Processes of ranks that are on the nodes after all ranks have ended, and locks in the user's folder; "" for none."""
    until = time.monotonic() + 3
    while (left := running.left()) and time.monotonic() < until:
        time.sleep(0.1)
    locks = [str(path) for path in (running.folder.parent / "home").rglob("*lock*")]
    return f"left behind: {[*left, *locks]}" if left or locks else ""


def crowded() -> float:
    """How many processes wait for each processor of this machine, 1 where none waits: so much longer everything takes."""
    return max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0)


def play_launched(misdeed: Misdeed, rank: int, call: int, mode: str, launcher: str) -> Result:
    """One case under a launcher of this machine."""
    deadline = DEADLINES[mode]
    with tempfile.TemporaryDirectory(prefix="comm-case-") as folder:
        found = launched_faults.play(misdeed, rank, call, launcher, mode, deadline, Path(folder))
    return {
        "case": f"{misdeed.said(rank, call, mode)}, by {launcher}",
        "said": found.title.replace(folder, "CASE"),
        "wrong": launched_faults.complaint(found, misdeed, rank, deadline + LAUNCHER * crowded(), launcher),
        "seconds": round(found.seconds, 1),
    }


def cases(modes: Sequence[str], launchers: Sequence[str]) -> list[Case]:
    """Every combination by its name."""
    found: list[Case] = []
    kinds = (*MISDEEDS, *LASTING)
    if "hand" in launchers:
        found += [Case.named(f"{fault.name}, by hand", partial(play, fault)) for fault in generated(kinds, modes=modes)]
        found += [Case.named(f"{fault.name}, by hand", partial(play, fault, call)) for fault, call in of_nodes(modes)]
    others = [launcher for launcher in launchers if launcher != "hand"]
    for misdeed, rank, call, mode, launcher in itertools.product(kinds, RANKS, CALLS, modes, others):
        if mode in misdeed.modes and (not misdeed.change or call == CALLS[0]):
            run = partial(play_launched, misdeed, rank, call, mode, launcher)
            found.append(Case.named(f"{misdeed.said(rank, call, mode)}, by {launcher}", run))
    return found


def drawn(chosen: Sequence[Case], count: int, seed: int, played: Sequence[Case] = ()) -> list[Case]:
    """So many, drawn by chance: of what has come least so far, first by kind, launcher and mode, then by rank and collective."""
    left = random.Random(seed).sample(chosen, len(chosen))  # noqa: S311 - no secret
    turns = Counter(each for case in played for each in _balanced(case))
    order: list[Case] = []
    while left and len(order) < count:
        order.append(min(left, key=lambda case: [turns[each] for each in _balanced(case)]))
        left.remove(order[-1])
        turns.update(_balanced(order[-1]))
    return order


def _balanced(case: Case) -> list[tuple[str, ...]]:
    """What comes equally often, the most important first."""
    kind, launcher, mode, rank, call = case.parts
    return [
        ("kind", kind, launcher, mode),
        ("kind", kind, launcher),
        ("kind", kind),
        ("of launcher", launcher, mode),
        ("of kind", kind, mode),
        ("place", rank, call),
    ]


def summary(cases: Sequence[Case], results: Sequence[Result]) -> dict[str, object]:
    """Of how many cases these are the results, how many of each kind and launcher, and of each mode, rank and collective."""
    by_name = {case.name: case for case in cases}
    played = [by_name[str(result["case"])] for result in results if result["case"] in by_name]
    counts = {
        name: dict(sorted(Counter(case.parts[place] for case in played).items()))
        for place, name in ((2, "modes"), (3, "ranks"), (4, "collectives"))
    }
    done, of = (Counter(case.parts[:2] for case in which) for which in (played, cases))
    table: dict[str, dict[str, str]] = {}
    for kind, launcher in sorted(of):
        table.setdefault(kind, {})[launcher] = f"{done[kind, launcher]} of {of[kind, launcher]}"
    wrong = sum(bool(result["wrong"]) for result in results)
    starts = dict(Counter(str(result.get("start", "real")) for result in results))
    return {
        "of": len(cases),
        "played": len(results),
        "wrong": wrong,
        "starts": starts,
        "table": table,
        "counts": counts,
    }


class AtOnce:
    """Cases that run beside each other, each in a process of its own."""

    def __init__(self, most: int, *, real: bool) -> None:
        self._most, self._real, self._last = most, real, 0.0
        self._running: dict[int, tuple[Case, float]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def room(self) -> bool:
        """Whether another case can begin: its start is what costs."""
        if self._running and (len(self) >= self._most or time.monotonic() < self._last + PAUSE):
            return False
        return not self._running or wanting() <= PROCESSORS

    def begin(self, case: Case) -> None:
        """Play a case in a fork."""
        reading, writing = os.pipe()
        start = "real" if self._real or case.parts[0] in REAL else "forked"
        fork(lambda: _play_in_fork(case, start, writing))
        os.close(writing)
        self._running[reading] = case, time.monotonic()
        self._last = time.monotonic()

    def ended(self) -> list[Result]:
        """The results that came since the last call; waits a moment for one."""
        found: list[Result] = []
        for handle in select.select(list(self._running), [], [], 0.1)[0]:
            case, began = self._running.pop(handle)
            with os.fdopen(handle) as pipe:
                text = pipe.read()
            os.wait()
            result = json.loads(text or '{"said": "", "wrong": "the case itself failed"}')
            took = round(time.monotonic() - began, 1)
            found.append({"case": case.name, **result, "took": took, "crowded": round(crowded(), 1)})
        return found


def _play_in_fork(case: Case, start: str, writing: int) -> None:
    with forking() if start == "forked" else contextlib.nullcontext():
        try:
            result = case.run()
        except Exception as error:
            result = {"said": "", "wrong": f"the case itself failed: {type(error).__name__}: {error}"}
    os.write(writing, json.dumps({**result, "start": start}).encode())


def longest(case: Case) -> float:
    """How many seconds a case may take: what ends a rank is seen at once, for everything else the deadline decides."""
    return SOON if case.parts[0].startswith(ENDING) else DEADLINES[f"--{case.parts[2]}"]


def wanting() -> int:
    """How many processes of the cases want to run now."""
    parents, states = dict[int, int](), dict[int, str]()
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            parents[int(place.name)], states[int(place.name)] = int(parent), state
    children: dict[int, list[int]] = {}
    for pid, above in parents.items():
        children.setdefault(above, []).append(pid)
    ours = list(children.get(os.getpid(), ()))
    for pid in ours:
        ours += children.get(pid, ())
    return sum(states[pid] == "R" for pid in ours)


def main(argv: Sequence[str] | None = None) -> None:
    """Play a sample of the table, or all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="so many more, drawn by chance (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", default="quick,default,full")
    parser.add_argument("--launchers", default="hand")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin what ends within so many")
    parser.add_argument("--at-once", type=int, default=1, help="so many cases beside each other")
    parser.add_argument("--real", action="store_true", help="start every interpreter anew")
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--json", type=Path, help="write the results; what was right in it already is not played again")
    given = parser.parse_args(argv)
    if reason := missing():
        raise SystemExit(reason)
    every = cases([f"--{mode}" for mode in given.modes.split(",")], given.launchers.split(","))
    every = [case for case in every if given.only in case.name]
    known = json.loads(given.json.read_text()) if given.json and given.json.exists() else {"results": []}
    results = [result for result in known["results"] if not result["wrong"]]
    first = list(known.get("wrong_first", []))
    done, until = {result["case"] for result in results}, time.monotonic() + given.seconds
    again = {result["case"] for result in known["results"] if result["wrong"]}
    chosen = [case for case in every if case.name in again]
    left = [case for case in every if case.name not in done | again]
    chosen += drawn(left, given.count or len(left), given.seed, [case for case in every if case.name in done])
    if not given.real:
        prepare()
    playing = AtOnce(given.at_once, real=given.real)
    while (case := next((case for case in chosen if time.monotonic() + longest(case) < until), None)) or playing:
        if case and playing.room():
            chosen.remove(case)
            playing.begin(case)
        for result in playing.ended():
            results.append(result)
            first += [result] if result["wrong"] else []
            print(f"{'WRONG' if result['wrong'] else 'ok   '} {json.dumps(result)}", flush=True)
            if given.json:
                told = {"seed": given.seed, **summary(every, results), "wrong_first": first, "results": results}
                given.json.write_text(json.dumps(told, indent=1) + "\n")
    counts = Counter("right" if not result["wrong"] else "wrong" for result in results)
    print(f"{len(results)} cases: {dict(counts)}")


if __name__ == "__main__":
    main()
