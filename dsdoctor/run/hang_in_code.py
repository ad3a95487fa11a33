"""The hang watch from within a script, for who can change that and not the line that launches it.

Under `dsdoctor.run` it is on already, and nothing is begun twice.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from dsdoctor.run.hang import HangWatch, checked
from dsdoctor.run.script import VARIABLE, at_exit


def watch_hangs(
    engine: Any = None, *, after: float | None = None, on_hang: str = "report", folder: str = "dsdoctor-hang"
) -> None:
    """Watch this process, one of several ranks, from here on: call it on every rank, after init_process_group.

    ``engine``: has ``global_steps``, which is told with a hang. ``after``: seconds without progress on any rank, None
    learns it. ``on_hang``: "report", or "stop" all ranks. Raises UsageError for what makes no sense.
    """
    options = checked(after, on_hang, folder)
    if json.loads(os.environ.get(VARIABLE, "{}")).get("hang"):
        return
    watch = HangWatch(asdict(options), main=os.getpid(), at_exit=at_exit)
    watch.begin(*_rank_and_world())
    watch.note_engine(engine)


def _rank_and_world() -> tuple[int | None, int | None]:
    """As torch says, else as a launcher did."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    told = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(told[0]), int(told[1])) if all(map(str.isdigit, told)) else (None, None)
