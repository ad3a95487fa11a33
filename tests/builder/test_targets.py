"""Interpreters that are looked for, and environments that are made by an interpreter that plays Python's and pip's part."""

import os
from pathlib import Path

import pytest

from dsdoctor.builder.targets import (
    Interpreter,
    Target,
    choose_installer,
    cross,
    environment,
    find_interpreters,
    find_version,
    key,
)
from dsdoctor.core.errors import BuildFailed, DoctorError, ImpossiblePlan, UsageError
from dsdoctor.core.host import LocalHost
from tests.conftest import Disk

SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def answering(version: str) -> str:
    """An interpreter that says where it is and of which version."""
    return f'#!/bin/sh\necho \'DSDOCTOR {{"python": {{"executable": "\'$0\'", "version": "{version}"}}}}\'\n'


def found(host: LocalHost, version: str) -> tuple[str, str] | None:
    """The end of an interpreter's path, and the step that led to it."""
    interpreter = find_version(host, version)
    return interpreter and (interpreter.executable[-len("/3.12.1/bin/python3") :], interpreter.found_via)


def test_a_version_is_found_behind_a_shim_that_does_not_answer(disk: Disk) -> None:
    files = {"/shims/python3.12": SHIM, "/usr/bin/python3.12": answering("3.12.4")}
    host = disk(files, PATH="/shims:/usr/bin")

    interpreter = find_version(host, "3.12")

    assert interpreter is not None
    assert interpreter.executable.endswith("/usr/bin/python3.12")
    assert (interpreter.version, interpreter.minor, interpreter.found_via) == ("3.12.4", "3.12", "on_path")


def test_the_newest_of_pyenvs_is_taken(disk: Disk) -> None:
    folders = ("3.12.1", "3.12.10", "3.12.9", "3.12-dev", "3.1.2")
    files = {f"/home/.pyenv/versions/{folder}/bin/python3": answering(folder) for folder in folders}
    host = disk({**files, "/shims/python3.12": SHIM}, PATH="/shims", HOME="/home")

    assert found(host, "3.12") == ("3.12.10/bin/python3", "of_pyenv")
    assert found(host, "3.12.1") == ("/3.12.1/bin/python3", "of_pyenv")
    assert found(host, "3.13.77") is None


def test_uv_is_asked(disk: Disk) -> None:
    files = {"/usr/bin/uv": "#!/bin/sh\necho /opt/uv/python\n", "/opt/uv/python": answering("3.98.0")}
    host = disk(files, PATH="/usr/bin")

    interpreter = find_version(host, "3.98")

    assert interpreter is not None
    assert (interpreter.executable.endswith("/opt/uv/python"), interpreter.found_via) == (True, "of_uv")


def test_all_that_are_missing_are_named_with_the_command_that_gets_them(disk: Disk) -> None:
    host = disk({"/usr/bin/pyenv": SHIM, "/usr/bin/python3.97": answering("3.97.0")}, PATH="/usr/bin", HOME="/home")

    with pytest.raises(ImpossiblePlan) as error:
        find_interpreters(host, ("3.97", "3.98", "3.99.1"))

    assert "no Python 3.98 and no Python 3.99.1 here" in error.value.message
    assert error.value.hint == "pyenv install 3.98; pyenv install 3.99.1"


def test_a_path_that_is_no_interpreter_is_said(disk: Disk) -> None:
    with pytest.raises(
        ImpossiblePlan, match=r"cannot run the Python .*/bin/python: pyenv: python3\.12: command not found"
    ):
        find_interpreters(disk({"/bin/python": SHIM}), ("/bin/python",))


def test_every_python_goes_with_every_torch_and_every_cuda_once() -> None:
    pythons = tuple(Interpreter(executable=f"/p{n}", version=f"3.{n}.0", found_via="") for n in (11, 12))

    names = [target.name for target in cross(pythons, ("2.13.0", "2.14.1", "2.13.0"), ("12.8", "cpu"), None)]

    assert len(names) == len(set(names)) == 8
    assert names[:2] == ["py3.11 torch2.13.0 cu12.8", "py3.11 torch2.13.0 cpu"]


@pytest.mark.parametrize(
    ("torch", "cuda"), [("newest", None), ("2.13.*", None), ("2.13.0", "cu128"), ("2.13.0+cpu", "12.8"), ("", None)]
)
def test_what_is_no_release_is_a_usage_error(torch: str, cuda: str | None) -> None:
    with pytest.raises(UsageError):
        cross((), (torch,), (cuda,) if cuda else (), None)


def test_a_wheel_index_is_part_of_what_an_environment_is() -> None:
    of = {
        key(Target(python="/p", version="3.12.1", torch="2.13.0", index=index))
        for index in (None, "https://a", "https://b")
    }

    assert len(of) == 3
    assert all(name.startswith("py3.12-torch2.13.0-") for name in of)


PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
*ask_release.py*) cat "$here/release" ;;
"-I -m venv --clear"*) exit 1 ;;
"-I -m venv "*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; echo made >> "$LOG" ;;
"-c "*"'pip'"*" --version") ;;
"-c "*"'pip'"*" install "*) shift 2; echo "pip $*" >> "$LOG"; echo "$RELEASE" > "$here/release"; exit "$STATUS" ;;
*) exit 1 ;;
esac
"""


class Place:
    """A folder with a base interpreter, whose pip gives ``release``."""

    def __init__(self, folder: Path) -> None:
        self.log, self.cache, self.bin = folder / "log", folder / "cache", folder / "bin"
        self.bin.mkdir()
        self.base = self.program("python3.12", PYTHON)

    def program(self, name: str, text: str) -> str:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)
        return str(self.bin / name)

    def make(self, *, release: str = '"2.13.0+cpu"', status: int = 0, offline: bool = False, **wanted: str) -> str:
        env = {"PATH": f"{self.bin}:{os.environ['PATH']}", "LOG": str(self.log), "STATUS": str(status)}
        # pip is set up, so that a uv of this machine has no part in it
        env |= {"RELEASE": f'DSDOCTOR {{"version": {release}}}', "PIP_INDEX_URL": "https://mirror.invalid/simple"}
        target = Target(python=self.base, version="3.12.1", torch="2.13.0", **wanted)
        return environment(LocalHost(env=env), target, self.cache, offline=offline, say=lambda _: None)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def left(self) -> list[str]:
        return [path.name for path in (self.cache / "targets").iterdir() if path.is_dir()]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_environment_is_made_once_and_kept(place: Place) -> None:
    first = place.make()
    again = place.make(offline=True)

    assert first == again
    assert place.calls == ["made", "pip install --quiet --disable-pip-version-check torch==2.13.0 setuptools wheel"]
    assert (place.cache / "targets").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_torch_comes_from_the_index_of_its_cuda_and_the_rest_from_the_users_own(place: Place) -> None:
    place.make(cuda="cpu")
    place.make(cuda="cpu", index="https://wheels.invalid")

    _, torch, rest, _, unlabelled, _ = place.calls
    assert torch.endswith("--no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu")
    assert rest.endswith("--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu setuptools wheel")
    assert unlabelled.endswith("--index-url https://wheels.invalid torch==2.13.0")


@pytest.mark.slow
def test_one_that_was_killed_half_made_is_made_anew(place: Place) -> None:
    python = Path(place.make())
    (python.parents[1] / "dsdoctor.json").unlink()
    (python.parents[1] / "half").write_text("made")

    place.make()

    assert place.calls.count("made") == 2
    assert not (python.parents[1] / "half").exists()


def test_one_whose_interpreter_is_gone_is_made_anew(place: Place) -> None:
    Path(place.make()).unlink()

    place.make()

    assert place.calls.count("made") == 2


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"cuda": "12.8"},
            ImpossiblePlan,
            r"you asked for --cuda 12\.8, but the index gave torch 2\.13\.0\+cpu, a CPU build",
        ),
        ({"cuda": "cpu", "release": '"2.13.0", "cuda": "13.0"'}, ImpossiblePlan, "a build for CUDA 13.0"),
        ({"cuda": "cpu", "release": '"2.13.0", "hip": "6.4"'}, ImpossiblePlan, "a build for ROCm 6.4"),
        ({"cuda": "cpu", "release": '"2.13.0", "xpu": "20250101"'}, ImpossiblePlan, "an XPU build"),
        ({"release": "null"}, ImpossiblePlan, "cannot be queried"),
        ({"status": 1}, BuildFailed, "pip could not install torch==2.13.0 setuptools wheel"),
    ],
)
def test_a_torch_that_is_not_what_was_asked_leaves_nothing(
    wrong: dict[str, str], error: type[DoctorError], message: str, place: Place
) -> None:
    with pytest.raises(error, match=message):
        place.make(**wrong)  # type: ignore[arg-type]

    assert place.left == []


def test_offline_an_environment_is_taken_and_none_is_made(place: Place) -> None:
    with pytest.raises(ImpossiblePlan, match="there is no environment for py3"):
        place.make(offline=True)

    assert (place.calls, place.left) == ([], [])


@pytest.mark.slow
def test_uv_installs_where_the_user_has_not_set_pip_up(place: Place) -> None:
    place.program("uv", '#!/bin/sh\necho "uv $*" >> "$LOG"\n')
    env = {"PATH": f"{place.bin}:{os.environ['PATH']}", "LOG": str(place.log), "PIP_CONFIG_FILE": os.devnull}

    plain = choose_installer(LocalHost(env=env), place.base)
    steered = choose_installer(LocalHost(env={**env, "PIP_FIND_LINKS": "/wheels"}), place.base)
    plain.make(place.cache / "x")
    plain.install("/x/bin/python", ["torch==2.13.0"])

    assert (plain.because, steered.because) == ("uv", "pip: uv would ignore its find-links")
    assert place.calls[0].startswith("uv venv --quiet --no-project --seed --python ")
    assert place.calls[1] == "uv pip install --quiet --python /x/bin/python torch==2.13.0"
