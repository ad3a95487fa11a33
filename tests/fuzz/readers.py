"""What each reader of foreign files is given: a grammar each, and the command or the reader that judges it.

A reader gets ``(random, place)``. It writes the input and gives back the command line that reads it, or reads it in place and
gives back None; then what it raises is what is wrong.
"""

import contextlib
import functools
import gzip
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from dsdoctor.builder.source.training_config import read_config, training_configs
from dsdoctor.child_scripts.config_fill import read_arguments
from dsdoctor.cli.app import COMMANDS, make_app
from dsdoctor.core.errors import UsageError
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.hang.incidents import write_ranks
from dsdoctor.hosts.hostfile import parse_deepspeed_env, parse_hostfile
from dsdoctor.ranks.nodelist import expand
from tests.builder.test_wheel import DATA, INFO, NAME, contents, wheel
from tests.checkpoint.test_odd_contents import fuzz_checkpoint
from tests.checkpoint.test_pickles import fuzz_pickle
from tests.checkpoint.written import KINDS, write
from tests.cli.runner import run
from tests.comm import reports
from tests.config.test_document import fuzz_document
from tests.core.test_zip_file import fuzz_zip
from tests.diagnosis.mangled import mangled
from tests.fuzz.grammar import (
    MARK,
    SURROGATE,
    TEXTS,
    as_bytes,
    damaged,
    log_line,
    mutated,
    mutated_answer,
    wrong,
    wrong_lines,
)
from tests.hang.made import calling, elsewhere, incident, operation, view
from tests.hang.test_parts import dump
from tests.machines.make import HERE as MACHINES

SNAPSHOTS = sorted(MACHINES.glob("*.json"))
TRACES = MACHINES.parent / "overflow" / "traces"
Words = list[str]


class Place:
    """A folder with one of everything that an argument may name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine, self.bare = folder / "machine.json", folder / "bare-python"
        self.bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
        self.bare.chmod(0o755)
        self.machine.write_bytes(SNAPSHOTS[0].read_bytes())
        (folder / "empty").touch()
        (folder / "text").write_text("hello\n")
        (folder / "list.json").write_text("[" * 500 + "]" * 500)
        (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
        (folder / "bytes").write_bytes(bytes(range(256)) * 40)
        (folder / "run.log").write_text("RuntimeError: CUDA out of memory\n")
        (folder / "folder").mkdir()
        (folder / "loop").symlink_to("loop")
        os.mkfifo(folder / "pipe")
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.wheel = wheel(self.wheels, contents(b""))
        trace = TRACES / "fp32"
        shutil.copytree(trace, folder / "trace")
        pipe = folder / "pipe"  # what is written to a pipe waits for a reader, as a shell's > does: nobody is given it
        self.files = [str(path) for path in sorted(folder.iterdir()) if path != pipe] + [
            str(folder / "none"),
            str(self.wheel),
            "\udcff",
        ]
        self.env = {
            "HOME": str(folder),
            "DSDOCTOR_CACHE": str(folder / "cache"),
            "PATH": "/usr/bin:/bin",
            "COLUMNS": "90",
        }

    @functools.cached_property
    def library(self) -> bytes:
        """A shared object as gcc makes it."""
        (self.folder / "x.c").write_text('#include <stdio.h>\nint f(void) { return puts("x"); }')
        argv = ["gcc", "-g", "-shared", "-fPIC", "-o", "x.so", "x.c"]
        subprocess.run(argv, cwd=self.folder, check=True)
        return (self.folder / "x.so").read_bytes()

    @functools.cached_property
    def checkpoints(self) -> tuple[Path, ...]:
        """A folder of checkpoints of each kind."""
        for kind in KINDS:
            write(self.folder / "checkpoints" / kind.name, kind)
        return tuple(sorted((self.folder / "checkpoints").iterdir()))

    def fresh(self, name: str) -> Path:
        """An empty folder."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def ask(self, words: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
        done = run(*words, stdin=stdin, **self.env)
        return done.returncode, done.stdout, done.stderr


