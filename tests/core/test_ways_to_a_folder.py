"""What is judged is what is used: ways on which the text of a path and the kernel differ, and ways that change meanwhile."""

import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path

import pytest

import dsdoctor
from dsdoctor.builder.cache.folders import stored_folders
from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.targets import Installer
from dsdoctor.core.errors import ImpossiblePlan
from dsdoctor.core.files import real_path
from dsdoctor.core.host import LocalHost
from dsdoctor.core.pip import pip_for
from dsdoctor.core.trust import Distrusted, distrust, trusted
from dsdoctor.core.workspace import private_folder, temporary_folder, trusted_temporary
from dsdoctor.probe.toolkits import assembled, judge_cache
from tests.builder.test_wheel import contents, wheel
from tests.cli.runner import run

STRANGER = 54321
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


def plant_toolkit(cache: Path, ran: Path) -> None:
    home = cache / "toolkits" / "13.0-x" / "home"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include" / "cuda.h").write_text("#define CUDA_VERSION 13000\n")
    (home / "dsdoctor-toolkit.txt").touch()
    (home / "bin" / "nvcc").write_text(
        f"#!/bin/sh\necho ran >> {ran}\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"
    )
    (home / "bin" / "nvcc").chmod(0o755)


def give_away(folder: Path) -> Path:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    return folder


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def scratch(tmp_path: Path, ran: Path) -> Path:
    """$SCRATCH, a link into a disk where everybody may write: a stranger has put a cache beside the folder it leads to."""
    home, disk = tmp_path / "home", tmp_path / "disk"
    (home / "cache").mkdir(parents=True, mode=0o700)
    (disk / "of-this-user").mkdir(parents=True)
    disk.chmod(0o1777)
    plant_toolkit(disk / "cache", ran)
    give_away(disk / "cache")
    (home / "scratch").symlink_to(disk / "of-this-user")
    return home / "scratch"


def test_a_folder_above_a_link_is_the_one_that_the_kernel_finds(scratch: Path) -> None:
    named = scratch / ".." / "cache"
    assert distrust(scratch.parent / "cache") is None, "what the text of the path looks like is this user's own"

    why = distrust(named)

    assert why is not None
    assert f"{scratch.parents[1]}/disk/cache belongs to user {STRANGER}" in why
    assert [*assembled(LocalHost(), (), str(named))] == []
    assert judge_cache(LocalHost(), str(named)) is not None
    assert stored_folders(named) == ()
    assert CacheStore(named / "compiled", limit=1).distrust() is not None
    with pytest.raises(ImpossiblePlan, match="belongs to user"):
        private_folder(named)


@pytest.mark.slow
def test_a_planted_nvcc_above_a_link_is_not_run(scratch: Path, ran: Path) -> None:
    named = f"{scratch}/../cache"

    looked, checked = (run(*command, DSDOCTOR_CACHE=named) for command in (("machine", "look"), ("check",)))

    assert not ran.exists()
    assert looked.returncode == 0
    assert "[cache-not-trusted]" in checked.stdout


def test_what_is_used_is_the_folder_that_was_judged_and_no_link_to_it(tmp_path: Path) -> None:
    real, link = tmp_path / "disk" / "cache", tmp_path / "link"
    real.mkdir(parents=True, mode=0o700)
    link.symlink_to("disk/cache")

    assert private_folder(link / ".." / "cache" / "sdists") == real / "sdists"
    assert trusted(Path(f"/{link}")) == real, "two slashes at the beginning are one"
    assert trusted(link / "toolkits") is None
    assert CacheStore(link / "compiled", limit=1).folder == real / "compiled"


@pytest.mark.parametrize("end", [".", "..", "x/.."])
def test_the_last_folder_of_a_way_that_goes_back_is_judged_as_the_last(end: str, tmp_path: Path) -> None:
    """In a folder with the sticky bit one may have a folder; it is none to keep one's own things in."""
    (tmp_path / "shared" / "x").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    named = tmp_path / "shared" / ("x" if end == ".." else "") / end
    assert distrust(tmp_path / "shared" / "x") is None

    assert distrust(named)


def test_a_link_to_its_own_folder_is_judged_as_that_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "x").symlink_to(".")
    (tmp_path / "own").symlink_to(".")

    assert distrust(shared / "x") == distrust(shared)
    assert distrust(shared) is not None
    assert trusted(tmp_path / "own") == tmp_path


def test_a_circle_of_links_and_a_file_on_the_way_are_reasons(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "file").touch()

    circle, file = distrust(tmp_path / "a" / "cache"), distrust(tmp_path / "file" / "cache")

    assert circle is not None
    assert "Too many levels of symbolic links" in circle
    assert file == f"{tmp_path}/file is not a folder"


