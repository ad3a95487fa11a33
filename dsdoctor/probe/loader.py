"""Host + environment -> which libraries of WATCHED an op would find when it is loaded. Loads nothing."""

import glob
import re
from collections.abc import Iterator

from dsdoctor.core.host import Host
from dsdoctor.core.machine import WATCHED
from dsdoctor.probe.paths import folders_on
from dsdoctor.probe.python import Environment

CACHE = "/etc/ld.so.cache"
"""What ldconfig writes and glibc's loader reads: it holds the paths as text, each ended by a zero byte. It is read directly
because ldconfig may be missing or not on PATH, and so that a snapshot does not hold the machine's other libraries."""

ALWAYS_LISTED = "libc.so.6"
"""A library that every cache of glibc lists. Without it there is no answer: another libc, or a snapshot without the question."""

TRUSTED = ("/lib", "/usr/lib", "/lib64", "/usr/lib64")
"""Where glibc's loader looks without any cache; Debian adds a folder named after the processor to the first two."""

FOLDERS_32_BIT = ("/lib32", "/usr/lib32", "/libx32", "/usr/libx32", "/lib/i386-linux-gnu", "/usr/lib/i386-linux-gnu")
"""Folders of 32-bit libraries, which no op links."""


def find_loadable(host: Host, environment: Environment | None) -> frozenset[str] | None:
    """Those of WATCHED that are found; None where the loader's cache cannot be read, or there is no Python."""
    names = "|".join(map(re.escape, (*WATCHED, ALWAYS_LISTED)))
    cached = parse_cache(host.search(CACHE, rf"/[^\0\n]*/(?:{names})(?=\0)"))
    if environment is None or ALWAYS_LISTED not in {path.rpartition("/")[2] for path in cached}:
        return None
    folders = tuple(dict.fromkeys(_folders(host, environment)))

    def is_found(name: str) -> bool:
        paths = (path for path in cached if path.endswith(f"/{name}"))
        return any(map(host.exists, paths)) or any(host.glob(f"{folder}/{name}") for folder in folders)

    return frozenset(name for name in WATCHED if is_found(name))


def parse_cache(text: str) -> tuple[str, ...]:
    """The paths of 64-bit libraries among those of the loader's cache.

    >>> parse_cache("/lib/x86_64-linux-gnu/libgomp.so.1\\n/lib32/libgomp.so.1")
    ('/lib/x86_64-linux-gnu/libgomp.so.1',)
    """
    return tuple(path for path in text.splitlines() if path.rpartition("/")[0] not in FOLDERS_32_BIT)


def _folders(host: Host, environment: Environment) -> Iterator[str]:
    """Patterns of the folders that are searched besides the cache: the loader's, LD_LIBRARY_PATH, Python's and torch's.

    For conda's interpreter the loader searches the ``lib`` of its prefix. Libraries beside torch's own, or in the packages that
    torch brings, are loaded by torch before any op.
    """
    python = environment.python
    family = python.platform.removeprefix("linux-")
    yield from (glob.escape(folder) for folder in folders_on(host, "LD_LIBRARY_PATH"))
    yield from (f"{folder}/{family}-linux-gnu" for folder in TRUSTED[:2])
    yield from TRUSTED
    for scripts in (python.scripts, host.resolve(python.executable).rpartition("/")[0]):
        yield f"{glob.escape(scripts.rpartition('/')[0])}/lib"
    if environment.torch:
        yield f"{glob.escape(environment.torch)}/lib"
        yield f"{glob.escape(environment.torch.rpartition('/')[0])}/nvidia/*/lib"
