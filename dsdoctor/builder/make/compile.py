"""BuildPlan -> compiled ops: taken from the cache where it has them, the others compiled side by side within one pool.

Starts the compilers and ends them on any interruption. An op that fails does not stop the others.
"""

import shlex
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from dsdoctor.builder.make.commands import Command, OpCommands
from dsdoctor.builder.make.first_error import first_error
from dsdoctor.builder.make.flags import FlagSettings, changes, edited, flag_settings, memory_of, threaded, threads_of
from dsdoctor.builder.make.op_cache import OpCache
from dsdoctor.builder.make.op_job import Compiled, OpWork, Watch
from dsdoctor.builder.make.scheduler import CompileJob, Pool, carry_out
from dsdoctor.builder.plan.choices import JOB_MEMORY
from dsdoctor.core.build_models import BuildPlan, OpPlan, OpProgress
from dsdoctor.core.host import LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.redaction import Hidden

LAUNCHERS = ("ccache", "sccache")
"""Compiler caches that are put in front of a compiler where they are on PATH. sccache can share one over S3, Redis or GitHub."""


def compile_ops(
    host: LocalHost,
    plan: BuildPlan,
    machine: Machine,
    asking: Callable[[], Mapping[str, OpCommands]],
    *,
    tree: Path,
    env: Mapping[str, str],
    pool: Pool,
    logs: Path,
    cache: OpCache | None,
    watch: Watch,
) -> tuple[Compiled, ...]:
    """Compile every op of a plan in ``env`` by the commands that ``asking`` gives, the longest object first.

    One that fails does not stop the others. On any interruption every compiler is ended before the exception is raised further.
    """
    for op in plan.ops:
        watch(OpProgress(op=op.op, state="waiting", total=len(op.sources)))
    asked, hidden = asking(), Hidden(host.environment())
    settings = flag_settings(plan, machine, tree, secret_flags=hidden.in_flags)
    works = [_begin(asked[op.op], op, settings, logs / f"{op.op}.log", hidden) for op in plan.ops]
    for work in works:
        _take(work, tree, cache)
        if work.cached or work.error:
            watch(work.progress(work.state))
    # processors that would be idle because there are fewer nvcc jobs than slots become threads of nvcc
    todo = [work for work in works if not work.cached and not work.error]
    earlier = cache.earlier_seconds([work.plan for work in todo]) if cache is not None else {}
    for work in todo:
        work.expected = earlier[work.plan.op] / pool.jobs if work.plan.op in earlier else None
        watch(work.progress("waiting"))
    by_nvcc = sum(command.by_nvcc for work in todo for command in work.commands.compile)
    idle = min(pool.jobs // max(1, by_nvcc), (plan.memory or sys.maxsize) // JOB_MEMORY[True])
    for work in todo:
        work.commands = threaded_op(work.commands, min(len(work.plan.architectures), idle))
    _compile(host, todo, tree=tree, env=env, pool=pool, cache=cache, watch=watch)
    return tuple(work.ended() for work in works)


def threaded_op(commands: OpCommands, threads: int) -> OpCommands:
    """The commands of an op; those of nvcc get that many threads."""
    return replace(commands, compile=tuple(threaded(command, threads) for command in commands.compile))


def child_environment(host: LocalHost, plan: BuildPlan) -> dict[str, str]:
    """The environment of a build: the caller's, without the variables that the plan unsets, with those that it sets."""
    env = {name: value for name, value in host.environment().items() if name not in plan.unset}
    env |= plan.env
    for name, folders in plan.prepend.items():
        env[name] = ":".join([*folders, *([env[name]] if env.get(name) else [])])
    return env


def shared_object(folder: Path, module: str) -> Path | None:
    """The shared object of a dotted module name below a folder."""
    *packages, name = module.split(".")
    return next(iter(sorted(folder.joinpath(*packages).glob(f"{name}.*so"))), None)


def _begin(asked: OpCommands, op: OpPlan, settings: FlagSettings, log: Path, hidden: Hidden) -> OpWork:
    """The op with its commands as they will be run, except for nvcc's threads. Its log says what was changed in each."""
    after = OpCommands(
        op=op.op,
        compile=tuple(edited(command, settings) for command in asked.compile),
        link=tuple(edited(command, settings) for command in asked.link),
        forgotten=asked.forgotten,
    )
    nothing = None if asked.link else "its builder gives no command that links it"
    error = hidden.out_of(asked.error) if asked.error else nothing
    work = OpWork(plan=op, commands=after, log=log, hidden=hidden, error=error)
    work.write(*asked.output)
    if work.error:
        work.fail(f"dsdoctor: error: {work.error}")
    if asked.forgotten:
        work.write(f"dsdoctor: linking {op.op} with {' '.join(asked.forgotten)}, which its builder leaves out")
    for before, now in zip(asked.all, after.all, strict=True):
        if changed := changes(before, now):
            work.write(f"dsdoctor: flags of {now.source or now.output}: {changed}")
    return work


def _take(work: OpWork, tree: Path, cache: OpCache | None) -> None:
    """Take the finished op from the cache, if it is there."""
    if cache is None or work.error:
        return
    found = cache.take(work.plan, work.commands, (tree / work.commands.link[-1].output).parent)
    work.write(f"dsdoctor: {found.message}")
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
    """Run the commands of the ops that the cache did not have."""
    wrapper = next(filter(None, map(LocalHost(env=env).which, LAUNCHERS)), None)
    commands = {command.output: (work, command) for work in works for command in work.commands.all}
    jobs = [_job(work, command) for work, command in commands.values()]

    def run(job: CompileJob) -> bool:
        work, command = commands[job.name]
        work.begin()
        watch(work.progress("compiling"))
        succeeded = _run(host, work, command, [wrapper] if wrapper and command.source else [], tree, env)
        if succeeded and command.source is None:
            work.library = _library(work, tree)
            if work.library and cache is not None:
                cache.keep(work.plan, work.made(work.library))
        ended = not succeeded or command.source is None
        watch(work.progress(work.state if ended else "compiling"))
        return succeeded

    carry_out(jobs, pool, run, host.stop)


def _run(
    host: LocalHost, work: OpWork, command: Command, wrapper: list[str], tree: Path, env: Mapping[str, str]
) -> bool:
    """Run one command, and log it with its output, CPU time and memory. True when it succeeded."""
    output: list[str] = []
    argv = (*wrapper, *command.argv)
    try:
        (tree / command.output).parent.mkdir(parents=True, exist_ok=True)
        ended = host.work(argv, cwd=tree, env=env, on_line=output.append)
    except OSError as error:
        work.fail(f"dsdoctor: error: {argv[0]} cannot be started: {error}")
        return False
    work.end(command, ended, output)
    head = f"[{work.done}/{len(work.commands.compile)}] " if command.source else ""
    shown = f"{head}{shlex.join(work.hidden.out_of_words(argv))}"
    took = f"{ended.cpu_seconds:.1f} CPU-seconds, at most {ended.peak_memory / (1 << 30):.2f} GiB"
    if ended.status == 0:
        work.write(shown, *output, f"dsdoctor: {command.output} took {took}")
        return True
    if ended.status < 0 and host.is_stopped:
        work.interrupt(f"dsdoctor: interrupted: {command.output}")
        return False
    work.write(f"FAILED: [code={ended.status}] {command.output}", shown)
    work.fail(*output, *_ending(command, ended.status, output), f"dsdoctor: it took {took}")
    return False


def _ending(command: Command, status: int, output: list[str]) -> list[str]:
    """An error line made from a compiler's exit status, where its output names no error."""
    if first_error(output):
        return []
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        killed = "; memory may have run out" if -status == signal.SIGKILL else ""
        return [f"dsdoctor: error: {command.argv[0]} was ended by signal {-status} ({name}){killed}"]
    return [f"dsdoctor: error: {command.argv[0]} ended with status {status} without an error message"]


def _job(work: OpWork, command: Command) -> CompileJob:
    cost = 1.0 + len(work.plan.architectures) if command.by_nvcc else 1.0
    after = frozenset() if command.source else frozenset(compiling.output for compiling in work.commands.compile)
    # a link goes first: it is short, and it completes an op
    return CompileJob(
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
