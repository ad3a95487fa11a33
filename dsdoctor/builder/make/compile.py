"""The compiled ops of a plan: taken from the cache where it has them, the others compiled side by side within one pool.

The longest job begins first, as many at a time as the pool allows. Any interruption ends the compilers. An op that fails does not
stop the others.
"""

import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from dsdoctor.builder.make.commands import (
    Command,
    FlagSettings,
    OpCommands,
    changes,
    edited,
    first_error,
    flag_settings,
    memory_of,
    threaded,
    threads_of,
)
from dsdoctor.builder.make.op_cache import Made, OpCache
from dsdoctor.builder.plan.choices import JOB_MEMORY_BYTES
from dsdoctor.core.build_models import BuildPlan, OpPlan, OpProgress
from dsdoctor.core.files import PRIVATE, append_text
from dsdoctor.core.host import Completed, LocalHost
from dsdoctor.core.machine import Machine
from dsdoctor.core.redaction import Hidden
from dsdoctor.core.workspace import trusted_temporary
from dsdoctor.rules import book


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The result of one op. ``library`` is the shared object, None where there is none; ``because`` is why.

    ``cpu_seconds`` and ``peak_memory`` (bytes, of the largest process) are those of its compilers: 0 where it was ``cached``.
    """

    op: str
    library: Path | None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    cached: bool = False
    because: str | None = None
    log: Path


Watch = Callable[[OpProgress], None]


@dataclass
class OpWork:
    """One op that is being compiled. Its commands run in several threads; ``lock`` guards the log and the figures.

    ``wrong`` holds the lines that may name the error, ``linked`` what the linker printed; ``hidden`` is what no line may hold.
    """

    plan: OpPlan
    commands: OpCommands
    log: Path
    hidden: Hidden = field(default_factory=lambda: Hidden({}))
    error: str | None = None
    started: float | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory: int = 0
    done: int = 0
    library: Path | None = None
    cached: bool = False
    interrupted: bool = False
    expected: float | None = None
    wrong: list[str] = field(default_factory=list)
    linked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def state(self) -> str:
        """How it ended, as OpProgress names it."""
        if self.library is None:
            return "interrupted" if self.interrupted and not self.wrong else "failed"
        return "cached" if self.cached else "built"

    def progress(self, state: str) -> OpProgress:
        """How far it is."""
        total = len(self.commands.compile)
        return OpProgress(op=self.plan.op, state=state, done=self.done, total=total, expected=self.expected)

    def write(self, *lines: str) -> None:
        """Add lines to its log, together: other commands of it may write at the same time."""
        with self.lock:
            append_text(self.log, "".join(f"{self.hidden.out_of(line)}\n" for line in lines), mode=PRIVATE)

    def fail(self, *lines: str) -> None:
        """Add lines to its log that say why it failed."""
        self.wrong += [self.hidden.out_of(line) for line in lines]
        self.write(*lines)

    def interrupt(self, line: str) -> None:
        """Add a line to its log that says that the user ended it."""
        self.interrupted = True
        self.write(line)

    def begin(self) -> None:
        """A command begins."""
        with self.lock:
            if self.started is None:
                self.started = time.monotonic()

    def end(self, command: Command, ended: Completed, output: list[str]) -> None:
        """A command has ended, with that output."""
        with self.lock:
            self.seconds = time.monotonic() - (self.started or 0.0)
            self.cpu_seconds += ended.cpu_seconds
            self.peak_memory = max(self.peak_memory, ended.peak_memory)
            self.done += 1 if command.source and not ended.status else 0
            self.linked += [] if command.source else output

    def made(self, library: Path) -> Made:
        """What the cache keeps of it."""
        return Made(
            library=library,
            commands=self.commands,
            linked=tuple(self.linked),
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
        )

    def ended(self) -> Compiled:
        """Its result."""
        because = None if self.library else self.error or first_error(self.wrong) or "interrupted"
        return Compiled(
            op=self.plan.op,
            library=self.library,
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            peak_memory=self.peak_memory,
            cached=self.cached,
            because=because,
            log=self.log,
        )


# why this is not a client of a GNU make job server (nvcc has been one since 13): nvcc then takes every token there is for as
# long as it runs, and an nvcc that is killed never gives them back (tried with nvcc 13.0)
class Pool:
    """The slots (``jobs``) and the memory in bytes (None: no limit) that all jobs share; several builds may share one pool."""

    def __init__(self, jobs: int, memory: int | None = None) -> None:
        self.jobs = jobs
        self._limit = memory
        self._busy = self._taken = 0
        self._changed = threading.Condition()

    @contextmanager
    def share(self, slots: int = 1, memory: int = 0) -> Iterator[None]:
        """Wait for slots and memory, and hold them. A job that needs more than the whole pool runs alone."""
        with self._changed:
            self._changed.wait_for(lambda: self._fits(slots, memory))
            self._busy, self._taken = self._busy + slots, self._taken + memory
        try:
            yield
        finally:
            with self._changed:
                self._busy, self._taken = self._busy - slots, self._taken - memory
                self._changed.notify_all()

    def _fits(self, slots: int, memory: int) -> bool:
        if self._busy == 0:
            return True
        room = self._limit is None or self._taken + memory <= self._limit
        return room and self._busy + slots <= self.jobs


@dataclass(frozen=True, kw_only=True)
class CompileJob:
    """One command of a ``group``. The highest ``cost`` begins first; ``slots`` and ``memory`` (bytes) are taken from the pool.

    It begins once the jobs named in ``after`` have succeeded, and never after another of its group has failed.
    """

    name: str
    group: str
    cost: float
    slots: int = 1
    memory: int = 0
    after: frozenset[str] = frozenset()


class _Board:
    """Which jobs are waiting, done and failed."""

    def __init__(self, jobs: Sequence[CompileJob]) -> None:
        self._waiting = sorted(jobs, key=lambda job: job.cost, reverse=True)
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._changed = threading.Condition()
        self.stopped = False

    def take(self) -> CompileJob | None:
        """The job of the highest cost that may begin; waits until there is one. None when no job is left."""
        with self._changed:
            while not self.stopped:
                self._waiting = [job for job in self._waiting if job.group not in self._failed]
                if not self._waiting:
                    return None
                ready = next((job for job in self._waiting if job.after <= self._done), None)
                if ready is not None:
                    self._waiting.remove(ready)
                    return ready
                self._changed.wait()
            return None

    def end(self, job: CompileJob, *, succeeded: bool) -> None:
        """A job has ended."""
        with self._changed:
            self._done |= {job.name} if succeeded else set()
            self._failed |= set() if succeeded else {job.group}
            self._changed.notify_all()

    def stop(self) -> None:
        """No further job begins."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()


