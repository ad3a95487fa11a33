"""Every command with every fault that a file or a disk can have: the exit status, the words, and one whole document."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsdoctor.cli.app import name_of
from dsdoctor.core.errors import DoctorError, refused_by_system
from dsdoctor.core.processes import fork
from dsdoctor.core.trust import distrust
from tests.builder import test_make
from tests.builder.test_wheel import INFO, contents, wheel
from tests.cli.runner import run
from tests.overflow.on_disk import chain, trace

MACHINE = str(Path(__file__).parents[1] / "machines" / "one-toolkit.json")
NO_UTF8 = os.fsdecode(b"wei\xdf.json")
SETUP = "from setuptools import setup; setup(name='deepspeed', version='1.0')"
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount, and be somebody else")

READERS: dict[str, tuple[str, ...]] = {
    "look": ("machine", "look", "--machine", "FILE"),
    "check": ("check", "--machine", "FILE"),
    "plan": ("build-wheel", "--dry-run", "--machine", "FILE"),
    "plan --node": ("build-wheel", "--dry-run", "--machine", MACHINE, "--node", "FILE"),
    "plan --for": ("build-wheel", "--dry-run", "--machine", MACHINE, "--for", "FILE"),
    "env": ("env", "--machine", "FILE"),
    "verify": ("wheel", "verify", "WHEEL", "--machine", "FILE"),
    "pick": ("wheel", "pick", "FOLDER", "--machine", "FILE"),
    "install --hostfile": ("install", "WHEEL", "--hostfile", "FILE"),
    "compare": ("machine", "compare", MACHINE, "FILE"),
    "trace show": ("trace", "show", "FILE"),
    "trace compare": ("trace", "compare", "FILE", "FILE"),
    "trace plot": ("trace", "plot", "FILE"),
    "trace show --headroom": ("trace", "show", "--headroom", "float16", "FILE"),
}


def not_there(path: Path) -> None:
    """No file at all."""


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 200_000)


def nested_objects(path: Path) -> None:
    path.write_bytes(b'{"answers":' * 200_000)


def bytes_of_no_text(path: Path) -> None:
    path.write_bytes(b'{"schema":"\xff"}\n')


def three_gigabytes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def a_pipe(path: Path) -> None:
    """One that nobody writes to: whoever opens it as a file waits for ever."""
    os.mkfifo(path)


def a_device_without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, a trace and a source."""
    made = tmp_path_factory.mktemp("ends")
    wheel(made, contents(os.urandom(1 << 16)))
    trace(made / "traced", *chain(0, 1.0, 2.0))
    (made / "DeepSpeed" / "op_builder").mkdir(parents=True)
    for name, text in {"setup.py": SETUP, "version.txt": "1.0\n", "op_builder/all_ops.py": ""}.items():
        (made / "DeepSpeed" / name).write_text(text)
    (made / "DeepSpeed" / "large").write_bytes(os.urandom(1 << 18))
    return made


def filled(arguments: tuple[str, ...], folder: Path, **places: Path | str) -> list[str]:
    places = {"WHEEL": next(folder.glob("*.whl"), ""), "FOLDER": folder, "TRACE": folder / "traced", **places}
    return [str(places.get(word, word)) for word in arguments]


