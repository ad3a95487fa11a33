"""Compiled ops in the cache: taken when everything they were made from is unchanged, and kept. Compiles nothing.

An op's key covers its commands, the compilers' and torch's versions, the variables that compilers read, and the names of the files
where they look for headers and libraries. The files that a compile really read are known only afterwards, from what compilers and
linker list; they are kept by a name such as "{torch}/include/...", so that a machine with other folders finds the same op.
"""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.make.commands import Command, OpCommands, dependency_file
from dsdoctor.builder.wheel.read import hex_of
from dsdoctor.core.build_models import BuildPlan, OpPlan
from dsdoctor.core.files import real_path
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.rules import book

SCHEMA = "dsdoctor-op/1"
PROGRAMS = ("cc1plus", "cc1", "as", "collect2", "ld")
"""The programs that gcc starts; clang has some of them."""

NVCC_PARTS = (
    "bin/nvcc",
    "bin/cudafe++",
    "bin/ptxas",
    "bin/fatbinary",
    "nvvm/bin/cicc",
    "nvvm/libdevice/libdevice.10.bc",
)
NVCC_MAY_HAVE = ("bin/nvcc.profile", "bin/nvlink")
READ_BY_COMPILERS = (
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "LD_RUN_PATH",
    "COMPILER_PATH",
    "CCC_OVERRIDE_OPTIONS",
    "GCC_EXEC_PREFIX",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "SOURCE_DATE_EPOCH",
)
SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
INCLUDE, LIBRARY = re.compile(r"-(?:I|isystem)(/.*)"), re.compile(r"-L(/.*)")
ASK_TIMEOUT_SECONDS = 30
TOOLKIT = "{toolkit}"
KIND = "ops"


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


