"""The op cache, and everything that tries to break it: kills, full disks, races, flipped bytes, hostile records.

The quick suite tries a few moments and rounds; STORE_ROUNDS=50 tries fifty times as many, and every moment of a kill.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from dsdoctor.builder.cache.entry import RECORD, Gone, open_folder
from dsdoctor.builder.cache.store import CacheStore, Entry
from tests.cli.test_cli import run

ROUNDS = int(os.environ.get("STORE_ROUNDS", "1"))
PLENTY = 1 << 30
FACTS = {"op": "fused_adam", "torch": "2.14.1+cu130", "accelerator": "cuda", "architectures": ["8.0", "9.0"]}


def key(word: str) -> str:
    return sha256(word.encode()).hexdigest()


def file(folder: Path, name: str, content: bytes, mode: int = 0o644) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def store(tmp_path: Path) -> CacheStore:
    return CacheStore(tmp_path / "compiled", limit=PLENTY)


Put = Callable[..., Entry]


@pytest.fixture
def put(store: CacheStore, tmp_path: Path) -> Put:
    """``put("word", b"content")``: an entry with two files under the word's key."""

    def act(word: str, content: bytes = b"machine code", **facts: object) -> Entry:
        folder = tmp_path / "made"
        files = {"op.so": file(folder, "op.so", content, 0o755), "op.d": file(folder, "op.d", b"headers")}
        entry = store.put("ops", key(word), files, {**FACTS, **facts})
        assert entry is not None
        return entry

    return act


def taken(store: CacheStore, word: str, into: Path) -> dict[str, bytes] | None:
    """What a build gets for a key."""
    for entry in store.find("ops", key(word)):
        if store.take(entry, into):
            return {path.name: path.read_bytes() for path in into.iterdir()}
    return None


def in_all(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def last_used(entry: Entry, seconds_ago: float) -> None:
    then = time.time() - seconds_ago
    os.utime(entry.folder / RECORD, (then, then))


def test_what_was_put_is_taken_with_its_facts_and_its_right_to_execute(
    store: CacheStore, put: Put, tmp_path: Path
) -> None:
    entry = put("a", seconds=12.5)

    assert store.find("ops", key("a"))[0].facts == {**FACTS, "seconds": 12.5}
    assert taken(store, "a", tmp_path / "into") == {"op.so": b"machine code", "op.d": b"headers"}
    assert os.access(tmp_path / "into" / "op.so", os.X_OK)
    assert not os.access(tmp_path / "into" / "op.d", os.X_OK)
    assert [(found.folder, found.files, found.size) for found in store.entries()] == [
        (entry.folder, entry.files, entry.size)
    ]
    assert (taken(store, "b", tmp_path / "b"), store.dropped, store.complaints) == (None, [], [])


def test_the_folder_is_made_when_it_is_needed_and_is_private(store: CacheStore, put: Put) -> None:
    assert (store.find("ops", key("a")), list(store.entries()), store.prune(0), store.verify()) == ((), [], (), ())
    assert not store.folder.exists()

    put("a")

    modes = {stat.S_IMODE(path.stat().st_mode) for path in (store.folder, *store.folder.rglob("*")) if path.is_dir()}
    assert modes == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.folder.rglob("*") if path.is_file()} == {0o600}


def test_variants_of_a_key_are_kept_side_by_side_and_the_same_twice_is_one(store: CacheStore, put: Put) -> None:
    first, second = put("a", b"1"), put("a", b"2")
    last_used(second, 60)
    assert [entry.folder for entry in store.find("ops", key("a"))] == [first.folder, second.folder]

    put("a", b"2")

    assert [entry.folder for entry in store.find("ops", key("a"))] == [second.folder, first.folder]
    assert in_all(store.folder / "tmp") == []