def test_a_store_whose_link_has_been_set_elsewhere_meanwhile_is_not_used(tmp_path: Path) -> None:
    link, source = tmp_path / "link", tmp_path / "source"
    source.write_bytes(b"x")
    for name in ("one", "two"):
        (tmp_path / name).mkdir(mode=0o700)
    link.symlink_to("one")
    store = CacheStore(link, limit=1 << 20)
    assert store.put("ops", "ab" * 32, {"x.so": source}, {})
    link.unlink()
    link.symlink_to("two")

    assert store.find("ops", "ab" * 32) == ()
    assert store.put("ops", "cd" * 32, {"x.so": source}, {}) is None
    assert [*(tmp_path / "two").iterdir()] == []
    assert f"led to {tmp_path}/one, and leads to {tmp_path}/two now" in store.complaints[0]


@contextmanager
def exchanging(place: Path, forms: list[Path]) -> Iterator[Callable[[], int]]:
    """Another user, who without an end puts one thing after another at a place. Gives how often so far.

    A form that is not there is nothing at that place; the others are links, set one over the other.
    """
    stop, count = threading.Event(), 0

    def exchange() -> None:
        nonlocal count
        for form in cycle(forms):
            if stop.is_set():
                return
            if form.is_symlink():
                set_anew = place.with_name("next")
                set_anew.symlink_to(form.readlink())
                os.chown(set_anew, form.lstat().st_uid, -1, follow_symlinks=False)
                set_anew.rename(place)
            else:
                place.unlink(missing_ok=True)
            count += 1

    thread = threading.Thread(target=exchange)

    def so_far() -> int:
        assert thread.is_alive()
        return count

    thread.start()
    try:
        while so_far() == 0:
            time.sleep(0)
        yield so_far
    finally:
        stop.set()
        thread.join()


SWAPS = pytest.mark.parametrize(
    "swaps", [100, pytest.param(1_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.exhaustive)]
)


@SWAPS
@pytest.mark.parametrize("missing", [False, True])
def test_what_is_exchanged_while_it_is_judged_is_never_used(
    swaps: int, missing: bool, tmp_path: Path, ran: Path
) -> None:
    """In a folder as /tmp: a stranger's link to this user's own folder, one to the stranger's, or nothing: always another."""
    shared, forms, own = tmp_path / "shared", tmp_path / "shared" / "forms", tmp_path / "own"
    forms.mkdir(parents=True)
    shared.chmod(0o1777)
    (own / "cache" / "toolkits").mkdir(parents=True)
    plant_toolkit(forms / "folder" / "cache", ran)
    (forms / "own").symlink_to(own)
    (forms / "planted").symlink_to(forms / "folder")
    give_away(forms)
    named, host, source, used = shared / "place" / "cache", LocalHost(), tmp_path / "source", list[object]()
    source.write_bytes(b"x")
    states = ("own", "none", "planted", "none") if missing else ("own", "planted")

    with exchanging(shared / "place", [forms / state for state in states]) as count:
        while count() < swaps:
            used += [*assembled(host, (), str(named)), *stored_folders(named)]
            used += CacheStore(named / "compiled", limit=1 << 20).find("ops", "ab" * 32)
            # what is not there is made, and is this user's own from then on: it would end the attack
            used += [] if missing else made_in(named, source)
            used += [found for found in [judged(named)] if found]

    assert used == []
    assert not ran.exists()


def made_in(named: Path, source: Path) -> list[object]:
    made: list[object] = []
    with suppress(ImpossiblePlan):
        made.append(private_folder(named))
    entry = CacheStore(named / "compiled", limit=1 << 20).put("ops", "ab" * 32, {"x.so": source}, {})
    return [*made, *([entry] if entry else [])]


def judged(folder: Path) -> Path | None:
    try:
        return trusted(folder)
    except Distrusted:
        return None


@pytest.mark.parametrize("times", [1, 1000])
def test_a_link_that_goes_while_it_is_read_is_no_failure(times: int, tmp_path: Path) -> None:
    """Between the two looks that Python takes at it, once or each time: then the path is taken as it is named."""
    link, seen = tmp_path / "link", 0
    (tmp_path / "folder").mkdir()

    def exchange(_: object, event: str, called: object) -> None:
        nonlocal seen
        if event == "c_call" and called is os.readlink and seen < times:
            seen += 1
            link.unlink()
        elif event == "return" and not link.is_symlink():
            link.symlink_to("folder")

    link.symlink_to("folder")
    sys.setprofile(exchange)
    try:
        found = real_path(link / "x")
    finally:
        sys.setprofile(None)

    assert seen >= 1
    assert found == str(tmp_path / ("folder" if times == 1 else "link") / "x")


