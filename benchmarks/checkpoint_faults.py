"""Is what is said of a sick checkpoint what real ranks do with it? Those of two ranks, damaged file by file, judged and loaded.

    python benchmarks/checkpoint_faults.py --json FILE             # all: about five minutes on two processors
    python benchmarks/checkpoint_faults.py --kinds zero2-fp32      # those of one kind
    python benchmarks/checkpoint_faults.py --every 20              # a sample
    python benchmarks/checkpoint_faults.py --seconds 240 --place FOLDER --json FILE   # a slice; again: goes on where it ended

Generated: kind x file x damage, and what befalls a folder: swapped ranks, files of another step or another training, latest, links.
A case is wrong where dsdoctor lets pass what does not load or loads other values, and where it does not name the file. Counted
apart: what is told although it loads (a damage that is there, in a file or a value that this load does not open), and what nothing
beside the file could say. Flipped bytes are looked for with --deep. Exits with 1 where one is wrong.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsdoctor.checkpoint.deep import judge_values
from dsdoctor.checkpoint.folder import look
from dsdoctor.checkpoint.judge import judge
from dsdoctor.checkpoint.loading import PROVEN_WITH, Plan
from dsdoctor.core.finding import has_error
from tests.checkpoint import real

TAG, OLDER = "global_step2", "global_step1"
KINDS = (
    "zero1-fp32", "zero1-bf16", "zero2-fp32", "zero2-bf16", "zero3-fp32", "zero3-bf16", "experts1-bf16", "pipeline1-bf16",
)  # fmt: skip
UNIVERSAL = ("zero2-fp32", "zero3-bf16")
CUTS = 10
FASTEST = 0.2
"""Seconds that a case at least takes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A damage: what it is, what it does to a copy of the folder, the file that is to be named ("" for none).

    ``alone``: no other file of the folder holds what this one holds, so nothing can tell that it is another's."""

    kind: str
    what: str
    damage: Callable[[Path], None]
    file: str = ""
    healthy: bool = False
    universal: bool = False
    alone: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}{' universal' * self.universal}: {self.file} {self.what}".replace(":  ", ": ")


def cut(place: int) -> Callable[[Path], None]:
    """The file ends after so many elevenths of it."""

    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * (place + 1) // (CUTS + 1)])

    return damage


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def linked_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "elsewhere.pt")


def linked(path: Path) -> None:
    moved = path.parents[1] / f"moved-{path.name}"
    path.rename(moved)
    path.symlink_to(moved)


def flipped(path: Path) -> None:
    """A bit of an exponent in the middle of the largest tensor."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = max((each for each in archive.infolist() if "/data/" in each.filename), key=lambda each: each.file_size)
    begin = (
        info.header_offset + 30 + int.from_bytes(content[info.header_offset + 26 : info.header_offset + 28], "little")
    )
    begin += int.from_bytes(content[info.header_offset + 28 : info.header_offset + 30], "little")
    content[begin + info.file_size // 2 // 4 * 4 + 3] ^= 0x10
    path.write_bytes(bytes(content))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "gone": Path.unlink, "empty": lambda path: path.write_bytes(b"") and None, "zeros": zeros,
    "a link to nothing": linked_to_nothing, "a flipped bit": flipped,
    **{f"cut off at {place + 1}/{CUTS + 1}": cut(place) for place in range(CUTS)},
}  # fmt: skip


def of_files(folder: Path, kind: str, *, universal: bool) -> Iterator[Case]:
    """Every damage of every file. Of a universal tag's many small files each is gone, cut and flipped once."""
    tag = folder / kind / (f"{TAG}_universal" if universal else TAG)
    for path in sorted(tag.rglob("*.pt")):
        name = path.relative_to(folder / kind).as_posix()
        if universal and path.name == "step.pt":
            # a number and no tensor: a flipped bit has nowhere to be
            continue
        for what, damage in DAMAGES.items():
            if not universal or what in {"gone", "a flipped bit", "cut off at 5/11"}:
                if what == "a flipped bit" and not has_tensors(path):
                    continue
                yield Case(kind=kind, what=what, file=name, universal=universal, damage=on(name, damage))


