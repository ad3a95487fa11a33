"""Completion for a shell, installed: the script, and the line that loads it. A startup file is edited only if its user agrees."""

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import make_folder, real_path, write_bytes
from dsdoctor.ui.terminal import Stream, show

Shell = Literal["bash", "zsh", "fish"]


@dataclass(frozen=True, kw_only=True)
class Startup:
    """The startup file of a shell, and the line in it that loads a script; it stands at the file's beginning or end."""

    file: Path
    line: str
    first: bool = False

    @property
    def is_there(self) -> bool:
        """Whether the file has the line."""
        return self.file.is_file() and self.line.encode() in self.file.read_bytes().splitlines()

    def add(self) -> None:
        """Write the line into the file, or where a link of that name leads."""
        file = Path(real_path(self.file))
        before = file.read_bytes() if file.is_file() else b""
        added = f"# completion of dsdoctor\n{self.line}\n".encode()
        end = b"" if before.endswith(b"\n") or not before else b"\n"
        mode = file.stat().st_mode & 0o777 if file.is_file() else 0o644
        write_bytes(file, added + before if self.first else before + end + added, mode=mode)


def install_completion(
    shell: Shell | None, output: Path | None, *, yes: bool, script_of: Callable[[Shell], str]
) -> Iterator[str]:
    """Write the script and, where the user agrees, the line that loads it; what was done, a line each."""
    chosen = shell or _shell_of(os.environ.get("SHELL", ""))
    script = (output or _default_output(chosen)).absolute()
    make_folder(script.parent)
    write_bytes(script, script_of(chosen).encode())
    yield f"✓ completion for {chosen} is in {script}"
    startup = _startup(chosen, script)
    if startup is None or startup.is_there:
        return
    if yes or _agrees(startup):
        startup.add()
        yield f"✓ {startup.file} loads it: start a new shell"
    else:
        yield f"· {startup.file} was not changed; to load it, add this line:"
        yield startup.line


def _shell_of(path: str) -> Shell:
    names: dict[str, Shell] = {"bash": "bash", "zsh": "zsh", "fish": "fish"}
    if (name := path.rpartition("/")[2]) not in names:
        raise UsageError(f"$SHELL is {path!r}, and completion is for bash, zsh and fish", hint="--shell bash")
    return names[name]


def _default_output(shell: Shell) -> Path:
    """Where each shell, or its completion package, looks by itself."""
    home = Path.home()
    if shell == "bash":
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        return data / "bash-completion" / "completions" / "dsdoctor"
    if shell == "zsh":
        return home / ".zsh" / "completions" / "_dsdoctor"
    return Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish" / "completions" / "dsdoctor.fish"


def _startup(shell: Shell, script: Path) -> Startup | None:
    """What must be in a startup file; fish needs nothing."""
    quoted = shlex.quote(str(script))
    if shell == "bash":
        return Startup(file=Path.home() / ".bashrc", line=f"[ -f {quoted} ] && . {quoted}")
    if shell == "zsh":
        folder = Path(os.environ.get("ZDOTDIR") or Path.home())
        return Startup(file=folder / ".zshrc", line=f"fpath=({shlex.quote(str(script.parent))} $fpath)", first=True)
    return None


def _agrees(startup: Startup) -> bool:
    """What the user at the terminal answers; nobody there is a no."""
    if sys.stdin is None or not sys.stdin.isatty() or not sys.stderr.isatty():
        return False
    show(Stream(stderr=True), [f"add this line to {startup.file}?", startup.line])
    sys.stderr.write("[y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}
