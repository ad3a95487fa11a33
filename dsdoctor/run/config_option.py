"""``--config-check`` of `python -m dsdoctor.run`. Light: it is imported before the script starts."""

import argparse

from dsdoctor.core.errors import UsageError

MODES = ("warn", "strict", "off")


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--config-check``."""
    parser.add_argument(
        "--config-check",
        metavar="MODE",
        default=MODES[0],
        help="judge each engine's DeepSpeed configuration before initialize: warn (default), strict refuses to start with "
        "one that has an error, off",
    )


def mode_of(given: argparse.Namespace) -> str:
    """What ``--config-check`` says. Raises UsageError for what it does not know."""
    mode = str(given.config_check)
    if mode not in MODES:
        raise UsageError(f"--config-check knows no {mode!r}", hint=f"one of {', '.join(MODES)}")
    return mode
