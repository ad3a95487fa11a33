"""What a rank waits for by itself: read from the kernel of a real thread or process, and said in the right words."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dsdoctor.hang.activity import Activity, activity_in
from dsdoctor.hang.incident_view import wakes_again_and_again
from dsdoctor.hang.local_rank import LocalRank, Moment, Node, polling_loop, with_call
from dsdoctor.hang.models import Frame, RankView, ThreadStack
from dsdoctor.hang.processes import (
    OF_OPEN_FILES,
    OF_PATHS,
    file_call,
    file_system_of,
    is_unserved,
    mounted_at,
    waits_in,
    work_of_children,
)
from dsdoctor.hang.ring import UNWATCHED, RingWriter
from dsdoctor.hang.stacks import MAX_SOURCE_BYTES, Sources
from dsdoctor.hang.verdict import judge
from tests.each import each
from tests.hang.made import calling, elsewhere, frame, incident, operation, view

WAITS = """
import os, select, signal, socket, sys, threading, time
fifo = sys.argv[1]
os.mkfifo(fifo)
pipe, one, terminal = os.pipe(), socket.socketpair(), os.openpty()
server = socket.create_server(("127.0.0.1", 0))
asking = socket.create_connection(server.getsockname())
calls = [
    lambda: os.open(fifo, os.O_RDONLY),
    lambda: os.read(pipe[0], 1),
    lambda: one[0].recv(1),
    lambda: asking.recv(1),
    lambda: os.read(terminal[1], 1),
    lambda: time.sleep(600),
    lambda: select.epoll().poll(),
]
threads = [threading.Thread(target=call, daemon=True) for call in calls]
for thread in threads:
    thread.start()