def machine_words(random: Random, place: Place) -> list[str]:
    """A command that reads a machine file."""
    machine = ["--machine", str(place.machine)]
    ways: list[list[str]] = [
        ["machine", "look", *machine],
        [
            "check",
            *machine,
            "--offline",
            random.choice(["-v", "--strict", "--report", "--op=fused_adam", "--arch=9.0"]),
        ],
        ["check", *machine, "--offline"],
        [
            "plan",
            *machine,
            "--offline",
            *random.choice([[], ["-v"], ["--ops", "all"], ["--arch", "8.0"], ["--accelerator", "cpu"]]),
        ],
        ["env", *machine],
        ["machine", "compare", str(SNAPSHOTS[1]), str(place.machine)],
        ["wheel", "verify", str(place.wheel), *machine],
        ["wheel", "pick", str(place.wheels), *machine],
        ["plan", "--machine", str(SNAPSHOTS[2]), "--offline", "--node", str(place.machine)],
    ]
    return [*random.choice(ways), *(["--json"] if random.random() < 0.3 and "--report" not in ways[1] else [])]


def machine_file(random: Random) -> bytes:
    """A snapshot with something wrong in it: in what children answered, in any answer, or around them."""
    document = json.loads(random.choice(SNAPSHOTS).read_bytes())
    answers = document["answers"]
    told = [name for name, answer in answers.items() if isinstance(answer, dict) and MARK in str(answer.get("stdout"))]
    for _ in range(random.choice([1, 1, 2, 5, 20])):
        how = random.randrange(10)
        if how < 3 and told:
            name = random.choice(told)
            if isinstance(answers.get(name), dict):
                answers[name]["stdout"] = mutated_answer(str(answers[name].get("stdout", "")), random)
        elif how < 8:
            document["answers"] = answers = mutated(answers, random)
        else:
            document = mutated(document, random)
            answers = document.get("answers") if isinstance(document, dict) else None
        if not isinstance(answers, dict):
            break
    return _perhaps_damaged(as_bytes(document), random)


def _perhaps_damaged(content: bytes, random: Random) -> bytes:
    return damaged(content, random) if random.random() < 0.08 else content


def _json(random: Random) -> Words:
    return ["--json"] if random.random() < 0.35 else []


def machines(random: Random, place: Place) -> Words:
    """A command that reads a machine file."""
    place.machine.write_bytes(machine_file(random))
    machine = ["--machine", str(place.machine)]
    check = ["check", *machine, "--offline"]
    plan = ["plan", *machine, "--offline"]
    asked = random.choice([[], ["-v"], ["--ops", "all"], ["--arch", "8.0"], ["--accelerator", "cpu"]])
    ways: list[Words] = [
        ["machine", "look", *machine],
        [*check, random.choice(["-v", "--strict", "--op=fused_adam", "--arch=9.0"]), *_json(random)],
        [*check, *random.choice([["--report"], _json(random)])],
        [*plan, *asked, *_json(random)],
        ["env", *machine, *_json(random)],
        ["machine", "compare", str(SNAPSHOTS[1]), str(place.machine), *_json(random)],
        ["wheel", "verify", str(place.wheel), *machine, *_json(random)],
        ["wheel", "pick", str(place.wheels), *machine, *_json(random)],
        ["plan", "--machine", str(SNAPSHOTS[2]), "--offline", "--node", str(place.machine), *_json(random)],
    ]
    return random.choice(ways)


CONFIG: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "torch_adam": False}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "nvme", "nvme_path": "/x"},
        "reduce_bucket_size": 5e8,
    },
    "aio": {"block_size": 1048576, "use_gds": False},
    "sparse_attention": {"mode": "fixed"},
    "checkpoint": {"writer": {"type": "FAST"}},
    "compile": {"deepcompile": True, "passes": ["z1"]},
}