def test_a_place_that_takes_no_file_gets_none_and_is_not_the_entrys_fault(
    store: CacheStore, put: Put, tmp_path: Path
) -> None:
    entry, into = put("a"), tmp_path / "into"
    (into / "op.so").mkdir(parents=True)

    assert not store.take(entry, into)

    assert in_all(into) == ["op.so"]
    assert "Is a directory" in store.complaints[0]
    assert store.find("ops", key("a"))


# damage


@pytest.mark.parametrize("name", [RECORD, "op.so", "op.d"])
def test_one_flipped_bit_anywhere_is_seen_said_and_never_served(
    name: str, store: CacheStore, put: Put, tmp_path: Path
) -> None:
    entry = put("a", b"machine code" * 9)
    aside = shutil.copytree(entry.folder, tmp_path / "aside")
    size = (aside / name).stat().st_size
    for place in range(0, size, max(1, size // (12 * ROUNDS))):
        entry.folder.exists() or shutil.copytree(aside, entry.folder)
        content = bytearray((aside / name).read_bytes())
        content[place] ^= 1 << place % 8
        (entry.folder / name).write_bytes(content)

        assert taken(store, "a", tmp_path / "into") is None
        assert not entry.folder.exists()
        assert store.dropped.pop().endswith(f"was dropped: {name} differs from the bytes that were stored")
        assert in_all(tmp_path / "into") == []
    assert (store.dropped, store.complaints) == ([], [])


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", [RECORD, "op.so"])
@pytest.mark.parametrize("harm", [shorter, longer, linked, a_folder, a_pipe, Path.unlink])
def test_a_file_that_is_no_more_what_it_was_is_never_served(
    harm: Callable[[Path], None], name: str, store: CacheStore, put: Put, tmp_path: Path
) -> None:
    harm(put("a").folder / name)

    assert taken(store, "a", tmp_path / "into") is None
    assert len(store.dropped) == 1
    assert list(store.entries()) == []
    put("a")
    assert taken(store, "a", tmp_path / "into") is not None


def test_damage_after_the_look_is_found_while_copying_and_leaves_nothing(
    store: CacheStore, put: Put, tmp_path: Path
) -> None:
    entry = put("a")
    (entry.folder / "op.so").write_bytes(b"MACHINE CODE")

    assert not store.take(entry, tmp_path / "into")

    assert in_all(tmp_path / "into") == []
    assert store.dropped == [
        f"the cached op fused_adam ({key('a')[:12]}) was dropped: op.so differs from the bytes that were stored"
    ]


@pytest.mark.parametrize("harm", [shorter, longer, Path.unlink])
def test_putting_where_a_damaged_one_stands_replaces_it(
    harm: Callable[[Path], None], store: CacheStore, put: Put, tmp_path: Path
) -> None:
    entry = put("a")
    harm(entry.folder / "op.so")

    put("a")

    assert (len(store.dropped), store.complaints) == (1, [])
    assert taken(store, "a", tmp_path / "into") == {"op.so": b"machine code", "op.d": b"headers"}


@pytest.mark.parametrize("harm", [shorter, longer, Path.unlink])
def test_a_file_of_another_size_is_found_by_looking(harm: Callable[[Path], None], store: CacheStore, put: Put) -> None:
    harm(put("a").folder / "op.so")

    assert (store.find("ops", key("a")), len(store.dropped)) == ((), 1)


def test_what_is_pruned_while_it_is_read_is_gone_and_not_damaged(store: CacheStore, put: Put) -> None:
    with open_folder(put("a").folder) as inside, inside.open("op.so") as file:
        store.prune(0)
        put("a")

        assert file.read() == b"machine code"
        with pytest.raises(Gone):
            inside.open("op.d")
    assert (len(store.find("ops", key("a"))), store.dropped) == (1, [])


def test_an_entry_that_is_a_link_goes_and_what_it_leads_to_stays(store: CacheStore, put: Put, tmp_path: Path) -> None:
    entry = put("a")
    entry.folder.rename(tmp_path / "elsewhere")
    entry.folder.symlink_to(tmp_path / "elsewhere")

    assert store.find("ops", key("a")) == ()

    assert (tmp_path / "elsewhere" / "op.so").exists()
    assert not entry.folder.is_symlink()


def plant(store: CacheStore, record: object, word: str = "a", name: str | None = None) -> Path:
    """An entry as an enemy would write it: everything fits its digest."""
    data = json.dumps(record).encode()
    folder = store.folder / "ops" / key(word)[:2] / key(word) / (name or sha256(data).hexdigest())
    file(folder, RECORD, data)
    return folder


def record_of(word: str, *names: str, content: bytes = b"evil", **more: object) -> dict[str, object]:
    files = {name: {"sha256": sha256(content).hexdigest(), "size": len(content)} for name in names}
    return {"schema": "dsdoctor-cache/1", "kind": "ops", "key": key(word), "files": files, "facts": {}, **more}


@pytest.mark.parametrize("name", ["../evil", "/{tmp}/evil", "a/../../evil", "..", ".", "", RECORD, "x" * 256, "a\0b"])
def test_a_record_with_names_that_are_no_plain_names_writes_nothing_anywhere(
    name: str, store: CacheStore, tmp_path: Path
) -> None:
    name = name.replace("/{tmp}", str(tmp_path))
    folder = plant(store, record_of("a", name))
    file(folder.parent, "evil", b"evil")
    before = in_all(tmp_path)

    assert taken(store, "a", tmp_path / "into") is None

    assert {path for path in in_all(tmp_path) if "evil" in path} <= set(before)
    assert "names a file" in store.dropped[0]
    assert not folder.exists()
    with pytest.raises(ValueError, match="plain file name"):
        store.put("ops", key("a"), {name: file(tmp_path, "good", b"")}, {})


@pytest.mark.parametrize(
    "record",
    [
        [],
        "x",
        None,
        {},
        {"schema": "dsdoctor-cache/1"},
        record_of("a", files=[]),
        record_of("a", files={"op.so": {"sha256": 1, "size": 1}}),
        record_of("a", facts=[]),
        record_of("b", "op.so"),
        record_of("a", kind="wheels"),
        record_of("a", "op.so", key="../../etc"),
    ],
)
def test_a_record_that_is_none_is_dropped(record: object, store: CacheStore) -> None:
    folder = plant(store, record)

    assert (store.find("ops", key("a")), len(store.dropped), folder.exists()) == ((), 1, False)


def test_what_a_newer_dsdoctor_wrote_is_left_alone_until_room_is_needed(store: CacheStore, put: Put) -> None:
    folder = plant(store, {"schema": "dsdoctor-cache/2", "files": "in another way"})
    old = put("a")
    assert [entry.folder for entry in store.find("ops", key("a"))] == [old.folder]
    assert (store.verify(), store.dropped, folder.exists()) == ((), [], True)

    assert {entry.folder for entry in store.prune(0)} == {folder, old.folder}


def test_foreign_files_in_the_cache_disturb_nobody(store: CacheStore, put: Put, tmp_path: Path) -> None:
    entry = put("a")
    shelf = entry.folder.parent
    for place in (store.folder, shelf, shelf.parent, shelf.parent.parent, entry.folder):
        file(place, ".nfs0001", b"x")
        file(place, "@eaDir", b"x")

    assert taken(store, "a", tmp_path / "into") is not None
    assert (store.verify(), len(store.prune(0)), store.dropped, store.complaints) == ((), 1, [], [])


@pytest.mark.parametrize("word", ["", "..", "a" * 63, "A" * 64, "../" * 21 + "a", "a" * 64 + "\n"])
def test_what_is_no_key_is_our_own_mistake(word: str, store: CacheStore) -> None:
    with pytest.raises(ValueError, match="not a key"):
        store.find("ops", word)
    with pytest.raises(ValueError, match="not a key"):
        store.find("../ops", key("a"))


# room


def test_the_least_recently_used_goes_first_and_taking_is_using(store: CacheStore, put: Put, tmp_path: Path) -> None:
    entries = {word: put(word, os.urandom(1000)) for word in "abcd"}
    for age, entry in enumerate(entries.values(), start=1):
        last_used(entry, 1000 - age)
    taken(store, "a", tmp_path / "into")
    size = entries["a"].size

    removed = store.prune(2 * size)

    assert [entry.key for entry in removed] == [key("b"), key("c")]
    assert {entry.key for entry in store.entries()} == {key("a"), key("d")}
    assert store.prune(2 * size) == ()
    assert not (store.folder / "ops" / key("b")[:2]).exists()


@pytest.mark.slow
def test_putting_keeps_to_the_limit_and_never_drops_what_it_put(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "compiled", limit=20_000)
    for number in range(30):
        entry = store.put("ops", key(str(number)), {"x": file(tmp_path, "x", os.urandom(3000))}, {})

        kept = list(store.entries())
        assert entry is not None
        assert entry.folder in {left.folder for left in kept}
        assert sum(left.size for left in kept) <= 20_000
    assert len(kept) >= 4
    assert store.put("ops", key("large"), {"x": file(tmp_path, "x", bytes(20_001))}, {}) is None
    assert "the limit" in store.complaints[0]
    assert len(list(store.entries())) == len(kept)


def test_what_killed_writers_left_goes_after_a_day(store: CacheStore, put: Put) -> None:
    put("a")
    old, young = (file(store.folder / "tmp" / name, "op.so", b"half").parent for name in ("0" * 32, "1" * 32))
    os.utime(old, (time.time() - 90_000,) * 2)

    assert store.prune(PLENTY) == ()

    assert (old.exists(), young.exists()) == (False, True)


def test_verifying_reads_every_byte_and_returns_what_it_removed(store: CacheStore, put: Put) -> None:
    well, flipped, unreadable = put("a"), put("b"), put("c")
    (flipped.folder / "op.so").write_bytes(b"MACHINE CODE")
    (unreadable.folder / RECORD).write_bytes(b"{}")

    wrong = {entry.key: (entry.facts.get("op"), why) for entry, why in store.verify()}

    assert wrong == {
        key("b"): ("fused_adam", "op.so differs from the bytes that were stored"),
        key("c"): (None, "entry.json differs from the bytes that were stored"),
    }
    assert [entry.key for entry in store.entries()] == [well.key]
    assert store.verify() == ()


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may be somebody else")


# whose folder it is


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        (0o777, "everyone may write"),
        (0o1777, "everyone may write"),
        pytest.param(0o770, "its group may write", marks=root),
        (0o2770, None),
        (0o755, None),
    ],
)
def test_a_folder_that_others_may_write_by_accident_is_not_used(
    mode: int, why: str | None, store: CacheStore, put: Put, tmp_path: Path
) -> None:
    put("a")
    if os.geteuid() == 0 and not mode & stat.S_ISGID:
        os.chown(store.folder, -1, 4711)
    store.folder.chmod(mode)

    served = taken(store, "a", tmp_path / "into")
    kept = store.put("ops", key("b"), {"x": file(tmp_path, "x", b"x")}, {})

    assert ((served is None), (kept is None)) == (why is not None,) * 2
    assert [why in sentence for sentence in store.complaints if why] == ([True] if why else [])


