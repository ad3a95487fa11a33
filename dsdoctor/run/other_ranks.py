"""A rank that ends by an exception leaves a line of it where the ranks found each other; one that fails after it says that line.

What the later ones raise ("Connection closed by peer") tells nothing but that the first one has ended. No collective.
"""

import contextlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

COUNT = "dsdoctor/raised"
PATIENCE = timedelta(seconds=3)
"""How long an answer may take at the end of a process: the store's host may have gone."""
MOST = 400
"""Characters of a message."""


CONSEQUENCES = ("gloo/transport/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL ")
"""Words of what a rank raises because another one is gone."""


def first_failure(failure: BaseException) -> str:
    """Leave a line about this rank's failure. Returns the line of another rank that failed before; empty: there is none, or
    nobody can be asked.

    Where the store may have ended with rank 0 it is not asked: torch prints a page about that."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    try:
        if c10d is None or not c10d.is_initialized() or c10d.get_world_size() < 2:
            return ""
        mine = line_of(failure)
        is_first_hand = not any(words in str(failure) for words in CONSEQUENCES)
        lasts = c10d.get_rank() == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if not (is_first_hand or lasts):
            return ""
        with _patient(c10d._get_default_store()) as store:
            number = store.add(COUNT, 1) if is_first_hand else 0
            if is_first_hand:
                store.set(f"{COUNT}/{number}", f"rank {c10d.get_rank()} raised {mine}")
            if number == 1 or not store.check([f"{COUNT}/1"]):
                return ""
            said: str = store.get(f"{COUNT}/1").decode(errors="replace")
            return "" if said.endswith(f" raised {mine}") else said
    except Exception:  # the store's host is gone, or the groups are
        return ""


@contextlib.contextmanager
def _patient(store: Any) -> Iterator[Any]:
    before = store.timeout
    store.set_timeout(PATIENCE)
    try:
        yield store
    finally:
        store.set_timeout(before)


def line_of(failure: BaseException) -> str:
    """An exception in a line, with the innermost place in the user's own code.

    >>> line_of(ValueError("no such\\nlabel"))
    'ValueError: no such'
    """
    from dsdoctor.core.redaction import Hidden
    from dsdoctor.report.terminal import printable

    said = "".join(traceback.format_exception_only(type(failure), failure)).strip().partition("\n")[0]
    frames = traceback.extract_tb(failure.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)] or frames
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return printable(Hidden(dict(os.environ)).out_of(f"{said[:MOST]}{place}"))


def _is_own(file: str) -> bool:
    """Whether code is the script's, and not a library's."""
    libraries = {sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    libraries |= {*site.getsitepackages(), site.getusersitepackages()}
    return not file.startswith("<") and not any(file.startswith(f"{folder}{os.sep}") for folder in libraries)
