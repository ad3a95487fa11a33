"""The parts of the watch: the ring, the messages between nodes, the pace, the files, torch's dumps, the options."""

import gc
import json
import mmap
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from dsdoctor.cli.hang import judge_folder
from dsdoctor.core.errors import UsageError
from dsdoctor.core.text import encode
from dsdoctor.hang.channel import Answer, Listener, NodeReport, RunIdentity, Sent, identity, node_folder, send_report
from dsdoctor.hang.incidents import plain_pickle, read_ranks, watched_rank, write_ranks
from dsdoctor.hang.inspection import handled_exception, stored
from dsdoctor.hang.local_rank import LocalRank, Node, decoded
from dsdoctor.hang.models import GroupState, HangOptions, History, Incident, Operation, Sample
from dsdoctor.hang.outside import parse_dump
from dsdoctor.hang.processes import RankProcess, file_call, moved_bytes
from dsdoctor.hang.ring import SLOT_BYTES, RingReader, RingWriter
from dsdoctor.hang.sampler import Sampler
from dsdoctor.hang.stacks import Sources
from dsdoctor.hang.supervisor import HANGS, LATE, WORKS, Judgement, StallThreshold, Supervisor, Task
from dsdoctor.hang.waiting import recorded_calls
from dsdoctor.ranks.failure import read_failure
from dsdoctor.ranks.flight_recorder import recorded_operations
from dsdoctor.run.__main__ import parse_command_line
from tests.each import each
from tests.hang.made import calling, elsewhere, incident, view


@contextmanager
def ring(folder: Path) -> Iterator[tuple[RingWriter, RingReader]]:
    """Both ends of a ring."""
    writer = RingWriter(folder / "ring")
    reader = RingReader(folder / "ring")
    yield writer, reader
    writer.close()
    reader.close()


def written(writer: RingWriter, text: bytes, number: int = 0) -> None:
    writer.write(text, clock=float(number), progress=number, stack=number, flags=0)


def test_the_newest_sample_is_read_however_many_there_were(tmp_path: Path) -> None:
    with ring(tmp_path) as (writer, reader):
        seen = [reader.payload()]
        for number in range(20):
            written(writer, b"x" * number * 100, number)
            seen.append(reader.payload())

    assert [len(text) for text in seen if text is not None] == [number * 100 for number in range(1, 20)]
    assert seen[:2] == [None, None]


def test_a_sample_that_does_not_fit_leaves_only_its_head(tmp_path: Path) -> None:
    with ring(tmp_path) as (writer, reader):
        written(writer, b"x" * (SLOT_BYTES + 1), 7)

        beat = reader.beat()
        assert (reader.payload(), beat and beat.progress) == (None, 7)


def test_a_sample_that_was_half_overwritten_is_not_taken(tmp_path: Path) -> None:
    with ring(tmp_path) as (writer, reader):
        written(writer, b"good")
        content = bytearray((tmp_path / "ring").read_bytes())
        content[content.index(b"good")] ^= 1
        (tmp_path / "ring").write_bytes(content)

        assert reader.payload() is None


def test_a_rank_writes_where_it_stands(tmp_path: Path) -> None:
    with ring(tmp_path) as (writer, reader):
        sampler = Sampler(writer, str(tmp_path / "words"), rank=3, world=4, patience=0.0, tend=lambda: None)
        sampler.engine = SimpleNamespace(global_steps=5, micro_steps=9)
        sampler.look()
        sample = decoded(reader.payload() or b"", Sample)

    assert sample is not None
    assert (sample.rank, sample.world, sample.step, sample.micro_step, sample.joined) == (3, 4, 5, 9, False)
    assert "test_a_rank_writes_where_it_stands" in [frame.function for frame in sample.threads[0].frames]


class Left:
    """What a function of the script leaves behind."""


