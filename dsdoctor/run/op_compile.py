"""torch's extensions under `dsdoctor.run`: while torch compiles one, which takes minutes without a word (DeepSpeed does so at its
first start), what it compiles; and before a script starts, locks that no process holds, which it would wait for as silently.

While torch compiles, a thread waits and writes a line now and then. It runs as long as the call, imports nothing, and takes no lock
but its own: it looks at the stack of the thread that called, and writes to the file descriptor of stderr.
"""

import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from dsdoctor.core.processes import FileHolder, holder_of
from dsdoctor.core.script import UnlistedThread, standing_for

MODULE = "torch.utils.cpp_extension"
NOTICES_SECONDS = (10.0, 30.0, 60.0, 120.0)
"""When a line comes; after the last of them again and again after as long."""
NO_HOLDER = FileHolder(pid=None, doubt="")
LOCK_RELEASED_SINCE = (2, 14)
"""From this torch on the operating system holds the lock."""


class CompileNotices:
    """What is written of the extensions that this process compiles or waits for. ``mark``: stands before each line. ``after``: when
    a line comes, in seconds from the begin of the call on."""

    def __init__(self, mark: str, after: tuple[float, ...] = NOTICES_SECONDS) -> None:
        self._mark, self._after = mark.encode(), after

    def wrap(self, cpp_extension: ModuleType) -> None:
        """Put a ``load`` that is told of in the place of torch's."""
        original = getattr(cpp_extension, "load", None)
        if callable(original):
            cpp_extension.load = self._with_notices(original)  # type: ignore[attr-defined]

    def _with_notices(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def load_with_notices(*args: Any, **kwargs: Any) -> Any:
            name = kwargs.get("name", args[0] if args else "")
            notice = _Notice(str(name), self._mark, self._after)
            notice.begin()
            try:
                return load(*args, **kwargs)
            finally:
                notice.end()

        return standing_for(load, load_with_notices)


class _Notice:
    def __init__(self, name: str, mark: bytes, after: tuple[float, ...]) -> None:
        self._name, self._mark, self._after = name.encode(errors="replace"), mark, after
        self._began, self._caller = time.monotonic(), threading.get_ident()
        self._ended = threading.Event()
        self._has_told = False
        self._thread = UnlistedThread(self._tell)

    def begin(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no more threads are allowed: the compile matters more
            self._ended.set()

    def end(self) -> None:
        self._ended.set()
        if self._has_told:
            self._write(b"%s is there after %d s" % (self._name, time.monotonic() - self._began))

    def _tell(self) -> None:
        number, due = 0, self._after[0]
        while not self._ended.wait(max(0.0, due - (time.monotonic() - self._began))):
            seconds = time.monotonic() - self._began
            waits = waits_for_another(sys._current_frames().get(self._caller))
            what = b"waiting for another process that compiles %s" if waits else b"compiling %s"
            self._has_told = True
            self._write((what + b" (first use), %d s") % (self._name, seconds))
            number += 1
            due = self._after[number] if number < len(self._after) else due + self._after[-1]

    def _write(self, line: bytes) -> None:
        try:
            os.write(2, self._mark + line + b"\n")
        except OSError:  # a closed or full stderr is no reason to end a compile
            self._has_told = False


def waits_for_another(frame: FrameType | None) -> bool:
    """Whether a stack waits for the lock of a build folder, which the process that compiles holds."""
    while frame is not None:
        if frame.f_code.co_filename.endswith("/torch/utils/file_baton.py"):
            return True
        frame = frame.f_back
    return False


def stale_locks(environment: Mapping[str, str]) -> Iterator[str]:
    """A line for each lock of this user's folder for extensions that surely nobody holds, with the command that removes it."""
    found = [path for path in lock_files(environment) if holder_of(str(path)) == NO_HOLDER]
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
    """Whether this environment's torch waits for a file to vanish."""
    version = re.match(r"(\d+)\.(\d+)", installed_torch())
    return version is not None and (int(version[1]), int(version[2])) < LOCK_RELEASED_SINCE


def installed_torch() -> str:
    """The version of this environment's torch, which is not imported; "" for none."""
    # not in every process of a script
    import importlib.metadata

    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