print(os.getpid(), *(thread.native_id for thread in threads), flush=True)
signal.pause()
"""
SAID = (
    "waits for a signal",
    "waits for a pipe",
    "waits for a pipe",
    "waits for a service of this host",
    "waits for the network",
    "waits for a terminal",
    "sleeps",
    "waits for something to read",
)
"""Of a thread that waits in each of these calls, the main thread first."""


def names_of(table: dict[str, dict[int, str]]) -> set[str]:
    return {name for names in table.values() for name in names.values()}


def said_of(pid: int, threads: list[int]) -> tuple[str, ...]:
    # a line of source that says nothing by itself
    line = frame("/home/a/train.py", 3, "f", "x = y(z)")
    return tuple(activity_in([line], waits_in(each), file_call(pid, each)).words for each in threads)


def test_what_a_thread_waits_for_is_said_as_the_kernel_sees_it(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", WAITS, str(tmp_path / "fifo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            numbers = [int(word) for word in process.stdout.readline().split()]
            last = time.monotonic() + 20
            # they may still be on their way into their calls
            while (said := said_of(process.pid, numbers)) != SAID and time.monotonic() < last:
                time.sleep(0.02)
            if not any(map(waits_in, numbers)):
                pytest.skip("this kernel does not show what a process waits in")
        finally:
            process.kill()

    assert said == SAID


def test_the_path_of_an_open_that_does_not_return_is_told_by_a_thread_of_the_same_process(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    thread = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDONLY)))
    thread.start()
    try:
        last = time.monotonic() + 20
        while (seen := file_call(os.getpid(), thread.native_id or 0)) == ("", "") and time.monotonic() < last:
            time.sleep(0.01)
    finally:
        os.close(os.open(path, os.O_WRONLY))
        thread.join()

    assert seen == ("open", str(path))
    assert file_system_of(os.getpid(), "/proc/self/stat") == "proc at /proc"


@pytest.mark.parametrize("folder", ["its own", "an open one", "none"])
def test_a_path_is_told_from_the_folder_that_it_begins_in(folder: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    begins = os.open(tmp_path, os.O_RDONLY) if folder == "an open one" else None
    where = {"its own": os.path.relpath(tmp_path / "fifo"), "an open one": "fifo", "none": str(tmp_path / "fifo")}
    thread = threading.Thread(target=lambda: os.close(os.open(where[folder], os.O_RDONLY, dir_fd=begins)))
    thread.start()
    try:
        last = time.monotonic() + 20
        while (seen := file_call(os.getpid(), thread.native_id or 0)) == ("", "") and time.monotonic() < last:
            time.sleep(0.01)
    finally:
        os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
        thread.join()
        if begins is not None:
            os.close(begins)

    assert (seen[0], os.path.normpath(seen[1])) == ("open", str(tmp_path / "fifo"))


@each(("kind", "source"), [("fuse", "curlftpfs#ftp://user:secret@host/"), ("nfs4", "host:/export")])
def test_of_a_mount_neither_its_source_nor_its_password_is_told(kind: str, source: str) -> None:
    lines = ["1 0 8:1 / / rw - ext4 /dev/sda1 rw", rf"2 1 0:9 / /mnt/my\040data rw shared:1 - {kind} {source} rw"]

    assert [mounted_at(lines, path) for path in ("/mnt/my data/x", "/mnt/my")] == [
        f"{kind} at /mnt/my data",
        "ext4 at /",
    ]


@each("state", ["S", "D"])
@each("name", sorted({name for table in (OF_OPEN_FILES, OF_PATHS) for name in names_of(table)}))
def test_only_of_an_open_file_in_disk_sleep_the_file_system_is_told(name: str, state: str) -> None:
    seen = view(0, elsewhere(), 4, state=state)
    assert seen.sample
    told = replace(seen, pid=os.getpid(), sample=replace(seen.sample, call=(name, "/proc/self/stat")))

    known = name in names_of(OF_OPEN_FILES) and state == "D"
    assert with_call(told).disk == ("proc at /proc" if known else "")


LIBRARY = "/usr/lib/python3.11/"
STACKS = {
    "waits for the lock of a file": frame("/v/site-packages/filelock/_api.py", 9, "acquire", "time.sleep(poll)"),
    "waits for another process": frame(f"{LIBRARY}multiprocessing/pool.py", 9, "wait", "self._event.wait()"),
    "waits in its asyncio loop": frame(f"{LIBRARY}asyncio/base_events.py", 9, "run_once", "poll(t)"),
    "waits for a lock or another thread": frame(f"{LIBRARY}threading.py", 9, "wait", "waiter.acquire()"),
    Activity.SCRIPT_ENDED.value: frame(f"{LIBRARY}threading.py", 9, "_shutdown", "lock.acquire()"),
}


@each("words", STACKS)
def test_what_a_library_waits_for_is_said_by_what_it_is_there_for(words: str) -> None:
    inner = frame(f"{LIBRARY}threading.py", 8, "wait")
    stack = [frame("/home/a/train.py", 3, "f", "x = y(z)"), STACKS[words], inner]

    assert activity_in(stack, "do_epoll_wait").words == words


def threads(rank: RankView, *others: tuple[str, Frame]) -> RankView:
    """A rank that tells all of its threads."""
    made = tuple(ThreadStack(name=name, frames=(each,)) for name, each in others)
    assert rank.sample
    return replace(rank, sample=replace(rank.sample, threads=(*rank.sample.threads, *made), all_threads=True))


def test_of_a_rank_that_waits_for_a_thread_it_is_told_where_the_others_stand_or_that_there_is_none() -> None:
    late = view(0, elsewhere("batch = ready.get()"), 3)
    others = [view(rank, calling("all_reduce"), 4) for rank in (1, 2, 3)]
    reader = ("reader", frame("/home/a/data.py", 7, "fill", "file.read()"))

    alone = judge(incident(threads(late), *others)).findings[0]
    second = judge(incident(threads(late, reader), *others)).findings[0]
    unknown = judge(incident(late, *others)).findings[0]

    assert "rank 0 has no other thread that runs Python" in alone.evidence
    assert "rank 0: its thread reader is in data.py:7 in fill: file.read()" in second.evidence
    assert not any("thread" in line for line in unknown.evidence)


@each("few", [1, 3])
def test_a_process_group_that_only_some_ranks_make_is_a_collective_that_the_others_do_not_call(few: int) -> None:
    made = [view(rank, calling("new_group" if rank < few else "all_reduce"), 4) for rank in range(4)]

    found = judge(incident(*made)).findings

    assert [finding.rule for finding in found] == ["hang-other-operation"]
    said = (
        "rank 0 in new_group; ranks 1-3 in all_reduce" if few == 1 else "rank 3 in all_reduce; ranks 0-2 in new_group"
    )
    assert said in found[0].title


def test_where_no_rank_asks_for_the_watch_any_more_nothing_stands_still(tmp_path: Path) -> None:
    ranks = [RingWriter(tmp_path / f"rank-0000{rank}-{os.getpid()}.ring") for rank in range(2)]
    seen = []
    for flags in ((0, 0), (UNWATCHED, 0), (UNWATCHED, UNWATCHED)):
        for ring, flag in zip(ranks, flags, strict=True):
            ring.write(b"{}", clock=time.monotonic(), progress=1, stack=1, flags=flag)
        node = Node(tmp_path, "node1")
        node.look()
        for rank in node.ranks.values():
            rank.moved -= 100.0
        node.look()
        seen.append((node.unwatched, node.still() > 50.0))
    for ring in ranks:
        ring.close()

    assert seen == [(False, True), (False, True), (True, False)]


@pytest.mark.parametrize("looks", [1, 2, 3, 5])
def test_what_was_hardly_looked_at_is_not_called_still(looks: int, tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / f"rank-00000-{os.getpid()}.ring")
    ring.write(b"{}", clock=time.monotonic(), progress=1, stack=1, flags=0)
    node = Node(tmp_path, "node1")
    for _ in range(looks):
        node.look()
        node.look_at_children()
    ring.close()

    # the first look is the one at which it moved
    assert node.seen_enough() == (looks > 2)


@pytest.mark.parametrize("apart", [1.0, 4.5])
@pytest.mark.parametrize("works", [True, False])
def test_a_rank_is_seen_to_work_also_where_the_looks_are_far_apart(works: bool, apart: float, tmp_path: Path) -> None:
    ring = RingWriter(tmp_path / f"rank-00000-{os.getpid()}.ring")
    rank = LocalRank(tmp_path / f"rank-00000-{os.getpid()}.ring", "node1")
    now = time.monotonic()
    rank.moved, rank.window = now - 5 * apart, 3.0
    clocks = [now - number * apart for number in range(4, -1, -1)]
    rank._moments.extend(Moment(clock=at, stack=1, cpu=at / 2 if works else 1.0, main=0.0, bytes=0) for at in clocks)
    seen = rank.activity(view(0, elsewhere(), 3))
    ring.close()
    rank.close()

    assert seen == ("it used or waited for 50% of a processor" if works else "")


def test_the_same_collective_of_another_type_is_told_with_the_types() -> None:
    doubles = replace(operation(4, "all_reduce", 64), types=("Double",))
    floats = replace(operation(4, "all_reduce", 64), types=("Float",))
    ranks = [view(0, calling("all_reduce"), 4, operations=(doubles,))]
    ranks += [view(rank, calling("all_reduce"), 4, operations=(floats,)) for rank in (1, 2, 3)]

    found = judge(incident(*ranks)).findings

    assert [finding.rule for finding in found] == ["hang-other-sizes"]
    said = "different dtypes at position 4: rank 0: all_reduce of 64 Double; ranks 1-3: all_reduce of 64 Float; rank 0 now blocked"
    assert said in found[0].title


@each("others", ["scheduled", "done"])
@each("state", ["scheduled", "started", "done"])
@each("types", [("Float",), ("Bool",), ()])
def test_types_are_a_cause_only_where_all_told_them_and_the_call_has_not_ended(
    types: tuple[str, ...], state: str, others: str
) -> None:
    last = operation(7, "all_reduce", 64)
    told = [(types, state), *((("Float",), others),) * 3]
    calls = [replace(operation(5, "all_reduce", 64, state=state), types=types) for types, state in told]
    ranks = [view(rank, calling("all_reduce"), 7, operations=(call, last)) for rank, call in enumerate(calls)]

    found = judge(incident(*ranks)).findings

    differ = types == ("Bool",) and (state, others) != ("done", "done")
    assert [finding.rule for finding in found] == ["hang-other-sizes" if differ else AGREE]
    assert ("different dtypes" in found[0].title) == differ


AGREE = "hang-transport"
ROOTS = {
    "one names another": (("0 in 0", "0 in 0", "2 in 0", "0 in 0"), (4, 4, 4, 4), "hang-other-operation"),
    "all name the same": (("0 in 0",) * 4, (4, 4, 4, 4), AGREE),
    "each group has its own": (("0 in 1", "0 in 1", "2 in 2", "2 in 2"), (4, 4, 4, 4), AGREE),
    "one is a call further": (("0 in 0", "0 in 0", "2 in 0", "0 in 0"), (4, 4, 5, 4), "hang-rank-behind"),
    "the group is not known": (("0 in 9", "0 in 9", "2 in 9", "0 in 9"), (4, 4, 4, 4), AGREE),
}
"""What each rank names as the sender in which group, its number, and what is told."""


@each("name", ROOTS)
def test_ranks_that_wait_for_different_senders_are_told_where_it_is_one_collective(name: str) -> None:
    roots, numbers, rule = ROOTS[name]
    ranks = []
    for rank, (root, number) in enumerate(zip(roots, numbers, strict=True)):
        seen = view(rank, calling("broadcast"), {"0": number, "1": 4, "2": 4})
        source, _, group = root.partition(" in ")
        assert seen.sample
        ranks.append(replace(seen, sample=replace(seen.sample, root=f"src={source} in group {group}")))

    found = judge(incident(*ranks)).findings

    assert found[0].rule == rule
    told = "rank 2: src=2; ranks 0-1, 3: src=0; rank 2 blocked in broadcast at train.py:" in found[0].title
    assert told == (rule == "hang-other-operation")


def test_a_rank_that_waits_for_a_receive_that_it_began_before_waits_in_a_collective() -> None:
    ranks = [view(0, elsewhere("work.wait()"), {"0": 5, "1": 3}), view(1, elsewhere("aio.wait()"), {"0": 4, "1": 4})]
    others = [view(rank, calling("all_reduce"), {"0": 4, "1": 4}) for rank in (2, 3)]

    found = judge(incident(ranks[0], replace(others[0], rank=1), *others)).findings
    another = judge(incident(*ranks, *others)).findings

    assert [finding.rule for finding in found] == ["hang-other-operation"]
    assert "rank 0 in work.wait(); ranks 1-3 in all_reduce" in found[0].title
    assert {finding.rule for finding in another} == {"hang-rank-behind"}


AIO = "/v/lib/python3.11/site-packages/deepspeed/nvme/ds_aio_handle.py"
USER = "/home/a/train.py"


@each("text", ["work.wait()", "handle.wait()", "req.wait()"])
@each(
    ("file", "kernel", "numbers", "rules"),
    [
        (USER, "futex_do_wait", (5, 6), {"hang-rank-behind"}),
        (AIO, "futex_do_wait", (5, 6), {"hang-rank-behind"}),
        (USER, "futex_do_wait", (6, 6), {"hang-unclear"}),
        (AIO, "futex_do_wait", (6, 6), {"hang-rank-outside"}),
        (USER, "read_events", (6, 6), {"hang-rank-outside"}),
        (USER, "io_cqring_wait", (6, 6), {"hang-rank-outside"}),
        (USER, "futex_do_wait", (), {"hang-unclear"}),
        (AIO, "futex_do_wait", (), {"hang-rank-outside"}),
        (USER, "read_events", (), {"hang-rank-outside"}),
    ],
)
def test_what_may_be_a_wait_for_a_disk_or_for_the_same_call_makes_no_other_operation(
    text: str, file: str, kernel: str, numbers: tuple[int, ...], rules: set[str]
) -> None:
    known: list[int | dict[str, int]] = list(numbers) or [{}, {}]
    waits = (frame(USER, 11, "<module>", "main()"), frame(file, 40, "f", text))
    ranks = [
        view(0, waits, known[0], waits=kernel),
        *(view(rank, calling("all_reduce"), known[1]) for rank in (1, 2, 3)),
    ]

    found = judge(incident(*ranks)).findings

    assert {finding.rule for finding in found} == rules
    assert "rank 0" in found[0].title or rules == {"hang-unclear"}


A_FILE = "/home/a/model.bin"
KINDS = {
    "file": A_FILE,
    "pipe by name": "/tmp/fifo",
    "pipe": "pipe:[7]",
    "socket": "socket:[7]",
    "card": "/dev/infiniband/uverbs0",
    "keyboard": "/dev/input/event0",
    "terminal": "/dev/pts/3",
    "of the kernel": "/proc/self/x",
    "setting": "/sys/block/x",
}
BY_KERNEL = {
    "": "",
    "anon_pipe_read": "waits for a pipe",
    "pipe_write": "waits for a pipe",
    "wait_for_partner": "waits for a pipe",
    "jbd2_log_wait_commit": "waits for a disk",
    "xfs_log_force": "waits for a disk",
    "folio_wait_bit_common": "waits for a disk or a file system",
    "nfs_wait_bit_killable": "waits for a network file system",
    "request_wait_answer": "waits for a network file system",
    "ib_uverbs_event_read": "",
    "evdev_read": "",
}
BY_KIND = {
    "pipe": "waits for a pipe",
    "socket": "waits for the network",
    "terminal": "waits for a terminal",
}


@each("kernel", BY_KERNEL)
def test_what_the_kernel_says_of_a_wait_goes_before_what_its_file_looks_like(kernel: str) -> None:
    stack = [frame("/home/a/train.py", 3, "f", "x = y(z)")]
    by_path = {"read": "waits for a file", "write": "waits for a file to be written"}
    expected = {
        (kind, call): BY_KIND.get(kind) or BY_KERNEL[kernel] or (words if kind in {"file", "pipe by name"} else "")
        for kind in KINDS
        for call, words in by_path.items()
    }

    assert {(kind, call): activity_in(stack, kernel, (call, KINDS[kind])).words for kind, call in expected} == expected


@each("state", ["S", "D"])
@each(("kind", "kernel"), [("pipe by name", "anon_pipe_read"), ("card", "ib_uverbs_event_read")])
def test_of_what_is_no_file_no_file_system_is_to_be_looked_at(kind: str, kernel: str, state: str) -> None:
    late = view(0, elsewhere("x = y(z)"), 3, state=state, waits=kernel, call=("read", KINDS[kind]))
    others = [view(rank, calling("all_reduce"), 4) for rank in (1, 2, 3)]

    (found,) = judge(incident(late, *others)).findings

    assert found.rule == ("hang-disk-sleep" if state == "D" else "hang-rank-behind")
    assert state == "D" or "df -h" not in repr(found.fix)


@each("text", ["work.wait()", "handle.wait()", "req.wait()"])
def test_where_all_wait_for_what_they_began_before_nobody_says_that_the_transport_is_at_fault(text: str) -> None:
    found = judge(incident(*(view(rank, elsewhere(text), 6) for rank in range(4)))).findings

    assert [finding.rule for finding in found] == ["hang-unclear"]


LOOPS = {
    "while p.poll() is None: time.sleep(1)": "while p.poll() is None: time.sleep(1)",
    "for step in steps:\n    while True:\n        time.sleep(1)\n        if p.exitcode is not None: break": "while True:",
    "for _ in range(99):\n    pid, _ = os.waitpid(-1, os.WNOHANG)\n    time.sleep(1)": "for _ in range(99):",
    # what the loop around it asks is not what it waits for
    "while p.poll() is None:\n    while not flag.exists():\n        time.sleep(1)": "",
    "while not flag.exists(): time.sleep(1)": "",
    "p.poll()\ntime.sleep(1)": "",
    "while p.poll( is None: time.sleep(1)": "",
}


@each(("source", "told"), LOOPS.items())
@each("helper", [True, False])
def test_the_loop_in_which_a_stack_asks_for_a_process_is_found(
    source: str, told: str, helper: bool, tmp_path: Path
) -> None:
    file, other = tmp_path / "train.py", tmp_path / "pause.py"
    text = source.replace("time.sleep(1)", "pause(1)") if helper else source
    file.write_text(text)
    other.write_text("def pause(seconds):\n    time.sleep(seconds)\n")
    line = next(number for number, each in enumerate(text.splitlines(), 1) if "pause(" in each or "sleep(" in each)
    stack = (frame(str(file), line, "<module>"), *([frame(str(other), 2, "pause")] if helper else []))

    assert polling_loop(stack, Sources()) == (told.replace("time.sleep(1)", "pause(1)") if helper else told)


def test_a_port_on_which_nothing_listens_is_known_on_this_host_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        asked = [is_unserved(os.getpid(), f"{host}:{port}") for host in ("127.0.0.1", "localhost", "elsewhere.example")]

        assert asked == [False] * 3
    asked = [is_unserved(os.getpid(), f"{host}:{port}") for host in ("127.0.0.1", "localhost", "elsewhere.example")]
    assert asked == [True, True, False]


TWO_THREADS = """
import threading, time
blocked = threading.Lock()
blocked.acquire()
thread = threading.Thread(target=blocked.acquire, daemon=True)
thread.start()
print(thread.native_id, flush=True)
while True:
    time.sleep(0.01)
