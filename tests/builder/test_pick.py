"""`dsdoctor wheel pick`, and the index that it and pip read: wheels made here, a recorded machine, the real pip."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from dsdoctor.builder.wheel.index import list_wheels, publish, wheels_of
from tests.builder.test_verify import with_gpu_code
from tests.builder.test_wheel import INFO, NAME, RECORD, VERSION, contents, wheel
from tests.cli.runner import run
from tests.each import each
from tests.machines.make import HERE

MACHINE = ("--machine", str(HERE / "several-toolkits.json"))
"""An H100 with torch 2.14 and CUDA 13.0."""
OLDER, NEWER = VERSION.replace("0.19.8", "0.18.1"), VERSION.replace("0.19.8", "0.19.9")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("library")
    (folder / "x.c").write_text("int f(int x) { return x + 1; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "x.so", "x.c"], cwd=folder, check=True)
    return with_gpu_code(folder / "x.so")


@pytest.fixture
def folder(library: bytes, tmp_path: Path) -> Path:
    """A wheel that fits, an older one that fits with more ops, one for another torch, and one that is none."""
    place = tmp_path / "wheels"
    place.mkdir()
    wheel(place, contents(library))
    more = RECORD.replace("'utils': False", "'utils': True").replace("0.19.8", "0.18.1").encode()
    with_utils = {
        "deepspeed/git_version_info_installed.py": more,
        "deepspeed/ops/utils_op.cpython-311-x86_64-linux-gnu.so": library,
    }
    wheel(place, contents(library, version=OLDER, **with_utils), NAME.replace("0.19.8", "0.18.1"))
    other = RECORD.replace("'version': '2.14'", "'version': '2.13'").replace("0.19.8", "0.19.9").encode()
    wheel(
        place,
        contents(library, version=NEWER, **{"deepspeed/git_version_info_installed.py": other}),
        NAME.replace("0.19.8", "0.19.9"),
    )
    (place / NAME.replace("0.19.8", "0.20.0")).write_bytes(b"no zip")
    return place


def picked(folder: Path, *more: str) -> tuple[int, str | None, dict[str, set[str]]]:
    done = run("wheel", "pick", str(folder), *MACHINE, *more, "--json")
    document = json.loads(done.stdout)
    wheels = {Path(one["wheel"]).name: {f["rule"] for f in one["findings"]} for one in document["wheels"]}
    return done.returncode, document["wheel"] and Path(document["wheel"]).name, wheels


def test_the_newest_wheel_that_fits_is_named_and_the_others_with_what_stands_in_their_way(folder: Path) -> None:
    status, best, wheels = picked(folder)

    assert (status, best) == (0, NAME)
    assert "ops-torch-version-mismatch" in wheels[NAME.replace("0.19.8", "0.19.9")]
    assert wheels[NAME.replace("0.19.8", "0.20.0")] == {"usage"}
    shown = run("wheel", "pick", str(folder), *MACHINE).stdout.splitlines()
    assert shown[0] == f"✓ {NAME}"
    assert shown[-1].startswith("$ ")
    assert shown[-1].endswith(NAME)


@each("digest", [f"sha256={'0' * 64}", f"SHA512={'0' * 128}", f"md5={'0' * 32}"])
def test_a_wheel_that_the_index_in_its_folder_describes_otherwise_is_not_chosen(digest: str, folder: Path) -> None:
    index = folder.parent / f"index-{digest[:4]}"
    publish(folder / NAME, index)
    assert picked(index)[:2] == (0, NAME)

    page = index / "deepspeed" / "index.html"
    page.write_text(re.sub(r"#sha256=\w+", f"#{digest}", page.read_text()))

    status, best, wheels = picked(index)
    assert (status, best) == (1, None)
    assert "wheel-not-fetched" in wheels[NAME]
    done = run("wheel", "verify", str(index / "deepspeed" / NAME), *MACHINE)
    assert done.returncode == 1
    assert "its index says 000000" in done.stdout


@each("page", ["", "<a href='x", "<" * 70_000, "\xff\xfe<a href='deepspeed-1-py3-none-any.whl#sha256='>x</a>"])
def test_a_page_that_says_no_digest_says_nothing_against_a_wheel(page: str, folder: Path) -> None:
    (folder / "index.html").write_bytes(page.encode("latin-1"))

    assert picked(folder)[:2] == (0, NAME)


def test_a_pipe_that_stands_for_a_page_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "index.html")

    assert picked(folder)[:2] == (0, NAME)


def test_an_op_that_must_be_in_it_decides(folder: Path) -> None:
    assert picked(folder, "--op", "utils")[:2] == (0, NAME.replace("0.19.8", "0.18.1"))

    status, best, wheels = picked(folder, "--op", "utils,async_io")
    assert (status, best) == (1, None)
    assert "op-not-in-wheel" in wheels[NAME]


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_a_folder_without_wheels_is_a_usage_error(name: str, tmp_path: Path) -> None:
    done = run("wheel", "pick", str(tmp_path / name), *MACHINE)

    assert (done.returncode, done.stdout) == (2, "")
    assert "Fix: " in done.stderr


@pytest.mark.slow
def test_pip_takes_a_wheel_from_the_index_with_the_digest_that_its_page_tells(tmp_path: Path) -> None:
    name = "deepspeed-1.0+x-py3-none-any.whl"
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as file:
        info = INFO.replace("0.19.8+cu13.0.torch2.14", "1.0+x")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: deepspeed\nVersion: 1.0+x\nRequires-Python: >=3.8\n"
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    index = tmp_path / "an index"
    published = publish(path, index)
    page = (index / "deepspeed" / "index.html").read_text()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--isolated", "--no-deps", "--no-cache-dir"]
    argv = [*pip, "--index-url", index.as_uri(), "deepspeed==1.0+x", "--dest", str(tmp_path / "got")]

    done = subprocess.run(argv, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "got" / name).read_bytes() == path.read_bytes()
    assert 'data-requires-python="&gt;=3.8"' in page
    assert wheels_of(index) == (published,)
    published.write_bytes(b"another")
    done = subprocess.run([*argv[:-1], str(tmp_path / "again")], capture_output=True, text=True)
    assert done.returncode != 0, "the page still tells the first digest"
    list_wheels(index)
    assert (index / "deepspeed" / "index.html").read_text() != page
    assert not list(index.rglob(".*"))
