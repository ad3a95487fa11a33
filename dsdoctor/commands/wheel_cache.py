"""The hall of finished wheels: an order of which every input is as it was -> the wheel that was made of it, at once.

What was asked, the machine's files and tools, DeepSpeed's source and dsdoctor itself make the key; every file that the ops were
made from, and every program that made them, must have the content that it had. torch is not imported, nothing is compiled.
"""

import shutil
import uuid
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import msgspec

from dsdoctor.builder.cache.store import CacheStore, Entry
from dsdoctor.builder.make.manifest import decode
from dsdoctor.builder.make.op_inputs import Digests
from dsdoctor.builder.source.fetch import digest_here
from dsdoctor.commands.cache import open_store
from dsdoctor.core.build_models import BuildOrder, BuildPlan, BuildResult
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.workspace import cache_folder
from dsdoctor.probe import Probing

KIND = "wheels"
DECIDE_NOTHING = (
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
OF_A_SESSION = ("SSH_", "XDG_", "DBUS_", "TMUX", "VSCODE_")
"""Variables that no build reads. Every other counts: one that is not known here is a miss, and never a wheel of something else."""


@dataclass(frozen=True, kw_only=True)
class WheelRequest:
    """An order and its key, and where finished wheels are."""

    order: BuildOrder
    key: str
    store: CacheStore


@dataclass(frozen=True, kw_only=True)
class KeptWheel:
    """A finished wheel in its place, and the plan that it was made by."""

    result: BuildResult
    plan: BuildPlan


def request_of(order: BuildOrder) -> WheelRequest | None:
    """The key of an order; None where that cannot be had without fetching, and for orders that want nothing of the cache."""
    if not order.cache or order.machine is not None:
        return None
    host = LocalHost()
    cache = cache_folder(host)
    with Probing(host, python=order.python, cache=str(cache), whole=False) as probing:
        machine = probing.early()
        # what importing torch would tell is not waited for
        host.stop()
    source = digest_here(LocalHost(), order.source, machine.deepspeed, cache)
    if source is None:
        return None
    files = [file for file in (*order.nodes, order.config) if file]
    if not all(file.is_file() for file in files):
        return None
    facts = {
        "order": replace(order, nodes=(), config=None),
        "files": [sha256(file.read_bytes()).hexdigest() for file in files],
        "source": source,
        "machine": _lasting(machine),
        "variables": _variables(host),
        "dsdoctor": _ourselves(),
    }
    return WheelRequest(
        order=order, key=sha256(msgspec.json.encode(facts, order="sorted")).hexdigest(), store=open_store(host)
    )


def returned(request: WheelRequest, out: Path) -> KeptWheel | None:
    """The wheel of that very order, put into ``out`` with its manifest, where nothing that it was made from has changed."""
    digests = Digests()
    for entry in request.store.find(KIND, request.key):
        known = entry.facts.get("inputs")
        if not isinstance(known, dict) or not known:
            continue
        if any(digests.of(Path(path)) != digest for path, digest in known.items()):
            continue
        if (found := _put(request.store, entry, out)) is not None:
            return found
    return None


def keep(request: WheelRequest, result: BuildResult, plan: BuildPlan) -> None:
    """Keep a wheel, where all that it was made from is known, and is what it was when the order was given."""
    if result.wheel is None or result.manifest is None or result.inputs is None:
        return
    now = request_of(request.order)
    if now is None or now.key != request.key:
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
    request.store.put(KIND, request.key, {wheel.name: wheel, manifest.name: manifest}, facts)


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
    folder.mkdir()
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
    names = (name for name in host.names("") if name not in DECIDE_NOTHING and not name.startswith(OF_A_SESSION))
    return {name: host.variable(name) or "" for name in names}


def _lasting(machine: Machine) -> Machine:
    """The machine without what changes by itself and decides nothing about a wheel."""
    system = replace(machine.system, cache_free=None, shared_memory=None)
    return replace(machine, system=system, jit=None, gaps=())


def _ourselves() -> str:
    """The digest of this very dsdoctor."""
    package = CHILD_SCRIPTS.parent
    files = sorted(package.rglob("*.py"))
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()