def test_what_a_function_of_the_script_leaves_behind_is_not_kept_by_a_look(tmp_path: Path) -> None:
    """The frames of all threads hold the watch's own: a circle, in which the script's would stay until a garbage collection."""
    entered, leave = threading.Event(), threading.Event()
    kept: list[weakref.ref[Left]] = []

    def step() -> None:
        left = Left()
        kept.append(weakref.ref(left))
        entered.set()
        leave.wait(20)

    script = threading.Thread(target=step)
    gc.disable()
    try:
        with ring(tmp_path) as (writer, _):
            sampler = Sampler(writer, str(tmp_path / "words"), rank=0, world=2, patience=0.0, tend=lambda: None)
            script.start()
            assert entered.wait(20)
            watching = threading.Thread(target=sampler.look)
            watching.start()
            watching.join()
            leave.set()
            script.join()

            assert kept[0]() is None
    finally:
        gc.enable()


class LetGo:
    """An engine that its script drops at the very moment in which the watch reads it."""

    ended: list[int]
    global_steps = 3

    def __del__(self) -> None:
        self.ended.append(threading.get_ident())


def test_an_engine_that_the_script_drops_while_it_is_read_does_not_end_in_the_watching_thread(tmp_path: Path) -> None:
    held, LetGo.ended = [LetGo()], []

    def drops(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is stored.__code__ and frame.f_locals["name"] == "global_steps":
            held.clear()

    def looks(sampler: Sampler) -> None:
        sys.setprofile(drops)
        sampler.look()

    with ring(tmp_path) as (writer, _):
        sampler = Sampler(writer, str(tmp_path / "words"), rank=0, world=2, patience=0.0, tend=lambda: None)
        sampler.engine = held[0]
        watching = threading.Thread(target=looks, args=(sampler,))
        watching.start()
        watching.join()

    assert held == LetGo.ended == []
    del sampler, watching
    gc.collect()
    assert LetGo.ended == [threading.get_ident()]


def test_an_engine_that_the_script_drops_is_not_kept(tmp_path: Path) -> None:
    class Engine:
        global_steps = 5

    engine = Engine()
    with ring(tmp_path) as (writer, _):
        sampler = Sampler(writer, str(tmp_path / "words"), rank=0, world=2, patience=0.0, tend=lambda: None)
        sampler.engine = engine
        del engine
        sampler.look()

    assert sampler.engine is None


@each("first_look", [True, False])
def test_an_exception_that_a_script_prints_and_goes_on_is_told_until_it_has_gone_on(
    first_look: bool, tmp_path: Path
) -> None:
    with ring(tmp_path) as (writer, reader):
        sampler = Sampler(writer, str(tmp_path / "words"), rank=3, world=4, patience=9.0, tend=lambda: None)
        sampler.engine = SimpleNamespace(global_steps=5, micro_steps=9)
        told: list[str] = []

        def look(step: int) -> None:
            sampler.engine.global_steps = step
            sampler.look()
            sample = decoded(reader.payload() or b"", Sample)
            told.append(f"{sample.failure} {len(sample.failed_in)}" if sample else "unread")

        if first_look:
            look(4)
        held = fails(sampler, "skipped batch")
        look(5)
        sampler.told = True
        look(5)
        look(6)
        assert not sampler.told
        # the step and the failure are both new
        fails(sampler, "the last")
        look(7)

    assert told[-4:] == [*["ValueError: skipped batch 1"] * 2, " 0", "ValueError: the last 1"]
    assert held() is None


def fails(sampler: Sampler, words: str) -> weakref.ref[threading.Event]:
    """Report an exception with a frame that holds something, which is returned."""
    held = threading.Event()
    try:
        raise ValueError(words)
    except ValueError as error:
        sampler.failed(read_failure(error))
    return weakref.ref(held)


@pytest.mark.parametrize("place", ["a file", "a message", "a source file"])
def test_what_is_no_text_leaves_the_sample_readable(place: str, tmp_path: Path) -> None:
    odd = os.fsdecode(b"caf\xdf \xf0\x9f")
    with ring(tmp_path) as (writer, reader), ExitStack() as stack:
        path, words = tmp_path / odd, "a bad sample"
        sampler = Sampler(writer, str(tmp_path / "words"), rank=3, world=4, patience=0.0, tend=lambda: None)
        if place == "a file":
            os.mkfifo(path)
            stack.enter_context(waiting_thread(path, sampler))
        elif place == "a message":
            words = odd
        source = compile("look()", odd if place == "a source file" else "train.py", "exec")
        try:
            raise ValueError(words)
        except ValueError:
            exec(source, {"look": sampler.look})
        sample = decoded(reader.payload() or b"", Sample)

    assert sample is not None
    told = {"a file": sample.call[1], "a message": sample.handling, "a source file": repr(sample.threads[0])}[place]
    assert "caf" in told
    assert encode(sample)


@contextmanager
def waiting_thread(path: Path, sampler: Sampler) -> Iterator[None]:
    """A thread in place of the one that trains, which waits in the opening of a named pipe."""
    thread = threading.Thread(target=lambda: os.close(os.open(path, os.O_RDONLY)))
    thread.start()
    sampler.pid, sampler._kernel_number = os.getpid(), thread.native_id or 0
    try:
        last = time.monotonic() + 20
        while not any(file_call(sampler.pid, sampler._kernel_number)) and time.monotonic() < last:
            time.sleep(0.01)
        yield
    finally:
        os.close(os.open(path, os.O_WRONLY))
        thread.join()


def run_on(port: int, secret: bytes = b"s" * 32) -> RunIdentity:
    return RunIdentity(key="k", master="127.0.0.1", ports=(port,), secret=secret)


@pytest.mark.parametrize("secret", [b"s" * 32, b"t" * 32], ids=["of the run", "of another run"])
def test_a_report_is_taken_from_this_run_alone(secret: bytes) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answer = Answer(host="node1", ranks=(0,), told=True)
    listener, sent = Listener(run_on(port), answer), list[Sent]()
    report = NodeReport(host="node2", still=7.0, views=(view(2, elsewhere(), 55),))
    sender = threading.Thread(target=lambda: sent.append(send_report(run_on(port, secret), report)))
    sender.start()
    sender.join()
    found = [report for _, report in listener.reports(0.0, enough=1)]
    listener.close()

    ours = secret == b"s" * 32
    assert (found, sent) == (([report], [Sent(answer=answer)]) if ours else ([], [Sent(unproven=True)]))


def test_where_nobody_listens_a_report_is_not_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert send_report(run_on(taken.getsockname()[1]), NodeReport(host="a", still=1.0)) == Sent()


def test_ranks_of_one_run_have_one_key_and_those_of_another_have_not() -> None:
    env = {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    keys = [
        identity({**env, **more}, user=user)
        for more, user in [
            ({}, 1),
            ({"RANK": "3"}, 1),
            ({"MASTER_PORT": "1"}, 1),
            ({}, 2),
            ({"DSDOCTOR_HANG_TOKEN": "x"}, 1),
        ]
    ]

    assert len({run.key for run in keys if run}) == 4
    assert keys[0] == keys[1]
    assert identity({}, user=1) is None


def test_a_folder_that_is_a_link_or_open_to_others_is_not_used(tmp_path: Path) -> None:
    user = os.geteuid()
    for name, prepare in {
        "link": lambda place: place.symlink_to(tmp_path),
        "open": lambda place: (place.mkdir(), place.chmod(0o777)),
    }.items():
        base = tmp_path / name
        base.mkdir()
        prepare(base / f"dsdoctor-hang-{user}")

        with pytest.raises(OSError, match="shared with other users"):
            node_folder("k", user=user, bases=(str(base),))


def test_a_pause_that_was_survived_makes_the_next_one_no_hang() -> None:
    pace = StallThreshold(after=6.0)
    pace.note(9.0, was_reported=False)
    before = pace.limit()
    pace.note(20.0, was_reported=True)

    assert (before, pace.limit(), StallThreshold().limit()) == (6.0, 40.0, 60.0)


def test_work_is_told_of_before_torch_ends_it() -> None:
    assert StallThreshold().limit_of_work(400.0) == 240.0
    assert StallThreshold(after=6.0).limit_of_work(None) == 30.0


def test_the_fault_handlers_own_words_become_stacks() -> None:
    import faulthandler
    import tempfile

    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        threads = tuple(parse_dump(file.read()))

    main = next(thread for thread in threads if thread.main)
    assert main.frames[-1].function == "test_the_fault_handlers_own_words_become_stacks"


def test_files_of_all_ranks_give_the_verdict_again(tmp_path: Path) -> None:
    made = incident(
        *(
            view(rank, elsewhere() if rank == 2 else calling("all_reduce"), 55 if rank == 2 else 56)
            for rank in range(4)
        ),
        run="k",
        when=5.0,
        nccl=("NCCL: DEAD",),
    )
    write_ranks(tmp_path, made)
    write_ranks(tmp_path, incident(view(9, elsewhere(), 1), run="of yesterday", when=1.0))

    assert read_ranks(tmp_path) == made
    assert [finding.rule for finding in judge_folder(tmp_path)[1].findings] == ["hang-rank-behind"]


def dump(rank: int, sequence: int, *, world: int = 3, size: int = 4) -> dict[str, object]:
    """A dump of torch's flight recorder."""
    entries = [
        {
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[size if number == sequence else 4]],
            "state": "completed" if number < 56 else "scheduled",
            "timeout_ms": 600_000,
            "is_p2p": False,
            "frames": [{"filename": "/home/a/train.py", "line": 40 + rank, "name": "main"}],
        }
        for number in range(1, sequence + 1)
    ]
    return {"version": "2.10", "pg_config": {"0": {"ranks": str(list(range(world)))}}, "entries": entries}


@pytest.mark.parametrize("kind", ["json", "pickle"])
def test_a_job_that_never_knew_us_is_judged_by_torchs_own_dumps(tmp_path: Path, kind: str) -> None:
    for rank, sequence in enumerate([56, 55, 56]):
        content = dump(rank, sequence)
        text = json.dumps(content).encode() if kind == "json" else pickle.dumps(content, protocol=2 + rank)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(text)
    made, verdict = judge_folder(tmp_path)

    assert made.world == 3
    assert verdict.findings[0].rule == "hang-rank-behind"
    assert verdict.findings[0].title.startswith("rank 1 ")
    assert "train.py:41" in verdict.findings[0].title


def test_nothing_in_a_dump_is_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    for protocol in range(2, 6):
        with pytest.raises(ValueError, match="more than plain values"):
            plain_pickle(pickle.dumps({"entries": [Evil()]}, protocol=protocol))
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UsageError, match="not a flight recorder dump"):
        judge_folder(tmp_path)
    assert not (tmp_path / "made").exists()


