"""In a rank: begin the watch on this process, and see to it that this node has a supervisor. Raises OSError where there is
no room."""

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dsdoctor.core.files import PRIVATE, append_text, open_new, write_bytes
from dsdoctor.core.host import LocalHost
from dsdoctor.hang.channel import SECRET_FILE, TOKEN, identity, node_folder, shared_secret
from dsdoctor.hang.models import HangOptions
from dsdoctor.hang.processes import catches
from dsdoctor.hang.ring import RingWriter
from dsdoctor.hang.sampler import Sampler

LOCK = "lock"
LOOKS_BETWEEN_TENDS = 5
"""Looks of the sampler between two looks for the supervisor."""
MAX_STARTS = 3
PATIENCE_SECONDS = 20.0


class Beginning:
    """The watch of one process: its ring, its thread, and how a supervisor is started."""

    def __init__(self, options: HangOptions, entry: Path, *, rank: int, world: int, place: str = "") -> None:
        user = os.geteuid()
        run = identity(os.environ, user=user, place=place)
        if run is None:
            raise FileNotFoundError("no launcher set the address of rank 0")
        self.folder = node_folder(run.key, user=user)
        self._options, self._entry, self._place = options, entry, place
        self._looks = self._starts = 0
        stem = f"rank-{rank:05d}-{os.getpid()}"
        patience = PATIENCE_SECONDS if options.after is None else options.after / 3
        append_text(self.folder / LOCK, "", mode=PRIVATE)
        answers = self._answer_signals(self.folder / f"{stem}.stacks")
        ring = RingWriter(self.folder / f"{stem}.ring")
        self.sampler = Sampler(
            ring,
            str(self.folder / f"{stem}.words"),
            rank=rank,
            world=world,
            patience=patience,
            tend=self._tend,
            after=options.after,
            answers=answers,
        )
        self.sampler.start(os.getpid())

    def share_secret(self, c10d: Any, *, world: int) -> None:
        """Have what nodes say to each other known as this run's, once the process group is there: in the script's own thread, since
        the store's client may be in use later. Nothing is asked where all ranks are on this node, or where there is a token."""
        if os.environ.get(TOKEN) or os.environ.get("LOCAL_WORLD_SIZE") == str(world) or not c10d.is_initialized():
            return
        secret = shared_secret(c10d._get_default_store())
        if not secret:
            return
        with contextlib.suppress(OSError):
            write_bytes(self.folder / SECRET_FILE, secret.encode(), mode=PRIVATE)

    def _answer_signals(self, path: Path) -> bool:
        """Let SIGUSR2 write the main thread's stack, unless the script has a use for that signal; whether it does.

        The kernel is asked: handlers in C, such as a fault handler of the script's own, are none to ``signal.getsignal``.

        Not those of the other threads: they may run meanwhile, and reading their frames then can end the process.
        """
        self._dumps = open_new(path, mode=PRIVATE)
        if catches(os.getpid(), signal.SIGUSR2) or signal.getsignal(signal.SIGUSR2) != signal.SIG_DFL:
            return False
        faulthandler.register(signal.SIGUSR2, file=self._dumps, all_threads=False)
        return True

    def _tend(self) -> None:
        self._looks += 1
        if self._looks % LOOKS_BETWEEN_TENDS != 1 or self._starts > MAX_STARTS or has_supervisor(self.folder):
            return
        self._starts += 1
        if self._starts > MAX_STARTS:
            os.write(2, b"dsdoctor: the hang watch is off: its supervisor process does not stay alive\n")
            return
        start_supervisor(self.folder, self._options, self._entry, place=self._place)


def has_supervisor(folder: Path) -> bool:
    """Whether some process holds the lock of the run's supervisor on this node."""
    lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def start_supervisor(folder: Path, options: HangOptions, entry: Path, *, place: str) -> None:
    """Start this node's supervisor, as nobody's child: the script may wait for all of its children."""
    order: Mapping[str, object] = {"folder": str(folder), "options": asdict(options), "place": place}
    # an editable install is in no folder of sys.path
    paths = [str(Path(__file__).parents[2])]
    paths += [path for path in sys.path if path and os.path.isdir(path)]  # noqa: PTH112
    with contextlib.suppress(OSError):
        LocalHost().leave_running([sys.executable, "-I", "-S", str(entry), json.dumps(order), *paths])
