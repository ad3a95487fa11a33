"""Many targets -> an environment, a plan and a wheel for each, under one pool of compilers. Shows nothing itself.

Environments and plans are made one after the other; meanwhile the targets that are planned compile.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from dsdoctor.builder.build import (
    AfterBuild,
    Inputs,
    PreparedPlan,
    find_wheel,
    inputs_of,
    keep,
    make_wheel,
    prepare_plan,
)
from dsdoctor.builder.make.compile import Pool
from dsdoctor.builder.make.make_wheel import prepare_out
from dsdoctor.builder.make.manifest import decode
from dsdoctor.builder.plan.choices import choose_local_version
from dsdoctor.builder.targets import Target, cross, environment, find_interpreters, is_version
from dsdoctor.core.build_models import BuildPlan, BuildResult, OpProgress
from dsdoctor.core.errors import BuildFailed, DoctorError, ImpossiblePlan, UsageError, refused_by_system
from dsdoctor.core.finding import Finding, has_error
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Cuda, Gap, Torch
from dsdoctor.core.requests import BuildOrder, check_interpreter
from dsdoctor.core.workspace import cache_folder, private_folder
from dsdoctor.probe.observe import probe_for_build
from dsdoctor.probe.python import ask_python, read_torch


@dataclass(frozen=True, kw_only=True)
class ListedTarget:
    """One of the wheels that the options name, by its place among them: what an array job builds by its own index."""

    number: int
    python: str
    torch: str | None
    cuda: str | None


@dataclass(frozen=True, kw_only=True)
class TargetOutcome:
    """How one target fared. ``python`` is the interpreter of its environment, ``error`` what ended it before there was a result.

    ``size`` (bytes) and ``sha256`` are the wheel's.
    """

    target: Target
    python: str | None = None
    plan: BuildPlan | None = None
    result: BuildResult | None = None
    error: DoctorError | None = None
    size: int | None = None
    sha256: str | None = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Those of the plan, then those of the build."""
        return (*(self.plan.findings if self.plan else ()), *(self.result.findings if self.result else ()))

    @property
    def status(self) -> int:
        """The exit status that it would have alone."""
        if self.error is not None:
            return self.error.exit_code
        if self.plan is not None and has_error(self.plan.findings):
            return ImpossiblePlan.exit_code
        failed = self.result is not None and (not self.result.wheel or has_error(self.result.findings))
        return BuildFailed.exit_code if failed else 0


@dataclass(frozen=True, kw_only=True)
class Talk:
    """Who hears of each target: a line, or a step of one of its ops. Called from several threads."""

    say: Callable[[Target, str], None]
    step: Callable[[Target, OpProgress], None]


@dataclass
class _Running:
    """A target under way; ``kept`` holds its throw-away folder."""

    outcome: TargetOutcome
    kept: ExitStack = field(default_factory=ExitStack)
    ready: PreparedPlan | None = None
    inputs: Inputs | None = None
    made: "Future[BuildResult] | None" = None