NO_NUMBER: list[dict[str, Any]] = [
    *({"collective_seq_id": value} for value in ("abc", [1], 1e400, 10**400, -5, 2**70)),
    *({"process_group": value} for value in (5, {})),
    *({"input_sizes": value} for value in (5, [["a"]], [[10**400]])),
    *({"frames": value} for value in (5, [{"line": "x"}], [[1]])),
    {"timeout_ms": "x"},
    {"time_created_ns": "x"},
    {"input_dtypes": 5},
    {"profiling_name": [1]},
]


@each("entry", NO_NUMBER)
def test_a_field_of_a_dump_that_torch_would_not_write_is_said(entry: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [{"collective_seq_id": 1}, entry]}))
    with pytest.raises(UsageError, match="not a flight recorder dump"):
        judge_folder(tmp_path)


@pytest.mark.parametrize("ranks", ["[9999999999999999999999]", "9" * 5000, ""])
def test_a_rank_that_no_run_has_is_none(ranks: str, tmp_path: Path) -> None:
    content = {"entries": [{"collective_seq_id": 1}], "pg_config": {"0": {"ranks": ranks}}}
    for name in ("nccl_trace_rank_0", "nccl_trace_rank_99999999999999999999"):
        (tmp_path / name).write_bytes(pickle.dumps(content))

    assert judge_folder(tmp_path)[0].world == 1


