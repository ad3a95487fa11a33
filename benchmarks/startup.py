"""How long dsdoctor takes to start, over Python itself: CPU time and wall time of whole processes, and when the first words come.

    python benchmarks/startup.py [--runs 15] [--json FILE]

``check, until its first question`` ends where it starts the first process. Python's own start is taken off, run by run in turns;
importing cyclopts, which reads every command line, stands beside. The first words are read from a terminal that the command is
given; a cold start has no compiled modules.
CPU time says what dsdoctor costs whatever else the machine does; wall time says what a user waits.
"""

import argparse
import json
import os
import platform
import pty
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINE = str(ROOT / "tests" / "machines" / "container-without-gpu.json")
SAMPLES = ROOT / "docs" / "samples"
BARE = ("-c", "pass")
UNTIL_FIRST_QUESTION = """
import os, sys
sys.addaudithook(lambda event, _: os._exit(0) if event == "subprocess.Popen" else None)
sys.argv = ["dsdoctor", "check", "--offline"]
import dsdoctor.cli
dsdoctor.cli.main()
"""
STARTS = {
    "--version": ("-m", "dsdoctor", "--version"),
    "import cyclopts": ("-c", "import cyclopts"),
    "check, until its first question": ("-c", UNTIL_FIRST_QUESTION),
    "explain RULE": ("-m", "dsdoctor", "explain", "torch-missing"),
    "explain RULE, of a log": ("-m", "dsdoctor", "explain", "cuda-home-wrong"),
    "check --machine FILE": ("-m", "dsdoctor", "check", "--offline", "--machine", MACHINE),
}
FIRST = {
    "check": ("check",),
    "plan": ("plan", "--offline"),
    "config": ("config", str(SAMPLES / "ds_config.json"), "--world", "4"),
    "memory": (
        "memory",
        "--config",
        str(SAMPLES / "zero2.json"),
        "--model",
        str(SAMPLES / "llama3-8b.json"),
        "--world",
        "8",
    ),
    "comm": ("comm", "--nproc", "2", "--quick"),
    "diagnose": ("diagnose", str(ROOT / "CHANGELOG.md")),
    "explain": ("explain", "cuda-home-wrong"),
    "verify": ("verify", "--installed"),
    "look": ("look",),
    "hang": ("hang", "/nonexistent"),
    "checkpoint": ("checkpoint", "/nonexistent"),
}


def cost(argv: tuple[str, ...], env: dict[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of one process."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *argv], stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def until_first_words(argv: tuple[str, ...], env: dict[str, str]) -> tuple[float, str]:
    """Seconds until anything is on the terminal, and the first line. The command is ended then."""
    outer, inner = pty.openpty()
    started = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "dsdoctor", *argv], stdin=subprocess.DEVNULL, stdout=inner, stderr=inner, env=env
    )
    os.close(inner)
    try:
        said = os.read(outer, 4096)
        taken = time.perf_counter() - started
    finally:
        child.terminate()
        child.wait()
        os.close(outer)
    return taken, said.decode(errors="replace").splitlines()[0]


def starts(runs: int, env: dict[str, str]) -> dict[str, dict[str, float]]:
    """Medians over Python's own, in milliseconds."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for number in range(runs + 1):
        for name, argv in STARTS.items():
            bare, ours = cost(BARE, env), cost(argv, env)
            if number:
                taken[name].append((ours[0] - bare[0], ours[1] - bare[1]))
    return {
        name: {
            "cpu_ms": round(1e3 * statistics.median(cpu for cpu, _ in pairs), 1),
            "wall_ms": round(1e3 * statistics.median(wall for _, wall in pairs), 1),
            "least_cpu_ms": round(1e3 * min(cpu for cpu, _ in pairs), 1),
        }
        for name, pairs in taken.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONDONTWRITEBYTECODE", "COLUMNS"}}
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as empty:
        warm = {**env, "PYTHONPYCACHEPREFIX": kept, "PYTHONPATH": str(ROOT)}
        # nothing compiled is found there, and nothing is written
        cold = {**warm, "PYTHONPYCACHEPREFIX": empty, "PYTHONDONTWRITEBYTECODE": "1"}
        for argv in FIRST.values():
            until_first_words(argv, warm)
        result = {
            "runs": given.runs,
            "start_over_python": starts(given.runs, warm),
            "first_words": {
                name: {
                    "seconds": round(until_first_words(argv, warm)[0], 3),
                    "cold_seconds": round((found := until_first_words(argv, cold))[0], 3),
                    "words": found[1],
                }
                for name, argv in FIRST.items()
            },
            "load": round(os.getloadavg()[0], 2),
            "machine": f"{platform.machine()}, {os.cpu_count()} processors",
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
    text = json.dumps(result, indent=1, ensure_ascii=False).replace(str(ROOT), ".")
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
