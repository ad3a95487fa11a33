import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsdoctor.comm.local.interfaces import bounded
from dsdoctor.core.errors import UsageError
from dsdoctor.core.host import MAX_ANSWER_BYTES, Answer, LocalHost
from dsdoctor.core.processes import state_of
from dsdoctor.core.snapshot import RecordedHost, Recorder, save
from tests.conftest import Disk


def test_a_folder_plays_a_machine(disk: Disk) -> None:
    host = disk({"/etc/os-release": "Debian", "/bin/tool": "#!/bin/sh\necho hello"}, PATH="/nowhere:/bin")

    assert host.read("/etc/os-release") == "Debian"
    assert host.which("tool") == "/bin/tool"
    assert host.glob("/etc/*") == ("/etc/os-release",)
    assert host.run(["/bin/tool"], timeout=5).stdout == "hello\n"


def test_links_are_followed_inside_the_folder(disk: Disk) -> None:
    host = disk({"/usr/local/cuda-13.0/a": ""}, links={"/usr/local/cuda": "/usr/local/cuda-13.0"})

    assert host.resolve("/usr/local/cuda") == "/usr/local/cuda-13.0"


def test_what_is_not_there_is_none() -> None:
    host = LocalHost(env={})

    assert host.read("/no/such/file") is None
    assert host.which("sh") is None
    assert host.glob("/no/such/*") == ()
    assert host.run(["/no/such/program"], timeout=5).returncode == 127
    assert host.read("/bad\0name") is None


def test_what_is_no_regular_file_is_not_read_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    fifo, empty = tmp_path / ".nccl.conf", tmp_path / "empty"
    os.mkfifo(fifo)
    os.mkfifo(empty)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        # with a writer a FIFO has bytes, and is no file all the same
        writer = os.open(fifo, os.O_RDWR)
        os.write(writer, b"NCCL_ALGO=Ring\n")
        host = LocalHost(env={"HOME": str(tmp_path)})
        answers = bounded(
            lambda: [host.read(str(tmp_path / name)) for name in (".nccl.conf", "empty", "socket", ".")], 30
        )
        device = host.read("/dev/zero")
        os.close(writer)

    assert answers == [None] * 4
    assert device is None
    assert host.read("/proc/self/stat")


def wait_until_ended(*pids: int) -> None:
    """Signals arrive when the kernel comes to it."""
    deadline = time.monotonic() + 10
    while left := [pid for pid in pids if state_of(pid) not in {"", "Z"}]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    script = f"sh -c 'echo $$ > {marker}; sleep 60' & wait"
    started = time.monotonic()

    # long enough for the child to be there on a busy machine
    answer = LocalHost().run(["/bin/sh", "-c", script], timeout=2)

    assert answer.returncode is None
    assert time.monotonic() - started < 40
    wait_until_ended(int(marker.read_text()))


DAEMON = "import os, sys, time; os.fork() or (os.setsid(), time.sleep(60)); print('answer', flush=True); {end}"
"""A tool that leaves a server behind, in a session of its own, which holds the tool's pipes."""


def leaves_daemon(end: str = "") -> list[str]:
    return [sys.executable, "-S", "-c", DAEMON.format(end=end)]


def test_a_tool_that_leaves_a_server_behind_is_not_waited_for() -> None:
    started = time.monotonic()

    answer = LocalHost().run(leaves_daemon(), timeout=20)

    assert (answer.returncode, answer.stdout) == (0, "answer\n")
    assert time.monotonic() - started < 40


def test_a_tool_that_hangs_beside_its_server_is_ended_at_its_limit() -> None:
    started = time.monotonic()

    answer = LocalHost().run(leaves_daemon("time.sleep(60)"), timeout=0.6)

    assert answer == Answer(returncode=None, stderr="no answer within 0.6 s")
    assert time.monotonic() - started < 40


