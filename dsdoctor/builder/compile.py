"""BuildPlan -> compiled ops: taken from the cache where they are there, the others compiled side by side under one pool."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from dsdoctor.builder.commands import Command, OpCommands, ask_commands
from dsdoctor.builder.flags import Orders, changes, edited, memory_of, orders_of, threads_of
from dsdoctor.builder.nouns import BuildPlan, OpPlan
from dsdoctor.builder.opcache import OpCache
from dsdoctor.builder.pool import Pool
from dsdoctor.builder.schedule import Job, carry_out
from dsdoctor.builder.underway import Compiled, OpWork, Step, Watch
from dsdoctor.host import LocalHost
from dsdoctor.machine import Machine


def compile_ops(
    host: LocalHost,
    plan: BuildPlan,
    machine: Machine,
    *,
    tree: Path,
    pool: Pool,
    logs: Path,
    cache: OpCache | None,
    watch: Watch,
) -> tuple[Compiled, ...]:
    """Compile every op of a plan, the longest object first; one that fails does not stop the others.

    On any interruption every compiler is ended before the exception goes on.
    """
    env = child_environment(host, plan)
    for op in plan.ops:
        watch(Step(op=op.op, state="waiting", total=len(op.sources)))
    asked = ask_commands(host, plan, tree=tree, env=env)
    by_nvcc = sum(command.by_nvcc for one in asked.values() for command in one.compile)
    works = [
        _begin(asked[op.op], op, orders_of(plan, op, machine, idle=pool.jobs // max(1, by_nvcc)), logs / f"{op.op}.log")
        for op in plan.ops
    ]
    for work in works:
        _take(work, tree, env, cache)
        if work.cached or work.commands.error:
            watch(Step(op=work.plan.op, state=work.state, done=work.done, total=len(work.commands.compile)))
    _compile(host, works, tree=tree, env=env, pool=pool, cache=cache, watch=watch)
    return tuple(work.ended() for work in works)


def child_environment(host: LocalHost, plan: BuildPlan) -> dict[str, str]:
    """The caller's environment without what steers builds, with what the plan sets."""
    env = {name: value for name, value in host.environment().items() if name not in plan.unset}
    env |= plan.env
    for name, folders in plan.prepend.items():
        env[name] = ":".join([*folders, *([env[name]] if env.get(name) else [])])
    return env


def shared_object(folder: Path, module: str) -> Path | None:
    """The shared object of a dotted module name below a folder."""
    *packages, name = module.split(".")
    return next(iter(sorted(folder.joinpath(*packages).glob(f"{name}.*so"))), None)


def _begin(asked: OpCommands, op: OpPlan, orders: Orders, log: Path) -> OpWork:
    """The op's commands as they are run; its log says what was changed in each."""
    after = OpCommands(
        op=op.op,
        compile=tuple(edited(command, orders) for command in asked.compile),
        link=tuple(edited(command, orders) for command in asked.link),
        forgotten=asked.forgotten,
        error=asked.error,
    )
    work = OpWork(plan=op, commands=after, log=log)
    work.write(*asked.said)
    if asked.error:
        work.write(f"dsdoctor: error: {asked.error}")
    if asked.forgotten:
        work.write(f"dsdoctor: linking {op.op} with {' '.join(asked.forgotten)}, which its builder leaves out")
    for before, now in zip(asked.all, after.all, strict=True):
        if changed := changes(before, now):
            work.write(f"dsdoctor: flags of {now.source or now.output}: {changed}")
    return work


def _take(work: OpWork, tree: Path, env: Mapping[str, str], cache: OpCache | None) -> None:
    """Take a finished op out of the cache, if it is there."""
    if cache is None or work.commands.error:
        return
    work.key = cache.key(work.commands, work.plan, env)
    found = cache.take(work.key, (tree / work.commands.link[-1].output).parent)
    work.write(f"dsdoctor: {found.said}")
    if found.taken:
        work.library = _library(work, tree)
        work.cached = work.library is not None


def _compile(
    host: LocalHost,
    works: list[OpWork],
    *,
    tree: Path,
    env: Mapping[str, str],
    pool: Pool,
    cache: OpCache | None,
    watch: Watch,
) -> None:
    """Run the commands of every op that is not there yet."""
    wrapper = LocalHost(env=env).which("ccache")
    todo = {work.plan.op: work for work in works if not work.cached and not work.commands.error}
    commands = {command.output: (work, command) for work in todo.values() for command in work.commands.all}
    jobs = [_job(work, command) for work, command in commands.values()]

    def run(job: Job) -> bool:
        work, command = commands[job.name]
        work.begin()
        total = len(work.commands.compile)
        watch(Step(op=job.group, state="compiling", done=work.done, total=total))
        well = _run(host, work, command, [wrapper] if wrapper and command.source else [], tree, env)
        if well and command.source is None:
            work.library = _library(work, tree)
            if work.library and cache is not None:
                cache.keep(work.key, work.plan, work.made(work.library))
        ended = not well or command.source is None
        watch(Step(op=job.group, state=work.state if ended else "compiling", done=work.done, total=total))
        return well

    carry_out(jobs, pool, run, host.stop)


def _run(
    host: LocalHost, work: OpWork, command: Command, wrapper: list[str], tree: Path, env: Mapping[str, str]
) -> bool:
    """Run one command and log it, with what it took."""
    (tree / command.output).parent.mkdir(parents=True, exist_ok=True)
    output: list[str] = []
    argv = (*wrapper, *command.argv)
    ended = host.work(argv, cwd=tree, env=env, on_line=output.append)
    work.end(command, ended)
    work.linked += [] if command.source else output
    failed = [f"FAILED: [status {ended.status}] {command.output}"] if ended.status else []
    head = f"[{work.done}/{len(work.commands.compile)}] " if command.source else ""
    took = f"{ended.cpu_seconds:.1f} CPU-seconds, at most {ended.peak_memory / (1 << 30):.2f} GiB"
    work.write(*failed, f"{head}{shlex.join(argv)}", *output, f"dsdoctor: {command.output} took {took}")
    return ended.status == 0


def _job(work: OpWork, command: Command) -> Job:
    cost = 1.0 + len(work.plan.architectures) if command.by_nvcc else 1.0
    after = frozenset() if command.source else frozenset(one.output for one in work.commands.compile)
    # a link is short, and ends an op
    return Job(
        name=command.output,
        group=work.plan.op,
        cost=cost if command.source else float("inf"),
        slots=threads_of(command),
        memory=memory_of(command),
        after=after,
    )


def _library(work: OpWork, tree: Path) -> Path | None:
    """The op's shared object, as its link command names it."""
    path = tree / work.commands.link[-1].output
    return path if path.is_file() else None
