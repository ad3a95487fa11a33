"""Everything that goes into a compiled op -> its key, and the files that it was made from -> whether they are still the same.

The key holds the commands, the identity of compilers, toolkit and torch, and the variables that compilers read. What a compile
read (every header, also the system's) is known only afterwards, from the compiler's own dependency file: it is kept beside the
op, and every file of it must have the same content when the op is taken again. Folders are written by name ("{torch}"), so
that another machine whose folders lie elsewhere finds the same op.
"""

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.commands import Command, OpCommands
from dsdoctor.builder.nouns import BuildPlan
from dsdoctor.builder.wheel import hex_of
from dsdoctor.host import Host
from dsdoctor.machine import Machine

SCHEMA = "dsdoctor-op/1"
PROGRAMS = ("cc1plus", "cc1", "as", "collect2", "ld")
"""What a gcc starts; clang names those that it has."""

NVCC_PARTS = (
    "bin/nvcc",
    "bin/nvcc.profile",
    "bin/cudafe++",
    "bin/ptxas",
    "bin/fatbinary",
    "bin/nvlink",
    "nvvm/bin/cicc",
)
READ_BY_COMPILERS = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "SOURCE_DATE_EPOCH",
)
NATIVE = ("-march=native", "-mcpu=native")
ASK_LIMIT = 30


@dataclass(frozen=True, kw_only=True)
class Places:
    """Folders by name, the innermost first: what a path is called on every machine. ``tree`` is the source tree."""

    tree: Path
    folders: tuple[tuple[str, str], ...]

    def name(self, path: str) -> str:
        """A path, or an argument with one in it, by name.

        >>> places = Places(tree=Path("/work/tree"), folders=(("/env/torch", "torch"),))
        >>> places.name("-I/env/torch/include"), places.name("/env/torches"), places.name("/work/tree/csrc/a.h")
        ('-I{torch}/include', '/env/torches', 'csrc/a.h')
        """
        for folder, called in self.folders:
            path = re.sub(rf"{re.escape(folder)}(?=/|$)", f"{{{called}}}", path)
        return path.removeprefix(f"{self.tree}/")

    def named(self, paths: Iterable[str]) -> Iterator[tuple[str, Path]]:
        """Each file once, by name and where it lies; without what was made on the way, and without torch's libraries, whose version
        is in the key."""
        for name in dict.fromkeys(self.name(os.path.normpath(self.tree / path)) for path in paths):
            if not name.startswith(("build/", "{torch}/lib/")):
                yield name, self.real(name)

    def real(self, name: str) -> Path:
        """The path of a name, here."""
        for folder, called in self.folders:
            if name.startswith(f"{{{called}}}"):
                return Path(folder + name[len(called) + 2 :])
        return self.tree / name


class Digests:
    """The sha256 of files, each read once. None for one that is not there."""

    def __init__(self) -> None:
        self._known: dict[Path, str | None] = {}

    def of(self, path: Path) -> str | None:
        """The digest of a file."""
        if path not in self._known:
            try:
                self._known[path] = hex_of(path)
            except OSError:
                self._known[path] = None
        return self._known[path]


def places_of(plan: BuildPlan, machine: Machine, tree: Path) -> Places:
    """What is called what in a build."""
    torch, python = machine.torch, machine.python
    found = [
        (torch.location if torch else "", "torch"),
        (plan.toolkit.root if plan.toolkit else "", "toolkit"),
        (plan.headers.root if plan.headers else "", "headers"),
        *((folder, "site") for folder in (python.site if python else ())),
    ]
    return Places(tree=tree, folders=tuple((folder, name) for folder, name in found if folder))


