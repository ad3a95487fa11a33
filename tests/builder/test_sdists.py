"""Fetched sdists and their digests: what an index lies about and what changes in the cache is planted for real."""

import hashlib
import json
import os
import subprocess
from pathlib import Path

import pytest

from dsdoctor.builder.source.fetch import NEWEST, fetch_sdist
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan, UsageError
from dsdoctor.core.host import LocalHost
from tests.cli.runner import run

MACHINE = str(Path(__file__).parents[1] / "machines" / "one-toolkit.json")
PIP = """#!/bin/sh
# plays the pip of an environment: "index/sdist" is what it fetches, "index/sha256" what the index says of it
echo "$3" >> {index}/calls
while [ $# -gt 0 ]; do
    case $1 in
        --dest) mkdir -p "$2"; cp {index}/sdist "$2/deepspeed-1.0.tar.gz";;
        --report)
            [ -f {index}/sha256 ] || exit 2
            archive="{{\\"hashes\\":{{\\"sha256\\":\\"$(cat {index}/sha256)\\"}}}}"
            item="{{\\"download_info\\":{{\\"url\\":\\"https://me:secret@h/d\\",\\"archive_info\\":$archive}}}}"
            echo "{{\\"install\\":[$item]}}" > "$2";;
    esac
    shift
done
"""


class Place:
    """An index with one sdist, a pip that asks it, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.index, self.cache, self.python = folder / "index", folder / "cache", folder / "python"
        self.index.mkdir()
        self.offer(b"good")
        self.python.write_text(PIP.format(index=self.index))
        self.python.chmod(0o755)

    def offer(self, content: bytes, *, digest: str | None = None) -> None:
        (self.index / "sdist").write_bytes(content)
        (self.index / "sha256").write_text(digest or hashlib.sha256(content).hexdigest())

    def fetch(self, version: str = "1.0", *, offline: bool = False) -> Path:
        return fetch_sdist(LocalHost(), version, cache=self.cache, python=str(self.python), offline=offline)

    @property
    def fetched(self) -> int:
        return (self.index / "calls").read_text().split().count("download") if (self.index / "calls").exists() else 0


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_fetched_sdist_is_kept_with_the_digest_that_the_index_told(place: Place) -> None:
    first, again = place.fetch(), place.fetch()

    record = json.loads(first.with_name("deepspeed-1.0.tar.gz.json").read_bytes())
    assert record == {"sha256": hashlib.sha256(b"good").hexdigest(), "url": "https://h/d"}
    assert (first, first.read_bytes(), place.fetched) == (again, b"good", 1)


def test_an_sdist_that_is_not_what_the_index_says_is_not_kept(place: Place) -> None:
    place.offer(b"bad", digest=hashlib.sha256(b"good").hexdigest())

    with pytest.raises(BuildFailed, match=r"deepspeed-1\.0\.tar\.gz came with sha256 .* the package index says"):
        place.fetch()
    assert [path.name for path in (place.cache / "sdists").iterdir()] == [".lock"]


@pytest.mark.parametrize("version", ["1.0", NEWEST])
def test_a_kept_sdist_that_has_changed_is_not_used_and_the_command_that_helps_does(place: Place, version: str) -> None:
    sdist = place.fetch()
    sdist.write_bytes(b"planted")

    with pytest.raises(ImpossiblePlan, match="is not used: its sha256 is") as refused:
        place.fetch(version, offline=True)
    command = refused.value.hint.split(";")[0]
    assert command == f"rm {sdist}"
    subprocess.run(["sh", "-c", command], check=True)
    assert place.fetch().read_bytes() == b"good"


def test_a_kept_sdist_of_which_nothing_is_recorded_is_fetched_again(place: Place) -> None:
    sdist = place.fetch()
    sdist.write_bytes(b"planted")
    sdist.with_name(f"{sdist.name}.json").write_bytes(b"[" * 100_000)

    with pytest.raises(UsageError, match="its digest was not recorded") as refused:
        place.fetch(offline=True)
    assert str(sdist) in refused.value.hint
    assert (place.fetch().read_bytes(), place.fetched) == (b"good", 2)
    assert place.fetch(offline=True) == sdist


def test_a_pip_that_cannot_tell_what_the_index_says_records_what_came(place: Place) -> None:
    (place.index / "sha256").unlink()
    sdist = place.fetch()

    assert (
        json.loads(sdist.with_name(f"{sdist.name}.json").read_bytes())["sha256"] == hashlib.sha256(b"good").hexdigest()
    )


@pytest.mark.slow
def test_a_real_pip_with_an_index_that_tells_digests(tmp_path: Path) -> None:
    tree, simple = tmp_path / "deepspeed-1.0", tmp_path / "simple" / "deepspeed"
    (tree / "op_builder").mkdir(parents=True)
    simple.mkdir(parents=True)
    (tree / "setup.py").write_text("from setuptools import setup; setup(name='deepspeed', version='1.0')")
    sdist = simple / "deepspeed-1.0.tar.gz"
    subprocess.run(["tar", "czf", sdist, "-C", tmp_path, tree.name], check=True)
    digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
    around = {
        "PIP_INDEX_URL": simple.parent.as_uri(),
        "PIP_CONSTRAINT": os.devnull,
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_BUILD_ISOLATION": "false",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
    }

    def fetch(told: str) -> tuple[int, str]:
        (simple / "index.html").write_text(f'<a href="deepspeed-1.0.tar.gz#sha256={told}">deepspeed-1.0.tar.gz</a>')
        done = run("plan", "--source", "1.0", "--machine", MACHINE, DSDOCTOR_CACHE=str(tmp_path / "cache"), **around)
        return done.returncode, done.stderr

    status, said = fetch("0" * 64)
    assert (status, "does not match the package index" in said, "network" in said) == (4, True, False), said
    assert not list((tmp_path / "cache").rglob("*.tar.gz"))
    # the index is true now; what it has is no DeepSpeed, which is told only when it is unpacked
    status, said = fetch(digest)
    assert "is not a DeepSpeed source" in said
    record = json.loads((tmp_path / "cache" / "sdists" / "deepspeed-1.0.tar.gz.json").read_bytes())
    assert (record["sha256"], record["url"]) == (digest, sdist.as_uri())