"""
LOADER = "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
STANDS = {
    "its own line": [("/home/a/t.py", "main")],
    "a sleep of its own": [("/home/a/t.py", "main"), ("/usr/lib/python3.11/threading.py", "wait")],
    "its loader": [("/home/a/t.py", "main"), (LOADER, "_try_get_data"), ("/usr/lib/python3.11/selectors.py", "select")],
    "a queue": [("/home/a/t.py", "main"), ("/usr/lib/python3.11/queue.py", "get")],
}


def looked_at(tmp_path: Path, process: "subprocess.Popen[str]", stands: str, threads: tuple[int, ...]) -> RankView:
    """A rank in whose process a thread wakes, as it is seen after some looks; ``threads``: which one it says that trains."""
    path = tmp_path / f"rank-00000-{process.pid}.ring"
    ring = RingWriter(path)
    frames = [{"file": file, "line": 3, "function": function} for file, function in STANDS[stands]]
    rank = LocalRank(path, "node1")
    for number in threads:
        sample = {"rank": 0, "world": 2, "pid": process.pid, "time": 0.0, "thread": number}
        sample["threads"] = [{"name": "MainThread", "frames": frames, "main": True}]
        ring.write(json.dumps(sample).encode(), clock=time.monotonic(), progress=1, stack=1, flags=0)
        rank.look()
        time.sleep(0.1)
    seen = rank.view()
    ring.close()
    rank.close()
    return seen


@each(
    ("stands", "goes_on"),
    [("its own line", True), ("a sleep of its own", True), ("its loader", False), ("a queue", False)],
)
def test_only_a_wake_in_the_users_own_line_is_one_of_its_loop(stands: str, goes_on: bool, tmp_path: Path) -> None:
    """torch's loader wakes every 5 s, to see whether its workers live: a rank that waits for a dead one does so for ever."""
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        seen = looked_at(tmp_path, process, stands, (process.pid,) * 5)
        process.kill()

    assert wakes_again_and_again(seen) is goes_on


