"""The private folders a build works in: made with mode 0700, removed at the end, also those of a build that was killed."""

import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from dsdoctor.errors import ImpossiblePlan
from dsdoctor.host import Host


def cache_folder(host: Host) -> Path:
    """Where sdists, assembled toolkits, logs and running builds lie: $DSDOCTOR_CACHE, else the user's cache folder."""
    named = host.variable("DSDOCTOR_CACHE")
    return Path(named).expanduser().absolute() if named else user_cache_path("dsdoctor")


@contextmanager
def workspace(cache: Path) -> Iterator[Path]:
    """A fresh folder for one build, removed whatever happens. Raises ImpossiblePlan when the cache is not writable."""
    builds = private_folder(cache / "builds")
    _sweep(builds)
    folder = builds / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def log_folder(cache: Path) -> Path:
    """A folder for one build's logs, named after the time; it stays."""
    return private_folder(cache / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def private_folder(folder: Path) -> Path:
    """Make a folder that only this user may enter. Raises ImpossiblePlan when that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {folder}")
    except OSError as error:
        raise ImpossiblePlan(
            f"the cache folder cannot be written: {error}", hint="export DSDOCTOR_CACHE=/a/folder/you/own"
        ) from None
    return folder


def _sweep(builds: Path) -> None:
    """Remove what a killed build of this host left behind."""
    for folder in builds.iterdir():
        host, _, rest = folder.name.rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and rest.isdigit() and not Path(f"/proc/{rest}").exists():
            shutil.rmtree(folder, ignore_errors=True)
