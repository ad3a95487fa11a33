"""In a rank: the workers of the data loader in whose code a stack stands, and whether they still have the fault handler that they
were forked with. Standard library; torch is not asked, its iterator's own fields are read.

A handler cannot be read from outside: the kernel tells only that there is one. So a worker counts as ours only where no code that
runs in it can have set another: the script has no ``worker_init_fn``, and none of its own files names signals at all.
"""

import functools
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

ITERATOR = "/torch/utils/data/dataloader.py"
MOST_FILES, LARGEST = 1000, 16 << 20
IN_SOURCE = re.compile(
    rb"\bimport\b[^\n]*\bsignal\b|\bfrom\s+signal\b|[\"']signal[\"']|SIGUSR2|valid_signals|sigaction|add_signal_handler|faulthandler"
)
IN_BINARY = re.compile(rb"sigaction|signal\0")
INSTALLED = re.compile(r"/(site|dist)-packages/")
OURS = str(Path(__file__).parents[1])


def loader_workers(frame: FrameType | None, modules: Mapping[str, Any]) -> tuple[list[int], bool]:
    """The processes of the loader that a stack stands in; whether each of them was forked and has its rank's fault handler.
    ``modules``: those of this process."""
    files: set[str] = set()
    iterator: Any = None
    while frame is not None:
        files.add(frame.f_code.co_filename)
        if iterator is None and frame.f_code.co_filename.endswith(ITERATOR):
            found = frame.f_locals.get("self")
            iterator = found if isinstance(getattr(found, "_workers", None), list) else None
        frame = frame.f_back
    if iterator is None:
        return [], False
    workers = [each for each in iterator._workers if isinstance(getattr(each, "pid", None), int)]
    forked = all(getattr(getattr(each, "_popen", None), "method", "") == "fork" for each in workers)
    untouched = forked and getattr(iterator, "_worker_init_fn", "unknown") is None
    return [each.pid for each in workers], untouched and none_names_signals(own_files(modules, files))


def none_names_signals(files: Iterable[str]) -> bool:
    """Whether all of some files can be read, and none of them has a word of signals; False for more than can be read soon."""
    asked = sorted(set(files))
    return len(asked) <= MOST_FILES and not any(map(_may_name_signals, asked))


def own_files(modules: Mapping[str, Any], more: Iterable[str]) -> Iterator[str]:
    """The files of modules that are neither Python's nor installed nor our own; of ``more`` likewise."""
    names = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    libraries = tuple(f"{folder}/" for folder in {*names, OURS})
    # torch.ops and its like are in no file
    known = [
        getattr(made, "__file__", None) for name, made in list(modules.items()) if name.partition(".")[0] != "torch"
    ]
    for file in (*known, *more):
        if isinstance(file, str) and not (file.startswith((*libraries, "<frozen ")) or INSTALLED.search(file)):
            yield file


@functools.cache
def _may_name_signals(file: str) -> bool:
    try:
        path = Path(file)
        if path.stat().st_size > LARGEST:
            return True
        return (IN_BINARY if file.endswith(".so") else IN_SOURCE).search(path.read_bytes()) is not None
    except (OSError, ValueError):  # code that was never in a file
        return True
