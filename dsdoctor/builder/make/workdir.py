"""The folders of one build, the source tree that is compiled, and the shared objects for the wheel. Compiles nothing."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.make.op_job import Compiled
from dsdoctor.builder.make.scheduler import Pool
from dsdoctor.core.build_models import BuildPlan, Source
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.machine import Machine
from dsdoctor.core.workspace import fixed_folder

ROOM = 1 << 30
"""Bytes that a tree and its objects may take, estimated high: one object without debug information has less than a MiB."""

LIBRARY = "lib"
"""The folder, inside the build's own, where setup.py finds the compiled ops."""


@dataclass(frozen=True, kw_only=True)
class Workdir:
    """The folders of a build: ``folder`` is temporary, ``logs`` stay, ``out`` gets the wheel, ``store`` keeps compiled ops.

    ``preloaded`` is the interpreter that is built for, where it was started beforehand.
    """

    folder: Path
    logs: Path
    out: Path
    store: CacheStore | None = None
    pool: Pool | None = None
    preloaded: PreloadedPython | None = None


@contextmanager
def tree_to_compile_in(plan: BuildPlan, source: Source, machine: Machine, say: Callable[[str], None]) -> Iterator[Path]:
    """The source tree to compile in: for GPU code a copy in a folder whose path is always the same."""
    # nvcc puts a digest of the path into GPU code: only the same path gives the same bytes
    tree = Path(os.path.realpath(source.folder))
    if not any(op.device_code for op in plan.ops):
        yield tree
        return
    torch, python = machine.torch, machine.python
    inputs = (source.version, torch.version if torch else "", python.tag if python else "", plan.accelerator)
    with fixed_folder(sha256(repr(inputs).encode()).hexdigest()[:16], say=say) as folder:
        copy = _copied(tree, folder / "source") if folder else None
        if copy is None:
            say("compiling in the cache folder: GPU code will hold a digest of its path")
        yield copy or tree


def _copied(tree: Path, to: Path) -> Path | None:
    """Copy the tree; None where there is no room for it and for what is compiled in it."""
    try:
        if shutil.disk_usage(to.parent).free < ROOM:
            return None
        shutil.copytree(tree, to, symlinks=True)
    except OSError:
        return None
    return Path(os.path.realpath(to))


def gather(plan: BuildPlan, compiled: tuple[Compiled, ...], library: Path) -> None:
    """Move the shared objects to where setup.py looks for compiled ops."""
    modules = {op.op: op.module for op in plan.ops}
    for op in compiled:
        if op.library is not None:
            target = library.joinpath(*modules[op.op].split(".")[:-1]) / op.library.name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(op.library, target)
