"""Each script of benchmarks/paired, run without and with `python -m dsdoctor.run`: what a script can see of the watch.

    python -m benchmarks.paired_runs [--only WORD ...] [--pauses] [--json FILE]

From the repository's root, in an environment with dsdoctor, torch and DeepSpeed; a script whose packages (PEFT, TRL, Lightning)
are not installed is skipped and said to be. Compared are stdout, what else than dsdoctor wrote to stderr, the exit status, the
files left behind with their content, and processes that are still there. Losses are printed with all their digits. What differs
is run once more without dsdoctor: what differs there too varies by itself and is listed as such. Prints a table in Markdown.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.paired_cases import CASES, Case

SCRIPTS = Path(__file__).parent / "paired"
MAX_SECONDS = 400.0
"""A run that takes longer is given up."""
OURS = ("dsdoctor-hang", "dsdoctor-trace", "dsdoctor.jsonl")
"""Files that dsdoctor says it writes."""
QUIET = ("--hang-after", "600")
WATCHES: dict[str, tuple[str, ...]] = {
    "default": QUIET,
    "frames": ("--overflow", "frames", "--memory", "trace", "--report", "dsdoctor.jsonl", *QUIET),
    "trace": ("--overflow", "trace", "--trace-batches", "0-2", "--memory", "trace", *QUIET),
}
IMPATIENT = ("--hang-after", "8")
VARIES = (
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d([.,]\d+)?"), "TIME"),
    (re.compile(r"\b[IWE]\d{4} \d\d:\d\d:\d\d\.\d+"), "TIME"),
    (re.compile(r"\bpid[ =:]+\d+", re.IGNORECASE), "pid PID"),
    (re.compile(r"\b(TIME) \d+\b"), r"\1 PID"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0xADDRESS"),
    (re.compile(r"torchelastic_\w+/none_\w+"), "torchelastic"),
    (re.compile(r"\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d"), "TIME"),
    (
        re.compile(r"((?:run|train|eval)_?time\w*|\w*per_second|elapsed\w*)(['\"]?[ :=]+['\"]?)[\d.e+-]+"),
        r"\1\2SECONDS",
    ),
)
DECLARED = (
    (
        r"stdout [-+] flag (ignore_environment|isolated) ",
        "-E and -I are done by taking Python's variables out of the environment",
    ),
    (
        r"stdout [-+] \[TIME\] \[\w+\] \[(runner|launch)\.py:\d+:\w+\] (cmd = |process \d+ spawned |\[.* exits with |Killing )",
        "DeepSpeed's launcher prints what it starts",
    ),
    (r"stderr [-+] (dsdoctor\.run|[\w.]+\.py) FAILED", "torchrun's summary names what it was told to start"),
    (
        r"stdout [-+] env (DSDOCTOR_RUN|PYTHONPATH|TORCH_FR_\w+|TORCH_NCCL_TRACE\w+) ",
        "variables by which its children are watched",
    ),
    (r"stdout [-+] \[('AfterImport', )*'(DistutilsMetaFinder|BuiltinImporter)", "three finders in sys.meta_path"),
    (r"stdout [-+] modules before: ", "modules of Python that torch imports too"),
    (r"stdout [-+] modules of the watch in the child: ", "a child by spawn is watched as the script is"),
    (r"stdout [-+] hooks ", "hooks on the modules of an engine"),
    (
        r"stdout [-+] [01] (threads|after) \['MainThread'(, 'dsdoctor-hang')?\]",
        "one thread, dsdoctor-hang, from the first process group on",
    ),
    (r"stdout [-+] [01] descriptors \d+$", "two descriptors of the hang watch"),
    (
        r"stdout [-+] [01] hooks False (True|False)$",
        "threading.excepthook notes what ended a thread, and calls the one that was there",
    ),
    (
        r"stdout [-+] [01] signals \[.*SigCgt:\\t0000000100000[08]02",
        "a handler for SIGUSR2 below Python's, until the script sets its own",
    ),
    (r"stdout [-+] traced: ", "a tracer that is never taken away sees dsdoctor's end"),
    (
        r"stderr [-+] (python: can't open file|✗ there is no script|    Fix: it is looked for from)",
        "its own words for no script",
    ),
)
"""What a script can see by design, with the reason; docs/commands/run.md names it."""
SAID = re.compile(r"^dsdoctor( \[rank \d+\])?: ")
MARKS = re.compile(SAID.pattern + "[✗!] ")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run left."""

    status: int | str
    stdout: list[str]
    stderr: list[str]
    said: list[str]
    files: dict[str, str]
    left: list[str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A row of the table."""

    name: str
    launcher: str
    watch: str
    equal: bool
    differences: list[str]
    varies: list[str]
    """What is not the same in two runs without dsdoctor either."""
    declared: list[str]
    said: list[str]
    false_verdicts: list[str]
    seconds: float
    seconds_watched: float


def command(case: Case, options: Sequence[str] | None) -> list[str]:
    """The command line; without dsdoctor where ``options`` is None."""
    target = [*(case.target or (case.file,)), *case.args]
    if options is None:
        return [*case.before, *case.start, *target]
    option = "--module" if case.start[0] == "deepspeed" else "-m"
    return [*case.before, *case.start, option, "dsdoctor.run", *options, *target]


def environment(case: Case, home: Path) -> dict[str, str]:
    """Small, so that what the user's shell holds plays no part."""
    kept = ("PYTHONPATH", "TORCH_EXTENSIONS_DIR", "LANG", "VIRTUAL_ENV")
    made = {name: os.environ[name] for name in kept if name in os.environ}
    made |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    made |= {
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(home.parents[1] / "inductor"),
    }
    made |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    made |= {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    made |= {"PAIRED_RUN": str(os.getpid()), "TQDM_MININTERVAL": "1000"}
    return {**made, **{name: value.format(site=SITE, here=SCRIPTS.parents[1]) for name, value in case.env.items()}}


SITE = str(Path(importlib.util.find_spec("packaging").origin or "").parents[1])  # type: ignore[union-attr]


def descendants() -> dict[int, str]:
    """Processes that a run of ours has started and that are alive, by the variable that they were given."""
    mark = f"PAIRED_RUN={os.getpid()}".encode()
    found = dict[int, str]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
    return found


def normal(line: str) -> str:
    """The line without what no two runs share: times, process ids, addresses."""
    for pattern, word in VARIES:
        line = pattern.sub(word, line)
    return line.rstrip()


def files_of(folder: Path) -> dict[str, str]:
    """What each file holds, as a digest; a folder of dsdoctor's own and Python's caches are left out."""
    found = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if name.startswith(OURS) or "__pycache__" in name or file.is_dir():
            continue
        if name.startswith("tmp/"):
            name = re.sub(r"[a-z0-9_]{8}(?=[/.]|$)", "*", name)
        found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else "special"
    return found


def run(case: Case, options: Sequence[str] | None, work: Path) -> Outcome:
    """One run, in a folder made anew under the same name."""
    shutil.rmtree(work, ignore_errors=True)
    folder, home = work / "here", work / "home"
    folder.mkdir(parents=True)
    (home / "tmp").mkdir(parents=True)
    source = SCRIPTS / case.file
    if source.is_dir():
        shutil.copytree(source, folder / case.file, ignore=shutil.ignore_patterns("__pycache__"))
    elif source.is_file():
        shutil.copy(source, folder)
    if case.prepare:
        case.prepare(folder)
    began, stdin = time.monotonic(), (case.stdin or "").encode()
    out, err = work / "stdout", work / "stderr"
    (work / "stdin").write_bytes(stdin)
    with out.open("wb") as to_out, err.open("wb") as to_err, (work / "stdin").open("rb") as from_file:
        process = subprocess.Popen(
            command(case, options),
            cwd=folder,
            env=environment(case, home),
            stdin=from_file,
            stdout=to_out,
            stderr=to_err,
            start_new_session=True,
        )
        status = waited_for(process, case, out)
    seconds = time.monotonic() - began
    left = remaining()
    stderr = err.read_text(errors="replace").splitlines()
    return Outcome(
        status=status,
        stdout=sorted(map(normal, out.read_text(errors="replace").splitlines())),
        stderr=sorted(normal(line) for line in stderr if not SAID.match(line)),
        said=[line for line in stderr if SAID.match(line)],
        files={**files_of(folder), **{f"HOME/{name}": held for name, held in files_of(home).items()}},
        left=left,
        seconds=round(seconds, 1),
    )


def waited_for(process: "subprocess.Popen[bytes]", case: Case, out: Path) -> int | str:
    """The exit status; a signal is sent on the way where the case says so."""
    deadline = time.monotonic() + MAX_SECONDS
    word, number = case.signals or ("", 0)
    while process.poll() is None:
        if word and word in out.read_text(errors="replace"):
            process.send_signal(number)
            word = ""
        if time.monotonic() > deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"still there after {MAX_SECONDS:g} s"
        time.sleep(0.05)
    return process.returncode


def remaining() -> list[str]:
    """What a run left running five seconds after its end, which is ended here."""
    for _ in range(25):
        if not descendants():
            return []
        time.sleep(0.2)
    alive = descendants()
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return sorted(alive.values())


def difference(one: Outcome, other: Outcome) -> list[str]:
    """Everything in which two runs differ, a line each."""
    lines = []
    if one.status != other.status:
        lines.append(f"status {one.status} -> {other.status}")
    for stream in ("stdout", "stderr"):
        before, after = Counter(getattr(one, stream)), Counter(getattr(other, stream))
        lines += [f"{stream} - {line}" for line in (before - after).elements()]
        lines += [f"{stream} + {line}" for line in (after - before).elements()]
    for name in sorted({*one.files, *other.files}):
        if one.files.get(name) != other.files.get(name):
            kind = "-" if name not in other.files else "+" if name not in one.files else "other content:"
            lines.append(f"file {kind} {name}")
    lines += [f"process left {each}" for each in other.left if each not in one.left]
    return lines


def shape(line: str) -> str:
    """The line without its figures, to find the one that varies by itself."""
    return re.sub(r"\d+", "#", re.sub(r"^(std\w+) [-+]", r"\1", line))


def compared(case: Case, watch: str, options: Sequence[str], plain: Outcome, work: Path) -> Pair:
    """The pair; what differs is looked at in a second run without dsdoctor."""
    watched = run(case, options, work)
    differences, varies = difference(plain, watched), list[str]()
    if case.refused and watched.status == 2 and not watched.stdout:
        differences = []
    declared = [case.refused] if case.refused else []
    declared += sorted({reason for line in differences for pattern, reason in DECLARED if re.match(pattern, line)})
    differences = [line for line in differences if not any(re.match(pattern, line) for pattern, _ in DECLARED)]
    if differences:
        by_itself = {shape(line) for line in difference(plain, run(case, None, work))}
        varies = [line for line in differences if shape(line) in by_itself]
        differences = [line for line in differences if shape(line) not in by_itself]
    verdicts = [line for line in watched.said if MARKS.match(line)]
    if case.marked:
        verdicts = [line for line in verdicts if not re.search(case.marked, line)]
    return Pair(
        name=case.name,
        launcher=case.start[0] if case.start[0] != sys.executable else "python",
        watch=watch,
        equal=not differences,
        differences=[line[:400] for line in differences[:40]],
        varies=[line[:200] for line in varies[:10]],
        declared=declared,
        said=[line[:400] for line in watched.said[:40]],
        false_verdicts=verdicts if case.healthy else [],
        seconds=plain.seconds,
        seconds_watched=watched.seconds,
    )


def pairs(case: Case, watches: dict[str, tuple[str, ...]], work: Path) -> list[Pair]:
    plain = run(case, None, work)
    return [compared(case, name, options, plain, work) for name, options in watches.items()]


def row(pair: Pair) -> str:
    cells = [pair.name, pair.launcher, pair.watch, "equal" if pair.equal else "; ".join(pair.differences[:3])]
    verdicts = "; ".join(pair.false_verdicts) or "none"
    cells += [verdicts, f"{pair.seconds:.1f}", f"{pair.seconds_watched:.1f}"]
    return "| " + " | ".join(cell.replace("|", "\\|")[:200] for cell in cells) + " |"


def missing(case: Case) -> list[str]:
    return [name for name in case.needs if importlib.util.find_spec(name) is None]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="scripts whose name holds one of these")
    parser.add_argument("--pauses", action="store_true", help="those that pause, with a hang watch that asks after 8 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written there on the way; other pairs in it stay")
    args = parser.parse_args(argv)
    chosen = [case for case in CASES if not args.only or any(word in case.name for word in args.only)]
    rows, skipped = list[Pair](), list[str]()
    print("| script | launcher | watch | outcome | false verdicts | seconds | watched |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="paired") as folder:
        for case in chosen:
            watches = {name: WATCHES[name] for name in case.watches}
            if args.pauses:
                watches = {"8 s": IMPATIENT} if case.pauses else {}
            if missing(case):
                skipped.append(f"{case.name}: {', '.join(missing(case))} not installed")
            elif watches:
                made = pairs(case, watches, Path(folder) / "work")
                rows += made
                print("\n".join(map(row, made)), flush=True)
            if args.json:
                write(args.json, rows, skipped)
    wrong = [pair for pair in rows if not pair.equal or pair.false_verdicts]
    print(
        f"\n{len(rows)} pairs of {len(chosen) - len(skipped)} scripts, {len(wrong)} not equal or with a false verdict"
    )
    print("\n".join(f"skipped: {line}" for line in skipped))
    return 1 if wrong else 0


def write(file: Path, rows: Sequence[Pair], skipped: Sequence[str]) -> None:
    """Into the file, beside the pairs of other scripts that stand there, in the order of the cases."""
    known = json.loads(file.read_text())["pairs"] if file.exists() else []
    pairs = {(pair["name"], pair["watch"]): pair for pair in (*known, *map(asdict, rows))}
    order = {case.name: number for number, case in enumerate(CASES)}
    listed = sorted((pair for pair in pairs.values() if pair["name"] in order), key=lambda pair: order[pair["name"]])
    counts = {
        "scripts": len({pair["name"] for pair in listed}),
        "not_equal": [f"{pair['name']} {pair['watch']}" for pair in listed if not pair["equal"]],
        "false_verdicts": [f"{pair['name']} {pair['watch']}" for pair in listed if pair["false_verdicts"]],
    }
    written = {**what(), **counts, "skipped": list(skipped), "pairs": listed}
    file.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n")


def what() -> dict[str, object]:
    """How this was measured."""
    from importlib.metadata import PackageNotFoundError, version

    releases = {}
    for name in ("torch", "deepspeed", "transformers", "accelerate", "peft", "trl", "lightning"):
        with contextlib.suppress(PackageNotFoundError):
            releases[name] = version(name)
    return {
        "what": "Each script with and without dsdoctor.run: python -m benchmarks.paired_runs",
        "python": ".".join(map(str, sys.version_info[:3])),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "watches": {name: " ".join(options) for name, options in WATCHES.items()},
        **releases,
    }


if __name__ == "__main__":
    sys.exit(main())
