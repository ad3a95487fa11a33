"""Before a script starts: options, the environment, and locks that nobody holds."""

import argparse
import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dsdoctor.core.errors import UsageError
from dsdoctor.core.processes import FileHolder, holder_of

# ``--config-check`` of `python -m dsdoctor.run`. Light: it is imported before the script starts.


MODES = ("warn", "strict", "off")


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """``--config-check``."""
    parser.add_argument(
        "--config-check",
        metavar="MODE",
        default=MODES[0],
        help="check each engine's DeepSpeed configuration before initialize: warn (default), strict (do not start with an "
        "error), or off",
    )


def mode_of(given: argparse.Namespace) -> str:
    """What ``--config-check`` says. Raises UsageError for what it does not know."""
    mode = str(given.config_check)
    if mode not in MODES:
        raise UsageError(f"unknown --config-check {mode!r}", hint=f"one of {', '.join(MODES)}")
    return mode


# For who cannot change the line that launches: what `dsdoctor.run` would set in the environment, as lines of a shell.
#
# With them every Python of this environment that makes a process group of torch, or imports DeepSpeed, is watched.


SHELL = "sh"
NO_MAIN = 0
"""In place of the script's pid: no process is the one that was called."""


def add_export_option(parser: argparse.ArgumentParser) -> None:
    """Our option, for the parser of ``dsdoctor.run``."""
    parser.add_argument(
        "--export",
        metavar=SHELL,
        help="run nothing; print shell lines that turn dsdoctor.run on for the commands after them",
    )


def is_wanted(given: argparse.Namespace, words: Sequence[str]) -> bool:
    """Whether lines are to be printed, and no script is run. Raises UsageError for what makes no sense."""
    if given.export is None:
        return False
    if given.export != SHELL:
        raise UsageError(f"unknown --export {given.export!r}", hint=f"only {SHELL} is supported")
    if words:
        raise UsageError(f"--export runs nothing, but {words[0]} was given", hint="remove one of them")
    return True


def shell_lines(environment: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """The lines that set some variables.

    >>> shell_lines({"A": "one two"}, ["A"])
    ["export A='one two'"]
    """
    return [f"export {name}={shlex.quote(environment[name])}" for name in names]


# Before a script starts: locks of torch's extensions that no process holds, which the script would wait for without a word.


SURELY_NOBODY = FileHolder(pid=None, doubt="")
RELEASED_SINCE = (2, 14)
"""From this torch on the operating system holds the lock."""


def stale_locks(environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each lock of this user's folder for extensions that surely nobody holds, with the command that removes it."""
    found = [path for path in lock_files(environment) if holder_of(str(path)) == SURELY_NOBODY]
    if not found or not waits_for_files():
        return
    for path in found:
        yield (
            f"! stale lock {path}: no process holds it, and whatever loads {path.parent.name} "
            f"waits for it forever. Remove it: rm -- {shlex.quote(str(path))}"
        )


def lock_files(environment: Mapping[str, str]) -> list[Path]:
    """The lock files where torch compiles extensions: TORCH_EXTENSIONS_DIR, else a folder for this Python and its CUDA."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    if named:
        return sorted(Path(named).glob("*/lock"))
    home = environment.get("HOME", "")
    cache = environment.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
    mine = f"torch_extensions/py{sys.version_info.major}{sys.version_info.minor}_*/*/lock"
    return sorted(Path(cache).glob(mine)) if cache else []


def waits_for_files() -> bool:
    """Whether this environment's torch waits for a file to vanish. It is not imported."""
    try:
        version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return False
    return version is not None and (int(version[1]), int(version[2])) < RELEASED_SINCE
