"""Completion: what a real shell completes, and what --install-completion writes. A startup file is the user's."""

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.runner import run
from tests.each import each

ROOT = Path(__file__).parents[2]


def talk(argv: list[str], typed: list[tuple[str, str]], *, cwd: Path, env: dict[str, str]) -> str:
    """What a program on a terminal of its own shows; each text is typed once what is awaited before it was shown."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        argv, cwd=cwd, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown, seen, until = "", 0, time.monotonic() + 60
    waiting = list(typed)
    try:
        while time.monotonic() < until:
            if waiting and waiting[0][0] in shown[seen:]:
                seen = len(shown)
                os.write(ours, waiting.pop(0)[1].encode())
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    part = os.read(ours, 4096)
                except OSError:
                    break
                if not part:
                    break
                shown += part.decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("dsdoctor diagnose trai", "training-of-monday.log"),
        ("dsdoctor config trai", "training-of-monday.log"),
        ("dsdoctor check --machine trai", "training-of-monday.log"),
        ("dsdoctor wheel verify trai", "training-of-monday.log"),
        ("dsdoctor diagn", "dsdoctor diagnose"),
    ],
)
def test_bash_completes_file_names_and_commands(typed: str, completed: str, tmp_path: Path) -> None:
    (tmp_path / "training-of-monday.log").touch()
    shutil.copy(ROOT / "completions" / "dsdoctor", tmp_path / "script")
    steps = [("READY$", "source ./script; echo DO''NE\n"), ("DONE", f"{typed}\t\x01echo [\x05]\n"), ("]", "exit\n")]
    env = {"PATH": os.environ["PATH"], "PS1": "READY$", "TERM": "dumb", "HOME": str(tmp_path)}

    shown = talk(["bash", "--norc", "--noprofile", "-i"], steps, cwd=tmp_path, env=env)

    assert completed in shown


@pytest.mark.slow
@each("shell", ["bash", "zsh", "fish"])
def test_without_a_terminal_no_startup_file_is_edited(shell: str, tmp_path: Path) -> None:
    home = tmp_path / shell
    home.mkdir()
    for name in (".bashrc", ".zshrc"):
        (home / name).write_text("# mine\n")

    done = run("--install-completion", HOME=str(home), SHELL=f"/usr/bin/{shell}", XDG_DATA_HOME="", XDG_CONFIG_HOME="")

    assert done.returncode == 0
    assert [(home / name).read_text() for name in (".bashrc", ".zshrc")] == ["# mine\n"] * 2
    assert "dsdoctor" in next(path for path in home.rglob("*dsdoctor*") if path.is_file()).read_text()
    assert ("to load it, add this line:" in done.stdout) == (shell != "fish")


@pytest.mark.slow
@each(("shell", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_with_yes_the_line_is_added_once_and_the_file_stays_a_link(shell: str, file: str, tmp_path: Path) -> None:
    home, dotfiles = tmp_path / shell, tmp_path / f"dotfiles-{shell}"
    home.mkdir()
    dotfiles.write_bytes(b"# mine, without an end, \xff")
    (home / file).symlink_to(dotfiles)

    for _ in range(2):
        done = run("--install-completion", "--shell", shell, "--yes", HOME=str(home), XDG_DATA_HOME="", ZDOTDIR="")

    assert done.returncode == 0
    assert (home / file).is_symlink()
    content = dotfiles.read_bytes()
    assert content.count(b"# completion of dsdoctor\n") == 1
    assert b"# mine, without an end, \xff" in content
    assert content.startswith(b"# mine") == (shell == "bash")


def test_a_shell_that_is_not_known_is_a_usage_error(tmp_path: Path) -> None:
    done = run("--install-completion", HOME=str(tmp_path), SHELL="/bin/dash")

    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "--shell bash" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["y", "n", ""])
def test_at_a_terminal_it_asks(answer: str, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "SHELL": "/bin/bash", "XDG_DATA_HOME": "", "COLUMNS": "300"}

    shown = talk(
        [sys.executable, "-m", "dsdoctor", "--install-completion"], [("[y/N]", f"{answer}\n")], cwd=ROOT, env=env
    )

    assert "add this line to" in shown
    assert (tmp_path / ".bashrc").exists() == (answer == "y")
