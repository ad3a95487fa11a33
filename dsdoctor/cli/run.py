"""The command that runs a training script with its watch: ``python -m dsdoctor.run`` by a shorter name."""

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

from cyclopts import Parameter

Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


def run_command(*words: Words) -> NoReturn:
    """Run a training script, watched for hangs, inf and memory.

    The script is unmodified. A report names the rank that hangs, the module that made the first inf, or what filled the memory.

    Example: dsdoctor run train.py --epochs 3
    """
    become_script(words)


def become_script(words: Sequence[str]) -> NoReturn:
    """Run the script that the words after ``dsdoctor run`` name, in this process: it ends as the script does."""
    from dsdoctor.run.__main__ import as_module, start

    start(words, as_module(sys.orig_argv, len(words)))