def test_a_dump_that_has_no_end_is_said_so_at_once(tmp_path: Path) -> None:
    """Lists that are shared 28 deep, or nested, or a mark before each of many values: each a few bytes, or quadratic to read."""
    shared: list[Any] = ["text"]
    for _ in range(28):
        shared = [shared, shared]
    endless: list[Any] = []
    endless.append(endless)
    bombs = [pickle.dumps({"entries": [{"profiling_name": value}]}, 2) for value in (shared, endless)]
    bombs += [b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", b"\x80\x02" + b"N" * 60_000 + b"(t" * 60_000 + b"."]
    before = time.process_time()
    for bomb in bombs:
        (tmp_path / "nccl_trace_rank_0").write_bytes(bomb)
        with pytest.raises(UsageError, match="not a flight recorder dump"):
            judge_folder(tmp_path)

    assert time.process_time() - before < 20, "one of them took more than 100 s"


@pytest.mark.parametrize("calls", ["x", "AAA=", "AAAA====", "\u00e4"])
def test_a_history_that_is_none_is_left_out(calls: str) -> None:
    made = Operation(sequence=3, name="all_reduce", sizes=((4,),), types=(), state="done", called=1.0)
    past = History(first=1, kinds=(made,), calls=calls)
    group = GroupState(name="0", ranks=(0, 1), sequence=3, operations=(made,), timeout=None, history=past)

    assert recorded_calls(group)[-1] == made


@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x04", b"abc", b"{}", b"[1]", b"\x80\x04]."])
def test_a_dump_that_is_none_is_said_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "nccl_trace_rank_0").write_bytes(content)

    with pytest.raises(UsageError):
        judge_folder(tmp_path)


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None], ids=["empty", "nowhere"])
def test_a_folder_without_files_is_a_usage_error(tmp_path: Path, make: object) -> None:
    make(tmp_path / "x")  # type: ignore[operator]

    with pytest.raises(UsageError, match=r"no folder|holds no files"):
        judge_folder(tmp_path / "x")