def hjson_text(random: Random) -> bytes:
    """A configuration as people write it, with something wrong in it."""
    text = json.dumps(wrong(CONFIG, random), indent=random.choice([None, 2]))
    match random.randrange(6):
        case 0:
            text = text.replace('",', '",\n # why\n').replace("true", "yes")
        case 1:
            text = "// x\n" + text.replace('"', "", random.randrange(6))
        case 2:
            text = text.replace(
                "{", random.choice(["{'''a\nb''' : 1,", "{ /* ", "{a: 1e999,", "{a: b,\n", "\ufeff{"]), 1
            )
        case 3:
            text = re.sub(
                r"[\d.]+", lambda found: random.choice([found[0], "1e999", "-", "0x1", ".5", "01", "9" * 400]), text
            )
    return _perhaps_damaged(text.encode("utf-8", "surrogatepass"), random)


def configs(random: Random, place: Place) -> Words | None:
    """ds_config.json: what a plan reads in it."""
    file = place.folder / "odd.json"
    file.write_bytes(hjson_text(random))
    if random.random() < 0.1:
        return ["plan", "--machine", str(SNAPSHOTS[0]), "--offline", "--for", str(file), *_json(random)]
    with contextlib.suppress(UsageError):
        assert len(training_configs(read_config(file))) < 10_000
    return None


def documents(random: Random, _: Place) -> None:
    """ds_config.json: the judgement of it, and its correction."""
    fuzz_document(random)


YAML = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: &x
  gradient_accumulation_steps: 1
  zero_stage: 3
  offload_optimizer_device: cpu
  zero3_init_flag: true
distributed_type: DEEPSPEED
mixed_precision: bf16
learning_rate: 5.0e-5
num_processes: 2"""
YAML_LINES = (
    *(
        "*x",
        "<<: *x",
        "a: *x",
        "a: &a [*a, *a]",
        "!!python/object/apply:os.system ['touch P']",
        "!!python/name:os.system",
        "? [a]",
    ),
    *(
        "a: !!binary x",
        "a: 2026-02-31",
        "a: 1:99:99",
        "a: !!int x",
        "- b",
        "---",
        "...",
        "%YAML 9.9",
        "a: |",
        "  - - -",
        "a: .inf",
    ),
    *(
        "a: 0b",
        "a: 0o9",
        "a: !!float x",
        "a: !!timestamp x",
        "\tx: y",
        "a: {b: [",
        "a: 'x",
        'a: "\\ud800"',
        "a: !!set {x}",
    ),
)


def yamls(random: Random, place: Place) -> None:
    """The YAML of a training or of accelerate, by what a child reads it with, in which any exception becomes one line."""
    file = place.folder / "odd.yaml"
    file.write_bytes(_perhaps_damaged(wrong_lines(YAML, YAML_LINES, random), random))
    with contextlib.suppress(Exception):
        read_arguments(str(file))
    assert not (place.folder / "folder" / "P").exists()


def zips(random: Random, _: Place) -> None:
    """A zip: what is read of it is what Python's zipfile reads."""
    fuzz_zip(random)


def pickles(random: Random, _: Place) -> None:
    """A program of pickle's opcodes."""
    fuzz_pickle(random)


def contents_of_checkpoints(random: Random, place: Place) -> None:
    """Any values in the files of a checkpoint."""
    fuzz_checkpoint(random, place.folder / "saved")


CHECKPOINT_OPTIONS: tuple[Words, ...] = (
    *(
        [],
        [],
        [],
        ["--deep"],
        ["--world", "3"],
        ["--stage", "1", "--world", "4"],
        ["--dtype", "fp16"],
        ["--load", "module"],
    ),
    *(["--tensor-parallel", "2"], ["--pipeline", "2"], ["--evaluation"], ["--repair"], ["--ranks-here", "2"]),
    *(["--merge", "M"], ["--merge", "M", "--merge-dtype", "bf16", "--largest-file", "1e-7"]),
)
TAGS = (
    *[b"global_step2"] * 9,
    b"\xff\xfe",
    b"../saved/global_step2",
    b"\n\n",
    b"x" * 5000,
    b"global_step2\x1b[31m",
    b"/etc",
    b"",
)


