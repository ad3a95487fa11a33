"""Builds: an order -> its plan, or its wheel, which is the one that is kept or one that is made now. Shows nothing itself.

``build`` observes, asks what decides the wheel, and takes the wheel that is kept, or plans, makes and keeps one.

An order of which every input is unchanged gets its kept wheel at once. What was asked, the machine's files and tools, DeepSpeed's
source and dsdoctor itself make the key; every file that the ops were made from, and every program that made them, must have the
content that it had. Nothing is compiled, and an import of torch that has begun is not waited for.
"""

import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import msgspec

from dsdoctor.builder.cache.folders import open_store, store_findings
from dsdoctor.builder.cache.store import CacheStore, Entry
from dsdoctor.builder.make.compile import Pool, Watch
from dsdoctor.builder.make.make_wheel import Workdir, make, prepare_out
from dsdoctor.builder.make.manifest import decode
from dsdoctor.builder.make.op_cache import Digests
from dsdoctor.builder.plan.choices import accelerator_of
from dsdoctor.builder.plan.plan import plan_build
from dsdoctor.builder.source.fetch import digest_here, lay_out, spell_source
from dsdoctor.builder.source.op_loads import find_load_sites, ops_of_config, unknown_sites
from dsdoctor.builder.source.ops import described, recorded_source
from dsdoctor.builder.source.training_config import TrainingConfig, read_config, training_configs
from dsdoctor.builder.toolkit.choose import toolkit_offers
from dsdoctor.builder.wheel.index import publish
from dsdoctor.core.build_models import BuildPlan, BuildResult, Source
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.finding import Finding, Severity, Step, has_error, step, with_options
from dsdoctor.core.host import CHILD_SCRIPTS, LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.requests import BuildOrder, BuildRequest
from dsdoctor.core.text import encode
from dsdoctor.core.workspace import cache_folder, log_folder, private_folder, workspace
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.models import LogOutcome
from dsdoctor.probe.observe import Observation, Say, probe_for_build, read_nodes
from dsdoctor.rules import book

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


BUILD = step("python -m dsdoctor build-wheel")
BUILD_ELSEWHERE = step("python -m dsdoctor build-wheel", note="on the machine of that snapshot")
AfterBuild = Callable[[BuildPlan, BuildResult], tuple[Finding, ...]]
"""Something to do with a built wheel; what goes wrong is a finding, the wheel stays."""


@dataclass(frozen=True, kw_only=True)
class PreparedPlan:
    """A plan with all that carrying it out needs; ``folder`` goes away when the context ends, ``store`` keeps compiled ops."""

    host: LocalHost
    machine: Machine
    source: Source
    plan: BuildPlan
    folder: Path
    cache: Path
    store: CacheStore | None


@dataclass(frozen=True, kw_only=True)
class BuildScreen:
    """Who hears of a build while it goes on: lines, the plan that is about to be carried out, the progress of each op."""

    say: Say
    plan: Callable[[BuildPlan], None]
    step: Watch


@dataclass(frozen=True, kw_only=True)
class BuildOutcome:
    """What came of an order. ``result`` is None for a plan that was not carried out; ``kept``: the wheel is one of the cache."""

    plan: BuildPlan
    result: BuildResult | None = None
    kept: bool = False

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of the plan, then those of the build."""
        return (*self.plan.findings, *(self.result.findings if self.result else ()))


def build(
    order: BuildOrder, out: Path, *, screen: BuildScreen, after: Callable[[], AfterBuild] | None = None, reuse: bool
) -> BuildOutcome:
    """A wheel in ``out``. ``reuse``: the one that is kept will do, where nothing that it is made of has changed.

    ``after`` is asked for what comes after the build once it is clear that there will be one. It may raise ImpossiblePlan.
    """
    screen.say(f"inspecting this machine and {order.python}")
    with PreloadedPython(order.python) as preloaded:
        with probe_for_build(order) as observing:
            inputs = inputs_of(order, observing.early().machine) if reuse else None
            if inputs is not None and (wheel := find_wheel(inputs, out)) is not None:
                observing.stop()
                return BuildOutcome(
                    plan=wheel.plan, result=_and_then(after and after(), wheel.plan, wheel.result), kept=True
                )
            # beside the look at torch, which takes as long
            preloaded.start()
            observation = observing.final()
        with prepare_plan(order, observation) as ready:
            if has_error(ready.plan.findings):
                return BuildOutcome(plan=ready.plan)
            screen.plan(ready.plan)
            then = after and after()
            made = make_wheel(ready, out, say=screen.say, watch=screen.step, preloaded=preloaded)
            result = _and_then(then, ready.plan, made)
        if inputs is not None and not has_error(result.findings):
            keep(inputs, result, ready.plan)
        return BuildOutcome(plan=ready.plan, result=result)


@contextmanager
def prepare_plan(order: BuildOrder, observation: Observation) -> Iterator[PreparedPlan]:
    """Lay the source out in a throw-away folder, ask it for its ops, and decide."""
    host, machine = LocalHost(), observation.machine
    request = replace(order.request, nodes=read_nodes(order.nodes))
    accelerator = accelerator_of(machine, request)
    # an error in the configuration is found before anything is fetched
    decided = training_configs(read_config(order.config), name=str(order.config)) if order.config else ()
    cache = private_folder(cache_folder(host))
    with workspace(cache) as folder:
        source = _source(host, observation, order, accelerator, folder, cache)
        request = _with_config(request, order.config, decided, source)
        plan = plan_build(
            machine, source, request, cache=observation.cache, offers=toolkit_offers(observation, request)
        )
        store = open_store(host) if order.cache else None
        yield PreparedPlan(
            host=host, machine=machine, source=source, plan=plan, folder=folder, cache=cache, store=store
        )


def make_wheel(
    ready: PreparedPlan,
    out: Path,
    *,
    say: Say,
    watch: Watch,
    pool: Pool | None = None,
    preloaded: PreloadedPython | None = None,
) -> BuildResult:
    """Carry a plan out, under a pool that other builds share, or under one of its own."""
    prepare_out(out)
    logs = log_folder(ready.cache)
    workdir = Workdir(folder=ready.folder, logs=logs, out=out, store=ready.store, pool=pool, preloaded=preloaded)
    say(f"logs: {workdir.logs}")
    result = explained(make(ready.host, ready.plan, ready.source, ready.machine, workdir, say=say, watch=watch))
    return replace(result, findings=(*result.findings, *(store_findings(ready.store) if ready.store else ())))


def publish_into(index: Path) -> AfterBuild:
    """List a built wheel in an index. Raises ImpossiblePlan for one that cannot be written."""
    prepare_out(index, "--index")

    def list_wheel(_: BuildPlan, result: BuildResult) -> tuple[Finding, ...]:
        assert result.wheel is not None
        try:
            publish(Path(result.wheel), index)
        except OSError as error:
            return (book.finding("wheel-not-published", Severity.ERROR, index=str(index), why=str(error)),)
        return ()

    return list_wheel


def build_command(order: BuildOrder) -> Step:
    """With every option that was given. For another machine's snapshot it is typed there, with a Python of that machine."""
    return with_options(BUILD if order.machine is None else BUILD_ELSEWHERE, _options(order))


