"""What a command says before anything of it is imported, so that no terminal is silent; and ``--version``, which needs none.

Imports nothing of dsdoctor but its version: that it costs nothing is what it is for.
"""

import sys
from collections.abc import Sequence

from dsdoctor.core.release import __version__

WORDS = {
    "check": "inspecting this machine",
    "machine look": "inspecting this machine",
    "install": "starting",
    "build-wheel": "starting",
    "prebuild": "starting",
    "config": "querying the installed DeepSpeed; importing it takes a few seconds",
    "memory": "querying the installed DeepSpeed and tracing the model's shapes",
    "comm": "starting",
    "diagnose": "reading",
    "hang": "reading the ranks' files",
    "trace": "reading",
    "checkpoint": "reading the checkpoint",
    "wheel verify": "inspecting the wheel and this machine",
    "wheel pick": "inspecting the wheels and this machine",
    "toolkit": "inspecting this machine",
    "env": "inspecting this machine",
    "machine record": "inspecting this machine",
    "cache": "reading the cache",
}
SILENT = {"-h", "--help", "--version", "--list", "--json"}
"""Options whose answer comes at once, or that are for programs."""


def first_words(arguments: Sequence[str]) -> str:
    """What to say at once on a terminal; "" for a command that answers at once.

    >>> first_words(["check", "--op", "fused_adam"]), first_words(["check", "--help"]), first_words(["explain", "x"])
    ('* inspecting this machine', '', '')
    """
    words = WORDS.get(" ".join(arguments[:2])) or WORDS.get("".join(arguments[:1]), "")
    return f"* {words}" if words and not SILENT.intersection(arguments) else ""


def say_first_words(arguments: Sequence[str]) -> None:
    """Say them on stderr, where that is a terminal."""
    words = first_words(arguments)
    if words and sys.stderr is not None and sys.stderr.isatty():
        print(words, file=sys.stderr, flush=True)


def version_line() -> str:
    """dsdoctor's version, and the torch and DeepSpeed of its environment, by their metadata: neither is imported."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    found = []
    for name, package in (("torch", "torch"), ("DeepSpeed", "deepspeed")):
        try:
            found.append(f"{name} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return f"{__version__} (Python {platform.python_version()}, {', '.join(found)})"