def checkpoints(random: Random, place: Place) -> Words:
    """A folder of checkpoints with damaged bytes, names and ``latest``."""
    folder = place.fresh("damaged")
    shutil.copytree(random.choice(place.checkpoints), folder, dirs_exist_ok=True)
    (folder / "latest").write_bytes(random.choice(TAGS))
    tag = folder / "global_step2"
    for file in random.sample(sorted(tag.iterdir()), k=1):
        if random.random() < 0.15:
            number = random.choice(["0", "1", "99", "0" * 30, "9" * 30, "٣"])
            file.rename(file.with_name(re.sub(r"\d+", number, file.name)))
        else:
            file.write_bytes(damaged(file.read_bytes(), random, near=random.choice([0, 400])))
    words = [word.replace("M", str(place.fresh("merged") / "m")) for word in random.choice(CHECKPOINT_OPTIONS)]
    return ["checkpoint", str(random.choice([folder, tag])), *words, *_json(random)]


METADATA_LINES = (
    *(
        "Requires-Dist: x @ https://u:p@h/x?token=a",
        "Requires-Dist: " + "(" * 500,
        "Requires-Dist: torch; extra == " + "'" * 99,
    ),
    *(
        "Name: evil",
        "Version: 1!9.9+\x1b[31m",
        "Tag: py3-none-any",
        "Tag: " + "-" * 99,
        "Root-Is-Purelib: true",
        "Dynamic: Name",
    ),
    *("Requires-Python: >=99", "Requires-Dist: a[b]>=" + "9." * 5000, "Metadata-Version: 9.9", ": x", "\u202e: y"),
    *(
        "[torch.backends]",
        "x = y:z",
        "torch/__init__.py,,",
        "../x,sha256=,9",
        "a,b,c,d",
        '"',
        "deepspeed/x.py,md5=x,-1",
    ),
)
WHEEL_NAMES = (
    *("deepspeed-0.19.8-py3-none-any.whl", "deepspeed-1-2-3-4-5.whl", "x.whl", "deepspeed-\u202e-py3-none-any.whl"),
    *(
        "deepspeed-0.19.8+a.b-cp311.cp312-abi3.none-any.whl",
        "deepspeed-0.19.8+" + "9" * 150 + "-cp311-cp311-linux_x86_64.whl",
    ),
)
FOREIGN = (
    *(
        "evil.pth",
        "torch/__init__.py",
        "a\x1b[31m.py",
        "deepspeed/\u202e.py",
        "x" * 200,
        "DEEPSPEED/x.py",
        f"{INFO.upper()}/RECORD",
    ),
    *(
        "a b/$(id).py",
        f"{DATA}/purelib/deepspeed/__init__.py",
        f"{DATA}/scripts/x",
        "deepspeed/",
        "deepspeed//x.py",
        "./deepspeed/x.py",
    ),
)


def wheels(random: Random, place: Place) -> Words:
    """A wheel: damaged shared objects, its metadata, its record, files of others, and the zip itself."""
    folder = place.fresh("odd-wheels")
    files = contents(place.library)
    manifest, entry_points = f"{INFO}/dsdoctor.json", f"{INFO}/entry_points.txt"
    files[entry_points] = b"[console_scripts]\ndeepspeed = deepspeed.launcher.runner:main\n"
    files[manifest] = as_bytes({"schema": "dsdoctor/1", "version": "0.19.8", "ops": {"cpu_adam": {}}, "inputs": {}})
    record = f"{INFO}/RECORD"
    for _ in range(random.choice([1, 1, 2])):
        name = random.choice([name for name in files if name != record])
        match random.randrange(6):
            case 0 | 1:
                op = random.choice([name for name in files if name.endswith(".so")])
                files[op] = damaged(place.library, random, near=random.choice([64, 0, 4096]))
            case 2 | 3 if not name.endswith(".so"):
                files[name] = wrong_lines(files[name].decode("utf-8", "replace"), METADATA_LINES, random)
            case 4:
                files[random.choice(FOREIGN)] = b"x"
            case _:
                files.pop(name, None)
    if random.random() < 0.8:
        files.pop(record)
        files = contents(b"", **files)
    if random.random() < 0.15:
        files[record] = wrong_lines(files[record].decode("utf-8", "replace"), METADATA_LINES, random)
    path = wheel(folder, files, random.choice(WHEEL_NAMES) if random.random() < 0.08 else NAME)
    if random.random() < 0.15:
        path.write_bytes(damaged(path.read_bytes(), random, near=random.choice([0, 2000])))
    ways = [
        ["wheel", "verify", str(path)],
        ["wheel", "verify", str(path)],
        ["wheel", "verify", str(path), "-v"],
        ["wheel", "pick", str(folder)],
    ]
    return [*random.choice(ways), "--machine", str(SNAPSHOTS[0]), *_json(random)]


