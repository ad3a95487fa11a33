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

from dsdoctor.builder.key import READ_BY_COMPILERS, Digests
from dsdoctor.builder.manifest import Manifest, decode
from dsdoctor.builder.nouns import BuildResult, OpResult
from dsdoctor.builder.source import digest_here
from dsdoctor.builder.store import Entry, Store
from dsdoctor.builder.workspace import cache_folder
from dsdoctor.caching import open_store
from dsdoctor.host import INSIDE, LocalHost
from dsdoctor.machine import Machine
from dsdoctor.order import Order
from dsdoctor.probe import Probing

KIND = "wheels"
SEEN_BY_TORCH = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH", "PATH")


@dataclass(frozen=True, kw_only=True)
class Request:
    """An order as a key, and where finished wheels are."""

    key: str
    store: Store


def request_of(order: Order) -> Request | None:
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
    named = (*READ_BY_COMPILERS, *SEEN_BY_TORCH)
    facts = {
        "order": replace(order, nodes=(), config=None),
        "files": [sha256(file.read_bytes()).hexdigest() for file in files],
        "source": source,
        "machine": _lasting(machine),
        "variables": {name: value for name in named if (value := host.variable(name)) is not None},
        "dsdoctor": _ourselves(),
    }
    return Request(key=sha256(msgspec.json.encode(facts, order="sorted")).hexdigest(), store=open_store(host))


def returned(request: Request, out: Path) -> tuple[BuildResult, Manifest] | None:
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


def keep(request: Request, result: BuildResult) -> None:
    """Keep a wheel, where all that it was made from is known."""
    if result.wheel is None or result.manifest is None or result.inputs is None:
        return
    wheel, manifest = Path(result.wheel), Path(result.manifest)
    made = decode(manifest.read_bytes())
    facts = {
        "name": wheel.name,
        "version": made.version,
        "torch": made.torch,
        "ops": [op.op for op in made.ops],
        "inputs": result.inputs,
    }
    request.store.put(KIND, request.key, {wheel.name: wheel, manifest.name: manifest}, facts)


def _put(store: Store, entry: Entry, out: Path) -> tuple[BuildResult, Manifest] | None:
    """Both files appear by rename, the wheel first."""
    if sum(name.endswith(".whl") for name in entry.files) != 1:
        return None
    folder = out / f".{uuid.uuid4().hex}.tmp"
    folder.mkdir()
    try:
        if not store.take(entry, folder):
            return None
        name = next(name for name in entry.files if name.endswith(".whl"))
        manifest = decode((folder / f"{name}.json").read_bytes())
        for one in (name, f"{name}.json"):
            (folder / one).replace(out / one)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    asked = {op.op: op.asked for op in manifest.plan.ops}
    built = tuple(OpResult(op=op.op, asked=asked.get(op.op, True), built=True, cached=True) for op in manifest.ops)
    left = tuple(OpResult(op=o.op, asked=o.asked, built=False, because=o.because) for o in manifest.plan.left_out)
    wheel = str(out / name)
    made = BuildResult(
        wheel=wheel, manifest=f"{wheel}.json", ops=(*built, *left), seconds=0.0, cpu_seconds=0.0, log=None
    )
    return made, manifest


def _lasting(machine: Machine) -> Machine:
    """The machine without what changes by itself and decides nothing about a wheel."""
    system = replace(machine.system, cache_free=None, shared_memory=None)
    return replace(machine, system=system, jit=None, gaps=())


def _ourselves() -> str:
    """The digest of this very dsdoctor."""
    package = INSIDE.parent
    files = sorted(package.rglob("*.py"))
    return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()
