"""`python -m dsdoctor.run`: a script runs as without us, and each engine that it makes is watched.

The engines are those of a small `deepspeed.py` beside the script; what watches them is handed in by name.
"""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

import dsdoctor
from dsdoctor.core.errors import UsageError
from dsdoctor.core.finding import Follows, alternative, step
from dsdoctor.run.__main__ import environment_for, parse_command_line
from dsdoctor.run.script import RANKS, VARIABLE, without_run
from tests.each import each

ROOT = str(Path(dsdoctor.__file__).parents[1])
OURS = [sys.executable, "-m", "dsdoctor.run"]
DEEPSPEED = """
class Engine:
    pass


made = []


def initialize(model=None, *, config=None):
    if config == "bad":
        raise ValueError("config is bad")
    made.append(Engine())
    return made[-1], None
"""
NOTES = """
from dsdoctor.core.errors import UsageError


class Watch:
    def close(self):
        print("closed", flush=True)


def watch(engine, *, level, include, **others):
    print("watch", type(engine).__name__, level, include, flush=True)
    if "usage" in include:
        raise UsageError("no such module", hint="name one")
    if "defect" in include:
        raise RuntimeError("a defect")
    engine.dsdoctor = Watch()
    return engine.dsdoctor
"""
SAYS_ALL = """
import sys, warnings
class Here: pass
print(sys.argv, sys.orig_argv[1:-1], sys.path, __name__, __spec__ and __spec__.name, __file__, __package__, __doc__)
print(sys.flags, sys.warnoptions, sys.excepthook is sys.__excepthook__, sys.modules["__main__"].Here is Here)
print([name for name in sorted(vars())], "sitecustomize" in sys.modules)
warnings.warn("at the top", stacklevel=2)
def fail(): raise ValueError("as without us")
fail()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the scripts are: no rank, no order of an outer run."""
    for name in (*RANKS, VARIABLE, "PYTHONPATH", "DSDOCTOR_OVERFLOW"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "deepspeed.py").write_text(DEEPSPEED)
    (tmp_path / "notes.py").write_text(NOTES)
    monkeypatch.chdir(tmp_path)
    # what another process left in the user's own folder is told too
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    return tmp_path


def started(command: Sequence[str], **env: str) -> "subprocess.Popen[str]":
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, env={**os.environ, **env}, **streams)


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def watched(script: str, *options: str, **env: str) -> tuple[int, str, str]:
    """What a script comes to whose engines `notes.watch` watches, without the process that becomes it."""
    Path("train.py").write_text(script)
    call = parse_command_line([*options, "train.py"], {})
    return ended(started([sys.executable, *call.script], **environment_for(call, {**os.environ, **env}, "notes:watch")))


@pytest.mark.parametrize(
    ("flags", "m", "script"),
    [((), "", "train.py"), (("-X", "dev", "-W", "error::FutureWarning"), "-m", "package.train")],
)
@pytest.mark.slow
def test_a_script_runs_as_without_us(folder: Path, flags: tuple[str, ...], m: str, script: str) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(SAYS_ALL)
    (folder / "train.py").write_text(SAYS_ALL)
    rest = [*filter(None, [m]), script, "--overflow", "frames", "--", "-m", "x"]
    plain = started([sys.executable, *flags, *rest])
    with_us = started([sys.executable, *flags, "-m", "dsdoctor.run", "--overflow", "off", *rest])
    as_command = started([sys.executable, *flags, "-m", "dsdoctor", "run", "--overflow", "off", *rest])

    assert ended(with_us) == ended(plain) == ended(as_command)