@functools.cache
def trace_lines() -> tuple[tuple[Any, ...], ...]:
    files = sorted(TRACES.glob("*/*.jsonl"))
    return tuple(tuple(json.loads(line) for line in file.read_text().splitlines()) for file in files)


def traces(random: Random, place: Place) -> Words:
    """The traces of two ranks."""
    folder = place.fresh("traces")
    for rank in range(2):
        header, *lines = random.choice(trace_lines())
        lines = [{**header, "rank": rank}, *lines[: random.choice([3, 10, 40, 200, 10_000])]]
        for _ in range(random.choice([0, 0, 1, 1, 2])):
            at = random.randrange(len(lines)) if random.random() < 0.1 else random.randrange(1, len(lines))
            lines[at] = wrong(lines[at], random)
        if random.random() < 0.1:
            random.shuffle(lines)
        content = b"\n".join(map(as_bytes, lines)) + b"\n"
        (folder / f"trace-rank0000{rank}.jsonl").write_bytes(_perhaps_damaged(content, random))
    ranks = [str(folder / f"trace-rank0000{rank}.jsonl") for rank in range(2)]
    ways: list[Words] = [
        ["show", str(folder)],
        ["show", str(folder), random.choice(["--bad", "--last=3", "--rank=1", "--phase=backward"])],
        ["show", str(folder), "--headroom", random.choice(["float16", "bfloat16", "float8_e4m3fn"])],
        ["compare", str(folder), *random.choice([["--rank-a", "0", "--rank-b", "1"], ["--tolerance", "0.1"]])],
        ["compare", *ranks],
    ]
    if random.random() < 0.03:
        return ["trace", "plot", str(folder), "-o", str(folder / "o.html")]
    return ["trace", *random.choice(ways), *_json(random)]


@functools.cache
def rank_files() -> tuple[Any, ...]:
    """What the watches of two ranks wrote."""
    running = (operation(1, "all_reduce", 4, state="done"), operation(2, "all_reduce", 4))
    waiting = view(0, calling("all_reduce"), 2, world=2, operations=running, waits="futex_do_wait", silent=0.2)
    busy = view(1, elsewhere(), 1, world=2, operations=running[:1], activity="reads a file", disk="D", age=0.3)
    files = []
    with tempfile.TemporaryDirectory() as folder:
        write_ranks(Path(folder), incident(waiting, busy, world=2, nccl=("NCCL WARN x",), run="a", when=1.0))
        files += [json.loads(file.read_bytes()) for file in sorted(Path(folder).iterdir())]
    return tuple(files)


def hangs(random: Random, place: Place) -> Words:
    """What a hang watch wrote."""
    folder = place.fresh("hang")
    for rank, file in enumerate(rank_files()):
        content = as_bytes(wrong(file, random) if random.random() < 0.6 else file)
        (folder / f"rank-0000{rank}.json").write_bytes(_perhaps_damaged(content, random))
    page = ["--html", str(folder / "o.html")] if random.random() < 0.03 else []
    return ["hang", str(folder), *_json(random), *page]


