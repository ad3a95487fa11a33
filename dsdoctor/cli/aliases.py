"""Other words for a command: the names that commands had in an earlier release, and ``dsdoctor help COMMAND``.

Imports nothing: it's asked before anything else of a command is.
"""

from collections.abc import Sequence

RENAMED = {
    "verify": "wheel verify",
    "pick": "wheel pick",
    "index merge": "wheel index",
    "index": "wheel",
    "look": "machine look",
    "record": "machine record",
    "compare": "machine compare",
    "plan": "build-wheel --dry-run",
    "prebuild": "install --build",
}
"""A command's name in an earlier release -> its name today. The longer one comes first where two begin alike."""

SEPARATE = {"prebuild"}
"""It only leads to its successor, which also loads each op and prints another document."""


def renamed(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The earlier name that a command line begins with, or "", and the command line of today.

    >>> renamed(["verify", "x.whl"]), renamed(["index", "merge", "public", "a"])
    (('verify', ['wheel', 'verify', 'x.whl']), ('index merge', ['wheel', 'index', 'public', 'a']))
    >>> renamed(["prebuild"]), renamed(["help", "plan"]), renamed(["help", "--all"])
    (('prebuild', ['prebuild']), ('plan', ['build-wheel', '--dry-run', '--help']), ('', ['--help', '--all']))
    """
    words = list(arguments)
    if words[:1] == ["help"]:
        words = ["--help", *words[1:]] if words[1:] in ([], ["--all"]) else [*words[1:], "--help"]
    for old, new in RENAMED.items():
        length = len(old.split())
        if words[:length] == old.split():
            return old, words if old in SEPARATE else [*new.split(), *words[length:]]
    return "", words