def test_the_watch_is_on_and_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def options(*argv: str, **env: str) -> dict[str, object] | None:
        return parse_command_line([*argv, "-m", "train"], env).hang

    assert options() == {"after": None, "on_hang": "report", "folder": str(tmp_path / "dsdoctor-hang")}
    assert options("--hang", "off") is None
    assert options(DSDOCTOR_HANG="off") is None
    given = options("--hang-after", "30", "--on-hang", "stop", "--hang-dir", "/x")
    assert given == {"after": 30.0, "on_hang": "stop", "folder": "/x"}


@pytest.mark.parametrize(
    "argv",
    [("--hang", "maybe"), ("--on-hang", "cry"), ("--hang-after", "0"), ("--hang-after", "nan"), ("--hang-after", "x")],
)
def test_options_that_make_no_sense_are_said(argv: tuple[str, str]) -> None:
    with pytest.raises(UsageError):
        parse_command_line([*argv, "-m", "train"], {})


def test_what_switches_the_watch_on_for_later_commands_is_lines_of_a_shell(tmp_path: Path) -> None:
    ours = [sys.executable, "-m", "dsdoctor.run", "--hang-after", "7", "--hang-dir", str(tmp_path / "a folder")]
    done = subprocess.run([*ours, "--export", "sh"], capture_output=True, text=True, check=True)
    shown = subprocess.run(
        ["sh", "-c", done.stdout + 'printf %s "$DSDOCTOR_RUN"'], capture_output=True, text=True, check=True
    )

    order = json.loads(shown.stdout)
    assert (order["main"], order["hang"]["after"], order["hang"]["folder"]) == (0, 7.0, str(tmp_path / "a folder"))


@pytest.mark.parametrize("argv", [["--export", "fish"], ["--export", "sh", "train.py"]])
def test_an_export_that_makes_no_sense_is_said(argv: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_command_line(argv, {})


def test_what_goes_to_a_disk_without_an_ended_system_call_is_seen(tmp_path: Path) -> None:
    size = 8 << 20
    with (tmp_path / "mapped").open("w+b") as file:
        file.truncate(size)
        before = moved_bytes(os.getpid())
        with mmap.mmap(file.fileno(), size) as mapped:
            mapped[:] = bytes(size)
            mapped.flush()
        seen = moved_bytes(os.getpid()) - before

    if seen < size and os.environ.get("CI") is None:
        pytest.skip("this folder is on no disk")
    assert seen >= size


def recorded(name: str, sequence: int, backend: str, when: int = 5) -> dict[str, object]:
    """An entry of a flight recorder."""
    return {
        "process_group": [name, ""],
        "collective_seq_id": sequence,
        "profiling_name": f"{backend}:all_reduce",
        "time_created_ns": when * 10**9,
        "timeout_ms": 600_000,
        "input_sizes": [[4]],
        "state": "scheduled",
    }


def test_the_recorder_of_nccl_is_read_beside_that_of_gloo_and_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    gloo, nccl = recorded("1", 3, "gloo"), recorded("0", 7, "nccl", when=9)
    c10d = SimpleNamespace(
        _dump_fr_trace_json=lambda: json.dumps({"entries": [gloo]}).encode(),
        _dump_nccl_trace_json=lambda: json.dumps({"entries": [gloo, nccl]}),
    )
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_distributed_c10d=c10d))  # type: ignore[arg-type]

    found = recorded_operations()

    told = {name: [(each["sequence"], each["called"]) for each in group["operations"]] for name, group in found.items()}
    assert told == {"1": [(3, 5.0)], "0": [(7, 9.0)]}


