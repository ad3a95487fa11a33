"""The outputs that README and the pages show, made by the commands that stand above them.

    python docs/make_samples.py                 those that need neither torch nor DeepSpeed, written in place
    python docs/make_samples.py --all           also those that ask DeepSpeed and run ranks (two minutes)
    python docs/make_samples.py --all --check   writes nothing; status 1 and a list, where a page shows something else

A page says where an output goes by ``<!-- sample: NAME -->`` above the block. Lines that say nothing new are left out of it, and
``...`` stands for them. In an output of real ranks every number is another one each time, and counts as the same.
"""

import argparse
import contextlib
import functools
import io
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SAMPLES = ROOT / "docs" / "samples"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
MARKED = re.compile(
    r"(?P<mark><!-- sample: (?P<name>[a-z0-9-]+) -->\n)```\n(?P<text>.*?)^```\n", re.MULTILINE | re.DOTALL
)
WIDTH = "100"
OURS = ("-m", "dsdoctor")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module")
ELIDED = "    ..."


@dataclass(frozen=True, kw_only=True)
class Sample:
    """An output. ``shown`` stands behind the ``$``, ``argv`` is what runs, in ``folder``.

    ``first``: what runs before it, all in one empty folder. ``made``: what puts files into an empty folder before it.
    ``keep``: only the lines that begin like one of these; empty: all. ``ranks``: it runs several processes, and numbers
    differ. ``quick``: it needs nothing that is not always here.
    """

    shown: str
    argv: tuple[str, ...]
    folder: Path = SAMPLES
    keep: tuple[str, ...] = ()
    quick: bool = False
    ranks: bool = False
    first: tuple[tuple[str, ...], ...] = ()
    made: Callable[[], None] | None = None
    env: Mapping[str, str] = field(default_factory=dict)


MACHINE = "tests/machines/container-without-gpu.json"
CHECK = Sample(
    shown=f"python -m dsdoctor check --machine {MACHINE}",
    argv=("check", "--offline", "--machine", MACHINE),
    folder=ROOT,
    quick=True,
)
EXPLAIN = Sample(
    shown="python -m dsdoctor explain cuda-home-wrong",
    argv=("explain", "cuda-home-wrong"),
    folder=ROOT,
    quick=True,
)
LOG = "tests/diagnosis/unseen_fifth/13-oom-at-save-tqdm.log"
DIAGNOSE = Sample(shown=f"python -m dsdoctor diagnose {LOG}", argv=("diagnose", LOG), folder=ROOT, quick=True)
CONFIG = Sample(
    shown="python -m dsdoctor config ds_config.json --world 4", argv=(*OURS, "config", "ds_config.json", "--world", "4")
)
MEMORY_ARGUMENTS = "--config zero2.json --model llama3-8b.json --batch 4 --sequence 4096 --gpus 8x80G"
MEMORY = Sample(
    shown=f"python -m dsdoctor memory {MEMORY_ARGUMENTS}", argv=(*OURS, "memory", *MEMORY_ARGUMENTS.split())
)
COMM = Sample(
    shown="python -m dsdoctor comm --nproc 2 --quick", argv=(*OURS, "comm", "--nproc", "2", "--quick"), ranks=True
)
HANG = Sample(
    shown="torchrun --nproc_per_node 2 -m dsdoctor.run --hang-after 8 --on-hang stop train.py",
    argv=(*TORCHRUN, "-m", "dsdoctor.run", "--hang-after", "8", "--on-hang", "stop", str(SAMPLES / "train.py")),
    keep=(r"dsdoctor: (no progress|[!✗])", r"dsdoctor:     (rank|no rank|Fix)"),
    ranks=True,
)
TRAINER = "tests/launch/hf_trainer.py"
OVERFLOW = Sample(
    shown=f"PLANT=transformer.h.1.mlp BF16=1 deepspeed --num_gpus 2 --module dsdoctor.run {TRAINER}",
    argv=(*DEEPSPEED, "dsdoctor.run", TRAINER),
    folder=ROOT,
    keep=(r"dsdoctor: ✗", r"      (step|first made|bad before|replayed|Fix)", r"      .* (input|output)"),
    ranks=True,
    env={"PLANT": "transformer.h.1.mlp", "BF16": "1"},
)
# a rank alone, as a launcher would start it
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29683"}
TWO_RUNS = tuple((str(SAMPLES / "precisions.py"), precision) for precision in ("fp16", "fp32"))
COMPARE = Sample(
    shown="dsdoctor trace compare fp16 fp32",
    argv=(*OURS, "trace", "compare", "fp16", "fp32"),
    first=TWO_RUNS,
    keep=(r"✗ first", r"    (forward|its)", r"  \d+ tensors"),
    ranks=True,
    env=ALONE,
)
HEADROOM = Sample(
    shown="dsdoctor trace show fp32 --headroom float16",
    argv=(*OURS, "trace", "show", "fp32", "--headroom", "float16"),
    first=TWO_RUNS,
    keep=(r"    bits", r"[✗✓] ", r"    (Fix|with)", r"      "),
    ranks=True,
    env=ALONE,
)


def _checkpoint() -> None:
    """output/, as two ranks of DeepSpeed write it at stage 2; the tests of checkpoints hold the same files."""
    from tests.checkpoint.written import Kind, write

    write(Path("output"), Kind(stage=2, dtype="bf16", world=2))


