"""Whole builds, with the machine's real gcc, of a small tree by an interpreter that plays torch's part."""

import atexit
import base64
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dsdoctor.builder.make.make_wheel import STAND_IN, Workdir, make
from dsdoctor.builder.make.manifest import Manifest, decode
from dsdoctor.core.build_models import BuildPlan, BuildResult, LeftOut, OpPlan, OpProgress, Source
from dsdoctor.core.errors import BuildFailed, ImpossiblePlan
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import cache_folder, log_folder, workspace
from tests.conftest import CPU_TORCH, machine
from tests.planted import COMPILED, IN_ADDRESSES, WORDINGS, plant

INSIDE = "deepspeed-1.0+cpu.torch2.13.dist-info"
PLAYER = Path(__file__).with_name("interpreter.py")
INTERPRETER = Path(tempfile.mkdtemp(prefix="dsdoctor-tests-")) / "python"
"""PLAYER behind a first line that names this very interpreter: a version manager's shim would take most of the time."""

INTERPRETER.write_text(f"#!{sys.executable} -IS\n{PLAYER.read_text()}")
INTERPRETER.chmod(0o755)
atexit.register(shutil.rmtree, INTERPRETER.parent, ignore_errors=True)
SOURCES = {
    "one": "int one(void) { return 1; }",
    "two": "int two(void) { return 2; }",
    "bad": "#include <no_such_header.h>\n",
    "slow": "#include </dev/stdin>\n",
}
HERE = machine(torch=CPU_TORCH)
PLANTED = plant(("CFLAGS",), {name: WORDINGS[name] for name in COMPILED})
PLANTED |= plant(("PIP_INDEX_URL",), IN_ADDRESSES, first=len(COMPILED))


def op(name: str) -> OpPlan:
    return OpPlan(
        op=name, variable=f"DS_BUILD_{name.upper()}", module=f"deepspeed.ops.{name}_op", sources=(f"{name}.c",)
    )


def plan(*names: str, **env: str) -> BuildPlan:
    return BuildPlan(
        python=str(INTERPRETER),
        source="here",
        source_version="1.0",
        accelerator="cpu",
        ops=tuple(op(name) for name in names),
        left_out=(LeftOut(op="absent", because="it is not here", asked=False),),
        architectures=(),
        toolkit=None,
        headers=None,
        jobs=2,
        memory=4 << 30,
        local_version="cpu.torch2.13",
        env={"CC": "/usr/bin/gcc", "DS_BUILD_OPS": "0", **env},
        prepend={"PATH": ("/first",)},
        unset=("DS_BUILD_FOREIGN",),
        disk=0,
        choices=(),
        findings=(),
    )


@pytest.fixture
def workdir(tmp_path: Path) -> Workdir:
    return workdir_in(tmp_path)


def workdir_in(place: Path) -> Workdir:
    tree = place / "work" / "source"
    (tree / "csrc").mkdir(parents=True)
    (place / "logs").mkdir()
    for name, text in SOURCES.items():
        (tree / "csrc" / f"{name}.c").write_text(text)
    return Workdir(folder=place / "work", logs=place / "logs", out=place / "dist")


@dataclass(frozen=True)
class Built:
    """A build that succeeded, of one op that was asked for and one that came along, in a shell with a foreign variable and
    with planted tokens."""

    result: BuildResult
    out: Path
    logs: Path
    steps: list[OpProgress]

    @property
    def manifest(self) -> Manifest:
        return decode(Path(self.result.manifest or "").read_bytes())

    def read(self, name: str) -> bytes:
        with zipfile.ZipFile(self.result.wheel or "") as wheel:
            return wheel.read(name)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    workdir, steps, wanted = workdir_in(tmp_path_factory.mktemp("built")), [], plan("one", "two")
    ops = (wanted.ops[0], replace(wanted.ops[1], asked=False))
    host = LocalHost(env={**os.environ, "DS_BUILD_FOREIGN": "1", **PLANTED.env})
    result = run(replace(wanted, ops=ops, source=f"{Path.home()}/DeepSpeed"), workdir, steps, host)
    return Built(result=result, out=workdir.out, logs=workdir.logs, steps=steps)


