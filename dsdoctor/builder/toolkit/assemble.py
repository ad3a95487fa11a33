"""ToolkitPlan -> a CUDA_HOME, assembled without root: fetched parts and parts of this machine, as one folder of links.

It is made under a lock in a temporary folder, renamed, and tried (``trial``); only then it is marked as finished. One without the
mark is made again; a finished one is compared with what was fetched, tried again and used.
"""

import contextlib
import errno
import glob
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from filelock import FileLock

from dsdoctor.builder.toolkit.download import Say
from dsdoctor.builder.toolkit.fetch_parts import fetch_parts, fetched_layers, forget_downloads
from dsdoctor.builder.toolkit.kept import KeptPart, altered, read_mark, write_digests, write_mark
from dsdoctor.builder.toolkit.links import link_layers, make_stub, settle_nvcc
from dsdoctor.builder.toolkit.plan_assembly import MARK
from dsdoctor.builder.toolkit.trial import try_toolkit
from dsdoctor.core.build_models import ToolkitPlan
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.host import LocalHost
from dsdoctor.core.workspace import private_folder

USED = ("home/bin/*", "home/nvvm/bin/*", "home/include", "home/lib64", "parts")
"""What of a kept toolkit runs, or is compiled and linked into ops: nobody else may write to it, or on the way to it."""


def assemble(
    host: LocalHost, plan: ToolkitPlan, *, python: str, architectures: Sequence[str], compiler: str, say: Say
) -> Path:
    """Make the toolkit of a plan and return its root. ``compiler`` is the host compiler that nvcc uses.

    Raises BuildFailed when a part cannot be fetched or the result does not compile.
    """
    home = Path(plan.root)
    private_folder(home.parent.parent)
    for part in USED:
        private_folder(home.parent.parent, f"{glob.escape(home.parent.name)}/{part}")
    with FileLock(home.parent.with_suffix(".lock")), _full_disk_named(home.parent.parent):
        whole = _is_whole(home) and _is_unaltered(home, say)
        if whole:
            say(f"using the toolkit assembled in {home}")
            parts = read_mark(home)
        else:
            parts = _make(host, plan, home, python=python, compiler=compiler, say=say)
        try:
            try_toolkit(host, home, plan, architectures=architectures, compiler=compiler)
        except BuildFailed:
            if not whole:
                # one that was whole before stays: another build may be using it
                shutil.rmtree(home.parent, ignore_errors=True)
            raise
        if not whole:
            write_mark(home, parts)
            forget_downloads(plan, home.parents[2])
    return home


def _make(
    host: LocalHost, plan: ToolkitPlan, home: Path, *, python: str, compiler: str, say: Say
) -> tuple[KeptPart, ...]:
    final = home.parent
    temporary = final.with_name(f".{final.name}.{os.getpid()}")
    # who holds the lock is alone: what other processes left here is of killed ones
    for left in (*final.parent.glob(f".{final.name}.*"), final):
        shutil.rmtree(left, ignore_errors=True)
    try:
        temporary.mkdir(mode=0o700)
        layers = list(plan.layers)
        parts: tuple[KeptPart, ...] = ()
        if plan.fetches:
            parts = fetch_parts(host, plan, temporary / "parts", cache=final.parent.parent, python=python, say=say)
            layers[:0] = fetched_layers(temporary / "parts", final / "parts")
            write_digests(temporary)
        link_layers(temporary, final, layers)
        temporary.rename(final)
        if plan.archives or plan.packages:
            settle_nvcc(home)
        make_stub(host, home, compiler)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return parts


def _is_whole(home: Path) -> bool:
    """Whether an assembled toolkit is there and none of its links dangles."""
    if not (home / MARK).is_file() or not (home / "nvvm" / "bin" / "cicc").exists():
        return False
    entries = [*(home / "bin").iterdir(), *(home / "include").iterdir(), *(home / "lib64").iterdir()]
    return all(entry.exists() for entry in entries)


def _is_unaltered(home: Path, say: Say) -> bool:
    wrong = altered(home.parent)
    if wrong:
        say(f"the toolkit in {home} is made anew: {wrong[0]} is not what was fetched")
    return not wrong


@contextlib.contextmanager
def _full_disk_named(folder: Path) -> Iterator[None]:
    """A disk that is full is a failure with a name."""
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        free = shutil.disk_usage(folder).free
        raise BuildFailed(
            f"the disk is full: {error.filename or folder} could not be written, {free / 1e6:.0f} MB are free there",
            hint="free some, or put the cache elsewhere: export DSDOCTOR_CACHE=/path/with/room",
        ) from None