@each("first", ["unknown", "main"])
def test_wakes_are_those_of_the_thread_that_trains(first: str, tmp_path: Path) -> None:
    """Under Ray Train the main thread is an event loop, which wakes for ever."""
    with subprocess.Popen([sys.executable, "-c", TWO_THREADS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        trains = int(process.stdout.readline())
        time.sleep(0.2)
        before = {"unknown": (0, 0), "main": (process.pid, process.pid)}[first]
        # one pair of looks is of the main thread where that is what the rank says, and no pair is of both
        seen = looked_at(tmp_path, process, "its own line", (*before[1:], *(trains,) * 6))
        process.kill()

    assert seen.wakes == 0


def test_a_loaders_worker_is_no_child_that_may_work_elsewhere() -> None:
    renamed = (
        "import ctypes, sys, time\nctypes.CDLL(None).prctl(15, b'pt_data_worker')\nprint(flush=True)\ntime.sleep(600)"
    )
    plain = "import time\nprint(flush=True)\ntime.sleep(600)"
    tracker = "import time\nprint(flush=True)\ntime.sleep(600) # multiprocessing.resource_tracker"
    began = [
        subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
        for text in (renamed, plain, plain, tracker)
    ]
    try:
        for each_one in began:
            assert each_one.stdout
            each_one.stdout.readline()
        parents = {each_one.pid: os.getpid() for each_one in began}
        counts = [work_of_children(os.getpid(), parents, named)[2] for named in ((), (began[1].pid,))]
    finally:
        for each_one in began:
            each_one.kill()
            each_one.communicate()

    assert counts == [2, 1]


def test_a_file_of_source_is_read_once(tmp_path: Path) -> None:
    """A sample names hundreds of lines of one file, and all ranks of a node run the same."""
    script = tmp_path / "train.py"
    script.write_text("first()\nsecond()\n")
    for rank in (0, 1):
        ring = RingWriter(tmp_path / f"rank-0000{rank}-{os.getpid()}.ring")
        frames = [{"file": str(script), "line": number, "function": "main"} for number in (1, 2, 3)]
        sample = {"rank": rank, "world": 2, "pid": os.getpid(), "time": 0.0}
        sample["threads"] = [{"name": "MainThread", "frames": frames, "main": True}]
        ring.write(json.dumps(sample).encode(), clock=time.monotonic(), progress=1, stack=1, flags=0)
        ring.close()
    node = Node(tmp_path, "node1")
    node.look()
    seen = []
    for _ in range(2):
        for view_ in node.views():
            assert view_.sample
            seen.append([each_one.text for each_one in view_.sample.threads[0].frames])
        script.write_text("other()\n")

    assert seen == [["first()", "second()", ""]] * 4


def test_sources_do_not_grow_with_what_stacks_name(tmp_path: Path) -> None:
    sources, sizes = Sources(), []
    for number in range(6):
        (tmp_path / f"{number}.py").write_bytes(b"x" * (MAX_SOURCE_BYTES // 2))
        sources.line(str(tmp_path / f"{number}.py"), 1)
        sizes.append(sum(len(line) for lines in sources._lines.values() for line in lines))

    assert max(sizes) <= MAX_SOURCE_BYTES


def test_what_the_watch_does_itself_is_no_time_in_which_it_was_not_let_run(tmp_path: Path) -> None:
    """Only a pause that takes longer than it should says that nothing was let run."""
    ring = RingWriter(tmp_path / f"rank-00000-{os.getpid()}.ring")
    ring.write(b"{}", clock=time.monotonic(), progress=1, stack=1, flags=0)
    node, seen = Node(tmp_path, "node1"), []
    node.look()
    for took in (1.0, 60.0):
        for rank in node.ranks.values():
            rank.moved -= 100.0
        node.note_pause(1.0, took)
        node.look()
        seen.append(node.still() > 50.0)
    ring.close()

    assert seen == [True, False]


def test_a_file_that_does_not_answer_is_not_waited_for() -> None:
    """As on the disk that is the reason of the hang."""
    end, other = os.pipe()
    try:
        assert Sources().line(f"/dev/fd/{end}", 1) == ""
    finally:
        os.close(other)
        os.close(end)