def run(
    made: BuildPlan, workdir: Workdir, steps: list[OpProgress] | None = None, host: LocalHost | None = None
) -> BuildResult:
    source = Source(
        folder=str(workdir.folder / "source"), asked="here", version="1.0", digest="d", accelerator="cpu", ops=()
    )
    watch = steps.append if steps is not None else lambda _: None
    return make(host or LocalHost(), made, source, HERE, workdir, say=lambda _: None, watch=watch)


@pytest.mark.slow
def test_a_wheel_with_every_op_and_its_manifest(built: Built) -> None:
    result, manifest = built.result, built.manifest

    assert result.wheel == str(built.out / "deepspeed-1.0+cpu.torch2.13-cp311-cp311-linux_x86_64.whl")
    assert [(o.op, o.built, o.because) for o in result.ops] == [
        ("one", True, None),
        ("two", True, None),
        ("absent", False, "it is not here"),
    ]
    assert {step.state for step in built.steps} == {"waiting", "compiling", "built"}
    assert sorted(path.name for path in built.out.iterdir()) == [
        Path(result.wheel).name,
        Path(result.wheel).name + ".json",
    ]
    assert manifest.sha256 == hashlib.sha256(Path(result.wheel).read_bytes()).hexdigest()
    assert (manifest.torch, manifest.nvidia) == ("2.13.0+cpu", None)
    assert all(entry.loads for entry in manifest.ops)


@pytest.mark.slow
def test_setup_py_finds_its_neighbours_where_the_users_python_leaves_its_own_folder_out(workdir: Workdir) -> None:
    assert run(plan("one", PYTHONSAFEPATH="1"), workdir).wheel is not None


def test_the_manifest_distinguishes_what_was_asked_from_what_came_along(built: Built) -> None:
    assert (built.manifest.asked, [entry.op for entry in built.manifest.ops]) == (("one",), ["one", "two"])


def test_the_record_of_the_wheel_is_true(built: Built) -> None:
    record = built.read(f"{INSIDE}/RECORD").decode()
    content = built.read(f"{INSIDE}/dsdoctor.json")

    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    assert f"{INSIDE}/dsdoctor.json,sha256={digest},{len(content)}\n" in record
    assert decode(content).wheel is None  # a file cannot hold its own digest


def test_the_bill_of_materials_lists_the_ops_by_their_digests(built: Built) -> None:
    path = f"{INSIDE}/sboms/dsdoctor.cdx.json"
    wheel = json.loads(built.read(path))["metadata"]["component"]

    assert f"\n{path},sha256=" in "\n" + built.read(f"{INSIDE}/RECORD").decode()
    assert wheel["version"] == "1.0+cpu.torch2.13"
    assert {part["name"]: part["hashes"][0]["content"] for part in wheel["components"]} == {
        entry.file: hashlib.sha256(built.read(entry.file)).hexdigest() for entry in built.manifest.ops
    }


def test_the_environment_is_the_callers_with_ours_on_top(built: Built) -> None:
    claimed = built.read("deepspeed/git_version_info_installed.py").decode()

    assert claimed.splitlines() == ["version='1.0+cpu.torch2.13'", "installed_ops={'one': 1, 'two': 1}"]


def test_the_manifest_does_not_name_the_users_home(built: Built) -> None:
    text = Path(built.result.manifest or "").read_text()

    assert str(Path.home()) + "/" not in text
    assert json.loads(text)["plan"]["source"] == "~/DeepSpeed"


def test_no_log_and_no_file_of_the_wheel_holds_a_planted_token(built: Built) -> None:
    with zipfile.ZipFile(built.result.wheel or "") as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    files |= {path.name: path.read_bytes() for folder in (built.logs, built.out) for path in folder.iterdir()}

    assert {"one.log", "wheel.log", "build.log", f"{INSIDE}/sboms/dsdoctor.cdx.json"} <= set(files)
    assert {name: found for name, data in files.items() if (found := PLANTED.found_in(data.decode("latin-1")))} == {}
    assert " -O2 -I/opt/x ... ... ... ... ... ... ... -c csrc/one.c" in files["one.log"].decode()
    assert PLANTED.found_in(str(built.result)) == []


def test_an_error_that_quotes_a_flag_of_the_shell_names_no_token(workdir: Workdir) -> None:
    planted = plant(("CFLAGS",), {"long option": WORDINGS["long option"]})
    result = run(plan("one"), workdir, host=LocalHost(env={**os.environ, **planted.env}))

    assert "unrecognized" in result.findings[0].title
    assert planted.found_in(str(result) + (workdir.logs / "build.log").read_text()) == []


