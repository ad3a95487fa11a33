"""A hidden folder beside what is to be made, on the same disk: removed at the end, also that of a process that was killed.

Nothing that lies in it is run, so the folder around it may be one that others write to, as those of a cluster's shared disk are.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def hidden_folder(parent: Path, purpose: str) -> Iterator[Path]:
    """A fresh folder that only this user may enter. Raises OSError."""
    prefix = f".dsdoctor-{purpose}-"
    _sweep(parent, prefix)
    folder = parent / f"{prefix}{os.urandom(8).hex()}"
    folder.mkdir(mode=0o700)
    held = os.open(folder, OPEN)
    try:
        # a file system without locks keeps what a kill leaves
        with suppress(OSError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what killed processes of this user left: the folders that nobody holds."""
    for folder in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            held = os.open(folder, OPEN)
            try:
                if os.fstat(held).st_uid == os.geteuid():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
