"""Real ops that are compiled once: a killed build, two builds at once, the same bytes, nothing changed, another version."""

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


def killed(*arguments: str, **cache: str) -> None:
    """A build that is killed while it compiles."""
    argv = [sys.executable, "-m", "dsdoctor", "build-wheel", *arguments]
    process = subprocess.Popen(argv, env=unpinned() | cache, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert any("pin_memory: compiling" in line for line in process.stderr)
    time.sleep(1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()


def test_what_was_compiled_once_is_not_compiled_again(tmp_path: Path) -> None:
    cache = {"DSDOCTOR_CACHE": str(tmp_path / "cache")}
    places = [tmp_path / "a", tmp_path / "another" / "folder"]
    sources = [str(unpack_deepspeed(place)) for place in places]

    def build(number: int, *more: str) -> dict[str, Any]:
        arguments = (*OPS, "--source", sources[number], "-o", str(places[number] / "dist"), *more)
        status, document = dsdoctor("build-wheel", *arguments, **cache)
        assert status == 0, document
        return document

    killed(*OPS, "--source", sources[0], "-o", str(tmp_path / "killed"), **cache)
    with ThreadPoolExecutor() as both:
        first, second = both.map(build, (0, 1))
    assert [built(document) for document in (first, second)] == [{"pin_memory": False}] * 2
    assert digest(first["wheel"]) == digest(second["wheel"])
    assert [path.name for path in (tmp_path / "cache" / "builds").iterdir()] == [".lock"]
    assert not list((tmp_path / "killed").iterdir())

    Path(first["wheel"]).unlink()
    again, other = build(0), build(0, "--local-version", "other")
    assert again["log"] is None
    assert digest(again["wheel"]) == digest(second["wheel"])
    assert built(other) == {"pin_memory": True}
    assert "+other-" in other["wheel"]

    status, document = dsdoctor("cache", "verify", **cache)
    assert status == 0, document
