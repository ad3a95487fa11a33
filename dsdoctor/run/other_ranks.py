"""A rank that ends by an exception leaves a line of it where the ranks found each other; one that fails and finds it says it.

What the others raise ("Connection closed by peer") tells nothing but that one has ended. Who raised first is not known: an
exception has no time, and what stands in ``finally`` may take minutes. No collective.
"""

import os
import site
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

COUNT = "dsdoctor/raised"
PATIENCE = 3.0
"""Seconds that an answer may take at the end of a process, whatever its store, the store's host and other threads do."""
MOST = 400
"""Characters of a message."""


def before_the_end(function: Callable[[], None]) -> None:
    """Call a function when the script has ended, while threads can be started: Python 3.12 forbids that from ``atexit`` on."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(function)


def other_failure(failure: BaseException) -> str:
    """Leave a line about this rank's failure. Returns the line of another rank; empty: there is none, or nobody can be asked."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    said: list[str] = []
    try:
        if c10d is None or not c10d.is_initialized() or c10d.get_world_size() < 2:
            return ""
        asked = _Asked(c10d._get_default_store(), c10d.get_rank(), line_of(failure), follows(failure), said)
        # whoever holds the lock of this process's client keeps a thread waiting, and not the process
        thread = threading.Thread(target=asked.ask, name="dsdoctor's question", daemon=True)
        thread.start()
        thread.join(PATIENCE)
    except Exception:  # the groups are gone, or no thread can be started
        return ""
    return said[0] if said else ""


class _Asked:
    """What one rank asks of the store: in a thread of its own, which may never end."""

    def __init__(self, store: Any, rank: int, mine: str, is_consequence: bool, said: list[str]) -> None:
        self.store, self.rank, self.mine, self.is_consequence, self.said = store, rank, mine, is_consequence, said

    def ask(self) -> None:
        try:
            _reach(self.store)
            # a connection of our own: that of the process may be in use, by a wait of half an hour
            store = self.store.clone() if hasattr(self.store, "clone") else self.store
            number = 0
            if not self.is_consequence:
                number = store.add(COUNT, 1)
                store.set(f"{COUNT}/{number}", f"rank {self.rank} raised {self.mine}")
            if number != 1 and store.check([f"{COUNT}/1"]):
                said: str = store.get(f"{COUNT}/1").decode(errors="replace")
                self.said += [] if said.endswith(f" raised {self.mine}") else [said]
        except Exception:  # the store's host is gone
            return


def _reach(store: Any) -> None:
    """Raise OSError where the store has ended with its host: torch prints a page about that, and this does not."""
    import socket

    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is not None and port is not None:
        socket.create_connection((host, port), timeout=PATIENCE).close()


def follows(failure: BaseException) -> bool:
    """Whether an exception, or one that it was raised from or while treating, only says that another rank is gone or does not
    come.

    >>> follows(RuntimeError("wait timeout after 2000ms, keys: /default_pg/0//ready"))
    True
    >>> follows(KeyError("label"))
    False
    """
    from dsdoctor.diagnosis.consequences import SAYS_ANOTHER_IS_GONE

    dist = sys.modules.get("torch.distributed")
    of_torch = getattr(dist, "DistError", ())
    for each in _with_its_causes(failure):
        said = _said(each)
        if isinstance(each, of_torch) or "NCCL " in said or SAYS_ANOTHER_IS_GONE.search(said):
            return True
    return False


def _with_its_causes(failure: BaseException) -> Iterator[BaseException]:
    waiting: list[BaseException | None] = [failure]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


def _said(failure: BaseException) -> str:
    """An exception's class and message, as Python prints them; of code that Python could not read the place too."""
    if isinstance(failure, SyntaxError):
        return f"{type(failure).__name__}: {failure}"
    return "".join(traceback.format_exception_only(type(failure), failure)).strip()


def line_of(failure: BaseException) -> str:
    """An exception in a line, with the innermost place in the user's own code.

    >>> line_of(ValueError("no such\\nlabel"))
    'ValueError: no such'
    >>> line_of(SyntaxError("invalid syntax", ("/work/model.py", 3, 1, "x = = 1")))
    'SyntaxError: invalid syntax (model.py, line 3)'
    """
    from dsdoctor.core.redaction import Hidden
    from dsdoctor.ui.terminal import printable

    said = _said(failure).partition("\n")[0]
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return printable(Hidden(dict(os.environ)).out_of(f"{said[:MOST]}{place}"))


def _is_own(file: str) -> bool:
    """Whether code is the script's, and not a library's."""
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    libraries |= {*site.getsitepackages(), site.getusersitepackages()}
    return not file.startswith("<") and not any(file.startswith(f"{folder}{os.sep}") for folder in libraries)