class Keys:
    """The keys of a build's ops. Asks the compilers who they are, once."""

    def __init__(self, host: Host, plan: BuildPlan, machine: Machine, places: Places, digests: Digests) -> None:
        self._host, self._plan, self._machine, self._places, self._digests = host, plan, machine, places, digests
        self._identities: dict[str, list[str | None]] = {}
        self._found: dict[str, str] = {}

    def of(self, op: OpCommands, module: str, env: Mapping[str, str]) -> str:
        """The key of one op, from its commands as they are run in ``env``."""
        torch, words = self._machine.torch, {word for command in op.all for word in command.argv}
        facts = {
            "schema": SCHEMA,
            "module": module,
            "torch": torch.version if torch else None,
            "commands": [[self._places.name(word) for word in command.argv] for command in op.all],
            "programs": {self._places.name(c.argv[0]): self._identity(c) for c in op.all},
            "variables": {name: self._places.name(env[name]) for name in READ_BY_COMPILERS if env.get(name)},
            "beside": self._beside(op),
            "processor": self._processor() if words & set(NATIVE) else None,
        }
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def programs(self) -> dict[str, str]:
        """The programs of all compilers that were asked for, with their digests."""
        return dict(self._found)

    def _processor(self) -> list[str | None]:
        system = self._machine.system
        return [system.architecture, system.cpu_model, *sorted(system.cpu_flags)]

    def _identity(self, command: Command) -> list[str | None]:
        """The digests of a compiler and of the programs that it starts."""
        program = command.argv[0]
        if program not in self._identities:
            known = self._nvcc_parts(program) if command.by_nvcc else self._programs(program)
            digests = {os.path.realpath(path): self._digests.of(Path(os.path.realpath(path))) for path in known}
            self._found |= {path: digest for path, digest in digests.items() if digest}
            self._identities[program] = list(digests.values())
        return self._identities[program]

    def _nvcc_parts(self, nvcc: str) -> list[str]:
        root = Path(nvcc).parent.parent
        return [str(root / part) for part in NVCC_PARTS]

    def _programs(self, compiler: str) -> list[str]:
        found = [self._host.which(compiler) or compiler]
        for name in PROGRAMS:
            said = self._host.run([compiler, f"-print-prog-name={name}"], timeout=ASK_LIMIT).stdout.strip()
            found.append(said if said.startswith("/") else self._host.which(said or name) or name)
        return found

    def _beside(self, op: OpCommands) -> list[str]:
        """The names of the files where headers of the tree are looked for: a new one could hide another."""
        folders = {os.path.dirname(command.source) for command in op.compile if command.source}  # noqa: PTH120
        folders |= {w[2:] for c in op.compile for w in c.argv if w.startswith("-I") and not w.startswith("-I/")}
        tree = self._places.tree
        found = {str(path.relative_to(tree)) for folder in folders for path in (tree / folder).rglob("*")}
        return sorted(name for name in found if "/dsdoctor/" not in name)


def differing(dependencies: Mapping[str, str], places: Places, digests: Digests) -> str | None:
    """The first file that is not what it was, by name. None when all are."""
    return next((name for name, known in dependencies.items() if digests.of(places.real(name)) != known), None)


def files_read(rules: Iterable[Path]) -> list[str]:
    """What compilers say in their dependency files that they read. Raises OSError where one is missing."""
    return [path for rule in rules for path in parse_dependencies(rule.read_text(encoding="utf-8"))]


def parse_dependencies(text: str) -> list[str]:
    r"""The files that a make rule of a compiler names, without its target.

    >>> parse_dependencies("build/a.o : csrc/a.cpp \\\n /usr/include/with\\ space.h\n")
    ['csrc/a.cpp', '/usr/include/with space.h']
    """
    rule = text.replace("\\\n", " ").replace("\\#", "#").replace("$$", "$")
    _, _, prerequisites = rule.partition(": ")
    return shlex.split(prerequisites.split("\n", 1)[0], posix=True)


def parse_trace(lines: Iterable[str]) -> list[str]:
    """The files that a linker says it read (--trace).

    >>> parse_trace(["/usr/lib/crti.o", "(/usr/lib/libgcc.a)_muldi3.o", "/usr/lib/libc.so.6", "build/a.o", "ld: warning: x"])
    ['/usr/lib/crti.o', '/usr/lib/libgcc.a', '/usr/lib/libc.so.6']
    """
    matches = (re.match(r"^(?:-l\S+ )?\(?(/[^()]*?)(?:\)\S*|\)?)$", line.strip()) for line in lines)
    return list(dict.fromkeys(match[1] for match in matches if match))
