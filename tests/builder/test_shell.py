"""The lines for a shell, taken by the real shells, with values that try to break out."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dsdoctor.builder.plan.environment import SHELLS, ShellSettings, lines_for
from dsdoctor.core.errors import UsageError

HOSTILE = (
    "/a b/c",
    "/it's",
    "/$(touch pwned)`touch pwned`",
    "/back\\slash\\n",
    '/"q"$HOME',
    "/new\nline\n\nx",
    "/!bang !1",
    "/*?[a]~",
    "/;touch pwned|<>#&",
    "/é日本",
    "/two  blanks\ttab",
    "-n",
    "/{a,b}^%",
)
RUN = {
    "bash": (["bash", "--norc", "-c"], 'eval "$(cat lines)"\n'),
    "zsh": (["zsh", "-f", "-c"], 'eval "$(cat lines)"\n'),
    "fish": (["fish", "-N", "-c"], "cat lines | source\n"),
    "csh": (["tcsh", "-f", "-c"], 'eval "`cat lines`"\n'),
}


def environment_after(shell: str, settings: ShellSettings, folder: Path, **env: str) -> dict[str, str]:
    argv, script = RUN[shell]
    if shutil.which(argv[0]) is None:
        assert os.environ.get("CI") != "true", f"CI installs {argv[0]}"
        pytest.skip(f"{argv[0]} is not installed")
    (folder / "lines").write_text("".join(f"{line}\n" for line in lines_for(shell, settings)))
    start = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8", **env}
    done = subprocess.run([*argv, script + "/usr/bin/env -0 > after"], cwd=folder, env=start, capture_output=True)
    assert done.returncode == 0, done.stderr
    after = (folder / "after").read_bytes().decode("utf-8", errors="surrogateescape")
    assert not (folder / "pwned").exists()
    return dict(entry.split("=", 1) for entry in after.split("\0") if "=" in entry)


@pytest.mark.parametrize("shell", SHELLS)
def test_hostile_values_arrive_whole_and_run_nothing(shell: str, tmp_path: Path) -> None:
    values = {f"V{number}": value for number, value in enumerate(HOSTILE) if shell != "csh" or "\n" not in value}

    after = environment_after(shell, ShellSettings(values=values, prepend={}, before={}), tmp_path)

    assert {name: after[name] for name in values} == values


@pytest.mark.parametrize("shell", SHELLS)
def test_folders_go_in_front_of_what_was_there(shell: str, tmp_path: Path) -> None:
    folders = {"PATH": ("/it's a\\path",), "LD_LIBRARY_PATH": ("/x y", "/z")}
    settings = ShellSettings(values={}, prepend=folders, before={"PATH": "/usr/bin:/bin"})

    after = environment_after(shell, settings, tmp_path)

    assert after["PATH"] == "/it's a\\path:/usr/bin:/bin"
    assert after["LD_LIBRARY_PATH"] == "/x y:/z"


def test_what_a_shell_cannot_hold_is_refused() -> None:
    settings = ShellSettings(values={"CUDA_HOME": "/a\nb"}, prepend={}, before={})

    with pytest.raises(UsageError, match="line break"):
        lines_for("csh", settings)
    with pytest.raises(UsageError, match="not a supported shell"):
        lines_for("powershell", settings)