@pytest.mark.slow
def test_the_command_gives_the_script_its_process_as_it_was(folder: Path) -> None:
    """Closed streams stay closed, and no signal is blocked or handled; --help is that of the watch."""
    (folder / "train.py").write_text(
        "import os, signal\nassert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()\n"
        "print(signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), os.path.exists('/proc/self/fd/0'))\n"
    )
    script = str(Path(sysconfig.get_path("scripts"), "dsdoctor"))
    closed = ["bash", "-c", 'exec "$@" <&-', "-"]
    plain = started([*closed, sys.executable, "train.py"])
    with_us = started([*closed, script, "run", "--overflow", "off", "--hang", "off", "train.py"])
    help_of_run = ended(started([script, "run", "--help"]))

    assert ended(with_us)[:2] == ended(plain)[:2]
    assert (help_of_run[0], "--on-overflow" in help_of_run[1]) == (0, True)
    assert ended(started([script, "run", "absent.py"]))[0] == 2


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="there -I leaves out what -P would")
@pytest.mark.parametrize("flag", ["-E", "-Iu"])
def test_where_python_ignores_its_variables_the_script_sees_them_and_python_does_not(folder: Path, flag: str) -> None:
    script = """
import os, sys
print(os.environ["PYTHONHASHSEED"], os.environ["PYTHONUNBUFFERED"], sys.flags.hash_randomization, sys.flags.no_user_site)
print([place for place in sys.path if "python" not in place.lower()], sys.flags.safe_path, sys.flags.dont_write_bytecode)
"""
    (folder / "train.py").write_text(script)
    # an interpreter that finds dsdoctor without PYTHONPATH
    called = [sys.executable, flag, *OURS[1:], "train.py"]
    finds = f"import runpy, sys; sys.path.insert(1, {ROOT!r}); sys.orig_argv[:] = {called!r}; sys.argv[:] = ['', 'train.py']"
    starts = f"{finds}; runpy.run_module('dsdoctor.run', run_name='__main__')"
    variables = {
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(folder),
    }
    plain = started([sys.executable, flag, "train.py"], **variables)
    with_us = started([sys.executable, flag, "-c", starts], **variables)

    assert ended(with_us)[:2] == ended(plain)[:2]


@pytest.mark.slow
@each("given", [{}, {"LC_CTYPE": "C"}, {"LC_CTYPE": "POSIX"}, {"LC_CTYPE": "C.UTF-8"}, {"LC_ALL": "C"}, {"LANG": "C"}])
def test_the_locale_of_a_bare_environment_is_the_scripts(folder: Path, given: dict[str, str]) -> None:
    """Python sets LC_CTYPE for itself where nothing does (PEP 538, 540); a second one takes that for the user's word."""
    (folder / "locale_of.py").write_text(
        "import locale, os, sys\nprint(sys.flags.utf8_mode, locale.getpreferredencoding(False), os.environ.get('LC_CTYPE'))\n"
    )
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": ROOT} | given

    shown = [
        subprocess.run(
            [*command, "locale_of.py"], cwd=folder, env=bare, capture_output=True, text=True, check=True
        ).stdout
        for command in ([sys.executable], OURS)
    ]

    assert shown[0] == shown[1]


@pytest.mark.slow
def test_files_of_the_working_folder_are_no_modules_of_ours(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "train.py").write_text("print('trained')")
    for name in ("argparse", "dataclasses", "importlib", "json", "msgspec", "pathlib", "re", "typing"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the working folder')")

    assert ended(started([*OURS, "--overflow", "off", "src/train.py"], PYTHONPATH=ROOT))[:2] == (0, "trained\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "gone",
    [
        "sys.stderr = None",
        "sys.stderr.close()",
        "os.close(2)",
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 2)",
    ],
)
def test_a_stderr_that_is_gone_costs_the_script_nothing(gone: str) -> None:
    """Neither a line of ours in its stdout, nor its end."""
    Path("train.py").write_text(f"import os, sys\nprint('trained', flush=True)\n{gone}\n")
    code, out, err = ended(started([*OURS, "train.py"], PYTHONPATH=ROOT))

    assert (code, out) == (0, "trained\n")
    assert "Traceback" not in err


@pytest.mark.slow
def test_every_engine_is_watched_and_every_watch_closed() -> None:
    script = "from deepspeed import initialize\ninitialize()\nimport deepspeed\nraise SystemExit(deepspeed.initialize()[1] or 7)"

    assert watched(script, "--overflow", "frames", "--include", "h.*") == (
        7,
        "watch Engine frames ['h.*']\nwatch Engine frames ['h.*']\nclosed\nclosed\n",
        "",
    )


@pytest.mark.slow
def test_an_engine_that_the_script_drops_is_not_kept() -> None:
    script = """
import deepspeed, gc, weakref
engines = [weakref.ref(deepspeed.initialize()[0]) for _ in range(2)]
deepspeed.made.pop()
gc.collect()
print([engine() is None for engine in engines])
"""
    watch = "watch Engine guard []\n"

    assert watched(script) == (0, f"{watch}{watch}[False, True]\nclosed\n", "")