@pytest.mark.parametrize(
    "fault",
    [
        nested,
        three_gigabytes,
        a_pipe,
        pytest.param(a_device_without_end, marks=pytest.mark.slow),
        pytest.param(not_there, marks=pytest.mark.slow),
        pytest.param(nested_objects, marks=pytest.mark.slow),
        pytest.param(bytes_of_no_text, marks=pytest.mark.slow),
    ],
)
def test_a_file_that_is_none_is_a_usage_error_in_every_command(
    fault: Callable[[Path], None], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / NO_UTF8
    fault(path)

    for name, arguments in READERS.items():
        done = run(*filled(arguments, folder, FILE=path), "--json", DSDOCTOR_CACHE=str(tmp_path / "cache"))

        document = json.loads(done.stdout)
        command = name_of(arguments)
        assert (done.returncode, document["command"], done.stderr) == (2, command, ""), name
        (finding,) = document["findings"]
        assert finding["rule"] == "usage", name
        assert "wei\\udcdf.json" in finding["title"], name


OTHER_READERS = {
    "diagnose": ("diagnose", "FILE"),
    "config": ("config", "FILE"),
    "comm": ("comm", "--read", "FILE"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_READERS)
@pytest.mark.parametrize("fault", [a_pipe, a_device_without_end])
def test_a_pipe_and_a_device_keep_no_reader_of_other_texts_waiting(
    fault: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    fault(tmp_path / "file")
    done = run(*filled(OTHER_READERS[name], tmp_path, FILE=tmp_path / "file"), "--json")

    (finding,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, finding["rule"], done.stderr) == (2, "usage", "")
    assert f"{tmp_path}/file" in finding["title"]


@pytest.mark.parametrize("size", ["inf", "1e308", "nan", "0"])
def test_a_size_that_no_file_has_is_a_usage_error(size: str, tmp_path: Path) -> None:
    done = run("checkpoint", str(tmp_path), "--merge", str(tmp_path / "out"), "--largest-file", size)

    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "--largest-file" in done.stderr


@pytest.mark.parametrize("fault", [a_pipe, a_device_without_end])
def test_a_wheel_that_is_no_file_is_refused_at_once(fault: Callable[[Path], None], tmp_path: Path) -> None:
    made = tmp_path / "deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl"
    fault(made)

    verified = run("wheel", "verify", str(made), "--machine", MACHINE, "--json")
    picked = run("wheel", "pick", str(tmp_path), "--machine", MACHINE, "--json", DSDOCTOR_CACHE=str(tmp_path / "cache"))

    assert (verified.returncode, "it is not a regular file" in verified.stdout) == (2, True)
    assert (picked.returncode, "it is not a regular file" in picked.stdout) == (1, True)


def test_what_stands_in_a_stream_of_this_process_is_read_as_a_file_is() -> None:
    out, into = os.pipe()
    os.write(into, b"[")
    os.close(into)

    read = run("machine", "look", "--machine", f"/dev/fd/{out}", "--json")

    os.close(out)
    (finding,) = json.loads(read.stdout)["findings"]
    assert "is not a machine snapshot" in finding["title"]
    assert "it is not a regular file" not in finding["title"]


def test_a_name_that_is_no_utf8_is_shown_in_a_document_and_on_a_terminal_alike(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / NO_UTF8).write_bytes(Path(MACHINE).read_bytes())
    log = tmp_path / NO_UTF8
    log.write_text("step 1 loss 2.5\n")

    compared = run("machine", "compare", str(tmp_path / "a" / NO_UTF8), str(tmp_path / "b" / NO_UTF8), "--json")
    diagnosed, shown = run("diagnose", str(log), "--json"), run("diagnose", str(log))

    assert (compared.returncode, json.loads(compared.stdout)["differences"]) == (0, [])
    assert json.loads(diagnosed.stdout)["logs"][0]["name"].endswith("/wei\\udcdf.json")
    assert "/wei\\udcdf.json (1 lines)" in shown.stdout


def test_a_manifest_in_a_wheel_that_is_nested_without_end_says_nothing_of_the_wheel(tmp_path: Path) -> None:
    parts = contents(b"no library", **{f"{INFO}/dsdoctor.json": b"[" * 200_000})
    made = wheel(tmp_path, parts)
    made.with_name(f"{made.name}.json").write_bytes(b"[" * 200_000)

    verified = run("wheel", "verify", str(made), "--machine", MACHINE, "--json")
    picked = run("wheel", "pick", str(tmp_path), "--machine", MACHINE, "--json")

    assert [json.loads(done.stdout)["command"] for done in (verified, picked)] == ["wheel verify", "wheel pick"]
    assert {verified.returncode, picked.returncode} <= {0, 1}


WRITERS: dict[str, tuple[str, ...]] = {
    "record": ("machine", "record", "TARGET.json"),
    "trace plot": ("trace", "plot", "TRACE", "--out", "TARGET.html"),
    "comm --html": ("comm", "--html", "TARGET.html"),
    "comm --out": ("comm", "--out", "TARGET"),
    "build-wheel --out": ("build-wheel", "--out", "TARGET"),
    "build-wheel --index": ("build-wheel", "--out", "TARGET", "--index", "TARGET"),
    "matrix --out": ("build-wheel", "--torch", "2.13.0", "--out", "TARGET"),
    "prebuild --out": ("prebuild", "--out", "TARGET"),
}
KEEPERS: dict[str, tuple[str, ...]] = {
    "plan": ("build-wheel", "--dry-run", "--machine", MACHINE, "--source", "TREE"),
    "check": ("check", "--machine", MACHINE, "--source", "TREE"),
    "toolkit": ("toolkit", "--python", "BARE"),
    "cache ls": ("cache", "ls"),
    "cache prune": ("cache", "prune"),
    "cache verify": ("cache", "verify"),
    "env": ("env", "--machine", MACHINE),
}


def test_a_target_that_cannot_be_written_is_a_usage_error_that_names_it(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, arguments in WRITERS.items():
        target = tmp_path / "file" / "target"
        words = [word.replace("TARGET", str(target)) for word in filled(arguments, folder)]
        done = run(*words, "--json", DSDOCTOR_CACHE=str(tmp_path / "cache"))

        (finding,) = json.loads(done.stdout)["findings"]
        assert (done.returncode, finding["rule"]) == (2, "usage"), name
        assert f"{target}" in finding["title"], name
        assert "cannot be written" in finding["title"], name
        assert finding["fix"], name


@root
@pytest.mark.slow
def test_a_folder_of_another_user_is_a_usage_error_that_names_it(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as theirs:
        Path(theirs).chmod(0o755)
        words = {
            name: [word.replace("TARGET", f"{theirs}/target") for word in filled(arguments, folder)]
            for name, arguments in WRITERS.items()
            if name != "matrix --out"  # it asks this Python first, which may be root's alone
        }
        for arguments in words.values():
            # everything is imported by root, whose Python this may be, and not even root can write below a file
            run(*[word.replace(theirs, __file__) for word in arguments], "--json")
        answer, told = os.pipe()

        def write() -> None:
            os.setgid(54321)
            os.setgroups([])
            os.setuid(54321)
            ends = {name: run(*arguments, "--json") for name, arguments in words.items()}
            os.write(told, json.dumps({name: [done.returncode, done.stdout] for name, done in ends.items()}).encode())

        os.waitpid(fork(write), 0)
        os.close(told)
        with os.fdopen(answer) as said:
            ends = json.load(said)
        assert not list(Path(theirs).iterdir())

    assert {name: status for name, (status, _) in ends.items()} == dict.fromkeys(words, 2)
    titles = {name: json.loads(out)["findings"][0]["title"] for name, (_, out) in ends.items()}
    assert [title for title in titles.values() if "cannot be written" not in title or theirs not in title] == []


def test_a_cache_that_cannot_be_written_is_no_defect_of_ours(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = tmp_path / "file" / "cache"
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    for name, arguments in KEEPERS.items():
        words = filled(arguments, folder, TREE=folder / "DeepSpeed", BARE=bare)
        done = run(*words, "--json", DSDOCTOR_CACHE=str(cache))

        findings = json.loads(done.stdout)["findings"]
        assert done.returncode in {0, 3}, (name, findings)
        assert name.startswith("env") or "toolkit" in name or done.returncode == 3, name
        assert done.returncode == 0 or "Traceback" not in done.stderr, name


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk on which a page can be written, and no more."""
    disk = tmp_path / "full"
    disk.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(disk)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        (disk / "filling").write_bytes(bytes(56 << 10))
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@root
@pytest.mark.slow
def test_a_full_disk_is_called_a_full_disk_in_every_command(folder: Path, full: Path, tmp_path: Path) -> None:
    plotted = ("trace", "plot", "TRACE", "--out", str(full / "a.html"))
    commands: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
        "plan": (KEEPERS["plan"], {"DSDOCTOR_CACHE": str(full / "cache")}),
        "check": (KEEPERS["check"], {"DSDOCTOR_CACHE": str(full / "cache")}),
        "trace plot": (plotted, {}),
    }
    for name, (arguments, around) in commands.items():
        cache = {"DSDOCTOR_CACHE": str(tmp_path / "cache")}
        done = run(*filled(arguments, folder, TREE=folder / "DeepSpeed"), "--json", **cache | around)

        (finding,) = json.loads(done.stdout)["findings"]
        assert (done.returncode, finding["title"].split(":")[0]) == (3, "the disk is full"), (name, finding)
        assert str(full) in finding["title"] + finding["fix"]["text"], name
        assert "network" not in str(finding), name
    assert {path.name for path in full.iterdir()} <= {"filling", "cache"}


@root
@pytest.mark.slow
def test_a_full_disk_is_named_where_pip_and_tempfile_say_so(folder: Path, full: Path, tmp_path: Path) -> None:
    sdist = tmp_path / "index" / "deepspeed-1.0.tar.gz"
    sdist.parent.mkdir()
    subprocess.run(
        ["tar", "czf", sdist, "-C", folder, "--transform=s/^DeepSpeed/deepspeed-1.0/", "DeepSpeed"], check=True
    )
    local = {
        "PIP_NO_INDEX": "1",
        "PIP_CONSTRAINT": os.devnull,
        "PIP_FIND_LINKS": str(sdist.parent),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_BUILD_ISOLATION": "false",
    }
    around = {**os.environ, **local, "DSDOCTOR_CACHE": str(tmp_path / "cache"), "TMPDIR": str(full)}
    commands = {
        "pip": ("build-wheel", "--dry-run", "--machine", MACHINE, "--source", "1.0"),
        "tempfile": ("wheel", "verify", "WHEEL", "--machine", MACHINE),
        "record": ("machine", "record", str(full / "a.json")),
    }
    for name, arguments in commands.items():
        argv = [sys.executable, "-m", "dsdoctor", *filled(arguments, folder), "--json"]
        done = subprocess.run(argv, env=around, capture_output=True, text=True, check=False)

        (finding,) = json.loads(done.stdout)["findings"]
        assert done.returncode in {3, 4}, (name, finding)
        assert "disk is full" in finding["title"], (name, finding)
        assert "network" not in str(finding), name


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_named(folder: Path, tmp_path: Path) -> None:
    commands = {
        "record": ("machine", "record", str(tmp_path / "a.json"), "--offline"),
        "verify": ("wheel", "verify", "WHEEL", "--machine", MACHINE),
    }
    for name, arguments in commands.items():
        argv = [sys.executable, "-m", "dsdoctor", *filled(arguments, folder), "--json"]
        limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *argv]
        done = subprocess.run(limited, capture_output=True, text=True, check=False)

        (finding,) = json.loads(done.stdout)["findings"]
        assert (done.returncode, "ulimit -f" in finding["title"]) == (3, True), (name, finding)
        assert "ulimit -f unlimited" in finding["fix"]["text"], name
    assert not list(tmp_path.glob("a.json"))


@root
@pytest.mark.slow
def test_a_disk_that_gets_full_in_the_middle_of_a_build_is_named(full: Path) -> None:
    (full / "filling").unlink()
    workdir = test_make.workdir_in(full)
    with contextlib.suppress(OSError), (full / "filling").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    (full / "filling").write_bytes((full / "filling").read_bytes()[:-8192])

    try:
        result = test_make.run(test_make.plan("one"), workdir)
        said = str(result.findings)
    except (DoctorError, OSError) as error:
        result, said = None, (error if isinstance(error, DoctorError) else refused_by_system(error)).message

    assert result is None or result.wheel is None
    assert "No space left on device" in said or "disk is full" in said
    assert not (full / "dist").exists() or not list((full / "dist").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.parametrize(
    "asked", [("trace", "show", "TRACE"), ("explain", "torch-missing"), ("explain", "no-such-rule")]
)
def test_a_result_or_an_error_that_standard_output_does_not_take_is_told(
    asked: tuple[str, ...], form: tuple[str, ...], folder: Path
) -> None:
    argv = [sys.executable, "-m", "dsdoctor", *filled(asked, folder), *form]
    with Path("/dev/full").open("w") as refusing:
        done = subprocess.run(argv, stdout=refusing, stderr=subprocess.PIPE, text=True, check=False)

    wrong = asked[-1] == "no-such-rule"
    assert (done.returncode, ("no-such-rule" if wrong else "the disk is full") in done.stderr) == (
        2 if wrong else 3,
        True,
    )
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_a_reader_that_has_gone_changes_no_status() -> None:
    read, write = os.pipe()
    os.close(read)
    argv = [sys.executable, "-m", "dsdoctor", "build-wheel", "--dry-run", "--machine", MACHINE, "--json"]
    done = subprocess.run(argv, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)

    assert (done.returncode, done.stderr) == (
        run("build-wheel", "--dry-run", "--machine", MACHINE, "--json").returncode,
        "",
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_under_json_is_one_document(kind: int, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nsleep 60\n")
    slow.chmod(0o755)
    argv = [sys.executable, "-m", "dsdoctor", "check", "--python", str(slow), "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(200):
            if (tmp_path / "started").exists():
                break
            time.sleep(0.1)
        process.send_signal(kind)
        out, err = process.communicate(timeout=30)

    document = json.loads(out)
    assert (process.returncode, err, document["command"], document["machine"]) == (128 + kind, "", "check", None)
    assert document["findings"][0]["title"].startswith("interrupted")


@pytest.mark.slow
def test_a_signal_before_anything_began_is_one_document_too() -> None:
    # Python itself takes a few hundredths of a second to begin, and until then a signal ends it without a word
    argv = [sys.executable, "-X", "importtime", "-m", "dsdoctor", "check", "--json"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.endswith("| cyclopts\n") or "cyclopts." in line:
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=30)

    assert (process.returncode, json.loads(out)["command"]) == (130, "check")
    assert "Traceback" not in err


@pytest.mark.parametrize("umask", [0o000, pytest.param(0o002, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_what_is_private_stays_private_under_any_umask(umask: int, folder: Path, tmp_path: Path) -> None:
    cache, before = tmp_path / "cache" / "of" / "mine", os.umask(umask)
    try:
        words = filled(KEEPERS["plan"], folder, TREE=folder / "DeepSpeed")
        first, second = (run(*words, DSDOCTOR_CACHE=str(cache)) for _ in range(2))
    finally:
        os.umask(before)

    # the source is none that can be described: by then the cache has been made, and used again
    assert (first.returncode, second.returncode) == (4, 4), first.stderr
    made = [tmp_path / "cache", tmp_path / "cache" / "of", *cache.rglob("*"), cache]
    assert [path for path in made if path.is_dir() and path.stat().st_mode & 0o777 != 0o700] == []
    assert [path for path in made if path.stat().st_mode & 0o022] == []
    assert "may write to" not in first.stderr + second.stderr


@root
def test_a_user_without_a_name_is_not_alarmed_by_a_umask_of_its_own(tmp_path: Path) -> None:
    """As in a container that was started with --user 54321:54321."""
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 54321, 54321)
    home.chmod(0o775)
    for above in list(home.parents)[:-2]:
        above.chmod(above.stat().st_mode | 0o011)
    answer, told = os.pipe()

    def judge() -> None:
        os.setgroups([])
        os.setgid(54321)
        os.setuid(54321)
        os.umask(0o002)
        (home / "cache").mkdir()
        os.write(told, f"{oct((home / 'cache').stat().st_mode & 0o777)} {distrust(home / 'cache')}".encode())

    os.waitpid(fork(judge), 0)
    os.close(told)

    with os.fdopen(answer) as said:
        assert said.read() == "0o775 None"


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_defect(closed: str) -> None:
    argv = shlex.join([sys.executable, "-m", "dsdoctor", "explain", "torch-missing", "--json"])

    done = subprocess.run(["/bin/bash", "-c", f"{argv} {closed}"], capture_output=True, text=True)

    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
