"""`dsdoctor build-wheel` beside the guide's `python setup.py build_ext -j8 bdist_wheel`: same ops, source and toolkit, alternating.

    python benchmarks/build.py --python VENV/bin/python --source DeepSpeed --toolkit CUDA_HOME [--rounds 3] [--json FILE]

``--python`` is an environment with the CUDA build of torch, setuptools and wheel; dsdoctor runs from the environment that runs
this script. Each round, with an empty cache: the guide's command in a fresh copy of the source; ours cold; ours again
(nothing changed); with another local version (all ops cached); with one op's flag changed in the source. The ratios are those of
the medians. The limit is what the compilers alone took, by the processors. Processes' memory is sampled four times a second.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

OPS = ("cpu_adam", "utils", "fused_adam", "fused_lamb")
CHANGED = ("fused_lamb.py", "'-O3'", "'-O3', '-DDSDOCTOR_BENCHMARK'")
GUIDE = "guide"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is compared on what."""

    python: str
    source: Path
    toolkit: Path
    arch: str


@dataclass(frozen=True, kw_only=True)
class Taken:
    """One whole process with its children: seconds, CPU-seconds, the most bytes resident at a time; ours also what it said."""

    wall: float
    cpu: float
    memory: int
    said: dict[str, Any]


def run(argv: list[str], *, cwd: Path, env: dict[str, str], log: Path) -> Taken:
    """Run a command to its end. Raises SystemExit where it fails: there is nothing to compare then."""
    started = time.perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=errors)
        most = [0]
        watcher = threading.Thread(target=watch, args=(process.pid, most), daemon=True)
        watcher.start()
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"{' '.join(argv)} ended with {process.returncode}; see {log}")
    said = json.loads(output) if "--json" in argv else {}
    return Taken(wall=wall, cpu=used.ru_utime + used.ru_stime, memory=most[0], said=said)


def watch(pid: int, most: list[int]) -> None:
    """The most memory that a process and its descendants have at a time."""
    try:
        whole = psutil.Process(pid)
        while True:
            most[0] = max(most[0], sum(resident(one) for one in (whole, *whole.children(recursive=True))))
            time.sleep(0.25)
    except psutil.Error:
        return


def resident(process: psutil.Process) -> int:
    """Bytes of one process, none where it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def guides(setting: Setting, place: Path) -> Taken:
    """The guide's command, told of the toolkit that dsdoctor would have to find."""
    tree = place / "DeepSpeed"
    shutil.copytree(setting.source, tree, symlinks=True)
    bins = f"{Path(setting.python).parent}:{setting.toolkit}/bin"
    env = plain() | {
        "PATH": f"{bins}:{os.environ['PATH']}",
        "CUDA_HOME": str(setting.toolkit),
        "LIBRARY_PATH": f"{setting.toolkit}/lib64:{setting.toolkit}/lib64/stubs",
        "DS_ACCELERATOR": "cuda",
        "TORCH_CUDA_ARCH_LIST": setting.arch,
        "TORCH_NO_COMPILER_WRAPPER": "1",
    }
    env |= {f"DS_BUILD_{op.upper()}": "1" for op in OPS}
    argv = [setting.python, "setup.py", "build_ext", "-j8", "bdist_wheel"]
    return run(argv, cwd=tree, env=env, log=place / "guide.log")


def ours(setting: Setting, place: Path, name: str, tree: Path, *more: str) -> Taken:
    """dsdoctor's command, with the cache of this round and without ccache."""
    path = ":".join(p for p in os.environ["PATH"].split(":") if not Path(p, "ccache").exists())
    env = plain() | {"DSDOCTOR_CACHE": str(place / "cache"), "PATH": path}
    argv = [sys.executable, "-m", "dsdoctor", "build-wheel", "--json", "--python", setting.python]
    argv += ["--source", str(tree), "--toolkit", str(setting.toolkit), "--arch", setting.arch, "--ops", ",".join(OPS)]
    return run([*argv, "--out", str(place / "dist"), *more], cwd=place, env=env, log=place / f"{name}.log")