def explained(result: BuildResult) -> BuildResult:
    """A build with the diagnosis of its failed ops' logs, as ``dsdoctor diagnose`` gives it; each problem once."""
    found = {(finding.rule, finding.title): finding for finding in result.findings}
    for op in result.ops:
        if op.built or op.log is None:
            continue
        with Path(op.log).open("rb") as log:
            read = diagnose(raw_lines(log), name=op.log)
        for finding in read.findings if read.outcome is LogOutcome.CAUSE else ():
            known = found.setdefault((finding.rule, finding.title), replace(finding, affects=()))
            affects = tuple(dict.fromkeys((*known.affects, op.op)))
            evidence = tuple(dict.fromkeys((*known.evidence, f"in {op.log}")))
            found[finding.rule, finding.title] = replace(known, affects=affects, evidence=evidence)
    return replace(result, findings=tuple(found.values()))


def unknown_sites_note(source: Source) -> str:
    """What is known to be unknown about a DeepSpeed of another version than the table of ops was written for."""
    folder = Path(source.folder)
    found = unknown_sites(find_load_sites(folder)) if source.folder and folder.is_dir() else ()
    sites = [site for site in found if source.op(site.op) is not None]
    if not sites:
        return ""
    places = ", ".join(dict.fromkeys(f"{site.op} in {site.file}" for site in sites))
    return book.phrase("builder", "also-loaded", version=source.version, places=places)


def _source(
    host: LocalHost, observation: Observation, order: BuildOrder, accelerator: str, folder: Path, cache: Path
) -> Source:
    if observation.snapshot is not None and not order.source:
        return recorded_source(observation.snapshot, accelerator)
    machine = observation.machine
    spec, because = spell_source(order.source, machine.deepspeed)
    python = machine.python.executable if observation.is_here and machine.python else sys.executable
    laid = lay_out(host, spec, folder / "source", cache=cache, python=python, offline=order.request.offline)
    because = laid.limit or because
    return described(observation, replace(laid, because=because), accelerator, folder)


def _with_config(
    request: BuildRequest, config: Path | None, decided: tuple[TrainingConfig, ...], source: Source
) -> BuildRequest:
    """The request with the ops that a ds_config.json decides, and the reason for each."""
    if config is None:
        return request
    ops = ops_of_config(decided, accelerator=source.accelerator)
    reasons = ", ".join(f"{op} for {reason}" for op, reason in ops.items())
    nothing = book.phrase("builder", "nothing-loaded", accelerator=source.accelerator)
    because = f"--for {config}: {reasons or nothing}{unknown_sites_note(source)}"
    return replace(request, ops=tuple(ops) or None, ops_because=because)


def _and_then(after: AfterBuild | None, plan: BuildPlan, result: BuildResult) -> BuildResult:
    if after is None or not result.wheel:
        return result
    return replace(result, findings=(*result.findings, *after(plan, result)))


def _options(order: BuildOrder) -> Iterator[Step]:
    if order.config is not None:
        yield step("--for {config}", config=str(order.config))
    if order.source is not None:
        yield step("--source {source}", source=order.source)
    for node in order.nodes:
        yield step("--node {file}", file=str(node))
    if order.machine is None and order.python != sys.executable:
        yield step("--python {python}", python=order.python)
    yield from _of_request(order.request)


def _of_request(request: BuildRequest) -> Iterator[Step]:
    if request.ops is not None and not request.ops_because:
        yield step("--ops {ops}", ops=",".join(request.ops))
    if request.arch is not None:
        yield step("--arch {architectures}", architectures=request.arch)
    if request.accelerator is not None:
        yield step("--accelerator {accelerator}", accelerator=request.accelerator)
    if request.cpu is not None:
        yield step("--cpu {level}", level=request.cpu)
    if request.toolkit != "auto":
        yield step("--toolkit {toolkit}", toolkit=request.toolkit)
    if request.jobs is not None:
        yield step("--jobs {jobs}", jobs=request.jobs)
    if request.local_version is not None:
        yield step("--local-version={version}", version=request.local_version)
    if request.no_local_version:
        yield step("--no-local-version")
    if request.offline:
        yield step("--offline")
    if request.debug_info:
        yield step("--debug-info")
