"""For who cannot change the line that launches: what `dsdoctor.run` would set in the environment, as lines of a shell.

With them every Python of this environment that makes a process group of torch, or imports DeepSpeed, is watched.
"""

import argparse
import shlex
from collections.abc import Mapping, Sequence

from dsdoctor.core.errors import UsageError

SHELL = "sh"
NO_MAIN = 0
"""In place of the script's pid: no process is the one that was called."""


def add_option(parser: argparse.ArgumentParser) -> None:
    """Our option, for the parser of ``dsdoctor.run``."""
    parser.add_argument(
        "--export",
        metavar=SHELL,
        help="run nothing: print the lines of a shell that switch all this on for the commands after them",
    )


def is_wanted(given: argparse.Namespace, words: Sequence[str]) -> bool:
    """Whether lines are to be printed, and no script is run. Raises UsageError for what makes no sense."""
    if given.export is None:
        return False
    if given.export != SHELL:
        raise UsageError(f"--export is {given.export!r}", hint=f"{SHELL} is the only one")
    if words:
        raise UsageError(f"--export runs nothing, and {words[0]} was given", hint="leave one of them out")
    return True


def shell_lines(environment: Mapping[str, str], names: Sequence[str]) -> list[str]:
    """The lines that set some variables.

    >>> shell_lines({"A": "one two"}, ["A"])
    ["export A='one two'"]
    """
    return [f"export {name}={shlex.quote(environment[name])}" for name in names]