def recorders(random: Random, place: Place) -> Words:
    """Dumps of torch's flight recorder, as JSON and as pickles."""
    folder = place.fresh("recorder")
    for rank in range(3):
        content: Any = dump(rank, random.choice([1, 3, 6]))
        if random.random() < 0.4:
            content = wrong(json.loads(json.dumps(content)), random)
        try:
            whole = (
                pickle.dumps(content, random.choice([2, 4, 2, 4, 2, 4, 2, 4, 0]))
                if random.random() < 0.6
                else as_bytes(content)
            )
        except (UnicodeError, RecursionError):
            whole = as_bytes(content)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(damaged(whole, random) if random.random() < 0.03 else whole)
    return ["hang", str(folder), *_json(random)]


@functools.cache
def comm_reports() -> tuple[Any, ...]:
    makers = (reports.healthy_2, reports.healthy_4, reports.missing_rank, reports.slow_node, reports.bad_pair)
    return tuple(json.loads(msgspec.json.encode({"schema": "dsdoctor/1", "report": maker()})) for maker in makers)


def comms(random: Random, place: Place) -> Words:
    """The result of a test of communication."""
    file = place.folder / "comm.json"
    file.write_bytes(_perhaps_damaged(as_bytes(wrong(random.choice(comm_reports()), random)), random))
    page = ["--html", str(place.folder / "o.html")] if random.random() < 0.03 else []
    return ["comm", "--read", str(file), *random.choice([[], ["-v"]]), *_json(random), *page]


HOST_WORDS = (
    *(
        "localhost",
        "127.0.0.1",
        "worker-1",
        "n[01-03]",
        "n[1-999999999]",
        "n[",
        "]",
        "slots=1",
        "slots=0",
        "slots=-1",
        "slots=",
    ),
    *(
        "slots=" + "9" * 20,
        "slots=٣",
        "#c",
        "-oProxyCommand=id",
        "user@h",
        "::1",
        "[::1]",
        "a" * 300,
        "\x1b[31mx",
        "\u202eh",
    ),
    *(
        "$(id)",
        "`id`",
        "h;id",
        "h\x00",
        "'",
        '"',
        "é.example",
        "slots=1 slots=2",
        "@",
        "h:22",
        "*",
        "?",
        "h,h2",
        "A=b",
        "=x",
    ),
)


def hostfiles(random: Random, place: Place) -> Words | None:
    """Hostfiles, lists of nodes and .deepspeed_env."""
    lines = [" ".join(random.choices(HOST_WORDS, k=random.choice([0, 1, 2, 2, 3]))) for _ in range(random.randrange(6))]
    if random.random() < 0.1:
        file = place.folder / "hosts"
        file.write_bytes(_perhaps_damaged("\n".join(lines).encode("utf-8", "surrogatepass"), random))
        others = ["--include", random.choice(["nosuchhost", "n[", "a@b@c", "n[5-1]", ",", "\x1b[31m", "٣"])]
        return ["comm", "--hostfile", str(file), "--static", *others, *_json(random)]
    parse_hostfile("\n".join(lines))
    parse_deepspeed_env("\n".join(lines))
    with contextlib.suppress(UsageError):
        expand("".join(random.choices((*HOST_WORDS, "[", "]", "-", ",", "1", "0009", "n"), k=random.randint(1, 6))))
    return None


def logs(random: Random, place: Place) -> Words:
    """Whole logs: lines that patterns match, tracebacks and what launchers write, mixed and mangled."""
    files = []
    for number in range(random.choice([1, 1, 1, 2, 4])):
        lines = [log_line(random) for _ in range(random.choice([1, 3, 8, 20, 60]))]
        ends = random.choice(["\n"] * 9 + ["\r\n", "\r", "\x0b"])
        content = ends.join(lines).encode("utf-8", "surrogatepass")
        match random.randrange(20):
            case 0 | 1:
                content = damaged(content, random) if content else content
            case 2:
                content = "\n".join(lines).encode("utf-16", errors="replace")
            case 3:
                content = gzip.compress(content)[: random.choice([None, -3, 20])]
        files.append(place.folder / f"odd-{number}.log")
        files[-1].write_bytes(content)
    return ["diagnose", *map(str, files), *_json(random), *random.choice([[], ["-v"]])]


