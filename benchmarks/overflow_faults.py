"""Planted overflows, generated: what does the watch say of each?

    python -m benchmarks.overflow_faults [--count 100] [--seed 1] [--level frames] [--json FILE] [--show]
    python -m benchmarks.overflow_faults --count 0 --parallel
    python -m benchmarks.overflow_faults --count 0 --healthy STEPS [--engines 0:4]

From the repository's root. One pair of processes goes through all cases. A case is right when rank 0's first finding has the
right kind, module, line of code and rank; a line may be left out, but not be another one.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.overflow.launch import conftest, parallel_cases
from tests.overflow.launch.fault_cases import healthy, judged, sample

ASKED = ("kind", "module", "line", "rank")


def played(cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Every case with what was said of it and how that was judged."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = conftest.launch("fault_worker.py", cases, Path(folder), seconds=3600)
    rows = []
    for name, case in cases.items():
        seen = ranks[0][name]
        problem = "\n".join(rank[name]["problem"] for rank in ranks).strip()
        verdict = judged(case, seen["findings"])
        rows.append(
            {
                **case,
                "name": name,
                **verdict,
                "healthy": seen["healthy"],
                "problem": problem,
                "seconds": seen["seconds"],
            }
        )
    return rows


def is_right(row: dict[str, Any]) -> bool:
    return all(row[asked] == "right" or (asked == "line" and row[asked] == "silent") for asked in ASKED)


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of right, silent and wrong; cases that could not be run are counted beside."""
    ran = [row for row in rows if not row["problem"]]
    counts = {asked: dict(Counter(row[asked] for row in ran)) for asked in ASKED}
    kinds = {
        kind: f"{sum(is_right(row) for row in ran if row['kind_planted'] == kind)} of "
        f"{sum(row['kind_planted'] == kind for row in ran)}"
        for kind in sorted({row["kind_planted"] for row in ran})
    }
    return {
        "cases": len(rows),
        "not_run": len(rows) - len(ran),
        "right": sum(map(is_right, ran)),
        "wrong_line": sum(row["line"] == "wrong" for row in ran),
        "findings_in_healthy_steps": sum(len(row["healthy"]) for row in ran),
        **counts,
        "by_kind": kinds,
    }


def healthy_figures(steps: int, engines: slice) -> dict[str, Any]:
    """What is said of engines with nothing wrong, and whether they train the same bit for bit with a watch as without."""
    cases = dict(list(healthy(steps).items())[engines])
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ranks = conftest.launch("fault_worker.py", cases, Path(folder), seconds=3600)
    # a dynamic loss scale that went too high is a note, and part of every healthy fp16 run
    normal = ("gradient-above-scale:", "loss-not-scaled:")
    found = [(name, finding) for name in cases for finding in ranks[0][name]["findings"]]
    told = {
        "engines": list(cases),
        "steps": steps,
        "findings": [f"{name}: {finding}" for name, finding in found if not finding.startswith(normal)],
        "beside": dict(Counter(finding.split(":")[0] for _, finding in found if finding.startswith(normal))),
        "same_bit_for_bit": sum(all(rank[name]["same"] for rank in ranks) for name in cases),
        "seconds": round(time.monotonic() - started),
    }
    return {"healthy": told}


def parallel_figures(*, show: bool) -> dict[str, Any]:
    """Faults before, in and behind experts, sliced layers and statistics over ranks: what is said of each."""
    cases = parallel_cases.everything()
    with tempfile.TemporaryDirectory() as folder:
        ranks = conftest.launch("parallel_worker.py", cases, Path(folder), seconds=3600)
    rows = {name: parallel_cases.judged(case, ranks[0][name]["findings"]) for name, case in cases.items()}
    for name, row in rows.items():
        if show and any(row[asked] != "right" for asked in ASKED):
            print(name, row, *(rank[name]["problem"] for rank in ranks))
    return {
        "parallel": {
            "cases": len(cases),
            "not_run": sum(any(rank[name]["problem"] for rank in ranks) for name in cases),
            **{asked: dict(Counter(row[asked] for row in rows.values())) for asked in ASKED},
        }
    }


def is_good(told: dict[str, Any]) -> bool:
    """At least 95 % right and no wrong line; nothing said of healthy engines, which train the same bit for bit."""
    faults = not rows_of(told) or (told["right"] >= 0.95 * rows_of(told) and not told["wrong_line"])
    engines = told.get("healthy", {"findings": [], "engines": [], "same_bit_for_bit": 0})
    return faults and not engines["findings"] and engines["same_bit_for_bit"] == len(engines["engines"])


def rows_of(told: dict[str, Any]) -> int:
    """How many planted cases were run."""
    return int(told.get("cases", 0)) - int(told.get("not_run", 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--level", default="guard", choices=["guard", "frames"])
    parser.add_argument("--healthy", type=int, default=0, metavar="STEPS", help="also train twelve healthy engines")
    parser.add_argument("--engines", default="0:12", metavar="FROM:TO", help="which of the twelve")
    parser.add_argument(
        "--parallel", action="store_true", help="also faults around layers that hand values to other ranks"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--show", action="store_true", help="print each case that is not right")
    asked = parser.parse_args()
    started = time.monotonic()
    cases = {name: {**case, "level": asked.level} for name, case in sample(asked.count, asked.seed).items()}
    rows = []
    for row in played(cases) if cases else ():
        rows.append({**row, "kind_planted": cases[row["name"]]["kind"]})
    told = figures(rows) if cases else {}
    if asked.healthy:
        told |= healthy_figures(asked.healthy, slice(*map(int, asked.engines.split(":"))))
    told |= parallel_figures(show=asked.show) if asked.parallel else {}
    for row in rows if asked.show else ():
        if row["problem"]:
            print(f"NOT RUN {row['name']}: {row['problem'].splitlines()[-1]}")
        elif not is_right(row) or row["line"] != "right" or row["healthy"]:
            marks = ", ".join(f"{asked} {row[asked]}" for asked in ASKED)
            print(f"{row['name']}\n    {marks}\n    {row['said']}\n    {row['healthy'] or ''}")
    print(json.dumps(told, indent=1))
    if asked.json:
        document = {
            "date": time.strftime("%Y-%m-%d"),
            "python": platform.python_version(),
            **({"seed": asked.seed, "level": asked.level} if cases else {}),
            "seconds": round(time.monotonic() - started),
            **told,
        }
        asked.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(0 if is_good(told) else 1)


if __name__ == "__main__":
    main()