def test_nothing_else_follows_a_path_that_may_change() -> None:
    sources = [path for path in Path(dsdoctor.__file__).parent.rglob("*.py") if "child_scripts" not in path.parts]
    calls = re.compile(r"os\.path\.realpath\(|\.resolve\((?:strict|\))")
    found = [path.name for path in sources for _ in calls.finditer(path.read_text())]

    # the one that retries, and a host's, which takes any failure for an answer
    assert sorted(found) == ["files.py", "host.py"]


@SWAPS
def test_a_link_of_one_s_own_that_is_set_anew_leads_to_a_folder_of_one_s_own(swaps: int, tmp_path: Path) -> None:
    """This user's own link, set anew at every moment to a folder of this user or of a stranger."""
    good, evil = tmp_path / "good", tmp_path / "evil"
    for folder in (good, evil):
        (folder / "cache").mkdir(parents=True, mode=0o700)
        (tmp_path / f"to-{folder.name}").symlink_to(folder)
    give_away(evil)
    seen = set()

    with exchanging(tmp_path / "place", [tmp_path / "to-good", tmp_path / "to-evil"]) as count:
        # a fast exchange may leave no moment in which the good one is judged
        while count() < swaps or (good / "cache" not in seen and count() < 1000 * swaps):
            seen.add(judged(tmp_path / "place" / "cache"))

    assert seen <= {None, good / "cache"}
    assert good / "cache" in seen


@pytest.mark.slow
def test_a_pip_that_lies_in_the_current_folder_is_not_run(
    tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pip", "runpy", "venv"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    plain = LocalHost().run([sys.executable, "-m", "pip", "--version"], timeout=60)
    assert ran.exists(), "else nothing was planted"
    ran.unlink()

    argv, options = pip_for(LocalHost(), sys.executable, "test")
    told = LocalHost().run([*argv, *options, "--version"], timeout=60)
    Installer(host=LocalHost(), base=sys.executable, uv=None, because="").make(tmp_path / "made")

    assert not ran.exists()
    assert plain.stdout == ""
    assert told.stdout.startswith("pip ")
    assert (tmp_path / "made" / "bin" / "python").exists()


def test_temporary_files_lie_where_nobody_can_exchange_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR is a stranger's folder, or one without the sticky bit where everybody may write."""
    stranger, shared = tmp_path / "stranger", tmp_path / "shared"
    for folder in (stranger, shared):
        folder.mkdir()
    shared.chmod(0o777)
    give_away(stranger)
    for folder in (stranger, shared, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with temporary_folder() as made:
            assert distrust(made) is None
            assert (made.parent == tmp_path) is (folder == tmp_path)
            assert made.stat().st_mode & 0o777 == 0o700
        assert not made.exists()
        assert [*folder.glob("dsdoctor-*")] == []


def test_a_compiler_keeps_its_temporary_files_where_nobody_can_exchange_them(tmp_path: Path) -> None:
    stranger, shared, own = tmp_path / "stranger", tmp_path / "shared", tmp_path / "own"
    for folder in (stranger, shared, own):
        folder.mkdir()
    shared.chmod(0o777)
    give_away(stranger)
    left = {"TMPDIR": str(own), "PATH": "/bin"}

    assert trusted_temporary(left) == left
    assert trusted_temporary(left | {"TMP": str(stranger), "TEMP": str(shared)}) == left
    assert trusted_temporary({"TMPDIR": str(shared / "x"), "PATH": "/bin"}) == {"PATH": "/bin"}
    shared.chmod(0o1777)
    assert trusted_temporary({"TMPDIR": str(shared)}) == {"TMPDIR": str(shared)}


UNPACK = """
import sys
from pathlib import Path
from dsdoctor.builder.wheel.read import read_wheel
sys.addaudithook(lambda event, given: print(given[0]) if event == "open" and str(given[0]).endswith("library.so") else None)
read_wheel(Path(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_wheel_is_unpacked_where_nobody_can_exchange_it(shared: bool, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o777 if shared else 0o700)
    built = wheel(tmp_path, contents(b"no library"))
    argv = [sys.executable, "-c", UNPACK, str(built)]
    done = LocalHost().run(argv, timeout=60, env={**os.environ, "TMPDIR": str(place)})

    assert "library.so" in done.stdout
    assert (str(place) in done.stdout) is not shared
