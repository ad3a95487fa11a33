"""The watches from within a script, for who can change that and not the line that launches it: ``watch`` and ``watch_hangs``.

Under `dsdoctor.run` the hang watch is on already, and nothing is begun twice.
"""

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.core.script import write_stderr
from dsdoctor.hang.models import HangOptions
from dsdoctor.overflow.watch import engine as overflow
from dsdoctor.run.hang import HangWatch, checked
from dsdoctor.run.script import VARIABLE, at_exit

_BEGUN: list[tuple[HangOptions, HangWatch]] = []
"""The watch of this process: one serves all parts of a script that ask for it."""
OPTIONS = ("after", "on_hang", "folder")


class AskedWatch:
    """The hang watch as one part of a script asks for it. A context manager; ``close`` ends it. Where no rank asks any more nothing
    is told."""

    def __init__(self, sampler: Any, engine: Any) -> None:
        self._sampler, self._engine = sampler, engine

    def close(self) -> None:
        """Ask no longer."""
        sampler, self._sampler = self._sampler, None
        if sampler is None:
            return
        sampler.asked -= 1
        if sampler.engine is self._engine:
            sampler.engine = None
        self._engine = None

    def __enter__(self) -> "AskedWatch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch_hangs(
    engine: Any = None, *, after: float | None = None, on_hang: str = "report", folder: str = "dsdoctor-hang"
) -> AskedWatch:
    """Watch this process, one of several ranks, from here on: call it on every rank, after init_process_group.

    ``engine``: holds ``global_steps`` (no property), which is told with a hang. ``after``: seconds without progress, None
    learns it. ``on_hang``: "report", or "stop" all ranks. It lasts to the end of the process, or of a ``with``. Raises UsageError
    for what makes no sense.
    """
    options = checked(after, on_hang, folder)
    if json.loads(os.environ.get(VARIABLE, "{}")).get("hang"):
        return AskedWatch(None, None)
    if not _BEGUN:
        _BEGUN.append((options, HangWatch(asdict(options), main=os.getpid(), at_exit=at_exit)))
    first, watch = _BEGUN[0]
    known = watch.sampler
    watch.begin(*_rank_and_world())
    if known is not None:
        known.asked += 1
        _say_if_other(first, options, known.rank)
    watch.note_engine(engine)
    return AskedWatch(watch.sampler, engine)


def _say_if_other(first: HangOptions, options: HangOptions, rank: int) -> None:
    """The supervisor beside the ranks has the options that it was started with."""
    if options != first and rank == 0:
        after = "learned" if first.after is None else f"{first.after:g} s"
        goes_on = f"after {after}, {first.on_hang}, {first.folder}"
        write_stderr(f"dsdoctor: the hang watch of this process keeps its first options: {goes_on}\n")


def _rank_and_world() -> tuple[int | None, int | None]:
    """As torch says, else as a launcher did."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    told = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(told[0]), int(told[1])) if all(map(str.isdigit, told)) else (None, None)


def watch(engine: Any, *, hang: Mapping[str, Any] | bool = False, **options: Any) -> overflow.Watch:
    """Watch a DeepSpeed engine; the options are those of ``Options``. Raises UsageError for what makes no sense.

    ``hang``: also say which rank does not come when nothing moves; True, or the options of ``watch_hangs``. Every rank must
    call it. Both end together.
    """
    wanted = dict(hang) if isinstance(hang, Mapping) else {}
    if wrong := [name for name in wanted if name not in OPTIONS]:
        raise UsageError(f"hang has no option {wrong[0]!r}", hint=f"one of {', '.join(OPTIONS)}")
    made = overflow.watch(engine, **options)
    if hang is not False:
        made.at_end(watch_hangs(engine, **wanted).close)
    return made
