"""What compilers and linker list as read -> the files that an op was made from, and whether they are still the same.

Files are known by a name such as "{torch}/include/...", so that a machine with other folders finds the same op in the cache.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core.build_models import BuildPlan
from dsdoctor.core.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders and their names, the longest folder first; ``tree`` is the source tree. A name is the same on every machine."""

    tree: Path
    folders: tuple[tuple[str, str], ...]

    def name(self, path: str) -> str:
        """A path, or an argument that holds one, with its folder replaced by the folder's name.

        >>> places = Places(tree=Path("/work/tree"), folders=(("/env/torch", "torch"),))
        >>> places.name("-I/env/torch/include"), places.name("/my/env/torch"), places.name("/work/tree/csrc/a.h")
        ('-I{torch}/include', '/my/env/torch', 'csrc/a.h')
        """
        for folder, called in self.folders:
            path = re.sub(rf"(^|^-I|^-L|^-isystem|[=:,]){re.escape(folder)}(?=/|$)", rf"\g<1>{{{called}}}", path)
        return path.removeprefix(f"{self.tree}/")

    def named(self, paths: Iterable[str]) -> Iterator[tuple[str, Path]]:
        """The name and the path of each file, once; without files of the build itself and torch's libraries."""
        # torch's version is in the key already
        for name in dict.fromkeys(self.name(_plain(os.path.join(self.tree, path))) for path in paths):  # noqa: PTH118
            if not name.startswith(("build/", "{torch}/lib/")):
                yield name, self.real(name)

    def real(self, name: str) -> Path:
        """The path on this machine that a name stands for."""
        for folder, called in self.folders:
            if name.startswith(f"{{{called}}}"):
                return Path(folder + name[len(called) + 2 :])
        return self.tree / name


class Digests:
    """The sha256 of files, each read once. None for what is not a readable file."""

    def __init__(self) -> None:
        self._known: dict[Path, str | None] = {}

    def of(self, path: Path) -> str | None:
        """The digest of a file."""
        if path not in self._known:
            try:
                self._known[path] = hex_of(path) if path.is_file() else None
            except (OSError, ValueError):
                self._known[path] = None
        return self._known[path]


def places_of(plan: BuildPlan, machine: Machine, tree: Path) -> Places:
    """The named folders of a build: torch, toolkit, headers, site-packages."""
    torch, python = machine.torch, machine.python
    found = [
        (torch.location if torch else "", "torch"),
        (plan.toolkit.root if plan.toolkit else "", "toolkit"),
        (plan.headers.root if plan.headers else "", "headers"),
        *((folder, f"site{number}") for number, folder in enumerate(python.site if python else ())),
    ]
    named = sorted(((folder, name) for folder, name in found if folder), key=lambda pair: len(pair[0]), reverse=True)
    return Places(tree=tree, folders=tuple(named))


def differing(dependencies: Mapping[str, str], places: Places, digests: Digests) -> str | None:
    """The name of the first file that has changed or is gone; None when all are unchanged."""
    return next((name for name, known in dependencies.items() if digests.of(places.real(name)) != known), None)


def files_read(rules: Iterable[Path]) -> list[str]:
    """The files that compilers read, from their dependency files.

    Raises OSError for a dependency file that is missing, ValueError for one that is not UTF-8.
    """
    return [path for rule in rules for path in parse_dependencies(rule.read_text(encoding="utf-8"))]


def parse_dependencies(text: str) -> list[str]:
    r"""The files that a compiler's make rule names, without the target.

    >>> parse_dependencies("build/a.o : csrc/a.cpp \\\n /home/o'brien/with\\ space.h\n")
    ['csrc/a.cpp', "/home/o'brien/with space.h"]
    """
    rule = text.replace("\\\n", " ").replace("$$", "$")
    _, _, prerequisites = rule.partition(": ")
    words = re.findall(r"(?:\\.|[^\s\\])+", prerequisites.split("\n", 1)[0])
    return [re.sub(r"\\(.)", r"\1", word) for word in words]


def parse_trace(lines: Iterable[str]) -> list[str]:
    """The files in the output of a linker that was run with --trace.

    >>> parse_trace(["/usr/lib/crti.o", "(/usr/lib/libgcc.a)_muldi3.o", "build/a.o", "/usr/bin/ld: warning: libx.so, needed by y"])
    ['/usr/lib/crti.o', '/usr/lib/libgcc.a']
    """
    matches = (re.match(r"^(?:-l\S+ )?\(?(/[^():]*?)(?:\)\S*|\)?)$", line.strip()) for line in lines)
    return list(dict.fromkeys(match[1] for match in matches if match))


def _plain(path: str) -> str:
    """A path without ".."."""
    # ".." after a linked folder leads out of the folder that the link points to: only realpath follows that
    return os.path.realpath(path) if "/../" in path else os.path.normpath(path)