def test_what_is_put_into_a_shared_folder_is_shared(store: CacheStore, put: Put) -> None:
    store.folder.mkdir()
    store.folder.chmod(0o2770)

    entry = put("a")

    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (entry.folder, *entry.folder.parents[:3])} == {0o2770}
    assert {stat.S_IMODE(path.stat().st_mode) for path in entry.folder.iterdir()} == {0o660}


PREAMBLE = """
import os, random, signal, subprocess, sys, time
from hashlib import sha256
from pathlib import Path
from dsdoctor.builder.cache.store import CacheStore

def key(word): return sha256(word.encode()).hexdigest()

def content(word, size): return (sha256(word.encode()).digest() * (size // 32 + 1))[:size]

def sources(word, size):
    folder = home / "made" / f"{word}-{os.getpid()}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("op.so", "op.d", "log"):
        (folder / name).write_bytes(content(word + name, size))
    return {name: folder / name for name in ("op.so", "op.d", "log")}

def served(store, word, size):
    # right bytes, or nothing: everything else ends the test
    for entry in store.find("ops", key(word)):
        into = home / f"into-{os.getpid()}"
        if store.take(entry, into):
            for name in ("op.so", "op.d", "log"):
                assert (into / name).read_bytes() == content(word + name, size), (word, name)
            assert len(list(into.iterdir())) == 3
            return True
    return False

def quiet(store): assert not store.dropped and not store.complaints, (store.dropped, store.complaints)

home, rounds = Path(sys.argv[1]), int(sys.argv[2])
folder = home / "compiled"
"""