def _cut_checkpoint() -> None:
    """The same, with a file of which the end is missing."""
    _checkpoint()
    os.truncate("output/global_step2/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", 1000)


CHECKPOINT = Sample(
    shown="dsdoctor checkpoint output --world 8",
    argv=("checkpoint", "output", "--world", "8"),
    made=_checkpoint,
    quick=True,
)
CUT = Sample(shown="dsdoctor checkpoint output", argv=("checkpoint", "output"), made=_cut_checkpoint, quick=True)


def _short(sample: Sample, *keep: str) -> Sample:
    """The same run, with fewer of its lines."""
    return Sample(**{**vars(sample), "keep": keep})


SAMPLES_BY_NAME: dict[str, Sample] = {
    "check": CHECK,
    "check-short": _short(
        CHECK, r"[✓✗] ", r"  (toolkit  |next)", r"    (it has|Fix: let)", r"      \$ export CUDA", r"ops of"
    ),
    "explain": EXPLAIN,
    "diagnose": DIAGNOSE,
    "checkpoint": CHECKPOINT,
    "checkpoint-cut": CUT,
    "config": CONFIG,
    "memory": MEMORY,
    "comm": COMM,
    "hang": HANG,
    "hang-short": _short(HANG, r"dsdoctor: (no progress|[!✗])"),
    "overflow": OVERFLOW,
    "trace-compare": COMPARE,
    "trace-headroom": HEADROOM,
}


def made(name: str) -> str:
    """The block's text: the command, then its output."""
    sample = SAMPLES_BY_NAME[name]
    output = (
        _quick_output(sample.argv, sample.made)
        if sample.quick
        else _output(sample.argv, sample.folder, tuple(sample.env.items()), sample.first)
    )
    return "\n".join([f"$ {sample.shown}", *_kept(output.splitlines(), sample.keep)]) + "\n"


@functools.cache
def _quick_output(argv: tuple[str, ...], prepare: Callable[[], None] | None) -> str:
    """A command that starts nothing, in this process."""
    from dsdoctor.cli.app import run

    out, before = io.StringIO(), Path.cwd()
    try:
        with (
            TemporaryDirectory() as empty,
            patch.dict(os.environ, {"COLUMNS": WIDTH}),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            os.chdir(empty if prepare else ROOT)
            if prepare:
                prepare()
            run(argv)
            os.chdir(before)
    finally:
        os.chdir(before)
    return out.getvalue()


@functools.cache
def _output(
    argv: tuple[str, ...], folder: Path, env: tuple[tuple[str, str], ...], first: tuple[tuple[str, ...], ...] = ()
) -> str:
    """What a process printed, without names of this machine."""
    around = {**os.environ, **dict(env), "COLUMNS": WIDTH, "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    around["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [around.get("PYTHONPATH")])])
    with TemporaryDirectory() as empty:
        alone = first or ("dsdoctor.run" in argv and folder == SAMPLES)
        where = Path(empty) if alone else folder
        for each in first:
            _ran(each, where, around)
        done = _ran(argv, where, around)
    said = (done.stderr + done.stdout).replace(socket.gethostname(), "node1")
    return said.replace(f"{folder}/", "")


def _ran(argv: tuple[str, ...], folder: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *argv], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def _kept(lines: list[str], keep: tuple[str, ...]) -> list[str]:
    """The lines that are shown. Dots tell that others stood between them."""
    shown: list[str] = []
    for line in map(str.rstrip, lines):
        if not keep or any(re.match(pattern, line) for pattern in keep):
            shown.append(line)
        elif line and shown and shown[-1] != ELIDED:
            shown.append(ELIDED)
    return shown[:-1] if shown[-1:] == [ELIDED] else shown


def alike(name: str, text: str) -> str:
    """What of a text must be the same in the next run: of ranks, all but the numbers and the blanks that fill a column."""
    if not SAMPLES_BY_NAME[name].ranks:
        return text
    return re.sub(r" +", " ", re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?( (µs|ms|s)\b)?", "N", text))


def stale(page: Path, names: frozenset[str]) -> list[str]:
    """The samples of a page that another output belongs to."""
    found = MARKED.finditer(page.read_text(encoding="utf-8"))
    return [
        sample["name"]
        for sample in found
        if sample["name"] in names
        and alike(sample["name"], made(sample["name"])) != alike(sample["name"], sample["text"])
    ]


def write(page: Path, names: frozenset[str]) -> None:
    """Put in the outputs that have changed."""
    changed = frozenset(stale(page, names))
    text = page.read_text(encoding="utf-8")

    def block(found: re.Match[str]) -> str:
        return f"{found['mark']}```\n{made(found['name'])}```\n" if found["name"] in changed else found[0]

    page.write_text(MARKED.sub(block, text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also what needs DeepSpeed and ranks")
    parser.add_argument("--check", action="store_true", help="write nothing, tell what is stale")
    given = parser.parse_args()
    names = frozenset(name for name, sample in SAMPLES_BY_NAME.items() if given.all or sample.quick)
    if not given.check:
        for page in PAGES:
            write(page, names)
        return 0
    old = [f"{page.relative_to(ROOT)}: {name}" for page in PAGES for name in stale(page, names)]
    for line in old:
        print(line)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