@pytest.mark.parametrize(
    ("entry", "state"),
    [({"state": "completed"}, "done"), ({"retired": True}, "done"), ({"state": "started"}, "started")],
)
def test_a_call_that_has_completed_is_done(
    entry: dict[str, object], state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"entries": [{**recorded("1", 3, "gloo"), **entry}]})
    c10d = SimpleNamespace(_dump_fr_trace_json=lambda: text)
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_distributed_c10d=c10d))  # type: ignore[arg-type]

    assert [each["state"] for each in recorded_operations()["1"]["operations"]] == [state]


def test_the_exception_that_a_thread_handles_is_told_with_its_place() -> None:
    inside, enough, ident = threading.Event(), threading.Event(), list[int]()

    def handles() -> None:
        ident.append(threading.get_ident())
        try:
            raise ValueError("a bad sample")
        except ValueError:
            inside.set()
            enough.wait()

    thread = threading.Thread(target=handles)
    thread.start()
    inside.wait()
    said = [handled_exception(ident[0]), handled_exception(threading.get_ident())]
    enough.set()
    thread.join()

    assert said[0].startswith(f"ValueError: a bad sample (raised at {__file__}:")
    assert said[1] == ""


@contextmanager
def supervised(
    folder: Path, judge: Callable[[Incident], Judgement], mention: Callable[[Any, Node], None] = lambda *_: None
) -> Iterator[tuple[Supervisor, RingWriter, list[Incident]]]:
    """The supervisor of one rank, this process, which moves when the writer's number changes; and what it tells."""
    seen: list[Incident] = []
    task = Task(
        folder=folder,
        options=HangOptions(after=0.001),
        run=run_on(1),
        host="node1",
        tell=lambda incident, _node: seen.append(incident),
        write=seen.append,
        mention=mention,
        judge=judge,
    )
    writer = RingWriter(folder / f"rank-00000-{os.getpid()}.ring")
    written(writer, b"{}")
    supervisor = Supervisor(task)
    for _ in range(3):
        supervisor.node.look()
        supervisor.node.look_at_children()
    yield supervisor, writer, seen
    writer.close()


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([WORKS] * 3, 1),
        ([WORKS, HANGS, HANGS], 2),
        ([LATE, LATE, WORKS, HANGS], 2),
        ([HANGS, HANGS], 1),
        ([""], 0),
    ],
)
def test_what_worked_when_it_was_reported_of_is_told_again_when_it_hangs(
    states: list[str], told: int, tmp_path: Path
) -> None:
    left = iter(states)
    with supervised(tmp_path, lambda _: Judgement(state=next(left))) as (supervisor, _, seen):
        for _ in states:
            time.sleep(0.02)
            supervisor.decide()

    assert len(seen) == told


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (Judgement(state=HANGS), "progress again after 0 s; the limit is now"),
        (Judgement(state=LATE, late=(1,)), "progress again after 0 s (rank 1 had been late); the limit is now"),
        (Judgement(state=""), ""),
    ],
)
def test_a_pause_that_was_reported_and_ends_is_taken_back(state: Judgement, text: str, tmp_path: Path) -> None:
    said: list[str] = []
    with supervised(tmp_path, lambda _: state, lambda what, _: said.append(what)) as (supervisor, writer, seen):
        time.sleep(0.05)
        supervisor.decide()
        written(writer, b"{}", number=1)
        supervisor.node.look()
        supervisor.decide()

    assert len(seen) == len(said) == bool(text)
    assert all(line.startswith(text) for line in said)