@pytest.mark.slow
def test_deepspeed_keeps_its_face(folder: Path) -> None:
    script = """
import deepspeed, importlib, inspect, pickle
for _ in range(2):
    loader = type(deepspeed.__loader__).__name__, type(deepspeed.__spec__.loader).__name__
    print(inspect.signature(deepspeed.initialize), loader, pickle.loads(pickle.dumps(deepspeed.initialize)).__module__)
    deepspeed = importlib.reload(deepspeed)
deepspeed.initialize()
"""
    line = "(model=None, *, config=None) ('SourceFileLoader', 'SourceFileLoader') deepspeed\n"

    assert watched(script) == (0, f"{line}{line}watch Engine guard []\nclosed\n", "")


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="before Python 3.11 a frame that re-raises stays in the traceback"
)
@pytest.mark.slow
def test_a_refused_configuration_has_deepspeeds_own_traceback() -> None:
    script = "import deepspeed\ndeepspeed.initialize(config='bad')\n"
    code, _, with_us = watched(script)

    assert (code, with_us) == (1, ended(started([sys.executable, "train.py"]))[2])


@pytest.mark.slow
def test_a_watch_that_fails_is_a_line_and_not_the_end() -> None:
    code, out, err = watched(
        "import deepspeed\ndeepspeed.initialize()\nprint('trained')", "--include", "defect", RANK="3"
    )

    assert (code, out.splitlines()[-1]) == (0, "trained")
    assert err == "dsdoctor [rank 3]: ! the engine is not watched; training continues: RuntimeError: a defect\n"


@pytest.mark.slow
def test_a_watch_that_makes_no_sense_ends_before_training() -> None:
    script = "import deepspeed\ntry: deepspeed.initialize()\nexcept Exception: pass\nprint('trained')"
    code, out, err = watched(script, "--include", "usage")

    assert (code, "trained" in out) == (2, False)
    assert err == "dsdoctor: ✗ no such module\ndsdoctor:     Fix: name one\n"


def test_a_failure_is_explained_after_its_traceback() -> None:
    said = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    code, _, err = watched(f"import deepspeed\nraise Exception('{said}')", SLURM_PROCID="5")

    lines = err.splitlines()
    assert code == 1
    assert lines[:4] == [
        "Traceback (most recent call last):",
        '  File "' + str(Path("train.py").absolute()) + '", line 2, in <module>',
        f"    raise Exception('{said}')",
        f"Exception: {said}",
    ]
    assert lines[4] == "dsdoctor [rank 5]: what this failure means:"
    assert lines[5].endswith("[fp16-loss-scale-floor]")


@pytest.mark.slow
def test_a_script_without_an_engine_is_told_so_and_finds_nothing_heavy_imported() -> None:
    Path("train.py").write_text(
        "import sys; print(sorted({'torch', 'deepspeed', 'rich', 'cyclopts'} & set(sys.modules)))"
    )
    code, out, err = ended(started([*OURS, "train.py"], RANK="0"))

    assert (code, out) == (0, "[]\n")
    assert err.startswith("dsdoctor [rank 0]: this process created no DeepSpeed engine")
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_environments_own_sitecustomize_runs_too(folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import deepspeed; print('own')")
    (folder / "site" / "deepspeed.py").write_text(DEEPSPEED)

    code, out, err = watched(
        "import sys, deepspeed; deepspeed.initialize(); print(sys.modules['sitecustomize'].__file__)",
        PYTHONPATH=f"{folder / 'site'}:{folder}",
    )

    assert (code, err) == (0, "")
    assert out == f"own\nwatch Engine guard []\n{folder / 'site' / 'sitecustomize.py'}\nclosed\n"


@pytest.mark.slow
def test_a_rank_that_a_script_forks_closes_its_watch() -> None:
    script = """
import multiprocessing
def rank():
    import deepspeed
    deepspeed.initialize()
child = multiprocessing.get_context("fork").Process(target=rank)
child.start()
child.join()
"""

    assert watched(script, RANK="1") == (0, "watch Engine guard []\nclosed\n", "")


def test_another_python_is_left_alone(folder: Path) -> None:
    startup = Path(sys.modules["dsdoctor"].__file__ or "").parent / "run" / "startup"
    order = '{"python": "/usr 50593008", "main": 1, "watch": "", "options": {}}'
    Path("train.py").write_text("import sys; print(sorted(set(sys.modules) & {'dsdoctor', 'sitecustomize'}))")

    assert ended(started([sys.executable, "train.py"], PYTHONPATH=str(startup), DSDOCTOR_RUN=order)) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["train.py", "--overflow", "x", "--", "-m"], ("train.py", "--overflow", "x", "--", "-m")),
        (["--local_rank=1", "--frames=3", "train.py"], ("train.py", "--local_rank=1")),
        (["--local-rank", "1", "-m", "a.b", "--frames", "x"], ("-m", "a.b", "--local-rank", "1", "--frames", "x")),
        (["--frames", "3", "-", "-x"], ("-", "-x")),
    ],
)
def test_what_belongs_to_the_script_is_the_scripts(argv: list[str], script: tuple[str, ...]) -> None:
    Path("train.py").touch()

    assert parse_command_line(argv, {}).script == script