def test_work_that_leaves_a_server_behind_comes_to_its_end(tmp_path: Path) -> None:
    heard: list[str] = []
    started = time.monotonic()

    status = LocalHost().stream(leaves_daemon("sys.exit(3)"), cwd=tmp_path, env=dict(os.environ), on_line=heard.append)

    assert (status, heard) == (3, ["answer"])
    assert time.monotonic() - started < 40


def test_of_a_tool_that_prints_without_end_only_the_beginning_is_kept() -> None:
    flood = "import sys; line = b'x' * 1048575 + b'\\n'\nfor _ in range(64): sys.stdout.buffer.write(line)"

    answer = LocalHost().run([sys.executable, "-S", "-c", flood], timeout=60)

    assert (answer.returncode, len(answer.stdout)) == (0, MAX_ANSWER_BYTES)


def test_of_a_line_without_end_only_the_beginning_is_kept_and_each_byte_is_touched_once(tmp_path: Path) -> None:
    """105 MB in one line took 100 CPU-seconds: all that had come was copied with each piece that came."""
    flood = "import sys; part = b'x' * 1048576\nfor _ in range(105): sys.stdout.buffer.write(part)\nprint('\\nlast')"
    heard: list[str] = []
    used = time.thread_time()

    argv = [sys.executable, "-S", "-c", flood]
    done = LocalHost().work(argv, cwd=tmp_path, env=dict(os.environ), on_line=heard.append)

    assert done.status == 0
    assert [len(line) for line in heard] == [MAX_ANSWER_BYTES, len("last")]
    assert heard[1] == "last"
    assert time.thread_time() - used < 15


def test_a_last_line_without_an_end_and_bytes_that_are_no_text_are_handed_over(tmp_path: Path) -> None:
    heard: list[str] = []

    LocalHost().stream(["/bin/sh", "-c", r"printf 'a\n\nb\377'"], cwd=tmp_path, env={}, on_line=heard.append)

    assert heard == ["a", "", "b\ufffd"]


def test_a_tool_that_closes_its_pipes_and_works_on_is_waited_for() -> None:
    answer = LocalHost().run(["/bin/sh", "-c", "exec >&- 2>&-; sleep 0.3; exit 4"], timeout=20)

    assert answer.returncode == 4


def test_stop_reaches_children_in_process_groups_of_their_own(tmp_path: Path) -> None:
    # ninja starts every compiler so: killing the group alone would leave them running
    script = (
        "import os, time; os.fork() or (os.setpgid(0, 0), print(os.getpid(), flush=True), time.sleep(60)); os.wait()"
    )
    host = LocalHost()
    children: list[int] = []

    def on_line(line: str) -> None:
        children.append(int(line))
        host.stop()

    host.stream([sys.executable, "-c", script], cwd=tmp_path, env=dict(os.environ), on_line=on_line)

    assert len(children) == 1
    wait_until_ended(*children)


def test_stream_hands_over_lines_and_the_status(tmp_path: Path) -> None:
    lines: list[str] = []

    status = LocalHost().stream(
        ["/bin/sh", "-c", "echo one; echo two >&2; exit 7"], cwd=tmp_path, env={}, on_line=lines.append
    )

    assert (status, lines) == (7, ["one", "two"])