def lines_of_logs(random: Random, _: Place) -> None:
    """Lines of the corpora, mangled."""
    for name, lines in mangled(1, random.randrange(1 << 30)):
        failed = [one.evidence[0] for one in diagnose(lines).findings if one.rule == "reader-failed"]
        assert not failed, f"{name}: {failed}"


COSTLY = {"comm", "build-wheel", "prebuild", "install", "toolkit", "machine record", "hang"}
"""They would work for minutes, or on processes of others: they get an option that is refused, or a Python without torch."""
WAITS = {"--follow", "-f"}
"""It ends with an interruption only."""
_OPTIONS: dict[str, list[tuple[str, bool]]] = {}


def options_of(name: str) -> list[tuple[str, bool]]:
    """Each option of a command, and whether it takes a value."""
    if name not in _OPTIONS:
        app = make_app()
        for word in name.split():
            app = app[word]
        found = []
        if app.default_command is not None:
            for argument in app.assemble_argument_collection():
                found += [(word, argument.hint is not bool) for word in argument.names if word.startswith("-")]
        _OPTIONS[name] = found
    return _OPTIONS[name]


def command_lines(random: Random, place: Place) -> Words:
    """A command with options and arguments of any kind."""
    name = random.choice(sorted(COMMANDS))
    words = name.split()
    listed = options_of(name)
    for _ in range(random.randrange(5)):
        option, takes = random.choice(listed) if listed else ("--json", False)
        if option in WAITS or (option in {"--python", "--source", "--index-url"} and name in COSTLY):
            continue
        words.append(option)
        if takes or random.random() < 0.1:
            words.append(_word(random, place))
    for _ in range(random.randrange(3)):
        words.insert(random.randrange(len(name.split()), len(words) + 1), _word(random, place))
    takes = {option for option, _ in listed}
    if name in COSTLY:
        words.append(
            random.choice(["--no-such-option", "--=", "--jsn"])
            if "--python" not in takes or "--offline" not in takes
            else "--offline"
        )
    if "--python" in takes:
        words += ["--python", str(place.bare)]
    if "--machine" in takes and random.random() < 0.9:
        words += ["--machine", str(place.machine)]
    if "--offline" in takes:
        words.append("--offline")
    return words


def _word(random: Random, place: Place) -> str:
    kind = random.randrange(10)
    if kind < 4:
        return random.choice(TEXTS).replace("\x00", "0")[:2000]
    if kind < 8:
        return random.choice(place.files)
    if kind == 8:
        return str(random.choice([0, 1, -1, 7, 64, 1 << 40, 0.5, -3.5]))
    return random.choice(
        ["8x80G", "0x80G", "2x-1G", "80G", "1:2", "a=b", "rank=1", "overflow", "torch-missing", "fused_adam"]
    ) + random.choice(["", SURROGATE])


READERS: dict[str, Callable[[Random, Place], Words | None]] = {
    "command-lines": command_lines,
    "machines": machines,
    "configs": configs,
    "documents": documents,
    "yaml": yamls,
    "zips": zips,
    "pickles": pickles,
    "contents": contents_of_checkpoints,
    "checkpoints": checkpoints,
    "wheels": wheels,
    "traces": traces,
    "hangs": hangs,
    "recorders": recorders,
    "comms": comms,
    "hostfiles": hostfiles,
    "logs": logs,
    "lines": lines_of_logs,
}
SHARES = {
    "command-lines": 8_000,
    "machines": 6_000,
    "configs": 10_000,
    "documents": 24_000,
    "yaml": 12_000,
    "zips": 30_000,
    "pickles": 30_000,
    "contents": 10_000,
    "checkpoints": 5_000,
    "wheels": 5_000,
    "traces": 6_000,
    "hangs": 6_000,
    "recorders": 6_000,
    "comms": 6_000,
    "hostfiles": 8_000,
    "logs": 6_000,
    "lines": 22_000,
}
"""How many of 200,000 inputs each reader gets: about ten CPU-minutes in all."""
