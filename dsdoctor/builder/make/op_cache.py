"""Takes compiled ops from the cache when everything they were made from is unchanged, and keeps new ones.

Joins the keys (``op_key``), the input files (``op_inputs``) and the store. Compiles nothing.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.make.commands import OpCommands
from dsdoctor.builder.make.flags import dependency_file
from dsdoctor.builder.make.op_inputs import Digests, differing, files_read, parse_trace, places_of
from dsdoctor.builder.make.op_key import Keys
from dsdoctor.core.build_models import BuildPlan, OpPlan
from dsdoctor.core.machine import Machine

KIND = "ops"


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
            return Taken(taken=False, message="compiled, and not kept: a part of its compiler could not be found")
        self._kept[op.op] = key
        why = "nothing of these commands and compilers is in the cache"
        for entry in self._store.find(KIND, key):
            known = entry.facts.get("dependencies")
            if not isinstance(known, dict):
                continue
            other = differing(known, self._places, self._digests)
            if other is not None:
                why = f"the one in the cache was made from another {other}"
                continue
            folder.mkdir(parents=True, exist_ok=True)
            if self._store.take(entry, folder):
                self._inputs[op.op] = known
                return Taken(taken=True, message=f"taken from the cache ({key[:12]})")
            why = "the one in the cache could not be taken"
        return Taken(taken=False, message=f"compiled, since {why}")

    def keep(self, op: OpPlan, made: Made) -> None:
        """Keep a compiled op, with the digests of all files that it was made from."""
        if op.op not in self._kept:
            return
        try:
            dependencies = self._made_from(made)
        except (OSError, ValueError) as error:
            self._store.complaints.append(f"{op.op} is not kept in the cache: {error}")
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
            "seconds": round(made.seconds, 1),
            "cpu_seconds": round(made.cpu_seconds, 1),
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
                raise FileNotFoundError(f"{path} was read, and is gone")
            written = path.stat()
            if max(written.st_mtime, written.st_ctime) > self._since:
                raise OSError(f"{path} was written while it was compiled")
            found[name] = digest
        return found