def script(text: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", PREAMBLE + text]


def child(tmp_path: Path, text: str, *before: str, rounds: int = ROUNDS) -> None:
    """Run a script in a process of its own, where it may fork, drop its rights and be killed."""
    argv = [*before, *script(text), str(tmp_path), str(rounds)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


AS_ANOTHER = """
def become(user, *groups):
    os.setgroups(groups)
    os.setresgid(*[groups[0]] * 3)
    os.setresuid(*[user] * 3)

def as_another(user, groups, act):
    child = os.fork()
    if not child:
        try:
            become(user, *groups)
            act()
            os._exit(0)
        except BaseException as error:
            print(type(error), error, file=sys.stderr)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0

(home / "made").mkdir(mode=0o777); (home / "made").chmod(0o777)
"""


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder whose parents everybody may enter, which pytest's are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@root
@pytest.mark.slow
def test_colleagues_share_a_folder_of_their_group_and_strangers_get_nothing(open_place: Path) -> None:
    child(
        open_place,
        AS_ANOTHER
        + """
def share():
    folder.mkdir(); os.chown(folder, -1, 7000); folder.chmod(0o2770)
    assert CacheStore(folder, limit=1 << 30).put("ops", key("a"), sources("a", 100), {})

def colleague():
    store = CacheStore(folder, limit=1 << 30)
    os.utime(next(store.entries()).folder / "entry.json")
    assert served(store, "a", 100)
    assert store.put("ops", key("b"), sources("b", 100), {})
    assert len(store.prune(0)) == 2
    quiet(store)

def stranger():
    store = CacheStore(folder, limit=1 << 30)
    assert not served(store, "a", 100) and store.put("ops", key("c"), sources("c", 100), {}) is None
    assert "belongs to user" in store.complaints[0] and len(store.complaints) == 1, store.complaints

as_another(6001, [7000], share)
as_another(6002, [7001, 7000], colleague)
as_another(6001, [7000], lambda: CacheStore(folder, limit=1 << 30).put("ops", key("a"), sources("a", 100), {}))
as_another(6003, [7003], stranger)
stranger()  # root, who may read everything, runs nobody's code either
""",
    )


@root
def test_a_folder_that_can_only_be_read_serves_and_says_why_nothing_is_kept(open_place: Path) -> None:
    child(
        open_place,
        AS_ANOTHER
        + """
folder.mkdir(); folder.chmod(0o755)
assert CacheStore(folder, limit=1 << 30).put("ops", key("a"), sources("a", 100), {})

def reader():
    store = CacheStore(folder, limit=1 << 30)
    assert served(store, "a", 100)
    assert store.put("ops", key("b"), sources("b", 100), {}) is None
    assert store.complaints == [f"nothing can be stored in the cache {folder}: Permission denied"], store.complaints
    assert store.prune(0) == () and len(list(store.entries())) == 1

as_another(6001, [7000], reader)
""",
    )


# broken off, crowded, full


KILLED = """
def check(store):
    open_folder = served(store, "a", SIZE), served(store, "b", SIZE)
    quiet(store)
    for left in (folder / "tmp").glob("*"):
        os.utime(left, (1, 1))
    return open_folder

def dies(act, moment):
    # the act in a child that kills itself with the moment-th line that runs in our modules or in shutil
    child = os.fork()
    if not child:
        left = moment
        def trace(frame, event, argument):
            nonlocal left
            if not any(part in frame.f_code.co_filename for part in ("dsdoctor", "shutil")):
                return None
            left -= event == "line"
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        act(CacheStore(folder, limit=1 << 30))
        sys.settrace(None)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL

SIZE = 100
a, b = sources("a", SIZE), sources("b", SIZE)
CacheStore(folder, limit=1 << 30).put("ops", key("a"), a, {"op": "a"})
"""
STRIDE = 1 if ROUNDS > 1 else 29


@pytest.mark.slow
def test_a_writer_killed_at_any_line_leaves_a_whole_entry_or_none(tmp_path: Path) -> None:
    child(
        tmp_path,
        KILLED
        + f"""
seen, moment = set(), random.randrange({STRIDE}) + 1
while dies(lambda store: store.put("ops", key("b"), b, {{"op": "b"}}), moment):
    moment += {STRIDE}
    store = CacheStore(folder, limit=1 << 30)
    seen.add(check(store))
    for entry in store.find("ops", key("b")):
        store.remove(entry)
assert moment > 200 and (True, False) in seen and (False, False) not in seen, (moment, seen)
store.prune(1 << 30)
assert check(store) == (True, True) and not list((folder / "tmp").iterdir())
""",
    )


@pytest.mark.slow
def test_a_pruner_killed_at_any_line_leaves_whole_entries(tmp_path: Path) -> None:
    child(
        tmp_path,
        KILLED
        + f"""
seen, moment = set(), random.randrange({STRIDE}) + 1
CacheStore(folder, limit=1 << 30).put("ops", key("b"), b, {{"op": "b"}})
while dies(lambda store: store.prune(0), moment):
    moment += {STRIDE}
    store = CacheStore(folder, limit=1 << 30)
    open_folder = check(store)
    seen.add(open_folder)
    open_folder[0] or store.put("ops", key("a"), a, {{"op": "a"}})
    open_folder[1] or store.put("ops", key("b"), b, {{"op": "b"}})
    assert check(store) == (True, True)
assert moment > 200 and len(seen) > 1, (moment, seen)
""",
    )


@pytest.mark.slow
def test_a_writer_killed_amid_large_files_leaves_whole_entries_or_none(tmp_path: Path) -> None:
    child(
        tmp_path,
        """
SIZE = 1 << 20
words = [f"w{number}" for number in range(4)]
files = {word: sources(word, SIZE) for word in words}
for number in range(6 * rounds):
    child = os.fork()
    if not child:
        store = CacheStore(folder, limit=8 << 20)
        while True:
            store.put("ops", key(word := random.choice(words)), files[word], {"op": word, "at": time.time()})
            random.random() < 0.2 and store.prune(0)
    time.sleep(random.uniform(0, 0.08))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    store = CacheStore(folder, limit=8 << 20)
    for word in words:
        served(store, word, SIZE)
    assert store.verify() == ()
    quiet(store)
    for left in (folder / "tmp").glob("*"):
        os.utime(left, (1, 1))
""",
    )


@pytest.mark.slow
def test_builds_at_once_and_a_pruner_among_them_get_right_bytes_or_nothing(tmp_path: Path) -> None:
    child(
        tmp_path,
        """
SIZE = 5000

def builder(number):
    store, hits = CacheStore(folder, limit=60_000), 0
    for turn in range(40 * rounds):
        word = f"w{random.randrange(4)}" if random.random() < 0.7 else f"own{number}"
        if served(store, word, SIZE):
            hits += 1
        else:
            store.put("ops", key(word), sources(word, SIZE), {"op": word})
    quiet(store)
    assert hits, "nothing was ever shared"

def pruner(number):
    store = CacheStore(folder, limit=60_000)
    for turn in range(40 * rounds):
        store.prune(random.choice([0, 20_000, 40_000]))
        store.verify() if turn % 5 == 0 else None
        time.sleep(random.uniform(0, 0.02))
    quiet(store)

children = {}
for number, act in enumerate((builder, builder, pruner)):
    child = os.fork()
    if not child:
        try:
            random.seed(os.getpid())
            act(number)
            os._exit(0)
        except BaseException as error:
            print(act.__name__, repr(error), file=sys.stderr)
        os._exit(1)
    children[child] = act.__name__
for _ in children:
    pid, status = os.wait()
    assert status == 0, children[pid]
assert not list((folder / "tmp").iterdir())
store = CacheStore(folder, limit=60_000)
assert store.verify() == ()
store.prune(0)
assert not list((folder / "ops").iterdir())
""",
    )


def may_mount() -> bool:
    argv = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        os.geteuid() == 0 and bool(shutil.which("unshare")) and not subprocess.run(argv, capture_output=True).returncode
    )


@pytest.mark.skipif(not may_mount(), reason="only root may mount a small disk")
@pytest.mark.slow
def test_a_full_disk_is_said_leaves_nothing_and_serves_what_was_there(tmp_path: Path) -> None:
    child(
        tmp_path,
        """
disk = home / "disk"
disk.mkdir()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], check=True)
folder = disk / "compiled"
store = CacheStore(folder, limit=1 << 30)
large = sources("large", 500_000)
assert store.put("ops", key("a"), sources("a", 200_000), {"op": "a"})
before = sorted(disk.rglob("*"))
assert store.put("ops", key("large"), large, {"op": "large"}) is None
assert store.complaints == [f"nothing can be stored in the cache {folder}: No space left on device"], store.complaints
assert sorted(path for path in disk.rglob("*") if path != folder / "tmp") == [p for p in before if p != folder / "tmp"]
assert served(store, "a", 200_000)

# to the last byte: an entry whose record alone finds no room, and no room for a folder either
with (disk / "ballast").open("wb", buffering=0) as ballast:
    try:
        while ballast.write(bytes(4096)): pass
    except OSError: pass
for size in (0, 10, 5000):
    assert store.put("ops", key(f"b{size}"), sources("b", size), {"op": "b"}) is None
    assert store.find("ops", key(f"b{size}")) == () and not list((folder / "tmp").iterdir())
assert served(store, "a", 200_000) and not store.dropped

# the disk of the build is full, and not that of the cache
into = disk / "into"
entry = store.find("ops", key("a"))[0]
assert not store.take(entry, into) and not list(into.glob("*")) and not store.dropped
assert "No space left" in store.complaints[-1], store.complaints
assert store.find("ops", key("a"))

# a full disk is made room on
assert len(store.prune(0)) == 1
(disk / "ballast").unlink()
assert store.put("ops", key("b"), sources("b", 10), {"op": "b"})
""",
        "unshare",
        "--mount",
    )


# the command


@pytest.fixture
def cache(store: CacheStore, put: Put, tmp_path: Path) -> str:
    """A cache folder with two ops and a wheel in it, of ages."""
    last_used(put("a", b"1" * 2_000_000, processor="x86-64-v3", dependencies={"/usr/include/x.h": "0"}), 7300)
    last_used(put("b", b"2", op="cpu_adam", architectures=None), 40 * 86400)
    wheel = file(tmp_path, "deepspeed-0.19.8-py3-none-any.whl", b"zip")
    kept = store.put(
        "wheels", key("w"), {wheel.name: wheel}, {"name": "deepspeed", "version": "0.19.8", "ops": ["x", "y"]}
    )
    assert kept is not None
    return str(tmp_path)


def asked(cache: str, *arguments: str, **env: str) -> tuple[int, str, str]:
    done = run("cache", *arguments, DSDOCTOR_CACHE=cache, **env)
    return done.returncode, done.stdout, done.stderr


def test_ls_shows_a_row_an_entry_and_the_total_against_the_limit(cache: str) -> None:
    status, shown, said = asked(cache, "ls", DSDOCTOR_CACHE_LIMIT="500M")
    document = json.loads(asked(cache, "ls", "--json")[1])

    rows = [line.split("  ") for line in shown.splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert (status, said) == (0, "")
    assert cells[0][:3] == ["wheel", "deepspeed 0.19.8", "x,y"]
    assert cells[1] == ["op", "fused_adam", "torch 2.14.1+cu130", "cuda 8.0,9.0 x86-64-v3", "1.9 MiB", "2 hours ago"]
    assert cells[2][:4] == ["op", "cpu_adam", "torch 2.14.1+cu130", "cuda"]
    assert cells[2][-1] == "40 days ago"
    assert cells[3] == ["3 entries, 1.9 MiB of 500 MiB", f"{cache}/compiled"]
    assert document["limit"] == 10 << 30
    assert document["size"] == sum(entry["size"] for entry in document["entries"])
    assert [entry["name"] for entry in document["entries"]] == ["deepspeed", "fused_adam", "cpu_adam"]
    assert document["entries"][1]["facts"] == {**FACTS, "processor": "x86-64-v3"}


def test_prune_removes_by_age_by_size_or_all_and_says_what(cache: str) -> None:
    def removed(*arguments: str) -> list[str]:
        return [entry["name"] for entry in json.loads(asked(cache, "prune", *arguments, "--json")[1])["removed"]]

    assert removed() == []
    assert removed("--older-than", "30d") == ["cpu_adam"]
    assert removed("--max-size", "1M", "--older-than", "30d") == ["fused_adam"]
    status, shown, _ = asked(cache, "prune", "--all")
    assert (status, shown.splitlines()[0][:5]) == (0, "wheel")
    assert shown.splitlines()[-1].startswith("✓ removed 1 entry")
    assert asked(cache, "prune", "--all")[1] == "✓ nothing to remove; 0 B left\n"


def test_verify_ends_with_1_when_something_was_damaged_and_then_with_0(cache: str, store: CacheStore) -> None:
    assert asked(cache, "verify")[:2] == (0, "✓ 3 entries are intact\n")
    (entry,) = store.find("ops", key("a"))
    (entry.folder / "op.so").write_bytes(b"3" * 2_000_000)

    status, shown, _ = asked(cache, "verify")

    assert status == 1
    assert f"fused_adam (ops {key('a')[:12]})" in shown
    assert "[cache-entry-damaged]" in shown
    assert asked(cache, "verify")[:2] == (0, "✓ 2 entries are intact\n")


@pytest.mark.parametrize(
    ("arguments", "env", "status"),
    [
        (("prune", "--max-size", "much"), {}, 2),
        (("prune", "--older-than", "30"), {}, 2),
        (("prune", "--all", "--max-size", "1G"), {}, 2),
        (("ls",), {"DSDOCTOR_CACHE_LIMIT": "-1"}, 2),
        (("verify", "--no-such"), {}, 2),
    ],
)
def test_nonsense_is_a_usage_error_and_removes_nothing(
    arguments: tuple[str, ...], env: dict[str, str], status: int, cache: str, store: CacheStore
) -> None:
    assert asked(cache, *arguments, **env)[:2] == (status, "")
    assert len(list(store.entries())) == 3


def test_a_folder_that_everybody_may_write_is_refused_with_the_command_that_ends_it(
    cache: str, store: CacheStore
) -> None:
    store.folder.chmod(0o777)

    status, shown, said = asked(cache, "ls")

    assert (status, shown) == (3, "")
    assert f"chmod o-w {store.folder}" in said.replace("\n", "")