class Keys:
    """The keys of a build's ops. Asks each compiler once, in the environment that it runs in."""

    def __init__(self, machine: Machine, places: Places, digests: Digests, env: Mapping[str, str]) -> None:
        self._machine, self._places, self._digests, self._env = machine, places, digests, env
        self._host = LocalHost(env=env)
        self._identities: dict[str, list[str | None]] = {}
        self._found: dict[str, str] = {}

    def of(self, op: OpCommands, module: str) -> str | None:
        """The key of one op, from its commands as they will be run; None where a part of a compiler cannot be found."""
        # nvcc's threads are added to the commands later: they change nothing about what it makes
        torch, words = self._machine.torch, [word for command in op.all for word in command.argv]
        programs = {self._places.name(command.argv[0]): self._identity(command) for command in op.all}
        if any(None in digests for digests in programs.values()):
            return None
        facts = {
            "schema": SCHEMA,
            "module": module,
            "torch": torch.version if torch else None,
            "commands": [[self._places.name(word) for word in command.argv] for command in op.all],
            "programs": programs,
            "variables": self._variables(words),
            "beside": self._beside(op),
            "before": self._before(words),
            "processor": self._processor() if any("=native" in word for word in words) else None,
        }
        return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def _variables(self, words: Sequence[str]) -> dict[str, str]:
        """The variables that compilers read, without our own folders of a toolkit that no command of the op names."""
        named = {name: self._places.name(self._env[name]) for name in READ_BY_COMPILERS if self._env.get(name)}
        if "LIBRARY_PATH" in named and not any(TOOLKIT in self._places.name(word) for word in words):
            folders = named["LIBRARY_PATH"].split(":")
            named["LIBRARY_PATH"] = ":".join(folder for folder in folders if not folder.startswith(TOOLKIT))
        return {name: value for name, value in named.items() if value}

    def programs(self) -> dict[str, str]:
        """The programs of all compilers seen so far, with their digests."""
        return dict(self._found)

    def _processor(self) -> list[str | None]:
        system = self._machine.system
        return [system.architecture, system.cpu_model, *sorted(system.cpu_flags)]

    def _identity(self, command: Command) -> list[str | None]:
        """The digests of a compiler and of the programs that it starts; None in place of one that is missing."""
        linker = next((word for word in command.argv if word.startswith("-fuse-ld=")), "")
        program = f"{command.argv[0]} {linker}"
        if program not in self._identities:
            known = _nvcc_parts(command.argv[0]) if command.by_nvcc else self._programs(command.argv[0], linker)
            digests = {real_path(path): self._digests.of(Path(real_path(path))) for path in known}
            self._found |= {path: digest for path, digest in digests.items() if digest}
            self._identities[program] = list(digests.values())
        return self._identities[program]

    def _programs(self, compiler: str, linker: str) -> list[str]:
        """The paths of a compiler, of those of PROGRAMS that it has, and of the linker that it is told to use."""
        found = [self._host.which(compiler) or compiler]
        for name in (*PROGRAMS, *([f"ld.{linker.partition('=')[2]}"] if linker else [])):
            answer = self._host.run([compiler, f"-print-prog-name={name}"], timeout=ASK_TIMEOUT_SECONDS).stdout.strip()
            found.append(answer if answer.startswith("/") else self._host.which(answer or name) or "")
        return [path for path in found if path]

    def _beside(self, op: OpCommands) -> list[str]:
        """The names of the files in the tree's own folders where headers are looked for."""
        # a new header there could hide the one that was read
        folders = {os.path.dirname(command.source) for command in op.compile if command.source}  # noqa: PTH120
        folders |= {w[2:] for c in op.compile for w in c.argv if w.startswith("-I") and not w.startswith("-I/")}
        tree = self._places.tree
        found = {str(path.relative_to(tree)) for folder in folders for path in (tree / folder).rglob("*")}
        return sorted(name for name in found if "/dsdoctor/" not in name)

    def _before(self, words: Sequence[str]) -> list[list[str]]:
        """The other folders where headers are looked for, with the names in each, and which wanted libraries each -L folder has."""
        searched = [match[1] for word in words if (match := INCLUDE.fullmatch(word))]
        searched += [folder for name in SEARCHED for folder in self._env.get(name, "").split(":")]
        libraries = [match[1] for word in words if (match := LIBRARY.fullmatch(word))]
        libraries += self._env.get("LIBRARY_PATH", "").split(":")
        wanted = {f"lib{word[2:]}{end}" for word in words if word.startswith("-l") for end in (".so", ".a")}
        names = {folder: _names(folder) for folder in searched if folder}
        names |= {f"-L{folder}": sorted(wanted.intersection(_names(folder))) for folder in libraries if folder}
        named = [[self._places.name(folder), *inside] for folder, inside in names.items()]
        # our own folder of a toolkit, with nothing in it that is wanted, is there because of another op
        return [entry for entry in named if len(entry) > 1 or not entry[0].startswith(f"-L{TOOLKIT}")]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The result of looking up an op. ``message`` says why it must be compiled, or that it need not be."""

    taken: bool
    message: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """A newly compiled op: its file, its commands, what the linker printed, and the time it took."""

    library: Path
    commands: OpCommands
    linked: Sequence[str]
    seconds: float
    cpu_seconds: float


class OpCache:
    """The cached ops of one build, whose compilers run in ``env``.

    No method raises for an error of the disk: the op is then compiled, or not kept.
    """

    def __init__(
        self, plan: BuildPlan, machine: Machine, tree: Path, store: CacheStore, env: Mapping[str, str]
    ) -> None:
        self._plan, self._store = plan, store
        self._torch = machine.torch.version if machine.torch else None
        self._digests, self._places = Digests(), places_of(plan, machine, tree)
        self._keys = Keys(machine, self._places, self._digests, env)
        self._kept: dict[str, str] = {}
        self._inputs: dict[str, dict[str, str]] = {}
        # a file written later than this may have had other contents when a compiler read it than when its digest is taken
        self._since = time.time()

    def take(self, op: OpPlan, commands: OpCommands, folder: Path) -> Taken:
        """Copy an op's files from the cache into a folder, each checked against its digest."""
        key = self._keys.of(commands, op.module)
        if key is None:
            return Taken(taken=False, message=book.phrase("builder", "compiled-not-kept"))
        self._kept[op.op] = key
        why = book.phrase("builder", "not-in-cache")
        for entry in self._store.find(KIND, key):
            known = entry.facts.get("dependencies")
            if not isinstance(known, dict):
                continue
            other = differing(known, self._places, self._digests)
            if other is not None:
                why = book.phrase("builder", "made-from-another", what=other)
                continue
            folder.mkdir(parents=True, exist_ok=True)
            if self._store.take(entry, folder):
                self._inputs[op.op] = known
                return Taken(taken=True, message=book.phrase("builder", "from-cache", key=key[:12]))
            why = book.phrase("builder", "not-copied")
        return Taken(taken=False, message=book.phrase("builder", "compiled-since", why=why))

    def keep(self, op: OpPlan, made: Made) -> None:
        """Keep a compiled op, with the digests of all files that it was made from."""
        if op.op not in self._kept:
            return
        try:
            dependencies = self._made_from(made)
        except (OSError, ValueError) as error:
            self._store.complaints.append(f"{op.op} was not cached: {error}")
            return
        self._inputs[op.op] = dependencies
        facts = {
            "op": op.op,
            "module": op.module,
            "deepspeed": self._plan.source_version,
            "accelerator": self._plan.accelerator,
            "torch": self._torch,
            "architectures": list(op.architectures),
            "processor": self._plan.processor,
            "seconds": round(made.seconds, 3),
            "cpu_seconds": round(made.cpu_seconds, 3),
            "dependencies": dependencies,
        }
        self._store.put(KIND, self._kept[op.op], {made.library.name: made.library}, facts)

    def earlier_seconds(self, ops: Sequence[OpPlan]) -> dict[str, float]:
        """The CPU seconds that each op took the last time, for as many architectures as now; those that were compiled before."""
        wanted = {op.op: op for op in ops}
        newest: dict[str, tuple[float, float]] = {}
        for entry in self._store.entries() if wanted else ():
            op, seconds = wanted.get(str(entry.facts.get("op"))), entry.facts.get("cpu_seconds")
            if entry.kind != KIND or op is None or not isinstance(seconds, int | float):
                continue
            then = entry.facts.get("architectures")
            share = max(1, len(op.architectures)) / max(1, len(then) if isinstance(then, list) else 1)
            newest[op.op] = max(newest.get(op.op, (0.0, 0.0)), (entry.used, seconds * share))
        return {name: seconds for name, (_, seconds) in newest.items()}

    def drop(self, ops: Iterable[str]) -> None:
        """Remove ops from the cache that turned out to be unusable."""
        # they are kept before they are checked, so that a build that is killed loses no compiled op
        for op in ops:
            for entry in self._store.find(KIND, self._kept[op]) if op in self._kept else ():
                self._store.remove(entry)

    def inputs(self) -> dict[str, str] | None:
        """The files outside the source tree that the ops were made from, and the compilers, with their digests.

        None when they are not known for every op.
        """
        if len(self._inputs) < len(self._plan.ops):
            return None
        named = {name: digest for inputs in self._inputs.values() for name, digest in inputs.items()}
        outside = {str(self._places.real(n)): d for n, d in named.items() if n.startswith(("/", "{"))}
        return outside | self._keys.programs()

    def _made_from(self, made: Made) -> dict[str, str]:
        """The files that an op was made from, by name, with their digests. Raises OSError for one that may have changed since."""
        rules = [self._places.tree / dependency_file(command) for command in made.commands.compile]
        found = {}
        for name, path in self._places.named([*files_read(rules), *parse_trace(made.linked)]):
            digest = self._digests.of(path)
            if digest is None:
                raise FileNotFoundError(f"{path} was read, but no longer exists")
            written = path.stat()
            if max(written.st_mtime, written.st_ctime) > self._since:
                raise OSError(f"{path} was written while it was compiled")
            found[name] = digest
        return found


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
    return real_path(path) if "/../" in path else os.path.normpath(path)


def _nvcc_parts(nvcc: str) -> list[str]:
    root = Path(nvcc).parent.parent
    more = [str(root / part) for part in NVCC_MAY_HAVE if (root / part).exists()]
    return [*(str(root / part) for part in NVCC_PARTS), *more]


def _names(folder: str) -> list[str]:
    """The names in a folder, none where it cannot be read."""
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208
    except OSError:
        return []
