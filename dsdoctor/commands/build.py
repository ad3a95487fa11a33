"""build-wheel: observe -> what decides the wheel -> the wheel that is kept, or plan -> make -> keep. Shows nothing itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dsdoctor.builder.make.make_wheel import make, prepare_out
from dsdoctor.builder.make.op_job import Watch
from dsdoctor.builder.make.scheduler import Pool
from dsdoctor.builder.make.workdir import Workdir
from dsdoctor.builder.wheel.index import publish
from dsdoctor.commands.cache import store_findings
from dsdoctor.commands.plan import Planned, planned
from dsdoctor.commands.wheel_cache import find_wheel, inputs_of, keep
from dsdoctor.core.build_models import BuildPlan, BuildResult
from dsdoctor.core.children import PreloadedPython
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.requests import BuildOrder
from dsdoctor.core.workspace import log_folder
from dsdoctor.diagnosis.diagnose import diagnose
from dsdoctor.diagnosis.lines import raw_lines
from dsdoctor.diagnosis.models import LogOutcome
from dsdoctor.probe.observe import Say, observing_for

AfterBuild = Callable[[BuildPlan, BuildResult], tuple[Finding, ...]]
"""Something to do with a built wheel; what goes wrong is a finding, the wheel stays."""


@dataclass(frozen=True, kw_only=True)
class BuildScreen:
    """Who hears of a build while it goes on: lines, the plan that is about to be carried out, the progress of each op."""

    say: Say
    plan: Callable[[BuildPlan], None]
    step: Watch


@dataclass(frozen=True, kw_only=True)
class Built:
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
) -> Built:
    """A wheel in ``out``. ``reuse``: the one that is kept will do, where nothing that it is made of has changed.

    ``after`` is asked for what comes after the build once it is clear that there will be one. It may raise ImpossiblePlan.
    """
    screen.say(f"looking at this machine and at {order.python}")
    with PreloadedPython(order.python) as preloaded:
        with observing_for(order) as observing:
            inputs = inputs_of(order, observing.early().machine) if reuse else None
            if inputs is not None and (wheel := find_wheel(inputs, out)) is not None:
                observing.stop()
                return Built(plan=wheel.plan, result=_and_then(after and after(), wheel.plan, wheel.result), kept=True)
            # beside the look at torch, which takes as long
            preloaded.start()
            observation = observing.final()
        with planned(order, observation) as ready:
            if has_error(ready.plan.findings):
                return Built(plan=ready.plan)
            screen.plan(ready.plan)
            then = after and after()
            made = make_wheel(ready, out, say=screen.say, watch=screen.step, preloaded=preloaded)
            result = _and_then(then, ready.plan, made)
        if inputs is not None and not has_error(result.findings):
            keep(inputs, result, ready.plan)
        return Built(plan=ready.plan, result=result)


def make_wheel(
    ready: Planned,
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


def publish_into(index: Path) -> AfterBuild:
    """List a built wheel in an index. Raises ImpossiblePlan for one that cannot be written."""
    prepare_out(index, "--index")

    def list_wheel(_: BuildPlan, result: BuildResult) -> tuple[Finding, ...]:
        assert result.wheel is not None
        try:
            publish(Path(result.wheel), index)
        except OSError as error:
            title = f"the wheel is built, and could not be put into the index {index}: {error}"
            return (Finding.error("wheel-not-published", title),)
        return ()

    return list_wheel


def _and_then(after: AfterBuild | None, plan: BuildPlan, result: BuildResult) -> BuildResult:
    if after is None or not result.wheel:
        return result
    return replace(result, findings=(*result.findings, *after(plan, result)))