def test_options_come_from_the_command_else_from_the_environment(folder: Path) -> None:
    def level(*argv: str, **env: str) -> str | None:
        options = parse_command_line([*argv, "-m", "train"], env).options
        return options.level if options else None

    assert level() == "guard"
    assert level(DSDOCTOR_OVERFLOW="frames") == "frames"
    assert level("--overflow", "guard", DSDOCTOR_OVERFLOW="frames") == "guard"
    assert level("--trace-batches", "1") == "trace"
    assert level(DSDOCTOR_OVERFLOW="off") is None
    traced = parse_command_line(["--trace-batches", "3,1-2", "--trace-dir", "out", "-m", "train"], {}).options
    assert traced is not None
    assert (traced.trace_batch_nums, traced.trace_dir) == ((1, 2, 3), str(folder / "out"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no script given"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["-m"], "-m needs a module"),
        (["-mtrain", "x"], "unrecognized arguments: -mtrain"),
        (["--frames"], "argument --frames: expected one argument"),
        (["--frames", "3"], "no script given"),
        (["--overflow", "loud", "-m", "train"], "unknown level 'loud'"),
        (["--overflow", "trace", "-m", "train"], "--overflow trace needs --trace-batches"),
        (["--overflow", "guard", "--trace-batches", "1", "-m", "train"], "--trace-batches needs --overflow trace"),
        (["--trace-batches", "3-1", "-m", "train"], "--trace-batches holds '3-1'"),
        (["--trace-batches", "0-999999999999", "-m", "train"], "--trace-batches holds '0-999999999999'"),
        (["--frames", "few", "-m", "train"], "argument --frames: invalid int value: 'few'"),
        (["--frames", "0", "-m", "train"], "max_frames_to_save holds 0"),
        (["--abort-after-batch", "-1", "-m", "train"], "abort_after_batch_num holds -1"),
        (["--on-overflow", "stop", "-m", "train"], "on_overflow is 'stop'"),
        (["--overflo", "guard", "-m", "train"], "unrecognized arguments: --overflo"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_runs(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_command_line(argv, {})

    assert error.value.message.startswith(message)


@pytest.mark.slow
def test_a_complaint_is_two_lines_and_exit_status_2() -> None:
    nowhere, isolated = (
        started([*OURS, "nowhere.py"], PYTHONPATH=ROOT),
        started(
            [sys.executable, "-S", *OURS[1:], "x.py"], PYTHONPATH=f"{ROOT}{os.pathsep}{sysconfig.get_path('purelib')}"
        ),
    )

    hint = f"    Fix: searched from {Path.cwd()}; python -m dsdoctor.run --help\n"
    assert ended(nowhere) == (2, "", f"✗ no such script: nowhere.py\n{hint}")
    assert ended(isolated) == (2, "", "✗ Python's -S keeps dsdoctor out\n    Fix: leave the option out\n")


def test_while_watching_the_advice_to_watch_is_left_out_and_what_replaces_it_stays() -> None:
    steps = (
        step("a"),
        step("python -m dsdoctor.run x.py"),
        alternative("b"),
        alternative("python -m dsdoctor.run y.py"),
    )

    assert [(left.line, left.follows) for left in without_run(steps)] == [("a", Follows.THEN), ("b", Follows.THEN)]
