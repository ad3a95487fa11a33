"""`dsdoctor check` beside `ds_report`: whole processes, alternating runs, the ratio of the medians, of wall and of CPU time.

    python benchmarks/check.py --python /path/to/venv/bin/python [--runs 9] [--json FILE]

``--python`` is an environment with torch and DeepSpeed, whose ds_report is the peer; dsdoctor runs from the environment
that runs this script. One run of each comes first and does not count.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path


def cost(argv: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process with all that it starts."""
    # modules are compiled once and kept, for both, as wherever pip has installed them
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(python: str, runs: int) -> dict[str, object]:
    """Alternate the two commands ``runs`` times."""
    ours = [sys.executable, "-m", "dsdoctor", "check", "--python", python]
    peer = [str(Path(python).parent / "ds_report")]
    times: dict[str, list[tuple[float, float]]] = {"dsdoctor check": [], "ds_report": []}
    for number in range(runs + 1):
        for name, argv in (("ds_report", peer), ("dsdoctor check", ours)):
            taken = cost(argv)
            if number:
                times[name].append(taken)
    # runs beside each other meet the same load: the median of their ratios is what a busy machine changes least
    pairs = [(a[0], b[0]) for a, b in zip(times["dsdoctor check"], times["ds_report"], strict=True)]
    wall, cpu = (
        {name: round(statistics.median(each[which] for each in taken), 3) for name, taken in times.items()}
        for which in (0, 1)
    )
    return {
        "runs": runs,
        "median_s": wall,
        "median_cpu_s": cpu,
        "all_s": {name: [round(each[0], 3) for each in taken] for name, taken in times.items()},
        "load": round(os.getloadavg()[0], 2),
        "median_ratio_of_pairs": round(statistics.median(ours / peer for ours, peer in pairs), 3),
        "ratio": round(wall["dsdoctor check"] / wall["ds_report"], 3),
        "cpu_ratio": round(cpu["dsdoctor check"] / cpu["ds_report"], 3),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the environment whose ds_report is the peer")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    result = measure(str(Path.cwd() / given.python), given.runs)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
