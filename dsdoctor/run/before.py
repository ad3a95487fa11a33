"""Before a script starts: locks of torch's extensions that no process holds, which the script would wait for without a word."""

import importlib.metadata
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsdoctor.core.processes import FileHolder, holder_of

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
            f"! no process holds {path}, which a launch that was killed left behind: whatever loads "
            f"{path.parent.name} waits for it for ever. Remove it: rm -- {shlex.quote(str(path))}"
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
