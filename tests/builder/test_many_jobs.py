"""Many jobs without a scheduler of ours: the list of targets, one of them by its number, and the index that joins the wheels."""

import json
import shutil
from pathlib import Path

from dsdoctor.builder.wheel.index import wheels_of
from tests.builder.test_pick import library  # noqa: F401
from tests.builder.test_wheel import NAME, contents, wheel
from tests.cli.runner import run

ASKED = (
    "--python",
    "3.11",
    "--python",
    "3.12",
    "--torch",
    "2.13.0",
    "--torch",
    "2.14.1",
    "--cuda",
    "12.8",
    "--cuda",
    "cpu",
)


def test_targets_are_listed_in_one_order_without_looking_at_the_machine() -> None:
    done = run("build-wheel", "--targets", *ASKED, "--json", PATH="/nonexistent")

    targets = json.loads(done.stdout)["targets"]
    assert done.returncode == 0
    assert [target["number"] for target in targets] == list(range(8))
    assert targets[5] == {"number": 5, "python": "3.12", "torch": "2.13.0", "cuda": "cpu"}
    assert run("build-wheel", "--targets", *ASKED).stdout.splitlines()[5] == "5 3.12 torch 2.13.0 CUDA cpu"


def test_one_target_is_built_by_its_number(tmp_path: Path) -> None:
    asked = ("--python", str(tmp_path / "no-python"), "--python", str(tmp_path / "nor-this"))

    chosen = run("build-wheel", *asked, "--target", "1", "--dry-run", DSDOCTOR_CACHE=str(tmp_path / "cache"))
    beyond = run("build-wheel", *asked, "--target", "2")

    assert "nor-this" in chosen.stderr
    assert "no-python" not in chosen.stderr
    assert (chosen.returncode, beyond.returncode) == (2, 2)
    assert "numbered from 0 to 1" in beyond.stderr


def test_an_index_joins_what_many_jobs_built(library: bytes, tmp_path: Path) -> None:  # noqa: F811
    folders = [tmp_path / f"dist-{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        made = wheel(folder, contents(library), NAME.replace("0.19.8", f"0.19.{8 + min(number, 1)}"))
        made.with_name(f"{made.name}.json").write_text("{}")

    first = run("index", "merge", str(tmp_path / "index"), *map(str, folders), "--json")
    again = run("index", "merge", str(tmp_path / "index"), *map(str, folders))

    assert (first.returncode, len(json.loads(first.stdout)["wheels"])) == (0, 2), first.stderr
    assert "0 new in" in again.stdout
    assert [path.name for path in wheels_of(tmp_path / "index")] == [NAME, NAME.replace("0.19.8", "0.19.9")]
    assert NAME.replace("+", "%2B") in (tmp_path / "index" / "deepspeed" / "index.html").read_text()


def test_two_different_wheels_of_one_name_are_refused_and_nothing_is_written(library: bytes, tmp_path: Path) -> None:  # noqa: F811
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        wheel(folder, contents(library, **{"deepspeed/x.py": str(number).encode()}))
    index = tmp_path / "index"

    done = run("index", "merge", str(index), str(tmp_path / "0"), str(tmp_path / "1"))
    shutil.copytree(tmp_path / "0", index / "deepspeed")
    there = run("index", "merge", str(index), str(tmp_path / "1"))

    assert (done.returncode, there.returncode) == (2, 2)
    assert "different wheels with the same name" in done.stderr
    assert [path.name for path in (index / "deepspeed").iterdir()] == [NAME]
