"""Real ops that are compiled once: two builds at once, the same bytes, nothing changed, another version, a build that is killed."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.wheel.conftest import dsdoctor, unpack_deepspeed, unpinned
from tests.wheel.test_real_wheels import digest

pytestmark = pytest.mark.wheel
OPS = ("--accelerator", "cpu", "--ops", "pin_memory")


def built(document: dict[str, Any]) -> dict[str, bool]:
    return {op["op"]: op["cached"] for op in document["ops"] if op["built"]}


def test_what_was_compiled_once_is_not_compiled_again(tmp_path: Path) -> None:
    cache = {"DSDOCTOR_CACHE": str(tmp_path / "cache")}
    places = [tmp_path / "a", tmp_path / "another" / "folder"]
    sources = [str(unpack_deepspeed(place)) for place in places]

    def build(number: int, *more: str) -> dict[str, Any]:
        arguments = (*OPS, "--source", sources[number], "-o", str(places[number] / "dist"), *more)
        status, document = dsdoctor("build-wheel", *arguments, **cache)
        assert status == 0, document
        return document

    with ThreadPoolExecutor() as both:
        first, second = both.map(build, (0, 1))
    assert [built(one) for one in (first, second)] == [{"pin_memory": False}] * 2
    assert digest(first["wheel"]) == digest(second["wheel"])

    Path(first["wheel"]).unlink()
    again, other = build(0), build(0, "--local-version", "other")
    assert again["log"] is None
    assert digest(again["wheel"]) == digest(second["wheel"])
    assert built(other) == {"pin_memory": True}
    assert "+other-" in other["wheel"]

    status, document = dsdoctor("cache", "verify", **cache)
    assert status == 0, document


def test_a_build_that_is_killed_leaves_a_cache_that_serves(tmp_path: Path) -> None:
    env = unpinned() | {"DSDOCTOR_CACHE": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "dsdoctor", "build-wheel", *OPS, "-o", str(tmp_path / "dist")]
    process = subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert any("pin_memory: compiling" in line for line in process.stderr)
    time.sleep(1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()

    status, document = dsdoctor("build-wheel", *OPS, "-o", str(tmp_path / "dist"), env=env)

    assert status == 0, document
    assert built(document) == {"pin_memory": False}
    assert [path.name for path in (tmp_path / "cache" / "builds").iterdir()] == [".lock"]
