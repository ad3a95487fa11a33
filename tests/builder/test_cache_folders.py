"""`cache ls` and `cache prune` know toolkits, archives and environments: real folders, with times that are set."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runner import run

DAY = 86400.0


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A toolkit of 3000 bytes used 40 days ago, one of 1000 used a day ago, an archive of an hour ago; a lock, a link, a record."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    for name, size, age in (
        ("toolkits/12.8-old", 3000, 40 * DAY),
        ("toolkits/13.0-new", 1000, DAY),
        ("sdists/deepspeed-0.19.8.tar.gz", 500, 3600.0),
    ):
        path = cache / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        file = path if path.name.endswith(".gz") else path / "home"
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_bytes(b"x" * size)
        for place in {file, path}:
            os.utime(place, (time.time() - age,) * 2)
    (cache / "sdists" / "deepspeed-0.19.8.tar.gz.json").write_text("{}")
    (cache / "toolkits" / "x.lock").touch()
    (cache / "toolkits" / "link").symlink_to(tmp_path)
    return cache


def folders(cache: Path, *arguments: str) -> set[str]:
    done = run("cache", *arguments, "--json", DSDOCTOR_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    return {entry["name"] for entry in json.loads(done.stdout)["folders"]}


def test_they_are_listed_with_their_sizes_and_neither_links_nor_locks_are(cache: Path) -> None:
    assert folders(cache, "ls") == {"12.8-old", "13.0-new", "deepspeed-0.19.8.tar.gz"}
    assert "4.4 KiB more in toolkits, sdists and targets" in run("cache", "ls", DSDOCTOR_CACHE=str(cache)).stdout


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ((), set()),
        (("--older-than", "30d"), {"12.8-old"}),
        (("--older-than", "1m"), {"12.8-old", "13.0-new"}),
        (("--max-size", "2000"), {"12.8-old"}),
        (("--max-size", "0"), {"12.8-old", "13.0-new"}),
        (("--all",), {"12.8-old", "13.0-new", "deepspeed-0.19.8.tar.gz"}),
    ],
)
def test_they_go_by_the_same_options_and_what_is_in_use_stays(
    options: tuple[str, ...], gone: set[str], cache: Path
) -> None:
    there = folders(cache, "ls")

    assert folders(cache, "prune", *options) == gone
    assert folders(cache, "ls") == there - gone
    assert (cache / "sdists" / "deepspeed-0.19.8.tar.gz.json").exists() == ("--all" not in options)
    assert (cache.parent / "cache").exists()


def test_what_others_may_write_to_is_left_alone(cache: Path) -> None:
    (cache / "toolkits").chmod(0o777)

    assert folders(cache, "prune", "--all") == {"deepspeed-0.19.8.tar.gz"}
    assert (cache / "toolkits" / "12.8-old").exists()


KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from dsdoctor.builder.cache.folders import remove_folder, stored_folders
oldest = stored_folders(Path(sys.argv[1]))[-1]
def trace(frame, event, argument):
    if frame.f_code.co_filename == shutil.__file__:
        os.kill(os.getpid(), signal.SIGKILL)
sys.settrace(trace)
remove_folder(oldest)
"""


@pytest.mark.slow
def test_what_a_removal_left_that_was_killed_is_listed_and_goes_with_the_next_one(cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(cache)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr

    (left,) = folders(cache, "ls") - {"13.0-new", "deepspeed-0.19.8.tar.gz"}
    assert (cache / "toolkits" / left / "home").stat().st_size == 3000
    assert folders(cache, "prune", "--older-than", "900d") == {left}
    assert not [path for path in (cache / "toolkits").iterdir() if path.name.endswith(".removed")]
