"""A real build and a real installation that are killed at random moments: nothing is half-written, and the same command goes on."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder
from tests.comm.left_over import left_over
from tests.wheel.conftest import dsdoctor, unpinned
from tests.wheel.test_install import SOURCE, A, Environment

pytestmark = [pytest.mark.wheel, pytest.mark.exhaustive]
ROUNDS = 6
LIMIT_SECONDS = 60.0


class Killed:
    """The command in a session of its own, with a mark by which what it leaves behind is found."""

    def __init__(self, cache: Path) -> None:
        self.mark = f"killed-{os.getpid()}-{random.randrange(1 << 30)}"
        self.env = {**unpinned(), "DSDOCTOR_CACHE": str(cache), "DSDOCTOR_TEST_MARK": self.mark}

    def after(self, seconds: float, *arguments: str) -> bool:
        """Run it, and kill it then; whether it still ran. What it started ends by itself."""
        argv = [sys.executable, "-m", "dsdoctor", *arguments]
        with subprocess.Popen(argv, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            killed = process.wait() == -signal.SIGKILL
        last = time.monotonic() + LIMIT_SECONDS
        while (left := left_over(self.mark)) and time.monotonic() < last:
            time.sleep(0.1)
        assert left == [], "a compiler or a pip that nobody ends"
        return killed


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with the sdist alone."""
    made = tmp_path / "cache"
    made.mkdir(mode=0o700)
    own = cache_folder(LocalHost()) / "sdists"
    if own.is_dir():
        shutil.copytree(own, made / "sdists")
    return made


def test_what_is_killed_at_any_moment_leaves_nothing_half_written(cache: Path, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    chance, killed, out = random.Random(seed), Killed(cache), tmp_path / "out"
    build = ("build-wheel", *SOURCE, "--ops", A, "--out", str(out))
    # the op is compiled in the first of them that is long enough, and taken from the cache after it
    kills = [killed.after(chance.uniform(0.5, 20.0), *build) for _ in range(ROUNDS // 2)]
    status, document = dsdoctor(*build, env=killed.env)
    assert status == 0, (seed, document["findings"])
    (made,) = out.glob("*.whl")
    whole = made.read_bytes()
    shutil.rmtree(out)
    began = time.monotonic()
    assert dsdoctor(*build, env=killed.env)[0] == 0
    took = time.monotonic() - began
    for _ in range(ROUNDS):
        shutil.rmtree(out)
        kills.append(killed.after(chance.uniform(0.2, took), *build))
        for path in out.glob("*.whl"):
            with zipfile.ZipFile(path) as archive:
                assert archive.testzip() is None, seed
        assert dsdoctor("cache", "verify", env=killed.env)[0] == 0, seed
        status, document = dsdoctor(*build, env=killed.env)
        assert status == 0, (seed, document["findings"])
        assert made.read_bytes() == whole, seed
        assert {path.name for path in out.iterdir()} == {made.name, f"{made.name}.json"}, seed
        assert [*(cache / "builds").glob("[0-9a-f]*")] == [], seed
    assert any(kills), seed

    environment = Environment(tmp_path / "env")
    install = ("install", "--python", environment.python, *SOURCE, "--ops", A, "--out", str(out))
    ended = [killed.after(chance.uniform(0.5, 6.0), *install) for _ in range(ROUNDS // 2)]
    status, document = dsdoctor(*install, env=killed.env)
    assert (status, document["ops"]) == (0, [A]), (seed, document["findings"])
    assert environment.loads() == {A}, (seed, ended)