@pytest.mark.slow
def test_one_op_that_fails_loses_neither_the_others_nor_their_logs(workdir: Workdir) -> None:
    result = run(plan("one", "bad", "two"), workdir)

    assert result.wheel is None
    assert not list(workdir.out.iterdir())
    built = {o.op: o.built for o in result.ops}
    assert built == {"one": True, "bad": False, "two": True, "absent": False}
    (finding,) = result.findings
    assert "fatal error: no_such_header.h: No such file or directory" in finding.title
    assert "no_such_header.h" in (workdir.logs / "bad.log").read_text()
    assert "===== one =====" in (workdir.logs / "build.log").read_text()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("missing", "the wheel does not contain it"),
        ("unclaimed", "does not list it"),
        ("unloadable", "undefined symbol"),
    ],
)
@pytest.mark.slow
def test_a_wheel_that_does_not_hold_what_was_asked_is_no_wheel(lie: str, reason: str, workdir: Workdir) -> None:
    result = run(plan("one", LIES=lie), workdir)

    assert result.wheel is None
    assert reason in (result.ops[0].because or "")
    assert not list(workdir.out.iterdir())


def test_a_compiler_that_is_killed_is_said(workdir: Workdir) -> None:
    killer = workdir.folder / "gcc"
    killer.write_text("#!/bin/sh\necho 'gcc: fatal error: Killed signal terminated program cc1plus' >&2\nexit 1\n")
    killer.chmod(0o755)

    result = run(plan("one", CC=str(killer)), workdir)

    assert "Killed signal" in (result.ops[0].because or "")


def test_a_compiler_that_cannot_be_started_fails_its_op_alone(workdir: Workdir) -> None:
    result = run(plan("one", "two", CC="/nonexistent/gcc"), workdir)

    assert "/nonexistent/gcc cannot be started" in (result.ops[0].because or "")
    assert [op.op for op in result.ops if op.log] == ["one", "two"]


@pytest.mark.slow
def test_a_compiler_that_is_ended_by_a_signal_is_said(workdir: Workdir) -> None:
    killer = workdir.folder / "gcc"
    killer.write_text("#!/bin/sh\nkill -9 $$\n")
    killer.chmod(0o755)

    result = run(plan("one", CC=str(killer)), workdir)

    assert "was ended by signal 9 (SIGKILL); memory may have run out" in (result.ops[0].because or "")


@pytest.mark.slow
def test_what_a_probe_printed_is_not_the_error(workdir: Workdir) -> None:
    result = run(plan("bad"), workdir)

    assert "no_such_header.h" in (result.ops[0].because or "")


@pytest.mark.slow
def test_a_builder_that_refuses_or_dies_fails_its_op_alone(workdir: Workdir) -> None:
    result = run(plan("refused", "deadly", "one"), workdir)

    assert {op.op: op.built for op in result.ops if op.log} == {"refused": False, "deadly": False, "one": True}
    assert "its probe declines it" in (result.ops[0].because or "")
    assert "its builder ends the process" in (result.ops[1].because or "")


@pytest.mark.slow
def test_a_packing_that_fails_is_our_failure(workdir: Workdir) -> None:
    (workdir.folder / "packed").write_text("in the way")

    with pytest.raises(BuildFailed, match="produced no wheel"):
        run(plan("one"), workdir)
    assert not list(workdir.out.iterdir())


def test_an_out_folder_that_cannot_be_written_is_said_before_any_work(workdir: Workdir) -> None:
    workdir.out.write_text("a file")

    with pytest.raises(ImpossiblePlan, match="cannot write to"):
        run(plan("one"), workdir)
    assert not (workdir.logs / "one.log").exists()


def test_an_interruption_ends_every_compiler(workdir: Workdir) -> None:
    sleeper = workdir.folder / "gcc"
    sleeper.write_text("#!/bin/sh\nsleep 60\n")
    sleeper.chmod(0o755)

    states: list[str] = []

    def watch(step: OpProgress) -> None:
        states.append(step.state)
        if step.state == "compiling" and step.done == 0:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    source = Source(
        folder=str(workdir.folder / "source"), asked="h", version="1", digest="d", accelerator="cpu", ops=()
    )
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        make(
            LocalHost(),
            plan("one", CC=str(sleeper)),
            source,
            HERE,
            workdir,
            say=lambda _: None,
            watch=watch,
        )

    assert time.monotonic() - started < 50
    assert not list(workdir.out.iterdir())
    assert states[-1] == "interrupted"
    log = (workdir.logs / "one.log").read_text()
    assert "dsdoctor: interrupted: " in log
    assert "FAILED" not in log


