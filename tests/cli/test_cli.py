"""The command as a user runs it: what stands on stdout, on stderr, and the exit status."""

import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dsdoctor
import dsdoctor.core.release
from dsdoctor.cli.app import make_app
from dsdoctor.core.options import HAS_COMPLETER
from dsdoctor.rules.book import rule_ids
from tests.cli.runner import run
from tests.each import each

MACHINES = Path(__file__).parents[1] / "machines"
MOVED_ON = "! dsdoctor prebuild is now dsdoctor install --build\n"


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """An interpreter whose environment holds no torch."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_help_teaches() -> None:
    shown = run("build-wheel", "--help").stdout

    assert "Build a DeepSpeed wheel for this environment" in shown
    assert "--arch" in shown


def test_the_version_says_which_torch_and_deepspeed_are_here() -> None:
    said = run("--version").stdout

    here = {
        name: bool(importlib.util.find_spec(package))
        for name, package in (("torch", "torch"), ("DeepSpeed", "deepspeed"))
    }
    assert said.startswith(f"{dsdoctor.core.release.__version__} (Python {platform.python_version()}, ")
    assert [f"no {name}" not in said for name in here] == list(here.values())
    assert len(said.splitlines()) == 1


def test_sets_are_sorted_in_a_document() -> None:
    machine = str(MACHINES / "several-toolkits.json")
    for command in (
        (
            "machine",
            "look",
        ),
        ("check", "--offline"),
    ):
        told = json.loads(run(*command, "--machine", machine, "--json").stdout)["machine"]
        sets = [told["system"]["cpu_flags"]]
        sets += [toolkit[name] for toolkit in told["toolkits"] for name in ("headers", "libraries")]

        assert min(map(len, sets)) > 3
        assert sets == list(map(sorted, sets))


def test_the_shells_of_the_readme_are_those_of_env() -> None:
    lines = {
        shell: run("env", "--shell", shell, "--machine", str(MACHINES / "one-toolkit.json")).stdout
        for shell in ("bash", "zsh", "csh", "tcsh")
    }

    assert lines["tcsh"] == lines["csh"] != lines["bash"] == lines["zsh"]
    assert "setenv CUDA_HOME '/usr/local/cuda'" in lines["tcsh"]


def test_an_architecture_that_is_asked_for_counts_in_a_check() -> None:
    without, asked, refused = (
        run("check", "--machine", str(MACHINES / "container-without-gpu.json"), *more)
        for more in ((), ("--arch", "9.0"), ("--arch", "6.0"))
    )

    assert "arch-list-empty" in without.stdout
    assert "arch-list-empty" not in asked.stdout
    assert asked.stdout.splitlines()[-1] == "  next: $ python -m dsdoctor build-wheel --arch 9.0"
    assert "gpu-arch-unsupported-by-nvcc" in refused.stdout


@pytest.mark.parametrize(
    "command",
    [
        (
            "machine",
            "compare",
        ),
        ("check", "--machine"),
        ("build-wheel", "--dry-run", "--machine"),
        ("machine", "look", "--machine"),
    ],
)
def test_a_snapshot_in_which_nothing_was_asked_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    more = (
        (str(MACHINES / "wsl.json"),)
        if command
        == (
            "machine",
            "compare",
        )
        else ()
    )

    done = run(*command, str(empty), *more)

    assert (done.returncode, done.stdout) == (2, "")
    assert "it contains no machine" in done.stderr


def test_a_wheel_that_is_not_there_is_said_to_be_not_there() -> None:
    done = run("wheel", "verify", "nofile.whl")

    assert (done.returncode, done.stdout) == (2, "")
    assert "nofile.whl is not there" in done.stderr


@pytest.mark.slow
def test_looking_works_without_torch(bare: str) -> None:
    done = run("machine", "look", "--python", bare, "--json")

    document = json.loads(done.stdout)
    assert (done.returncode, document["command"], document["machine"]["torch"]) == (0, "machine look", None)
    assert document["machine"]["system"]["cpus"] >= 1


def test_looking_shows_lines(bare: str) -> None:
    done = run("machine", "look", "--python", bare)

    assert done.returncode == 0
    assert "no torch" in done.stdout.splitlines()
    assert "\x1b" not in done.stdout


def test_no_torch_is_an_impossible_plan_with_the_next_command(bare: str, tmp_path: Path) -> None:
    done = run("build-wheel", "--python", bare, DSDOCTOR_CACHE=str(tmp_path / "cache"))

    assert (done.returncode, done.stdout) == (3, "")
    assert "✗ torch is not installed in the environment of" in done.stderr
    assert "pip install torch" in done.stderr


def test_an_error_is_one_json_document_too(bare: str, tmp_path: Path) -> None:
    done = run("build-wheel", "--python", bare, "--json", DSDOCTOR_CACHE=str(tmp_path / "cache"))

    document = json.loads(done.stdout)
    assert done.returncode == 3
    assert (document["schema"], document["command"], document["wheel"]) == ("dsdoctor/1", "build-wheel", None)
    assert document["findings"][0]["severity"] == "error"
    assert document["findings"][0]["fix"]["text"].endswith("-m pip install torch")


@pytest.mark.parametrize(
    "arguments",
    [
        ("build-wheel", "--ops", "a", "--for", "x.json"),
        ("build-wheel", "--accelerator", "tpu"),
        ("build-wheel", "--jobs", "0"),
        ("build-wheel", "--ops", ","),
        ("build-wheel", "--toolkit"),
        ("build-wheel", "--jobs", "2.7"),
        ("build-wheel", "--jobs", "none"),
        ("build-wheel", "--accelerator", "None"),
        ("machine", "look", "--machine", "none"),
        ("build-wheel", "--dry-run", "--machine", str(MACHINES / "one-toolkit.json"), "--node", '["a.json"]'),
        ("machine", "look", "--version"),
        ("diagnose", "--verbos"),
        ("build-wheel", "--dry-run", "--no-such-option"),
        ("no-such-command",),
    ],
)
def test_nonsense_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("build-wheel", "--ops", "a", "--for", "x.json", "--json"),
        ("trace show", "--no-such-option", "--json"),
        ("comm", "--nproc", "x", "--json"),
    ],
)
def test_nonsense_is_one_json_document_too(arguments: tuple[str, ...]) -> None:
    command, *rest = arguments
    done = run(*command.split(), *rest)

    document = json.loads(done.stdout)
    assert (done.returncode, document["command"], document["findings"][0]["rule"]) == (2, command, "usage")


def test_an_option_that_is_given_twice_is_the_last_one() -> None:
    recorded = ("--machine", str(MACHINES / "one-toolkit.json"))

    assert "8.0,8.0" in run("build-wheel", "--dry-run", *recorded, "--arch", "9.0", "--arch", "8.0,8.0").stderr


def test_a_value_may_begin_with_a_hyphen_and_be_any_word() -> None:
    recorded = ("--machine", str(MACHINES / "one-toolkit.json"))

    assert "'-x'" in run("build-wheel", "--dry-run", *recorded, "--arch", "-x").stderr
    assert "none cannot be read" in run("diagnose", "none").stderr
    assert run("diagnose", "-", stdin=b"step 1 loss 2.5\n").returncode == 0


@pytest.mark.parametrize("group", [(), ("cache",), ("trace",)])
def test_no_command_at_all_is_the_help_and_a_usage_error(group: tuple[str, ...]) -> None:
    done = run(*group)

    assert (done.returncode, "Usage: dsdoctor" in done.stdout) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("push", "x.whl", "--hostfile", "hosts"), "dsdoctor install WHEEL --hostfile FILE"),
        (("trace", "headroom", "folder", "--dtype", "float16"), "dsdoctor trace show --headroom DTYPE"),
    ],
)
def test_a_command_of_an_earlier_release_names_the_one_that_does_its_work(words: tuple[str, ...], hint: str) -> None:
    done = run(*words, "--json")

    (finding,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, finding["fix"]["text"]) == (2, hint)


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zsh", "fish"))])
def test_completion_knows_commands_options_and_values(shell: str) -> None:
    from dsdoctor.cli.app import completion

    script = completion(shell)

    assert all(word in script for word in ("build-wheel", "headroom", "accelerator", "cuda"))


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_COMPLETER, reason="the newest cyclopts for Python 3.10 completes no values that are asked for"
)
def test_a_shell_completes_rules_and_ops() -> None:
    app = make_app()
    offered = {}
    for command, name in (("explain", "rule"), ("check", "rules"), ("check", "op")):
        arguments = app[command].assemble_argument_collection()
        (found,) = (argument for argument in arguments if argument.field_info.name == name)
        offered[command, name] = {value for value, _ in found.get_completions(None)}

    assert offered["explain", "rule"] == set(rule_ids())
    assert "cuda-home-wrong" in offered["check", "rules"] < offered["explain", "rule"]
    assert {"cpu_adam", "fused_adam"} < offered["check", "op"]
    assert "deepspeed_not_implemented" not in offered["check", "op"]


def test_an_option_of_a_build_is_an_option_of_each_command_that_plans() -> None:
    ours = {
        "--ops",
        "--for",
        "--source",
        "--arch",
        "--cpu",
        "--node",
        "--toolkit",
        "--jobs",
        "--debug-info",
        "--offline",
    }

    for command in ("build-wheel", "prebuild"):
        shown = run(command, "--help").stdout
        assert {option for option in ours if f"{option} " in shown} == ours


def test_a_toolkit_that_cannot_be_had_leaves_stdout_empty(bare: str, tmp_path: Path) -> None:
    done = run("toolkit", "--python", bare, "--toolkit", "~nosuch/x", DSDOCTOR_CACHE=str(tmp_path))

    assert (done.returncode, done.stdout) == (3, "")


def test_an_interpreter_that_is_none(tmp_path: Path) -> None:
    done = run("build-wheel", "--dry-run", "--python", "/no/such/python", DSDOCTOR_CACHE=str(tmp_path))

    assert done.returncode == 2
    assert "/no/such/python" in done.stderr


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_status_130(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nsleep 60\n")
    slow.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "dsdoctor", "machine", "look", "--python", str(slow)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(100):
        if (tmp_path / "started").exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (130, "")
    assert err.startswith("✗ interrupted")
    assert "Traceback" not in err


def test_check_without_torch_is_an_error_and_says_why(bare: str, tmp_path: Path) -> None:
    env = {"DSDOCTOR_CACHE": str(tmp_path / "cache")}

    done = run("check", "--python", bare, "--offline", **env)
    document = json.loads(run("check", "--python", bare, "--offline", "--json", **env).stdout)

    assert done.returncode == 1
    assert "[torch-missing]" in done.stdout
    assert (document["command"], document["ops"]) == ("check", [])
    assert {"rule", "severity", "title", "evidence", "affects", "ranks", "fix", "url"} == set(document["findings"][0])


@pytest.mark.slow
def test_check_lists_and_runs_single_checks(bare: str) -> None:
    listed = run("check", "--list")
    one = run("check", "torch-missing", "--python", bare)
    other = run("check", "libaio-missing", "--strict", "--python", bare)
    unknown = run("check", "no-such-check", "--python", bare)

    assert "cuda-home-wrong" in listed.stdout
    assert (one.returncode, other.returncode in {0, 1}, unknown.returncode) == (1, True, 2)
    assert "torch-missing" in one.stdout
    assert "there is no check 'no-such-check'" in unknown.stderr


def test_a_recorded_machine_is_judged_anywhere() -> None:
    sick = run("check", "--machine", str(MACHINES / "several-toolkits.json"))
    well = run("check", "--machine", str(MACHINES / "one-toolkit.json"), "--op", "fused_adam")
    asked = run("check", "--machine", str(MACHINES / "one-toolkit.json"), "--op", "evoformer_attn", "--json")

    assert (sick.returncode, well.returncode, asked.returncode) == (1, 0, 1)
    assert 'eval "$(python -m dsdoctor env)"' in sick.stdout
    *_, verdict, following = well.stdout.splitlines()
    assert verdict.startswith("✓ no problems found")
    assert following == "  next: $ python -m dsdoctor install --ops fused_adam"
    refused = next(f for f in json.loads(asked.stdout)["findings"] if f["severity"] == "error")
    assert (refused["rule"], refused["affects"]) == ("op-cannot-be-built", ["evoformer_attn"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--deep", "--machine", str(MACHINES / "wsl.json")),
        ("check", "--machine", "/none.json"),
        ("check", "--machine", str(MACHINES / "wsl.json"), "--op", "no_such_op"),
        ("env", "--shell", "cmd.exe", "--machine", str(MACHINES / "one-toolkit.json")),
        (
            "wheel",
            "verify",
        ),
        ("wheel", "verify", "x.whl", "--installed"),
        ("wheel", "verify", "/none/deepspeed-0.1-py3-none-any.whl"),
        ("machine", "compare", str(MACHINES / "wsl.json")),
        ("explain",),
        ("explain", "no-such-rule"),
        (
            "machine",
            "record",
        ),
    ],
)
def test_nonsense_leaves_stdout_empty_and_is_status_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)

    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_recording_and_comparing(bare: str, tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    env = {"DSDOCTOR_CACHE": str(tmp_path / "cache"), "AWS_SECRET_ACCESS_KEY": "hush", "DS_API_KEY": "hush"}
    env |= {"CFLAGS": "-I/opt/x -DTOKEN=hush", "DS_BUILD_TOKEN": "hush", "DS_BUILD_STRING": "+git.https://me:hush@host"}
    env |= {"NVCC_APPEND_FLAGS": "-DKEY=hush", "DS_BUILD_OPS": "1"}

    done = run("machine", "record", str(first), "--python", bare, "--offline", **env)
    run("machine", "record", str(second), "--python", bare, "--offline", CUDA_HOME="/opt/x", **env)
    same = run("machine", "compare", str(first), str(first))
    other = run("machine", "compare", str(first), str(second), "--json")

    assert (done.returncode, same.returncode, other.returncode) == (0, 0, 1)
    assert "hush" not in first.read_text()
    assert first.stat().st_mode & 0o077 == 0
    differences = {one["fact"] for one in json.loads(other.stdout)["differences"]}
    assert "CUDA_HOME" in differences
    assert not list(tmp_path.glob(".*tmp"))


@pytest.mark.slow
def test_an_environment_that_is_no_utf8_and_a_terminal_that_has_no_marks(bare: str, tmp_path: Path) -> None:
    env = {**os.environ, "CFLAGS": "-I/tmp/\udce9", "PYTHONIOENCODING": "latin-1", "DSDOCTOR_CACHE": str(tmp_path)}
    argv = [sys.executable, "-m", "dsdoctor", "check", "--python", bare, "--offline"]

    shown = subprocess.run(argv, env=env, capture_output=True, timeout=60)
    document = run(
        "check", "--python", bare, "--offline", "--json", CFLAGS="-I/tmp/\udce9", DSDOCTOR_CACHE=str(tmp_path)
    )

    assert (shown.returncode, b"Traceback" in shown.stderr) == (1, False)
    assert json.loads(document.stdout)["machine"]["variables"]["CFLAGS"].startswith("-I/tmp/")


def test_fixes_are_for_the_environment_that_was_judged(bare: str, tmp_path: Path) -> None:
    with_blank = tmp_path / "my env"
    with_blank.mkdir()
    python = with_blank / "python"
    Path(bare).rename(python)

    done = run("check", "--python", str(python), "--offline", DSDOCTOR_CACHE=str(tmp_path / "cache"))

    assert f"$ {shlex.quote(sys.executable)} -m pip install --upgrade torch" in done.stdout
    assert not [line for line in done.stdout.splitlines() if "-m dsdoctor" in line and "--python" not in line]


def test_explaining(bare: str) -> None:
    page = run("explain", "cuda-home-wrong")
    listed = json.loads(run("explain", "--list", "--json").stdout)

    assert page.returncode == 0
    assert page.stdout.startswith("cuda-home-wrong\n\nWhat it means\n    The folder that torch and DeepSpeed use")
    assert {"nccl-collective-timeout", "op-cannot-be-built", "torch-missing"} <= set(listed["rules"])


def test_every_rule_that_is_written_anywhere_can_be_explained() -> None:
    written = {
        rule
        for path in Path(dsdoctor.__file__).parent.rglob("*.py")
        for rule in re.findall(r'(?:rule=|_error\(|Rule\(\s*id=)"([a-z0-9]+(?:-[a-z0-9]+)+)"', path.read_text())
    }

    assert written <= set(rule_ids())


@each(
    "command",
    [
        ("check",),
        (
            "machine",
            "look",
        ),
        ("env",),
        (
            "build-wheel",
            "--dry-run",
        ),
        ("toolkit",),
        ("install",),
        ("build-wheel",),
        ("build-wheel", "--torch", "2.14.1", "--python", sys.executable),
        ("prebuild",),
        ("machine", "record", "machine.json"),
        ("wheel", "verify", "--installed"),
        ("wheel", "pick", "."),
        ("config", "ds_config.json"),
        ("checkpoint", "."),
        ("memory", "--config", "ds_config.json", "--model", "config.json"),
    ],
)
def test_a_python_that_is_none_is_refused_in_one_sentence(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True, exist_ok=True)
    (venv / "python").touch()
    wrong = (
        (str(tmp_path / "none"), "none does not exist"),
        ("python9.99", "--python python9.99 does not exist"),
        (str(tmp_path / "text"), "text is not executable"),
        (str(venv.parent), f"venv is a folder\n    Fix: name its interpreter: --python {venv / 'python'}\n"),
    )
    for python, why in wrong if command == ("check",) else wrong[:1]:
        done = run(*command, "--python", python)

        assert (done.returncode, done.stdout) == (2, ""), (command, python)
        said = done.stderr.removeprefix(MOVED_ON)
        assert said.startswith("✗ --python ")
        assert why in said
        assert len(said.splitlines()) == 2


@each(
    "command",
    [
        ("check",),
        (
            "build-wheel",
            "--dry-run",
        ),
        ("toolkit",),
        ("env",),
        ("build-wheel",),
        ("install",),
    ],
)
@each("machine", ["one-toolkit.json", "container-without-gpu.json"])
def test_architectures_that_are_none_are_refused_whatever_torch_is_there(
    command: tuple[str, ...], machine: str
) -> None:
    recorded = (
        ("--machine", str(MACHINES / machine)) if command[0] in {"check", "env"} or "--dry-run" in command else ()
    )

    done = run(*command, "--arch", "banana", *recorded)

    assert (done.returncode, done.stdout) == (2, "")
    assert "architecture 'banana' is not a compute capability (--arch)" in done.stderr


@each(
    "command",
    [
        ("build-wheel",),
        ("build-wheel", "--dry-run"),
        ("build-wheel", "--torch", "2.14.1"),
        ("build-wheel", "--torch", "2.14.1", "--dry-run"),
        ("prebuild",),
        ("install",),
    ],
)
@pytest.mark.slow
def test_a_file_where_a_folder_is_to_be_made_is_refused_before_anything_is_done(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        done = run(*command, "--out", str(out))

        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.removeprefix(MOVED_ON).startswith(
            f"✗ {out} cannot be written: {tmp_path / 'file'} is no folder"
        )


def test_progress_stands_on_stderr_beside_a_document(bare: str, tmp_path: Path) -> None:
    file, cache = str(tmp_path / "machine.json"), str(tmp_path / "cache")
    done = run("machine", "record", file, "--offline", "--json", "--python", bare, DSDOCTOR_CACHE=cache)

    assert json.loads(done.stdout)["file"] == file
    assert done.stderr.startswith("* ")


@pytest.mark.parametrize("command", ["hang", "verify"])
def test_a_path_that_is_too_long_is_refused_as_usage(command: str) -> None:
    shown = run(command, "x/" * 2500)

    assert shown.returncode == 2
    assert "File name too long" in shown.stderr
    assert max(map(len, shown.stderr.splitlines())) < 200


def test_a_width_that_is_no_number_is_none() -> None:
    assert run("explain", "gpu-oom", COLUMNS="²").returncode == 0
