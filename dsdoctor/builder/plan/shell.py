"""Environment settings -> the shell lines that make them, safe to ``eval`` whatever characters the paths hold. Pure."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsdoctor.core.errors import UsageError

SHELLS = ("bash", "zsh", "fish", "csh")
SAME = {"tcsh": "csh"}


@dataclass(frozen=True, kw_only=True)
class ShellSettings:
    """Variables to set, and folders to put in front of path variables. ``before`` is what those hold now."""

    values: Mapping[str, str]
    prepend: Mapping[str, tuple[str, ...]]
    before: Mapping[str, str]


def lines_for(shell: str, settings: ShellSettings) -> tuple[str, ...]:
    """The lines for a shell. Raises UsageError for a shell that is not in SHELLS, or that cannot take one of the values."""
    shell = SAME.get(shell, shell)
    if shell not in SHELLS:
        raise UsageError(f"--shell {shell!r} is not a known shell", hint=f"it takes {', '.join((*SHELLS, *SAME))}")
    setter = {"bash": _posix, "zsh": _posix, "fish": _fish, "csh": _csh}[shell]
    return (*_set(settings, setter), *_prepended(settings, shell))


def _set(settings: ShellSettings, setter: Callable[[str, str], str]) -> tuple[str, ...]:
    return tuple(setter(name, value) for name, value in sorted(settings.values.items()))


def _prepended(settings: ShellSettings, shell: str) -> tuple[str, ...]:
    lines = []
    for name, folders in sorted(settings.prepend.items()):
        joined = ":".join(folders)
        if shell == "fish":
            lines.append(f"set -gx --path {name} {' '.join(map(quoted_for_fish, folders))} ${name};")
        elif shell == "csh":
            # csh has no way to ask for a variable that may be unset within one line: what it holds now is written out
            before = settings.before.get(name)
            lines.append(_csh(name, f"{joined}:{before}" if before else joined))
        else:
            lines.append(f'export {name}={shlex.quote(joined)}"${{{name}:+:${name}}}";')
    return tuple(lines)


def _posix(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)};"


def _fish(name: str, value: str) -> str:
    return f"set -gx {name} {quoted_for_fish(value)};"


def _csh(name: str, value: str) -> str:
    return f"setenv {name} {quoted_for_csh(value)};"


def quoted_for_fish(text: str) -> str:
    """A word quoted for fish: in single quotes only the quote and the backslash are special; a line break is put outside them.

    >>> quoted_for_fish("it's")
    "'it\\\\'s'"
    """
    inner = text.replace("\\", "\\\\").replace("'", "\\'")
    return "'" + inner.replace("\n", "'\\n'") + "'"


def quoted_for_csh(text: str) -> str:
    """A word quoted for csh: in single quotes; a quote and an exclamation mark are put outside them, after a backslash.

    >>> print(quoted_for_csh("a'b"))
    'a'\\''b'
    """
    if re.search(r"[\n\r]", text):
        raise UsageError(f"csh cannot take a path with a line break: {text!r}", hint="use --shell bash, zsh or fish")
    return "'" + re.sub(r"(['!])", r"'\\\1'", text) + "'"