@pytest.mark.slow
def test_two_builds_into_one_folder_at_once(workdir: Workdir, tmp_path: Path) -> None:
    workdirs = []
    for name in ("a", "b"):
        folder, logs = tmp_path / name, tmp_path / f"logs-{name}"
        logs.mkdir()
        subprocess.run(["cp", "-r", str(workdir.folder), str(folder)], check=True)
        workdirs.append(replace(workdir, folder=folder, logs=logs))
    results: list[BuildResult] = []
    threads = [
        threading.Thread(target=lambda folders=folders: results.append(run(plan("one"), folders)))
        for folders in workdirs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({result.wheel for result in results}) == 1
    with zipfile.ZipFile(results[0].wheel or "") as wheel:
        assert wheel.testzip() is None
    assert len(list(workdir.out.iterdir())) == 2


def test_a_workspace_is_private_and_goes_away(tmp_path: Path) -> None:
    with workspace(tmp_path) as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "x").write_text("x")

    assert not folder.exists()


def test_what_a_killed_build_left_is_swept_and_a_running_one_stays(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from dsdoctor.core.workspace import workspace
with workspace(Path({str(tmp_path)!r})) as folder:
    print(folder, flush=True)
    input()
"""
    other = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    left = Path(other.stdout.readline().strip())
    with workspace(tmp_path):
        assert left.exists()
    other.kill()
    other.communicate()
    with workspace(tmp_path) as running:
        assert (running.exists(), left.exists()) == (True, False)


def test_the_cache_folder_can_be_named(tmp_path: Path) -> None:
    host = LocalHost(env={"DSDOCTOR_CACHE": str(tmp_path / "c"), "HOME": "/root"})

    assert cache_folder(host) == tmp_path / "c"
    assert log_folder(cache_folder(host)).is_dir()


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    with pytest.raises(ImpossiblePlan, match="cache folder cannot be written"), workspace(tmp_path / "cache"):
        pass


@pytest.mark.slow
def test_two_wheels_of_other_content_never_bear_one_name(tmp_path: Path) -> None:
    """Another op, another object, another time in the files: each another name; the very same content: the same."""
    tagged = replace(plan("one"), tagged=True)
    wanted = {
        "same": tagged,
        "again": tagged,
        "ops": replace(plan("one", "two"), tagged=True),
        "asked": replace(tagged, ops=(replace(tagged.ops[0], asked=False),)),
    }
    names = {}
    for name, asked in wanted.items():
        names[name] = Path(run(asked, workdir_in(tmp_path / name)).wheel or "").name
    changed = workdir_in(tmp_path / "object")
    (changed.folder / "source" / "csrc" / "one.c").write_text("int one(void) { return 11; }")
    names["object"] = Path(run(tagged, changed).wheel or "").name
    later = LocalHost(env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    names["later"] = Path(run(tagged, workdir_in(tmp_path / "later"), host=later).wheel or "").name

    assert names["same"] == names["again"]
    assert len(set(names.values())) == 5
    assert all(
        re.fullmatch(r"deepspeed-1\.0\+cpu\.torch2\.13\.b[0-9a-f]{8}-cp.*\.whl", name) for name in names.values()
    )
    same = [(tmp_path / name / "dist" / names[name]).read_bytes() for name in ("same", "again")]
    assert same[0] == same[1]
    # the version inside is that of the name, and nothing tells of what stood there while the tag was not known
    version = names["same"].split("-")[1]
    with zipfile.ZipFile(tmp_path / "same" / "dist" / names["same"]) as wheel:
        texts = {name: wheel.read(name).decode("latin-1") for name in wheel.namelist()}
    assert texts[f"deepspeed-{version}.dist-info/METADATA"] == f"Name: deepspeed\nVersion: {version}\n"
    assert f"version='{version}'" in texts["deepspeed/git_version_info_installed.py"]
    assert not [name for name, text in texts.items() if STAND_IN in name + text]