@dataclass
class _TargetBuilds:
    """All targets under way. Used by one thread; only the builds run in others."""

    order: BuildOrder
    cache: Path
    out: Path
    talk: Talk
    kept: ExitStack
    threads: ThreadPoolExecutor
    running: list[_Running] = field(default_factory=list)
    pool: Pool | None = None
    stopped: bool = False
    names: dict[tuple[str, str], Target] = field(default_factory=dict)

    def begin(self, target: Target, *, dry_run: bool) -> None:
        """Make the environment and the plan, and begin the build."""
        running = _Running(outcome=TargetOutcome(target=target))
        self.running.append(running)
        self.kept.enter_context(running.kept)
        try:
            self._plan(running, dry_run=dry_run)
            if running.ready is None or dry_run or has_error(running.ready.plan.findings):
                return
            self._claim(target, running.ready)
            prefix = "" if running.ready.plan.toolkit is None else f"toolkit {running.ready.plan.toolkit.root}, "
            self.talk.say(target, f"{prefix}ops {', '.join(op.op for op in running.ready.plan.ops)}")
            running.made = self.threads.submit(self._build, target, running.ready, self._pool(running.ready.plan))
        except (DoctorError, OSError) as error:
            running.outcome = replace(running.outcome, error=_ours(error))

    def end(self, running: _Running, after: AfterBuild | None) -> TargetOutcome:
        """Wait for a build, do what comes after on its wheel, and throw its folder away."""
        outcome = self._ended(running, after)
        # not where an interruption passes by: the build still stands in it then
        running.kept.close()
        return outcome

    def _ended(self, running: _Running, after: AfterBuild | None) -> TargetOutcome:
        plan, result = running.outcome.plan, running.outcome.result
        if plan is None or (running.made is None and result is None):
            return running.outcome
        try:
            if running.made is not None:
                result = running.made.result()
                if running.inputs is not None and not has_error(result.findings):
                    keep(running.inputs, result, plan)
            assert result is not None
            if result.wheel and after:
                result = replace(result, findings=(*result.findings, *after(plan, result)))
            return _with_wheel(replace(running.outcome, result=result))
        except (DoctorError, OSError) as error:
            return replace(running.outcome, error=_ours(error))

    def stop(self) -> None:
        """End every compiler; the builds end by that, and nothing more is told of them."""
        self.stopped = True
        for running in self.running:
            if running.ready is not None:
                running.ready.host.stop()

    def _plan(self, running: _Running, *, dry_run: bool) -> None:
        target, request = running.outcome.target, self.order.request
        python = target.python
        if target.torch is not None:
            talk = self.talk
            python = environment(
                LocalHost(), target, self.cache, offline=request.offline, say=lambda line: talk.say(target, line)
            )
        running.outcome = replace(running.outcome, python=python)
        order = replace(self.order, python=python)
        with probe_for_build(order) as observing:
            running.inputs = inputs_of(order, observing.early().machine) if order.cache and not dry_run else None
            kept = find_wheel(running.inputs, self.out) if running.inputs is not None else None
            if kept is not None:
                observing.stop()
                self.talk.say(target, "unchanged since the last build: wheel taken from the cache")
                running.outcome = replace(running.outcome, plan=kept.plan, result=kept.result)
                return
            observation = observing.final()
        running.ready = running.kept.enter_context(prepare_plan(order, observation))
        running.outcome = replace(running.outcome, plan=running.ready.plan)

    def _claim(self, target: Target, ready: PreparedPlan) -> None:
        """A wheel's name is one target's: what a torch from an index turns out to be is known only now."""
        if ready.plan.tagged:
            return
        tag = ready.machine.python.tag if ready.machine.python else ""
        first = self.names.setdefault((ready.plan.local_version, tag), target)
        if first is not target:
            raise clash(first, target)

    def _pool(self, plan: BuildPlan) -> Pool:
        """The one pool, sized by the first plan."""
        if self.pool is None:
            self.pool = Pool(plan.jobs, plan.memory)
        return self.pool

    def _build(self, target: Target, ready: PreparedPlan, pool: Pool) -> BuildResult:
        def say(line: str) -> None:
            if not self.stopped:
                self.talk.say(target, line)

        def watch(step: OpProgress) -> None:
            if not self.stopped:
                self.talk.step(target, step)

        result = make_wheel(ready, self.out, say=say, watch=watch, pool=pool)
        # the process's own figure has the neighbours' compilers in it
        return replace(result, cpu_seconds=round(sum(op.cpu_seconds or 0.0 for op in result.ops), 1))


def targets_of(
    pythons: Sequence[str], torches: Sequence[str], cudas: Sequence[str], index: str | None
) -> tuple[Target, ...]:
    """What the options name. Raises UsageError for nonsense, ImpossiblePlan for a Python that is not here."""
    asked = tuple(dict.fromkeys(pythons)) or (sys.executable,)
    for python in asked:
        if not is_version(python):
            check_interpreter(python)
    if torches:
        return cross(find_interpreters(LocalHost(), asked), tuple(torches), tuple(cudas), index)
    if cudas or index:
        option = "--cuda" if cudas else "--torch-index"
        raise UsageError(f"{option} needs --torch", hint="--torch 2.14.1")
    versions = tuple(python for python in asked if is_version(python))
    found = dict(zip(versions, find_interpreters(LocalHost(), versions), strict=True))
    paths = (found[python].executable if python in found else python for python in asked)
    return tuple(Target(python=path) for path in dict.fromkeys(paths))