def carry_out(
    jobs: Sequence[CompileJob], pool: Pool, run: Callable[[CompileJob], bool], stop: Callable[[], None]
) -> None:
    """Run every job. ``run`` returns whether the job succeeded; on any interruption ``stop`` ends what is running."""
    board = _Board(jobs)

    def work() -> None:
        while (job := board.take()) is not None:
            succeeded = False
            try:
                with pool.share(job.slots, job.memory):
                    succeeded = not board.stopped and run(job)
            finally:
                board.end(job, succeeded=succeeded)

    with ThreadPoolExecutor(max_workers=pool.jobs) as workers:
        futures = [workers.submit(work) for _ in range(min(pool.jobs, len(jobs)))]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future.done():
                    future.result()
        except BaseException:
            board.stop()
            stop()
            raise


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
    idle = min(pool.jobs // max(1, by_nvcc), (plan.memory or sys.maxsize) // JOB_MEMORY_BYTES[True])
    for work in todo:
        work.commands = threaded_op(work.commands, min(len(work.plan.architectures), idle))
    _compile(host, todo, tree=tree, env=env, pool=pool, cache=cache, watch=watch)
    return tuple(work.ended() for work in works)


def threaded_op(commands: OpCommands, threads: int) -> OpCommands:
    """The commands of an op; those of nvcc get that many threads."""
    return replace(commands, compile=tuple(threaded(command, threads) for command in commands.compile))


def child_environment(host: LocalHost, plan: BuildPlan) -> dict[str, str]:
    """The environment of a build: the caller's, without the variables that the plan unsets, with those that it sets. A compiler
    keeps the parts of what it makes among the temporary files: where others could exchange these, it is told another folder."""
    env = {name: value for name, value in host.environment().items() if name not in plan.unset}
    env = trusted_temporary(env)
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
    nothing = None if asked.link else book.phrase("builder", "no-link-command")
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
