"""The hall between the rooms: joins probe and builder for the command line. Acts through them, shows nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.cache.store import CacheStore
from dsdoctor.builder.make.make_wheel import make, prepare_out
from dsdoctor.builder.make.op_job import Watch
from dsdoctor.builder.make.scheduler import Pool
from dsdoctor.builder.make.workdir import Workdir
from dsdoctor.builder.plan.choices import accelerator_of
from dsdoctor.builder.plan.plan import plan_build
from dsdoctor.builder.source.fetch import lay_out, spell_source
from dsdoctor.builder.source.op_config import ops_of_config, read_config
from dsdoctor.builder.wheel.index import publish
from dsdoctor.commands.cache import open_store, told
from dsdoctor.commands.observe import Observation, described, look, read_nodes, recorded_source
from dsdoctor.core.build_models import BuildOrder, BuildPlan, BuildRequest, BuildResult, Source
from dsdoctor.core.errors import BuildFailed
from dsdoctor.core.finding import Finding, Fix, Severity
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.pip import install_wheel
from dsdoctor.core.workspace import cache_folder, log_folder, private_folder, workspace
from dsdoctor.diagnosis.clean import raw_lines
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.models import LogOutcome

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan with all that carrying it out needs; ``folder`` goes away when the context ends, ``store`` keeps compiled ops."""

    host: LocalHost
    machine: Machine
    source: Source
    plan: BuildPlan
    folder: Path
    cache: Path
    store: CacheStore | None


Job = Callable[[Planned, BuildResult], tuple[Finding, ...]]
"""Something to do with a built wheel; what goes wrong is a finding, the wheel stays."""


@contextmanager
def planned(order: BuildOrder) -> Iterator[Planned]:
    """Look, lay the source out in a throw-away folder, and decide."""
    order = replace(order, request=replace(order.request, nodes=read_nodes(order.nodes)))
    host, observation = LocalHost(), look(order)
    machine, cache = observation.machine, private_folder(cache_folder(host))
    accelerator = accelerator_of(machine, order.request)
    with workspace(cache) as folder:
        if observation.snapshot is not None and not order.source:
            source = recorded_source(observation.snapshot, accelerator)
        else:
            source = _laid_out(host, observation, order, accelerator, folder, cache)
        plan = plan_build(machine, source, _with_config(order, accelerator), cache=observation.cache)
        store = open_store(host) if order.cache else None
        yield Planned(host=host, machine=machine, source=source, plan=plan, folder=folder, cache=cache, store=store)


def _laid_out(
    host: LocalHost, observation: Observation, order: BuildOrder, accelerator: str, folder: Path, cache: Path
) -> Source:
    spec, because = spell_source(order.source, observation.machine.deepspeed)
    python = (
        observation.machine.python.executable if observation.is_here and observation.machine.python else sys.executable
    )
    laid = lay_out(host, spec, folder / "source", cache=cache, python=python, offline=order.request.offline)
    return described(observation, replace(laid, because=because), accelerator, folder)


def build(ready: Planned, out: Path, *, say: Say, watch: Watch, pool: Pool | None = None) -> BuildResult:
    """Carry a plan out, under a pool that other builds share, or under one of its own."""
    prepare_out(out)
    workdir = Workdir(folder=ready.folder, logs=log_folder(ready.cache), out=out, store=ready.store, pool=pool)
    say(f"logs: {workdir.logs}")
    result = explained(make(ready.host, ready.plan, ready.source, ready.machine, workdir, say=say, watch=watch))
    return replace(result, findings=(*result.findings, *(told(ready.store) if ready.store else ())))


def explained(result: BuildResult) -> BuildResult:
    """A build with the diagnosis of its failed ops' logs, as ``dsdoctor diagnose`` gives it; each ill once."""
    told = {(finding.rule, finding.title): finding for finding in result.findings}
    for op in result.ops:
        if op.built or op.log is None:
            continue
        with Path(op.log).open("rb") as log:
            read = diagnose(raw_lines(log), name=op.log)
        for finding in read.findings if read.outcome is LogOutcome.CAUSE else ():
            known = told.setdefault((finding.rule, finding.title), replace(finding, affects=()))
            affects = tuple(dict.fromkeys((*known.affects, op.op)))
            evidence = tuple(dict.fromkeys((*known.evidence, f"in {op.log}")))
            told[finding.rule, finding.title] = replace(known, affects=affects, evidence=evidence)
    return replace(result, findings=tuple(told.values()))


def install(ready: Planned, made: BuildResult) -> tuple[Finding, ...]:
    """Install a built wheel into the environment it was built for; a finding when that fails: the wheel stays."""
    assert made.wheel is not None
    try:
        install_wheel(ready.host, ready.plan.python, made.wheel)
    except BuildFailed as error:
        fix = Fix(text="install it by hand", commands=(error.hint,))
        return (Finding(rule="wheel-not-installed", severity=Severity.ERROR, title=error.message, fix=fix),)
    return ()


def publish_into(index: Path) -> Job:
    """List a built wheel in an index. Raises ImpossiblePlan for one that cannot be written."""
    prepare_out(index, "--index")
    return lambda _, made: list_wheel(index, made)


def list_wheel(index: Path, made: BuildResult) -> tuple[Finding, ...]:
    """List a built wheel in an index; a finding when that fails: the wheel stays."""
    assert made.wheel is not None
    try:
        publish(Path(made.wheel), index)
    except OSError as error:
        title = f"the wheel is built, and could not be put into the index {index}: {error}"
        return (Finding(rule="wheel-not-published", severity=Severity.ERROR, title=title),)
    return ()


def _with_config(order: BuildOrder, accelerator: str) -> BuildRequest:
    if order.config is None:
        return order.request
    ops = ops_of_config(read_config(order.config), accelerator=accelerator)
    return replace(order.request, ops=ops or None, ops_because=f"--for {order.config}")