def plain() -> dict[str, str]:
    """This environment without what steers builds."""
    steering = ("DS_", "CUDA_", "TORCH_", "DSDOCTOR_", "MAX_JOBS", "MAKEFLAGS")
    return {name: value for name, value in os.environ.items() if not name.startswith(steering)}


def one_round(setting: Setting, place: Path, *, guide_first: bool) -> dict[str, Taken]:
    """Every case once, the guide's command before ours or after."""
    taken: dict[str, Taken] = {}
    if guide_first:
        taken[GUIDE] = guides(setting, place)
    taken["cold"] = ours(setting, place, "cold", setting.source)
    manifest = json.loads(Path(str(taken["cold"].said["manifest"])).read_text(encoding="utf-8"))
    taken["cold"].said["planned_memory"] = manifest["plan"]["memory"]
    taken["nothing changed"] = ours(setting, place, "nothing", setting.source)
    taken["all ops cached"] = ours(setting, place, "cached", setting.source, "--local-version", "again")
    changed = place / "changed"
    shutil.copytree(setting.source, changed, symlinks=True)
    file, old, new = changed / "op_builder" / CHANGED[0], CHANGED[1], CHANGED[2]
    text = file.read_text(encoding="utf-8")
    if old not in text:
        sys.exit(f"{file} has no {old}")
    file.write_text(text.replace(old, new), encoding="utf-8")
    taken["one flag changed"] = ours(setting, place, "changed", changed)
    if not guide_first:
        taken[GUIDE] = guides(setting, place)
    return taken


def told(rounds: list[dict[str, Taken]]) -> dict[str, object]:
    """The figures: every one, medians, ratios to the guide's command."""
    cases = list(rounds[0])
    medians = {
        case: (statistics.median(r[case].wall for r in rounds), statistics.median(r[case].cpu for r in rounds))
        for case in cases
    }
    wall, cpu = medians[GUIDE]
    cold = [r["cold"] for r in rounds]
    compilers = statistics.median(sum(op["cpu_seconds"] or 0 for op in one.said["ops"]) for one in cold)
    cores = len(os.sched_getaffinity(0))
    return {
        "rounds": len(rounds),
        "median": {case: {"wall_s": round(w, 2), "cpu_s": round(c, 2)} for case, (w, c) in medians.items()},
        "ratio": {
            case: {"wall": round(w / wall, 4), "cpu": round(c / cpu, 4)}
            for case, (w, c) in medians.items()
            if case != GUIDE
        },
        "limit": {
            "compilers_cpu_s": round(compilers, 1),
            "compilers_cpu_s_by_cores": round(compilers / cores, 1),
            "cold_wall_to_limit": round(medians["cold"][0] / (compilers / cores), 3),
        },
        "memory": {
            "guide": max(r[GUIDE].memory for r in rounds),
            "cold": max(one.memory for one in cold),
            "planned": cold[0].said["planned_memory"],
        },
        "all": {
            case: [{"wall_s": round(r[case].wall, 2), "cpu_s": round(r[case].cpu, 2)} for r in rounds] for case in cases
        },
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the environment to build for")
    parser.add_argument("--source", type=Path, required=True, help="an unpacked DeepSpeed")
    parser.add_argument("--toolkit", type=Path, required=True, help="a whole CUDA_HOME of torch's release")
    parser.add_argument("--arch", default="8.6", help="TORCH_CUDA_ARCH_LIST of both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    python, source, toolkit = (str(Path.cwd() / given.python), given.source.absolute(), given.toolkit.absolute())
    setting = Setting(python=python, source=source, toolkit=toolkit, arch=given.arch)
    rounds = []
    for number in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="dsdoctor-benchmark-") as folder:
            rounds.append(one_round(setting, Path(folder), guide_first=number % 2 == 0))
        print(json.dumps(told(rounds)["all"]), file=sys.stderr, flush=True)
    asked = "import torch; print(torch.__version__)"
    torch = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip()
    result = told(rounds) | {
        "ops": OPS,
        "arch": given.arch,
        "torch": torch,
        "deepspeed": (source / "version.txt").read_text(encoding="utf-8").strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, {psutil.virtual_memory().total >> 30} GiB",
        "date": time.strftime("%Y-%m-%d"),
    }
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