@pytest.mark.parametrize("apart", ["os.setpgid(0, 0)", "os.setsid() and None"])
def test_kill_9_leaves_no_compiler(apart: str, tmp_path: Path) -> None:
    """The work has a child in a process group or a session of its own, as a compiler under ninja or behind a launcher has;
    dsdoctor is killed, and cannot clean up."""
    work = f"import os, time; print(os.getpid(), os.fork() or {apart}, flush=True); time.sleep(60)"
    code = (
        "import os, pathlib, sys; from dsdoctor.core.host import LocalHost;"
        f"LocalHost().stream([sys.executable, '-S', '-c', {work!r}],"
        " cwd=pathlib.Path('.'), env=dict(os.environ), on_line=lambda line: print(line, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    with process.stdout:
        pids = {int(word) for _ in range(2) for word in process.stdout.readline().split() if word.isdigit()} - {0}

    process.kill()
    process.wait()

    assert len(pids) == 2
    wait_until_ended(*pids)


def test_work_ends_with_the_commands_own_status_signal_or_absence(tmp_path: Path) -> None:
    def ending(*argv: str) -> int:
        return LocalHost().stream(argv, cwd=tmp_path, env=dict(os.environ), on_line=print)

    assert ending("sh", "-c", "exit 41") == 41
    assert ending("sh", "-c", "kill -SEGV $$") == -signal.SIGSEGV
    assert ending("sh", "-c", "kill -9 $$") == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ending("no-such-program")


def test_stop_ends_what_is_running_and_what_would_start(tmp_path: Path) -> None:
    host = LocalHost()
    status = host.stream(
        ["/bin/sh", "-c", "echo ready; sleep 60"], cwd=tmp_path, env=dict(os.environ), on_line=lambda _: host.stop()
    )

    assert status < 0
    assert host.stream(["/bin/sleep", "60"], cwd=tmp_path, env={}, on_line=print) < 0


def test_a_recorded_machine_answers_as_it_did(disk: Disk, tmp_path: Path) -> None:
    recorder = Recorder(disk({"/bin/tool": "#!/bin/sh\necho 1"}, PATH="/bin", SECRET_TOKEN="hush", DS_X="1"))
    asked = (
        recorder.which("tool"),
        recorder.run(["/bin/tool"], timeout=5),
        recorder.variables("DS_"),
        recorder.glob("/bin/*"),
        recorder.read("/none"),
        recorder.cpus(),
    )
    file = tmp_path / "machine.json"
    save(recorder.snapshot, file, home="/none")
    host = RecordedHost.load(file)

    assert (
        host.which("tool"),
        host.run(["/bin/tool"], timeout=5),
        host.variables("DS_"),
        host.glob("/bin/*"),
        host.read("/none"),
        host.cpus(),
    ) == asked
    assert "hush" not in file.read_text()


def test_a_recorded_machine_knows_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"schema": "dsdoctor-snapshot/1", "answers": {}}))
    host = RecordedHost.load(file)

    assert host.which("gcc") is None
    assert host.run(["gcc"], timeout=1) == Answer(returncode=127, stderr="not in the snapshot")


@pytest.mark.parametrize("text", ["", "{}x", "[]", '{"schema": "other/9", "answers": {}}'])
def test_what_is_no_snapshot_is_said(text: str, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    file.write_text(text)

    with pytest.raises(UsageError, match="snapshot"):
        RecordedHost.load(file)


def test_a_command_takes_no_program_and_no_temporary_folder_of_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc asks for a gcc by its name, and gives it files in TMPDIR."""
    planted, shared, own = tmp_path / "planted", tmp_path / "shared", tmp_path / "own"
    for folder in (planted, shared, own):
        folder.mkdir()
    shared.chmod(0o777)
    (planted / "gcc").write_text("#!/bin/sh\ntouch ran\n")
    (planted / "gcc").chmod(0o755)
    monkeypatch.chdir(planted)
    tool = tmp_path / "nvcc"
    tool.write_text('#!/bin/sh\ngcc --version >/dev/null 2>&1\necho "$TMPDIR"\n')
    tool.chmod(0o755)

    for path in (":/usr/bin:/bin", ".:/usr/bin:/bin", "/usr/bin:/bin:", "../planted:/usr/bin:/bin"):
        told = LocalHost(env={"PATH": path, "TMPDIR": str(shared)}).run([str(tool)], timeout=60)
        assert told.stdout == "\n", path
    kept = LocalHost(env={"PATH": "/usr/bin:/bin", "TMPDIR": str(own)}).run([str(tool)], timeout=60)

    assert kept.stdout == f"{own}\n"
    assert not (planted / "ran").exists()