@pytest.mark.parametrize(("state", "ends"), [(LATE, False), (WORKS, False), (HANGS, True)])
def test_on_hang_stop_ends_no_rank_that_may_still_come(state: str, ends: bool, tmp_path: Path) -> None:
    with supervised(tmp_path, lambda _: Judgement(state=state, late=(0,))) as (supervisor, _, seen):
        supervisor.task = replace(supervisor.task, options=HangOptions(after=0.001, on_hang="stop"))
        stopped: list[bool] = []
        supervisor._stop = lambda: stopped.append(True)  # type: ignore[method-assign]
        time.sleep(0.05)
        supervisor.decide()

    assert len(seen) == 1
    assert bool(stopped) is ends


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
@pytest.mark.parametrize("harm", ["a ring", "a pipe", "an own folder with a ring of another", "none"])
def test_a_ring_that_another_user_made_for_a_process_is_not_read(harm: str) -> None:
    """In /tmp anybody may make one that is called as the watch's own."""
    stranger, pid = 54321, os.getpid()
    user = 0 if harm in {"none", "an own folder with a ring of another"} else stranger
    outer = Path(f"/tmp/dsdoctor-hang-{user}")
    was_there = outer.exists()
    folder = outer / f"test-{pid}"
    folder.mkdir(parents=True, mode=0o700)
    path = folder / f"rank-00000-{pid}.ring"
    try:
        if harm == "a pipe":
            os.mkfifo(path)
        else:
            writer = RingWriter(path)
            written(writer, json.dumps({"rank": 0, "world": 2, "pid": pid, "time": 0.0, "joined": True}).encode())
            writer.close()
        if harm != "none":
            os.chown(path, stranger, stranger)
        if user == stranger:
            for each in (outer, folder):
                os.chown(each, stranger, stranger)

        assert (watched_rank(RankProcess(pid=pid, rank=0, world=2), "node1") is not None) is (harm == "none")
    finally:
        shutil.rmtree(outer if not was_there else folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
@pytest.mark.parametrize("own", [True, False])
def test_no_file_is_read_for_what_a_rank_of_another_user_says(own: bool, tmp_path: Path) -> None:
    frames = [{"file": str(tmp_path / "private.py"), "line": 2, "function": "main", "text": ""}]
    (tmp_path / "private.py").write_text("\nsecret()\n")
    path = tmp_path / f"rank-00000-{os.getpid()}.ring"
    writer = RingWriter(path)
    sample = {"rank": 0, "world": 2, "pid": os.getpid(), "time": 0.0, "joined": True}
    written(
        writer, json.dumps({**sample, "threads": [{"name": "MainThread", "main": True, "frames": frames}]}).encode()
    )
    writer.close()
    if not own:
        os.chown(path, 54321, -1)
    rank = LocalRank(path, "node1")
    rank.look()
    seen = rank.view().sample
    rank.close()

    assert seen is not None
    assert seen.threads[0].frames[0].text == ("secret()" if own else "")


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder", "none"])
def test_a_source_that_is_no_file_has_no_line_and_keeps_nobody_waiting(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "train.py"
    if kind == "a pipe":
        os.mkfifo(place)
    elif kind == "a device":
        place.symlink_to("/dev/zero")
    elif kind == "a folder":
        place.mkdir()

    assert Sources().line(str(place), 1) == ""


@pytest.mark.slow
def test_a_fault_handler_of_the_scripts_own_for_sigusr2_is_left_to_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import faulthandler, os, signal, sys\n"
        "from pathlib import Path\n"
        "from dsdoctor.hang.models import HangOptions\n"
        "from dsdoctor.hang.start import Beginning\n"
        "own = open(sys.argv[1] + '/own', 'w')\n"
        "if len(sys.argv) > 2: faulthandler.register(signal.SIGUSR2, file=own, all_threads=False)\n"
        "begun = Beginning(HangOptions(after=30.0, folder=sys.argv[1]), Path(__file__), rank=0, world=1)\n"
        "signal.raise_signal(signal.SIGUSR2)\n"
        "print(os.fstat(own.fileno()).st_size > 0, begun.sampler._answers)\n"
        "begun._starts = 99\n"
        "begun.sampler.close()\n"
    )
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TMPDIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, str(script), str(tmp_path), *more], capture_output=True, text=True, env=env, check=True
        ).stdout.split()
        for more in ([], ["own"])
    ]

    assert said == [["False", "True"], ["True", "False"]]