def list_targets(pythons: Sequence[str], torches: Sequence[str], cudas: Sequence[str]) -> tuple[ListedTarget, ...]:
    """Every Python with every torch and every CUDA, each once, always in this order. Nothing is looked for on this machine."""
    choices = (pythons or (sys.executable,), torches or (None,), cudas or (None,))
    each = tuple(dict.fromkeys(product(*choices)))
    return tuple(
        ListedTarget(number=number, python=python, torch=torch, cuda=cuda)
        for number, (python, torch, cuda) in enumerate(each)
    )


def chosen_target(listed: Sequence[ListedTarget], number: int) -> ListedTarget:
    """The one with a number. Raises UsageError for a number that none has."""
    if 0 <= number < len(listed):
        return listed[number]
    raise UsageError(
        f"there is no target {number}; targets are numbered from 0 to {len(listed) - 1}", hint="--targets lists them"
    )


def refuse_clashes(order: BuildOrder, targets: Sequence[Target]) -> None:
    """Raise UsageError where two wheels would have one file name, as far as that can be told without installing anything."""
    if order.request.tagged:
        return  # a tag of the content tells them apart
    names: dict[tuple[str, ...], Target] = {}
    for target in targets:
        expected = _expected(order, target)
        if expected is not None and names.setdefault(expected, target) is not target:
            raise clash(names[expected], target)


def clash(first: Target, second: Target) -> UsageError:
    """Why two targets cannot be built into one folder."""
    return UsageError(
        f"the wheels for {first.name} and for {second.name} would have the same file name",
        hint="choose one, or give each its own --out: DeepSpeed's loader distinguishes only torch's major.minor and CUDA release",
    )


def build_targets(
    order: BuildOrder,
    targets: Sequence[Target],
    out: Path,
    *,
    after: AfterBuild | None,
    talk: Talk,
    dry_run: bool = False,
) -> tuple[TargetOutcome, ...]:
    """A wheel for each target, or why there is none; one that fails does not stop the others. ``dry_run`` ends at the plans.

    Raises UsageError for two whose wheels would have one file name, before anything is made. Any interruption ends all.
    """
    refuse_clashes(order, targets)
    prepare_out(out)
    cache = private_folder(cache_folder(LocalHost()))
    with ExitStack() as kept, ThreadPoolExecutor(max_workers=len(targets)) as threads:
        builds = _TargetBuilds(order=order, cache=cache, out=out, talk=talk, kept=kept, threads=threads)
        try:
            for target in targets:
                builds.begin(target, dry_run=dry_run)
            return tuple(builds.end(running, after) for running in builds.running)
        except BaseException:
            builds.stop()
            raise


def _expected(order: BuildOrder, target: Target) -> tuple[str, ...] | None:
    """What will tell a target's wheel from others in its name; None where its environment cannot be asked."""
    request = order.request
    if target.torch is None:
        environment_ = ask_python(LocalHost(), target.python)
        if isinstance(environment_, Gap) or environment_.torch is None:
            return None
        tag, torch = environment_.python.tag, read_torch(LocalHost(), environment_.torch)
    else:
        tag = f"cp{target.minor.replace('.', '')}"
        cuda = None if target.build == "cpu" else Cuda.parse(target.build)
        torch = Torch(version=target.torch, location="", cuda=cuda)
    if torch is None:
        return None
    accelerator = request.accelerator or ("cuda" if torch.cuda else "cpu")
    local, _ = choose_local_version(torch, accelerator, request)
    return tag, local


def _with_wheel(outcome: TargetOutcome) -> TargetOutcome:
    """The outcome with what the manifest beside the wheel says of it."""
    if outcome.result is None or outcome.result.manifest is None:
        return outcome
    manifest = decode(Path(outcome.result.manifest).read_bytes())
    return replace(outcome, size=manifest.size, sha256=manifest.sha256)


def _ours(error: DoctorError | OSError) -> DoctorError:
    return error if isinstance(error, DoctorError) else refused_by_system(error)
