"""What is run from dsdoctor's cache is this user's own: folders that others may write to, planted for real."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.trust import distrust
from dsdoctor.core.workspace import private_folder
from tests.cli.runner import run

STRANGER = 54321
root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "home" / "cache"
    (folder / "toolkits").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    return folder


def test_a_private_folder_is_trusted_below_tmp_too(cache: Path) -> None:
    assert distrust(cache) is None
    assert distrust(cache / "not" / "there" / "yet") is None


def everybody_writes(cache: Path) -> Path:
    cache.chmod(0o777)
    return cache


def everybody_writes_but_removes_nothing(cache: Path) -> Path:
    cache.chmod(0o1777)
    return cache


def a_group_writes(cache: Path) -> Path:
    os.chown(cache, -1, STRANGER)
    cache.chmod(0o770)
    return cache


def everybody_writes_to_the_parent(cache: Path) -> Path:
    cache.parent.chmod(0o777)
    return cache


def somebody_owns_it(cache: Path) -> Path:
    os.chown(cache, STRANGER, -1)
    return cache


def somebody_owns_the_parent(cache: Path) -> Path:
    os.chown(cache.parent, STRANGER, -1)
    return cache


def somebodys_link_leads_to_it(cache: Path) -> Path:
    link = cache.parent / "link"
    link.symlink_to(cache)
    os.chown(link, STRANGER, -1, follow_symlinks=False)
    return link


def a_link_leads_to_where_everybody_writes(cache: Path) -> Path:
    cache.chmod(0o777)
    (cache.parent / "link").symlink_to(cache)
    return cache.parent / "link"


def it_is_a_file(cache: Path) -> Path:
    (cache / "file").touch()
    return cache / "file"


@root
@pytest.mark.parametrize(
    "harm",
    [
        everybody_writes,
        everybody_writes_but_removes_nothing,
        a_group_writes,
        everybody_writes_to_the_parent,
        somebody_owns_it,
        somebody_owns_the_parent,
        somebodys_link_leads_to_it,
        a_link_leads_to_where_everybody_writes,
        it_is_a_file,
    ],
)
def test_what_others_may_change_is_not_used(harm: Callable[[Path], Path], cache: Path) -> None:
    harmed = harm(cache)

    assert distrust(harmed)
    assert CacheStore(harmed, limit=1).distrust()
    with pytest.raises(ImpossiblePlan, match="cache") as refused:
        private_folder(harmed)
    assert "DSDOCTOR_CACHE" in refused.value.hint


@root
@pytest.mark.parametrize(
    ("owner", "group", "used"), [(STRANGER, 0, True), (STRANGER, STRANGER, False), (0, STRANGER, False)]
)
def test_compiled_ops_may_be_shared_by_a_group_below_the_folders_of_the_one_who_shares(
    owner: int, group: int, used: bool, cache: Path
) -> None:
    """In the group of a colleague; in a group of others, and below a folder of somebody who does not share it."""
    shared = cache / "compiled"
    shared.mkdir()
    os.chown(cache, STRANGER, group)
    os.chown(shared, owner, group)
    cache.chmod(0o770)
    shared.chmod(0o2770)

    assert (CacheStore(shared, limit=1).distrust() is None) is used
    assert distrust(shared), "nothing else is shared"


@root
def test_the_sticky_bit_makes_a_parent_good_and_the_groups_of_root_do_no_harm(cache: Path) -> None:
    cache.parent.chmod(0o1777)
    cache.chmod(0o770)
    os.chown(cache, -1, 0)

    assert distrust(cache) is None


@root
@pytest.mark.slow
def test_an_nvcc_that_somebody_planted_is_not_run(cache: Path) -> None:
    home, ran = cache / "toolkits" / "13.0-x" / "home", cache.parent / "ran"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    (home / "dsdoctor-toolkit.txt").touch()
    nvcc = home / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho ran >> {ran}\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    assert run("look", DSDOCTOR_CACHE=str(cache)).returncode == 0
    assert ran.exists(), "in a cache of one's own it is asked, else this test shows nothing"
    ran.unlink()
    cache.chmod(0o777)

    looked, checked = (run(command, DSDOCTOR_CACHE=str(cache)) for command in ("look", "check"))

    assert not ran.exists()
    assert looked.returncode == 0
    assert f"everybody may write to {cache}" in checked.stdout
    assert "[cache-not-trusted]" in checked.stdout


@root
@pytest.mark.slow
def test_a_source_that_somebody_planted_is_not_run(cache: Path) -> None:
    (cache / "sdists").mkdir(mode=0o777)
    (cache / "sdists").chmod(0o777)
    (cache / "sdists" / "deepspeed-0.19.8.tar.gz").write_bytes(b"planted")

    done = run("plan", "--source", "0.19.8", "--offline", DSDOCTOR_CACHE=str(cache))

    assert done.returncode == 3
    assert f"the cache is not used: everybody may write to {cache}/sdists" in done.stderr