def has_tensors(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any("/data/" in each.filename and each.file_size for each in archive.infolist())


def on(name: str, damage: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: damage(folder / name)


def of_folders(folder: Path, other: Path, kind: str) -> Iterator[Case]:
    """What befalls more than one file."""
    tag = folder / kind / TAG
    yield Case(kind=kind, what="as it was saved", damage=lambda _: None, healthy=True)
    for group in ("*optim_states.pt", "zero_pp_rank_*model_states.pt", "mp_rank_*", "layer_*"):
        files = [path.name for path in sorted(tag.glob(group))]
        if len(files) > 1:
            yield Case(
                kind=kind, what=f"{files[0]} and {files[1]} swapped", file=f"{TAG}/{files[0]}", damage=swapped(files)
            )
    for path in sorted(tag.iterdir()):
        name = f"{TAG}/{path.name}"
        yield Case(
            kind=kind, what="of another step", file=name, damage=replaced(folder / kind / OLDER / path.name, name)
        )
        # below stage 3 the model's own file holds the same weights; at stage 3 a rank's file is alone with its part of them
        alone = kind.startswith("zero3") and "optim_states" in name
        yield Case(
            kind=kind, what="of another training", file=name, damage=replaced(other / kind / name, name), alone=alone
        )
        yield Case(kind=kind, what=f"{path.name} a link to the whole file", damage=on(name, linked), healthy=True)
    for what, text in (("gone", None), ("of no tag", "global_step9"), ("empty", "")):
        yield Case(kind=kind, what=f"latest {what}", damage=latest(text))
    for what, text in (("with a line's end", f"{TAG}\n"), ("of the older tag", OLDER)):
        yield Case(kind=kind, what=f"latest {what}", damage=latest(text), healthy=True)
    yield Case(kind=kind, what="the tag a link to its folder", damage=tag_linked, healthy=True)


def swapped(files: list[str]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        one, two = (folder / TAG / name for name in files[:2])
        first, second = one.read_bytes(), two.read_bytes()
        one.write_bytes(second)
        two.write_bytes(first)

    return damage


def replaced(source: Path, name: str) -> Callable[[Path], None]:
    return lambda folder: shutil.copy(source, folder / name) and None


def latest(text: str | None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / "latest").unlink()
        if text is not None:
            (folder / "latest").write_text(text)

    return damage


def tag_linked(folder: Path) -> None:
    (folder / TAG).rename(folder / "moved")
    (folder / TAG).symlink_to(folder / "moved")


def order_of(case: Case, folder: Path) -> dict[str, Any]:
    kind, dtype = case.kind.split("-")
    return {
        "kind": kind[:-1], "stage": int(kind[-1]), "dtype": dtype, "folder": str(folder), "universal": case.universal, "tag": None,
    }  # fmt: skip


def became(ranks: list[dict[str, Any]], healthy: dict[str, Any]) -> str:
    """What the ranks did, in a word."""
    failed = ["error" in rank for rank in ranks]
    if all(failed):
        return "fails"
    if any(failed):
        return "fails on one rank"
    if not all(rank["path"] for rank in ranks):
        return "nothing is loaded"
    same = [rank["holds"] for rank in ranks] == [rank["holds"] for rank in healthy["ranks"]]
    return "loads" if same else "loads other values"


def judged(case: Case, folder: Path) -> dict[str, Any]:
    """What dsdoctor says: the quick look, --deep where that says nothing, and whether the file is named."""
    tag = f"{TAG}_universal" if case.universal else None
    began = time.monotonic()
    quick = judge(look(folder), tag, Plan())
    took = time.monotonic() - began
    found = quick.findings
    if not has_error(found):
        found = judge(
            look(folder), tag, Plan(), values=lambda examined: judge_values(examined, lambda _: None)
        ).findings
    lines = [line for each in found for line in (each.title, *each.evidence)]
    name = case.file.partition("/")[2]
    return {
        "rules": sorted({each.rule for each in found}), "alarm": any(each.severity.value != "note" for each in found),
        "by": "quick look" if has_error(quick.findings) else "--deep" if has_error(found) else "", "seconds": round(took, 3),
        "named": not name or any(name in line for line in lines),
    }  # fmt: skip


def verdict_on(case: Case, said: dict[str, Any], did: str) -> str:
    """right, or how it is wrong. The older tag that latest names is whole, and is loaded as it was saved."""
    if case.healthy or did == "loads":
        return "right" if not said["by"] else "told although it loads"
    if not said["alarm"]:
        return "not told: nothing beside the file says so" if case.alone else "wrong: not told"
    return "right" if said["named"] else "wrong: the file is not named"


def made(place: Path, kinds: list[str]) -> list[Case]:
    """Let ranks save, where that was not done before; every case of what they saved."""
    saved, other = place / "saved", place / "other"
    if not (other / "sums.json").exists():
        real.make_two(saved, other, *kinds, env={"EVERY_STEP": "1", "UNIVERSAL": " ".join(UNIVERSAL)})
    cases = [case for kind in kinds for case in of_folders(saved, other, kind)]
    cases += [
        Case(kind=kind, what="as it was saved", damage=lambda _: None, healthy=True, universal=True)
        for kind in UNIVERSAL
        if kind in kinds
    ]
    cases += [case for kind in kinds for case in of_files(saved, kind, universal=False)]
    return cases + [case for kind in UNIVERSAL if kind in kinds for case in of_files(saved, kind, universal=True)]


def rows(
    place: Path, kinds: list[str], every: int = 1, seconds: float = 3600, done: frozenset[str] = frozenset()
) -> tuple[list[dict[str, Any]], int]:
    """Damage, judge, load: a row for each case that is not done; and how many are left, in an order that is drawn once."""
    end = time.monotonic() + seconds
    cases = made(place, kinds)
    rest = [case for case in cases if case.what != "as it was saved"][::every]
    random.Random(5).shuffle(rest)  # noqa: S311
    rest = [case for case in rest if case.name not in done]
    asked = rest[: max(1, int((end - time.monotonic()) / FASTEST))]
    wanted = {(case.kind, case.universal) for case in asked}
    healthy = [case for case in cases if case.what == "as it was saved" and (case.kind, case.universal) in wanted]
    with tempfile.TemporaryDirectory() as work:
        found = compared(Path(work), place / "saved", [*healthy, *asked], end)
    return found, len(rest) + len(healthy) - len(found)


def compared(place: Path, saved: Path, cases: list[Case], end: float) -> list[dict[str, Any]]:
    """Load each case, and judge it meanwhile; those that were loaded before the time had run out."""
    folders = [place / f"case{number}" for number in range(len(cases))]
    for case, folder in zip(cases, folders, strict=True):
        shutil.copytree(saved / case.kind, folder, symlinks=True)
        case.damage(folder)
    (place / "orders.json").write_text(json.dumps([order_of(*each) for each in zip(cases, folders, strict=True)]))
    loads = Path(__file__).parents[1] / "tests/checkpoint/loads.py"
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    loading = subprocess.Popen(
        [sys.executable, str(loads), str(place / "orders.json"), str(place / "answers.json"), str(end - time.monotonic())],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    said = [judged(*each) for each in zip(cases, folders, strict=True) if loading.poll() is None]
    assert loading.wait() == 0
    answers = json.loads((place / "answers.json").read_text())
    said += [judged(*each) for each in list(zip(cases, folders, strict=True))[len(said) : len(answers)]]
    return compared_rows(cases, said, answers)


def compared_rows(cases: list[Case], said: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was said of each case beside what the ranks did."""
    loaded = list(zip(cases, said, answers, strict=False))
    usual = {(case.kind, case.universal): answer for case, _, answer in loaded if case.what == "as it was saved"}
    found = []
    for case, words, answer in loaded:
        did = became(answer["ranks"], usual[case.kind, case.universal])
        errors = [rank["error"][:120] for rank in answer["ranks"] if "error" in rank]
        found.append({
            "case": case.name, "said": words["rules"], "by": words["by"], "did": did, "verdict": verdict_on(case, words, did),
            "seconds": words["seconds"], "errors": errors,
        })  # fmt: skip
    return found


def main() -> int:
    """Make, damage, judge, load, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--place", type=Path, help="where what the ranks saved is kept for the next slice")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    before = {row["case"]: row for row in json.loads(given.json.read_text())["rows"]} if _there(given.json) else {}
    with tempfile.TemporaryDirectory() as folder:
        place = given.place or Path(folder)
        place.mkdir(exist_ok=True)
        new, left = rows(place, given.kinds, given.every, given.seconds, frozenset(before))
    found = list({**before, **{row["case"]: row for row in new}}.values())
    text = {
        "deepspeed": PROVEN_WITH, "kinds": given.kinds, "every": given.every,
        "cases": len(found), "left": left, "verdicts": Counter(row["verdict"] for row in found),
        "did": Counter(row["did"] for row in found), "by": Counter(row["by"] for row in found if row["by"]),
        "slowest_look_seconds": max(row["seconds"] for row in found),
    }  # fmt: skip
    print(json.dumps(text, indent=1))
    wrong = [row for row in found if row["verdict"] != "right"]
    for row in wrong:
        print(json.dumps(row))
    if given.json:
        lines = ",\n  ".join(json.dumps(row) for row in found)
        given.json.write_text(json.dumps(text, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')
    return 1 if any(row["verdict"].startswith("wrong") for row in wrong) else 0


def _there(file: Path | None) -> bool:
    return file is not None and file.exists()


if __name__ == "__main__":
    sys.exit(main())
