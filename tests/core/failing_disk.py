"""Run under LD_PRELOAD of failing_disk.c: a scenario again and again, each time with another call that fails; a line of JSON each.

    python -m tests.core.failing_disk SCENARIO FOLDER ERRNO STEP

Each run is a fork: its folder, its exit status and stderr, and what ``judge`` finds there when the disk works again.
"""

import ctypes
import io
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.source.fetch import lay_out
from dsdoctor.cli import app
from dsdoctor.core.host import LocalHost
from dsdoctor.core.snapshot import Recorder, save
from dsdoctor.core.workspace import log_folder, private_folder, workspace

KEYS = ("ab" * 32, "cd" * 32)


def keep(folder: Path) -> None:
    """Keep two entries in an op cache, take one, and use a private folder."""
    store = CacheStore(folder / "compiled", limit=1 << 20)
    for number, key in enumerate(KEYS):
        source = folder / "source" / f"{number}.so"
        if store.put("ops", key, {source.name: source}, {"op": str(number)}) is None:
            sys.exit(4 if store.complaints else 9)
    for entry in store.find("ops", KEYS[0]):
        if not store.take(entry, folder / "taken"):
            sys.exit(4 if store.complaints else 9)


def judge_kept(folder: Path, ended_well: bool) -> str:
    store = CacheStore(folder / "compiled", limit=1 << 20)
    damaged = [why for _, why in store.verify()]
    kept = [entry for key in KEYS for entry in store.find("ops", key)]
    taken = folder / "taken" / "0.so"
    if taken.exists() and taken.read_bytes() != b"0" * 1000:
        return "what was taken is half"
    if [*(folder / "taken").glob(".*")]:
        return "a part was left"
    if ended_well and (len(kept) != 2 or not taken.exists()):
        return "it ended well, and not all is there"
    return "; ".join(damaged + store.dropped)


def prepare_kept(folder: Path) -> None:
    (folder / "source").mkdir()
    for number in range(2):
        (folder / "source" / f"{number}.so").write_bytes(str(number).encode() * 1000)


def prepare_full(folder: Path) -> None:
    prepare_kept(folder)
    keep(folder)


def prune(folder: Path) -> None:
    """``cache prune --all`` of a cache with two entries and a toolkit."""
    os.environ["DSDOCTOR_CACHE"] = str(folder)
    sys.exit(app.run(["cache", "prune", "--all"], begun=lambda: None))


def judge_pruned(folder: Path, ended_well: bool) -> str:
    store = CacheStore(folder / "compiled", limit=1 << 20)
    left = sum(len(store.find("ops", key)) for key in KEYS)
    return "; ".join(why for _, why in store.verify()) or ("something is left" if ended_well and left else "")


def record(folder: Path) -> None:
    """A snapshot in place of an older one."""
    save(Recorder(LocalHost()).snapshot, folder / "machine.json", home="/root")


def prepare_record(folder: Path) -> None:
    (folder / "machine.json").write_text('{"old": 1}')


def judge_record(folder: Path, ended_well: bool) -> str:
    found = json.loads((folder / "machine.json").read_text())
    if [path.name for path in folder.iterdir() if path.name.startswith(".")]:
        return "a hidden file was left"
    return "the old one stands" if ended_well and "old" in found else ""


FILES = {"setup.py": b"#" * 1000, "version.txt": b"0.19.8", "op_builder/all_ops.py": b"#" * 70000}


def unpack(folder: Path) -> None:
    """An sdist that a user names, laid out in a workspace, and a folder for logs."""
    cache = private_folder(folder / "cache")
    with workspace(cache) as place:
        sdist = str(folder / "deepspeed-0.19.8.tar.gz")
        laid = lay_out(LocalHost(), sdist, place / "source", cache=cache, python=sys.executable, offline=True)
        names = {path.name: path.stat().st_size for path in Path(laid.folder).rglob("*") if path.is_file()}
        if names != {Path(name).name: len(content) for name, content in FILES.items()}:
            sys.exit(9)
        log_folder(cache)


def prepare_unpack(folder: Path) -> None:
    with tarfile.open(folder / "deepspeed-0.19.8.tar.gz", "w:gz") as file:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"deepspeed-0.19.8/{name}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def judge_unpack(folder: Path, ended_well: bool) -> str:
    left = [path.name for path in (folder / "cache").glob("builds/*") if path.name != ".lock"]
    return (
        f"builds left {left}"
        if left
        else ("no logs" if ended_well and not (folder / "cache" / "logs").exists() else "")
    )


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None], Callable[[Path, bool], str]]] = {
    "keep": (prepare_kept, keep, judge_kept),
    "prune": (prepare_full, prune, judge_pruned),
    "record": (prepare_record, record, judge_record),
    "unpack": (prepare_unpack, unpack, judge_unpack),
}


def main(name: str, base: Path, error: int, step: int) -> None:
    prepare, act, judge = SCENARIOS[name]
    disk = ctypes.CDLL(None)
    shutil.rmtree(base, ignore_errors=True)
    nth, reached = 1, True
    while reached:
        for for_good in (0, 1) if error > 0 else (0,):
            folder = base / f"{nth}-{for_good}"
            folder.mkdir(parents=True, mode=0o700)
            prepare(folder)
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:
                os.dup2(writing, 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                disk.fail_at(nth, error, for_good)
                status = ended(act, folder)
                reached = disk.calls_so_far() >= nth
                disk.fail_at(0, 0, 0)
                os._exit(status | (0x80 if reached else 0))
            os.close(writing)
            with os.fdopen(reading, errors="replace") as pipe:
                said = pipe.read()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status < 0:
                sweep(folder)
                reached = True
            else:
                reached, status = bool(status & 0x80), status & 0x7F
            wrong = judge(folder, status == 0)
            row = {"nth": nth, "for_good": for_good, "reached": reached, "status": status, "said": said, "wrong": wrong}
            print(json.dumps(row))
        nth += step


def sweep(folder: Path) -> None:
    """What a kill may leave is hidden, and goes with the next use: that of a build; of a file that is written it stays."""
    with workspace(private_folder(folder / "cache")):
        for path in (*folder.glob(".dsdoctor-*"), *(folder / "taken").glob(".*")):
            path.unlink()


def ended(act: Callable[[Path], None], folder: Path) -> int:
    """The exit status that a command would have: 3 and 4 for errors that we know of, 5 for a traceback."""
    import traceback

    from dsdoctor.core.errors import DoctorError, refused_by_system

    try:
        act(folder)
    except SystemExit as end:
        sys.stdout.flush()
        return int(end.code or 0)
    except DoctorError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        # as every command ends then (cli.app)
        told = refused_by_system(error)
        print(told, file=sys.stderr, flush=True)
        return told.exit_code
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 5
    return 0


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
