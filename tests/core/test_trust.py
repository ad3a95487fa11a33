"""What is run from dsdoctor's cache is this user's own: folders that others may write to, planted for real."""

import contextlib
import os
import pwd
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.targets import USED
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.host import LocalHost
from dsdoctor.core.trust import distrust
from dsdoctor.core.workspace import private_folder
from dsdoctor.probe.toolkits import assembled, judge_cache
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


ENTRIES = {
    "toolkits": ("13.0-x", "13.0-x/home", "13.0-x/home/bin", "13.0-x/home/bin/nvcc", "13.0-x/home/include"),
    "sdists": ("deepspeed-0.19.8.tar.gz", "deepspeed-0.19.8.tar.gz.json"),
    "builds": ("0123abcd",),
    "targets": (
        "py3-x",
        "py3-x/bin",
        "py3-x/bin/python",
        "py3-x/lib",
        "py3-x/lib/python3.12/site-packages",
        "py3-x/lib/python3.12/site-packages/torch",
    ),
}
FILES = ("13.0-x/home/dsdoctor-toolkit.txt", "13.0-x/home/bin/nvcc", "py3-x/bin/python", *ENTRIES["sdists"])
PLACES = [f"{kind}/{entry}" for kind, entries in ENTRIES.items() for entry in entries]


def all_may_write(path: Path) -> None:
    path.chmod(0o777)


