"""The hang watch under `dsdoctor.run`: its options, and how it begins in a process that becomes a rank.

A process is a rank when it calls torch.distributed.init_process_group, or when it is the script that a launcher started as one of
several. Nothing here ends a training, and nothing is imported before the script imports torch.
"""

import argparse
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from dsdoctor.core.errors import UsageError
from dsdoctor.core.files import absolute
from dsdoctor.core.processes import whole_number
from dsdoctor.core.script import standing_for, write_stderr
from dsdoctor.hang.models import HangOptions
from dsdoctor.ranks.failure import read_failure

MODULE = "torch.distributed.distributed_c10d"
VARIABLE = "DSDOCTOR_HANG"
ENTRY = Path(__file__).with_name("hang_supervisor.py")
SWITCH, ANSWERS = ("on", "off"), ("report", "stop")
MIN_AFTER_SECONDS = 3.0
TOLD_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def add_options(parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
    """Our options, for the parser of ``dsdoctor.run``. All take a value."""
    add = parser.add_argument_group("a run that hangs").add_argument
    add(
        "--hang",
        metavar="on|off",
        default=environment.get(VARIABLE) or "on",
        help="name the missing rank in a hang (on)",
    )
    add(
        "--hang-after",
        metavar="SECONDS",
        type=float,
        help="report after this time without progress (default: 60, or ten times the usual pause of this run)",
    )
    add(
        "--on-hang",
        metavar="ANSWER",
        default="report",
        help="report (default) and keep waiting, or stop all ranks: at once for a wait that can't end, else after five times "
        "--hang-after",
    )
    add("--hang-dir", metavar="DIR", default=HangOptions.folder, help="folder for the files of a hang (%(default)s)")


def options_of(given: argparse.Namespace) -> dict[str, Any] | None:
    """The fields of ``HangOptions``; None for --hang off. Raises UsageError for what makes no sense."""
    if given.hang not in SWITCH:
        raise UsageError(f"--hang is {given.hang!r}", hint="on or off")
    options = checked(given.hang_after, given.on_hang, given.hang_dir)
    return None if given.hang == "off" else asdict(options)


def checked(after: float | None, on_hang: str, folder: str) -> HangOptions:
    """The options of a watch. Raises UsageError for what makes no sense."""
    if on_hang not in ANSWERS:
        raise UsageError(f"--on-hang is {on_hang!r}", hint="report or stop")
    if after is not None and not MIN_AFTER_SECONDS <= after < 1e6:
        raise UsageError(f"--hang-after is {after:g}", hint=f"seconds, {MIN_AFTER_SECONDS:g} or more")
    # scripts change folders
    return HangOptions(after=after, on_hang=on_hang, folder=absolute(folder))


class HangWatch:
    """The watch of this process and of those that it forks. ``at_exit``: has a function called at the end of this process."""

    def __init__(
        self, options: dict[str, Any], *, main: int, at_exit: Callable[[Callable[[Any], None], Any], None]
    ) -> None:
        self._options, self._main, self._at_exit = HangOptions(**options), main, at_exit
        self._begun: tuple[int, Any] | None = None

    def wrap(self, c10d: ModuleType) -> None:
        """torch.distributed is there: put a watched init_process_group in the place of torch's."""
        original = getattr(c10d, "init_process_group", None)
        if callable(original):
            c10d.init_process_group = self._watched(original)  # type: ignore[attr-defined]
        launched = os.getpid() == self._main and all(os.environ.get(name) for name in TOLD_BY_LAUNCHERS)
        if launched and not _is_worker():
            self.begin(whole_number(os.environ["RANK"]), whole_number(os.environ["WORLD_SIZE"]))

    @property
    def sampler(self) -> Any:
        """The thread that watches this process; None while there is none."""
        return self._begun[1].sampler if self._begun is not None and self._begun[0] == os.getpid() else None

    def note_engine(self, engine: Any) -> None:
        """An engine was made: its counters of steps are of interest."""
        if (sampler := self.sampler) is not None:
            sampler.engine = engine

    def begin(self, rank: int | None, world: int | None, place: str = "") -> None:
        """Begin to watch this process, once. A watch that cannot begin is a line, and the training goes on."""
        if rank is None or rank < 0 or world is None or world < 2:
            return
        if (sampler := self.sampler) is not None:
            sampler.rank, sampler.world = rank, world
            return
        try:
            from dsdoctor.hang.start import Beginning

            begun = Beginning(self._options, ENTRY, rank=rank, world=world, place=place)
            self._begun = (os.getpid(), begun)
            self._at_exit(_close, begun.sampler)
            note_failures(begun.sampler)
            self._share_secret(world)
        except Exception as error:  # an error of dsdoctor's own must not end a training
            write_stderr(f"dsdoctor: the hang watch of rank {rank} could not start: {error}\n")

    def _share_secret(self, world: int | None) -> None:
        """Where the process group is there: have the nodes' messages known as this run's."""
        c10d = sys.modules.get(MODULE)
        if self._begun is not None and self._begun[0] == os.getpid() and world is not None and c10d is not None:
            with contextlib.suppress(Exception):  # an error of dsdoctor's own must not end a training
                self._begun[1].share_secret(c10d, world=world)

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group_watched(*args: Any, **kwargs: Any) -> Any:
            place = str(kwargs.get("init_method") or (args[1] if len(args) > 1 else "") or "")
            rank, world = kwargs.get("rank", -1), kwargs.get("world_size", -1)
            if rank is None or rank < 0:
                rank = whole_number(os.environ.get("RANK", ""))
            if world is None or world < 0:
                world = whole_number(os.environ.get("WORLD_SIZE", ""))
            self.begin(rank, world, place)
            made = original(*args, **kwargs)
            if (sampler := self.sampler) is not None:
                sampler.initialized = True
            self._share_secret(world)
            return made

        return standing_for(original, init_process_group_watched)


def note_failures(sampler: Any) -> None:
    """Have exceptions that end the script, or a thread, noted before their traceback is printed: as it would be without."""
    before, before_thread = sys.excepthook, threading.excepthook

    @functools.wraps(before)
    def noted(kind: type[BaseException], failure: BaseException, trace: Any) -> None:
        with contextlib.suppress(Exception):  # an exception may raise where it is read
            sampler.failed(read_failure(failure))
        before(kind, failure, trace)

    @functools.wraps(before_thread)
    def noted_of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            with contextlib.suppress(Exception):
                sampler.thread_ended(
                    args.thread.name if args.thread is not None else "thread", read_failure(args.exc_value)
                )
        before_thread(args)

    sys.excepthook, threading.excepthook = noted, noted_of_thread


def _close(sampler: Any) -> None:
    sampler.close()


def _is_worker() -> bool:
    """Whether this process is a child of multiprocessing: a data loader's worker inherits a rank's variables."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = getattr(multiprocessing, "parent_process", None)
    return parent is not None and parent() is not None
