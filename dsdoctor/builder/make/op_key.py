"""Commands, compilers and folders of an op -> its key in the cache. Asks compilers for their programs; compiles nothing.

The key covers the commands, the compilers' and torch's versions, the variables that compilers read, and the names of the files
where they look for headers and libraries. The files that a compile really read are known only afterwards: see ``op_inputs``.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from dsdoctor.builder.make.commands import Command, OpCommands
from dsdoctor.builder.make.op_inputs import Digests, Places
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine

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
ASK_LIMIT = 30
TOOLKIT = "{toolkit}"


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
            digests = {os.path.realpath(path): self._digests.of(Path(os.path.realpath(path))) for path in known}
            self._found |= {path: digest for path, digest in digests.items() if digest}
            self._identities[program] = list(digests.values())
        return self._identities[program]

    def _programs(self, compiler: str, linker: str) -> list[str]:
        """The paths of a compiler, of those of PROGRAMS that it has, and of the linker that it is told to use."""
        found = [self._host.which(compiler) or compiler]
        for name in (*PROGRAMS, *([f"ld.{linker.partition('=')[2]}"] if linker else [])):
            answer = self._host.run([compiler, f"-print-prog-name={name}"], timeout=ASK_LIMIT).stdout.strip()
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