def a_foreign_group_may_write(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(0o775)


def it_is_a_strangers(path: Path) -> None:
    os.chown(path, STRANGER, -1)


def a_strangers_copy_is_linked(path: Path) -> None:
    copy = path.with_name(f".{path.name}.copy")
    path.rename(copy)
    os.chown(copy, STRANGER, -1)
    path.symlink_to(copy)


def a_stranger_made_it_a_link(path: Path) -> None:
    copy = path.with_name(f".{path.name}.copy")
    path.rename(copy)
    path.symlink_to(copy)
    os.chown(path, STRANGER, -1, follow_symlinks=False)


def an_access_list_names_a_stranger(path: Path) -> None:
    grant(path, user=STRANGER)


def grant(path: Path, *, user: int, mask: int = 7) -> None:
    """What ``setfacl -m u:USER:rwx`` does."""
    everyone = 0xFFFFFFFF
    entries = ((1, 7, everyone), (2, 7, user), (4, 5, everyone), (0x10, mask, everyone), (0x20, 5, everyone))
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", content)
    except OSError as error:
        pytest.skip(f"this file system has no access control lists: {error.strerror}")


HARMS = (
    all_may_write,
    a_foreign_group_may_write,
    it_is_a_strangers,
    a_strangers_copy_is_linked,
    a_stranger_made_it_a_link,
    an_access_list_names_a_stranger,
)


@pytest.fixture
def filled(cache: Path) -> Path:
    """A cache with something of every kind, in folders that others may enter."""
    for place in (*PLACES, f"toolkits/{FILES[0]}"):
        path = cache / place
        path.parent.mkdir(parents=True, exist_ok=True)
        if place.partition("/")[2] in FILES:
            path.touch()
        else:
            path.mkdir(exist_ok=True)
    for kind in ENTRIES:
        (cache / kind).chmod(0o755)
    return cache


def users_of_what_is_kept(cache: Path, kind: str) -> list[str]:
    """Why each that uses what is kept of a kind refuses it."""
    host = LocalHost()
    if kind == "toolkits":
        return [] if [*assembled(host, (), str(cache))] else ["not found"]
    inside = {"targets": [f"py3-x/{part}" for part in USED]}.get(kind, ["*"])
    refused = []
    for pattern in inside:
        try:
            private_folder(cache / kind, pattern)
        except ImpossiblePlan as refusal:
            refused.append(str(refusal))
    return refused


@root
@pytest.mark.parametrize("place", PLACES)
def test_nothing_kept_is_used_that_others_may_change_or_the_way_to_it(place: str, filled: Path) -> None:
    kind = place.partition("/")[0]
    assert users_of_what_is_kept(filled, kind) == []
    assert judge_cache(LocalHost(), str(filled)) is None
    for harm in HARMS:
        whole = filled.parent / harm.__name__
        shutil.copytree(filled / kind, whole / kind, symlinks=True)
        harm(whole / place)

        assert users_of_what_is_kept(whole, kind), harm.__name__


@root
@pytest.mark.parametrize("harm", HARMS)
def test_the_command_for_an_entry_that_others_could_change_mends(harm: Callable[[Path], None], filled: Path) -> None:
    harm(filled / "toolkits" / "13.0-x")
    gap = judge_cache(LocalHost(), str(filled))
    assert gap is not None
    assert str(STRANGER) in gap.reason or "everyone" in gap.reason

    follow(gap.reason)

    if (left := judge_cache(LocalHost(), str(filled))) is not None:
        follow(left.reason)  # a copy that it was a link to
    assert judge_cache(LocalHost(), str(filled)) is None
    assert [*assembled(LocalHost(), (), str(filled))] == []


def follow(reason: str) -> None:
    """Type the command that a reason ends with."""
    command = re.search(r"\b(mv \S+ \S+?|(?:chmod \S+|setfacl -b) \S+)(?:[,;]| ends that|$)", reason)
    assert command, reason
    subprocess.run(command[1], shell=True, check=True)


@root
def test_what_others_put_into_a_folder_that_they_could_write_to_goes_with_the_command(filled: Path) -> None:
    toolkits = filled / "toolkits"
    toolkits.chmod(0o777)
    shutil.copytree(toolkits / "13.0-x", toolkits / "planted")
    os.chown(toolkits / "planted", STRANGER, STRANGER)
    gap = judge_cache(LocalHost(), str(filled))
    assert gap is not None
    assert f"others put planted of user {STRANGER} there" in gap.reason

    follow(gap.reason)

    assert judge_cache(LocalHost(), str(filled)) is None
    assert [*assembled(LocalHost(), (), str(filled))] == []


@root
@pytest.mark.parametrize("harmed", ["ops", "ops/ab", f"ops/ab/{'ab' * 32}", f"ops/ab/{'ab' * 32}/{'cd' * 32}"])
def test_compiled_ops_that_somebody_planted_are_not_served(harmed: str, filled: Path) -> None:
    compiled = filled / "compiled"
    (compiled / "ops" / "ab" / ("ab" * 32) / ("cd" * 32)).mkdir(parents=True)
    compiled.chmod(0o755)
    store = CacheStore(compiled, limit=1)
    assert not distrust(compiled, f"{harmed}/*", shareable=True)
    os.chown(compiled / harmed, STRANGER, -1)

    assert store.find("ops", "ab" * 32) == ()

    assert f"{compiled / harmed} belongs to user {STRANGER}" in store.complaints[0]


@root
def test_only_the_owner_matters_where_nobody_else_can_enter(filled: Path) -> None:
    """A umask of 000 or 002 is many a user's; what dsdoctor makes lies in folders of mode 0700."""
    (filled / "toolkits").chmod(0o700)
    (filled / "toolkits" / "13.0-x" / "home").chmod(0o777)
    assert [*assembled(LocalHost(), (), str(filled))]

    os.chown(filled / "toolkits" / "13.0-x" / "home", STRANGER, -1)
    assert [*assembled(LocalHost(), (), str(filled))] == []


@root
def test_an_access_list_is_read_with_its_mask(cache: Path) -> None:
    grant(cache, user=STRANGER, mask=5)
    assert distrust(cache) is None
    grant(cache, user=0)
    assert distrust(cache) is None
    grant(cache, user=STRANGER)
    why = distrust(cache)

    assert why is not None
    assert f"an access control list lets user {STRANGER} write to {cache}" in why
    follow(why)
    assert distrust(cache) is None


@contextlib.contextmanager
def added_user(name: str, *options: str) -> Iterator[int]:
    if shutil.which("useradd") is None:
        pytest.skip("needs useradd")
    subprocess.run(["useradd", "--no-log-init", *options, name], check=True, capture_output=True)
    try:
        yield pwd.getpwnam(name).pw_uid
    finally:
        subprocess.run(["userdel", "--force", name], check=False, capture_output=True)


def asked_as(user: int, group: int, folder: Path) -> str:
    """What this user is told about a folder."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        os.write(writing, str(distrust(folder)).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read()


@root
@pytest.mark.slow
def test_whoever_has_root_s_group_may_write_where_root_s_group_may(cache: Path) -> None:
    cache.chmod(0o775)
    assert distrust(cache) is None
    with added_user("dsd-in-root", "-g", "0"):
        why = distrust(cache)

    assert why is not None
    assert "(dsd-in-root in it)" in why
    assert distrust(cache) is None


@root
@pytest.mark.slow
def test_accounts_of_the_system_that_nobody_can_be_have_root_s_group_on_fedora(cache: Path) -> None:
    cache.chmod(0o775)
    with contextlib.suppress(KeyError):
        pytest.skip(f"there is {pwd.getpwnam('halt').pw_name} already")
    with added_user("halt", "-g", "0", "-s", "/sbin/halt"):
        assert distrust(cache) is None
    with added_user("halt", "-g", "0", "-s", "/bin/sh"):
        assert distrust(cache)


@root
@pytest.mark.slow
def test_a_group_of_one_s_own_is_not_when_it_is_another_s_first_group() -> None:
    with tempfile.TemporaryDirectory() as place, added_user("dsd-owner", "-U") as owner:
        Path(place).chmod(0o755)
        folder = Path(place) / "cache"
        folder.mkdir()
        group = pwd.getpwuid(owner).pw_gid
        os.chown(folder, owner, group)
        folder.chmod(0o775)
        assert asked_as(owner, group, folder) == "None"
        with added_user("dsd-other", "-g", "dsd-owner"):
            assert "(dsd-other in it)" in asked_as(owner, group, folder)
        # as in a container of OpenShift: a user with a number, whose group is root's
        os.chown(folder, STRANGER, 0)
        assert asked_as(STRANGER, 0, folder) == "None"


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
    assert run("machine", "look", DSDOCTOR_CACHE=str(cache)).returncode == 0
    assert ran.exists(), "in a cache of one's own it is asked, else this test shows nothing"
    ran.unlink()
    cache.chmod(0o777)

    looked, checked = (run(*command, DSDOCTOR_CACHE=str(cache)) for command in (("machine", "look"), ("check",)))

    assert not ran.exists()
    assert looked.returncode == 0
    assert f"everyone may write to {cache}" in checked.stdout
    assert "[cache-not-trusted]" in checked.stdout


@root
@pytest.mark.slow
def test_a_source_that_somebody_planted_is_not_run(cache: Path) -> None:
    (cache / "sdists").mkdir(mode=0o777)
    (cache / "sdists").chmod(0o777)
    (cache / "sdists" / "deepspeed-0.19.8.tar.gz").write_bytes(b"planted")

    done = run("plan", "--source", "0.19.8", "--offline", DSDOCTOR_CACHE=str(cache))

    assert done.returncode == 3
    assert f"the cache is not used: everyone may write to {cache}/sdists" in done.stderr
