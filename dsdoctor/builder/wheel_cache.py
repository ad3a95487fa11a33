"""Finished wheels that are kept: an order of which every input is unchanged gets its wheel at once.

What was asked, the machine's files and tools, DeepSpeed's source and dsdoctor itself make the key; every file that the ops were
made from, and every program that made them, must have the content that it had. Nothing is compiled, and an import of torch that
has begun is not waited for.
"""

import shutil
import uuid
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import msgspec

from dsdoctor.builder.cache.folders import open_store
from dsdoctor.builder.cache.store import CacheStore, Entry
from dsdoctor.builder.make.make_wheel import prepare_out
from dsdoctor.builder.make.manifest import decode
from dsdoctor.builder.make.op_cache import Digests
from dsdoctor.builder.source.fetch import digest_here
from dsdoctor.core.build_models import BuildPlan, BuildResult
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildOrder
from dsdoctor.core.text import encode
from dsdoctor.core.workspace import cache_folder

KIND = "wheels"
IGNORED_VARIABLES = (
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "TERM",
    "COLUMNS",
    "LINES",
    "DISPLAY",
    "LS_COLORS",
    "PYTEST_CURRENT_TEST",
)
IGNORED_PREFIXES = ("SSH_", "XDG_", "DBUS_", "TMUX", "VSCODE_")
"""Variables that no build reads. Every other counts: one that is not known here is a miss, and never a wheel of something else."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that decides a wheel, as it was when it was asked for: its key, and the digests of the files that the user named.

    ``source`` identifies DeepSpeed's source; ``files`` are the digests of the snapshots and the ds_config.json.
    """

    key: str
    store: CacheStore
    order: BuildOrder
    machine: Machine
    source: str
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class KeptWheel:
    """A finished wheel in its place, and the plan that it was made by."""

    result: BuildResult
    plan: BuildPlan


def inputs_of(order: BuildOrder, machine: Machine) -> Inputs | None:
    """What decides the wheel of an order; None where that cannot be had without fetching, and where the cache is not wanted.

    ``machine`` is this one, as its files and tools tell.
    """
    if not order.cache or order.machine is not None:
        return None
    named = _digests(order, machine)
    if named is None:
        return None
    source, files = named
    facts = {
        "order": replace(order, nodes=(), config=None),
        "files": files,
        "source": source,
        "machine": _without_changing_facts(machine),
        "variables": _variables(LocalHost()),
        "dsdoctor": _own_digest(),
    }
    key = sha256(encode(facts, order="sorted")).hexdigest()
    return Inputs(key=key, store=open_store(LocalHost()), order=order, machine=machine, source=source, files=files)


def find_wheel(inputs: Inputs, out: Path) -> KeptWheel | None:
    """The wheel that was made of the very same, put into ``out`` with its manifest. Raises ImpossiblePlan where it cannot be."""
    prepare_out(out)
    digests = Digests()
    for entry in inputs.store.find(KIND, inputs.key):
        known = entry.facts.get("inputs")
        if not isinstance(known, dict) or not known:
            continue
        if any(digests.of(Path(path)) != digest for path, digest in known.items()):
            continue
        if (found := _put(inputs.store, entry, out)) is not None:
            return found
    return None


def keep(inputs: Inputs, result: BuildResult, plan: BuildPlan) -> None:
    """Keep a wheel, where all that it was made from is known, and is what it was when the order was given."""
    if result.wheel is None or result.manifest is None or result.inputs is None:
        return
    # what the ops were compiled from was digested when they were; what the user named may have changed under the build
    if _digests(inputs.order, inputs.machine) != (inputs.source, inputs.files):
        return
    wheel, manifest = Path(result.wheel), Path(result.manifest)
    made = decode(manifest.read_bytes())
    facts = {
        "name": wheel.name,
        "version": made.version,
        "torch": made.torch,
        "ops": [op.op for op in made.ops],
        "inputs": result.inputs,
        "plan": msgspec.to_builtins(plan),
        "result": msgspec.to_builtins(replace(result, inputs=None, log=None)),
    }
    inputs.store.put(KIND, inputs.key, {wheel.name: wheel, manifest.name: manifest}, facts)


def _digests(order: BuildOrder, machine: Machine) -> tuple[str, tuple[str, ...]] | None:
    """What identifies the source, and the digests of the named files; None where one of them is not here."""
    host = LocalHost()
    source = digest_here(host, order.source, machine.deepspeed, cache_folder(host))
    files = [file for file in (*order.nodes, order.config) if file]
    if source is None or not all(file.is_file() for file in files):
        return None
    return source, tuple(sha256(file.read_bytes()).hexdigest() for file in files)


def _put(store: CacheStore, entry: Entry, out: Path) -> KeptWheel | None:
    """Both files appear by rename, the wheel first."""
    names = [name for name in entry.files if name.endswith(".whl")]
    try:
        was = msgspec.convert(entry.facts.get("result"), BuildResult)
        plan = msgspec.convert(entry.facts.get("plan"), BuildPlan)
    except msgspec.ValidationError:
        return None
    if len(names) != 1 or set(entry.files) != {names[0], f"{names[0]}.json"}:
        return None
    folder = out / f".{uuid.uuid4().hex}.tmp"
    folder.mkdir(mode=0o700)
    try:
        if not store.take(entry, folder):
            return None
        for name in (names[0], f"{names[0]}.json"):
            (folder / name).replace(out / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wheel, ops = str(out / names[0]), tuple(replace(op, cached=op.built, log=None) for op in was.ops)
    now = replace(was, wheel=wheel, manifest=f"{wheel}.json", ops=ops, seconds=0.0, cpu_seconds=0.0, log=None)
    return KeptWheel(result=now, plan=plan)


def _variables(host: LocalHost) -> dict[str, str]:
    """The environment, but for what decides nothing about a build. It is only digested."""
    names = (name for name in host.names("") if name not in IGNORED_VARIABLES and not name.startswith(IGNORED_PREFIXES))
    return {name: host.variable(name) or "" for name in names}


def _without_changing_facts(machine: Machine) -> Machine:
    """The machine without what changes by itself and decides nothing about a wheel."""
    system = replace(machine.system, cache_free=None, shared_memory=None)
    return replace(machine, system=system, jit=None, shared_memory=None, gaps=())


def _own_digest() -> str:
    """The digest of this very dsdoctor."""
    package = CHILD_SCRIPTS.parent
    files = sorted(package.rglob("*.py"))
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()
