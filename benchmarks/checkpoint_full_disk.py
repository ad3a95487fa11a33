"""A disk that really runs full, a tmpfs: while a training saves, while a model is merged, while a tag is made universal.

    python benchmarks/checkpoint_full_disk.py --json FILE     # as root, who may mount one; half a minute

What the training saved is judged, tag by tag: the one that was cut off is to be named, and no other. A merge and a conversion are
to leave no file that is not whole, also where the room was there when they began: another process takes it meanwhile.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import Plan
from dsdoctor.core.finding import has_error
from tests.checkpoint import real
from tests.checkpoint.test_merge import large, read

UNDER = ("-m", "dsdoctor.run", "--overflow", "off", "--memory", "off", "--hang", "off", "--config-check", "off")
SAID = re.compile(r"\[(checkpoint-[a-z-]+)\]")


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[Path]:
    """A disk of so many bytes."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def while_saving(place: Path, size: int) -> dict[str, Any]:
    """Save until the disk is full; what is said of each tag, and what the watched training was told."""
    with small_disk(place, size) as disk:
        (said,) = real.start(1, "fill", str(disk), under=UNDER)
        said = said.replace(str(disk), "DISK")
        line = next(line for line in said.splitlines() if "FILLED " in line)
        became = json.loads(line.partition("FILLED ")[2])
        verdicts = {}
        for tag in look(disk).tags:
            found = judge(look(disk), tag.name, Plan())
            verdicts[tag.name] = sorted({each.rule for each in found.findings if has_error((each,))})
        latest = look(disk).latest
        whole = [name for name, rules in verdicts.items() if not rules]
    last = len(became)
    cut = f"global_step{last}"
    return {
        "what": "while a training saves", "disk": size, "saves": became, "told": SAID.findall(said), "verdicts": verdicts,
        "right": bool(
            latest == f"global_step{last - 1}" and len(whole) == last - 1 and cut not in whole
            and "checkpoint-save-failed" in SAID.findall(said) and "checkpoint-disk-full" in SAID.findall(said)
        ),
    }  # fmt: skip


def taken(disk: Path, out: Path, size: int, done: threading.Event) -> None:
    """Take the room that is left, as soon as a file in a folder has so many bytes."""
    while not done.is_set():
        if any(file.stat().st_size >= size for file in files(out)):
            left = shutil.disk_usage(disk).free
            with contextlib.suppress(OSError), (disk / "other").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, left)
            return
        time.sleep(0.0005)


def files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [path for path in folder.rglob("*") if path.is_file()]
    return []


def run_full(
    place: Path, size: int, saved: Path, options: list[str], left: Callable[[Path], list[str]]
) -> dict[str, Any]:
    """Run a command whose disk runs full, and run it again when there is room."""
    with small_disk(place, size) as disk:
        out, done = disk / "out", threading.Event()
        command = [
            sys.executable,
            "-m",
            "dsdoctor",
            "checkpoint",
            str(saved),
            options[0],
            str(out / "new"),
            *options[1:],
        ]
        thief = threading.Thread(target=taken, args=(disk, out, (8 if options[0] == "--merge" else 1) << 20, done))
        thief.start()
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
        done.set()
        thief.join()
        there = left(out)
        stolen = (disk / "other").exists()
        (disk / "other").unlink(missing_ok=True)
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200, env=environment)
        hidden = [path.name for path in out.rglob(".dsdoctor*")]
        same = bool(options[0] == "--universal" or read(out / "new"))
    said = ended.stderr.replace(str(disk), "DISK").strip().splitlines()[-2:]
    right = stolen and ended.returncode not in {0, 1} and not there and again.returncode == 0 and same and not hidden
    return {
        "what": options[0], "disk": size, "status": ended.returncode, "said": said, "left": there, "again": again.returncode,
        "hidden": hidden, "right": right,
    }  # fmt: skip


def not_whole(out: Path) -> list[str]:
    """Files of a merged model that are not whole, and hidden ones."""
    sizes = {path.name: path.stat().st_size for path in files(out)}
    return [name for name, size in sizes.items() if size < 40_000_000 or not name.endswith(".safetensors")]


def any_tag(out: Path) -> list[str]:
    """Whatever a training could take for a checkpoint."""
    return [path.name for path in out.iterdir() if not path.name.startswith(".")] if out.is_dir() else []


def with_moments(folder: Path) -> None:
    """A large tag, as real Adam leaves it."""
    make = "import benchmarks.checkpoint_merge as b; exec(b.MAKE)"
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run([sys.executable, "-c", make, str(tag), "3", "4000000", "2000000"], check=True, env=environment)


def saves(place: Path) -> Iterator[dict[str, Any]]:
    """Disks that are full in the second, third or fourth save."""
    yield from (while_saving(place / f"disk{size}", size) for size in (100_000, 150_000, 210_000))


def merge(place: Path) -> Iterator[dict[str, Any]]:
    """A model of 80 MB in two files."""
    large(place / "merge")
    yield run_full(place / "disk", 120 << 20, place / "merge", ["--merge", "--largest-file", "0.05"], not_whole)


def universal(place: Path) -> Iterator[dict[str, Any]]:
    """48 MB of weights and moments."""
    with_moments(place / "universal")
    yield run_full(place / "other", 260 << 20, place / "universal", ["--universal"], any_tag)


PARTS = {"saves": saves, "merge": merge, "universal": universal}


def main() -> int:
    """Fill, judge, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=["saves", "merge", "universal"], choices=["saves", "merge", "universal"]
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        rows = [row for what in given.only for row in PARTS[what](place)]
    for row in rows:
        print(json.dumps(row))
    if given.json:
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        given.json.write_text(f'{{\n "rows": [\n  {lines}\n ]\n}}\n')
    return 0 if all(row["right"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
